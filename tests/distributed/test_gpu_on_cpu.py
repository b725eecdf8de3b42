"""What is kept for machines with a GPU runs, on the CPU in its place, with torch and numpy and no other package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
ONLY_TORCH_AND_NUMPY = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"aiohttp", "pynvml", "prometheus_client", "kopf", "kubernetes", "pytest", "yaml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run_module(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(ONLY_TORCH_AND_NUMPY)
    path = os.pathsep.join([str(folder), *(str(PROJECT / root) for root in ("analysis", "trainer"))])
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


CAN_RUN = (
    "test_modes.Modes.test_live_switches",
    "test_times.Times.test_own_work_of_a_rank_that_no_rank_waits_for",
    "test_overlap",
    "test_faults.Faults.test_a_rank_that_waits_for_its_endless_kernel_is_named",
    "test_faults.Faults.test_a_rank_killed_within_a_kernel_trains_again",
)


def test_tests_for_gpus_can_run(tmp_path: Path) -> None:
    """All in one interpreter: it, and the query of the machine's facts, would import torch again for each run."""
    done = run_module(tmp_path, "tests.gpu", *(f"tests.gpu.{test}" for test in CAN_RUN), PACEKEEPER_TEST_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1] == "OK"
    assert any(line.startswith(f"Ran {len(CAN_RUN)} tests in ") for line in lines)


def test_without_a_gpu_no_test_runs_and_the_exit_status_is_no_success(tmp_path: Path) -> None:
    done = run_module(tmp_path, "tests.gpu", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (77, "")
    assert "not run: no GPU here" in done.stderr
