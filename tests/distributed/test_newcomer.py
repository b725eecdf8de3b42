"""The README's commands that need no cluster, run as by a user who has just cloned the repository.

That which needs one is gone through by tests/cluster/test_upgrade.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bench.scripts.guard import list_descendants
from testing.readme import read_commands
from testing.training.launchers import wait_until_true

ROOT = Path(__file__).parents[2]
WITHOUT = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", "*.so", ".*_cache")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has what the first door installs."""
    clone = Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("newcomer") / "clone", ignore=WITHOUT))
    install, _ = read_commands("Try it")
    make, install = install.split(" && ")
    run_bash(make, clone)
    (packages,) = (clone / ".venv").glob("lib/python*/site-packages")
    # What it depends on is here already, and takes minutes to fetch.
    packages.joinpath("known.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run_bash(install, clone)
    return clone


def test_the_quickstart_recovers_from_a_killed_rank(clone: Path) -> None:
    _, run = read_commands("Try it")
    losses = run_and_kill_rank(run, clone)
    assert list(losses)[-1] == 300
    assert losses[300] < 0.5 * losses[50]


def test_an_unchanged_script_recovers_from_a_killed_rank(clone: Path) -> None:
    """It has no checkpoint of its own: all begin again."""
    _, run = read_commands("Watch any script as it is")
    losses = run_and_kill_rank(run, clone, STEPS="500")
    assert list(losses)[-1] == 500
    assert losses[500] < 0.5 * losses[50]


def run_and_kill_rank(run: str, clone: Path, **environment: str) -> dict[int, float]:
    """Losses by step, of a run of which a rank is killed after the first of them."""
    log = clone / "log"
    with log.open("w") as output:
        running = subprocess.Popen(
            ["bash", "-ec", f"exec {run}"],
            cwd=clone,
            env=build_clean_environment() | environment,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until_true(lambda: "step 50: loss" in log.read_text(), "steps", seconds=600.0)
        os.kill(max(list_ranks(running.pid)), signal.SIGKILL)
        assert running.wait(timeout=600) == 0, log.read_text()
    finally:
        running.kill()
        running.wait()
    text = log.read_text()
    assert "was killed by SIGKILL" in text
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


def run_bash(command: str, folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=build_clean_environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


def build_clean_environment() -> dict[str, str]:
    """Nothing of ours: the Python of the tests under the name that the README uses, and the machine's own rest."""
    base = Path(sys.base_prefix, "bin")
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACEKEEPER", "VIRTUAL"))
    }
    return {**kept, "PATH": f"{base}{os.pathsep}{os.environ['PATH']}"}


def list_ranks(launcher: int) -> set[int]:
    """Descendants without children."""
    return {pid for pid in list_descendants(launcher) if not list_descendants(pid)}
