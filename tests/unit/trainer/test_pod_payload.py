"""The init container of a watched pod: what it puts into the pod's volumes, also when it runs again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacekeeper.watch import payload
from pacekeeper_operator.pods.injection import BOOT_PATH, PAYLOAD_PATH, RECORDER_PATH
from pacekeeper_rank.watching.watch_folder import FOLDERS


def fill_volumes(target: Path, runtime: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACEKEEPER_WATCH_RUNTIME": str(runtime)}
    command = [sys.executable, "-m", "pacekeeper.watch.payload", str(target)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_it_fills_both_volumes_and_can_run_again(tmp_path: Path) -> None:
    target, runtime = tmp_path / "payload", tmp_path / "runtime"
    target.mkdir()
    runtime.mkdir()
    for _ in range(2):
        done = fill_volumes(target, runtime)
        assert (done.returncode, done.stderr) == (0, "")
    boot, recorder = (target / Path(path).relative_to(PAYLOAD_PATH) for path in (BOOT_PATH, RECORDER_PATH))
    assert (boot / "sitecustomize.py").is_file()
    assert os.access(recorder, os.X_OK)
    assert {path.name for path in runtime.iterdir()} == set(FOLDERS)
    assert {path.stat().st_mode & 0o7777 for path in runtime.iterdir()} == {0o1777}


def test_the_recorded_path_of_the_image_is_restored(tmp_path: Path) -> None:
    """As in a pod: the image sets PYTHONPATH, and the pod's variable hides it."""
    target, runtime, modules = tmp_path / "payload", tmp_path / "runtime", tmp_path / "modules"
    for folder in (target, runtime, modules):
        folder.mkdir()
    (modules / "of_the_image.py").write_text("FOUND = 'yes'\n")
    assert fill_volumes(target, runtime).returncode == 0
    recorded = runtime / "image_pythonpath"
    recorder = [str(target / "bin/environment_recorder"), str(recorded), "PYTHONPATH"]
    subprocess.run(recorder, env={"PYTHONPATH": str(modules)}, check=True, timeout=60)
    variables = {
        "PYTHONPATH": str(target / "boot"),
        "PACEKEEPER_IMAGE_PYTHONPATH": str(recorded),
        "PACEKEEPER_WATCH_RUNTIME": str(runtime),
    }
    command = [sys.executable, "-c", "import of_the_image, os; print(of_the_image.FOUND, os.environ['PYTHONPATH'])"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["yes", f"{target / 'boot'}:{modules}"]


def test_an_image_without_the_recorder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(payload, "RECORDER", tmp_path / "absent")
    assert payload.main([str(tmp_path / "payload")]) == 1
    assert "without a C compiler" in capsys.readouterr().err
