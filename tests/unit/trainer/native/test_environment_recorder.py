"""The environment recorder: what it writes, and when it may hold up a pod."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

import pacekeeper.native

RECORDER = Path(pacekeeper.native.__file__).with_name("environment_recorder.bin")
PROGRAM_INTERPRETER = 3  # type of a program header


def record_python_path(file: Path, environment: dict[str, str]) -> int:
    """Return the exit status."""
    command = [str(RECORDER), str(file), "PYTHONPATH"]
    return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode


def test_the_value_is_recorded_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert record_python_path(file, {"PYTHONPATHS": "/no", "PYTHONPATH": "/a:/b c"}) == 0
    assert file.read_bytes() == b"/a:/b c"
    assert file.stat().st_mode & 0o777 == 0o644
    assert record_python_path(file, {"PYTHONPATHS": "/no"}) == 0
    assert file.read_bytes() == b"", "a restarted pod has the new value"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("environment", "status"), [({"PYTHONPATH": "/a"}, 1), ({"HOME": "/"}, 0)])
def test_it_holds_up_the_pod_only_if_the_job_would_miss_a_variable(
    tmp_path: Path, environment: dict[str, str], status: int
) -> None:
    assert record_python_path(tmp_path / "absent" / "file", environment) == status
    assert record_python_path(tmp_path / ("x" * 5000), environment) == status


@pytest.mark.parametrize("name", ["file", "file.new"])
def test_links_of_earlier_ranks_are_not_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / name).symlink_to(target)
    assert record_python_path(tmp_path / "file", {"PYTHONPATH": "/a"}) == 0
    assert target.read_text() == "kept"
    assert (tmp_path / "file").read_bytes() == b"/a"
    assert not (tmp_path / "file").is_symlink()


def test_it_needs_no_library_of_the_image() -> None:
    data = RECORDER.read_bytes()
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    kinds = {struct.unpack_from("<I", data, offset + index * size)[0] for index in range(count)}
    assert PROGRAM_INTERPRETER not in kinds
