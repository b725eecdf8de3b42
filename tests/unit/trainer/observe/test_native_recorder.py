"""What the part in C does with invalid input: it raises, stores nothing, and never crashes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pacekeeper.environment import Environment
from pacekeeper.observe.monitoring import open_rank_recorder
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_rank import native_recorder, recorder_factory
from pacekeeper_rank.native import recording
from pacekeeper_rank.record_ring import RingWriter, create_ring

SOURCE = Path(str(recording.__file__)).with_suffix(".c")
STRESS = Path(__file__).parents[4] / "testing" / "scripts" / "recording_stress.py"
OPTIONS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-shared", "-fPIC", "-fvisibility=hidden")
SANITIZER = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build_library(folder: Path, *options: str) -> Path:
    library = folder / "recording.so"
    headers = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["cc", *OPTIONS, *options, headers, "-o", library, SOURCE], check=True, timeout=600)
    return library


def run_stress(library: Path, rounds: int, seed: int, **environment: str) -> tuple[int, int]:
    """Return the objects and bytes that are left of the second half."""
    command = [sys.executable, str(STRESS), str(library), str(rounds), str(seed)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    objects, size = done.stdout.split()
    return int(objects), int(size)


def test_nothing_is_left_behind_by_answers_that_raise(tmp_path: Path) -> None:
    objects, size = run_stress(build_library(tmp_path, "-O2"), rounds=100, seed=1)
    assert objects <= 10
    assert size <= 40_000


@pytest.mark.parametrize("seed", [2, 3])
def test_freed_memory_is_not_touched(tmp_path: Path, seed: int) -> None:
    """Under AddressSanitizer and UndefinedBehaviorSanitizer, with objects where these see them."""
    queries = (["cc", f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan"))
    runtimes = [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in queries]
    run_stress(
        build_library(tmp_path, *SANITIZER),
        rounds=50,
        seed=seed,
        LD_PRELOAD=" ".join(runtimes),
        ASAN_OPTIONS="detect_leaks=0",
        PYTHONMALLOC="malloc",
    )


def test_numbers_that_no_record_can_hold_are_rejected_by_name(tmp_path: Path) -> None:
    create_ring(tmp_path / "ring", 0, 1)
    ring = native_recorder.NativeRing(tmp_path / "ring")
    for given, complaint in (
        ({"flags": 256}, "flags=256 .* 0 to 255"),
        ({"step": -1}, "step=-1"),
        ({"sequence": 2**32}, "sequence=4294967296"),
    ):
        with pytest.raises(ValueError, match=complaint):
            ring.write(3, 1, 2, **given)
    with pytest.raises(TypeError, match="no parameter 'steps'"):
        ring.write(3, 1, 2, steps=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="needs kind"):
        ring.write(3, 1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="kind twice"):
        ring.write(3, 1, 2, kind=3)  # type: ignore[misc]


@pytest.mark.parametrize("layout", ["NUMBERS", "RECORD", "STATE"])
def test_a_build_of_another_version_is_not_used(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = vars(recording)[layout]
    name = next(iter(fields))
    monkeypatch.setitem(fields, name, 77)
    with pytest.raises(ImportError, match="reinstall the package"):
        native_recorder._check_layouts()


@pytest.mark.parametrize("reason", ["not built", "PACEKEEPER_NATIVE=0"])
def test_without_it_python_records_and_the_log_gives_the_reason(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    create_ring(runtime.ring(0), 0, 1)
    variables = {"PACEKEEPER_RUNTIME": str(tmp_path)}
    assert isinstance(open_rank_recorder(Environment.read(variables)), native_recorder.NativeRecorder)
    if reason == "not built":
        monkeypatch.setattr(recorder_factory, "native_recorder", None)
        monkeypatch.setattr(recorder_factory, "NATIVE_UNAVAILABLE_REASON", reason)
    else:
        variables["PACEKEEPER_NATIVE"] = "0"
    with caplog.at_level("INFO"):
        recorder = open_rank_recorder(Environment.read(variables))
    assert type(recorder.ring) is RingWriter
    assert type(recorder_factory.create_collective_monitor(recorder)).__name__ == "CollectiveMonitor"
    assert f"this rank records without the C extension: {reason}" in caplog.text
