"""SIGKILL of a rank in the midst of a kernel, with much of the GPU's memory held → its next step, by its parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .machine import DEVICE, ON_GPU, read_machine_facts
from .workers import PROJECT

SCRIPT = Path(__file__).with_name("holding.py")
GIB = 1 << 30
WANTED_BYTES = 60 * GIB
KERNEL_SECONDS = 20.0
TIMEOUT_SECONDS = 300.0
STAGES = ("started", "device", "memory", "calibrated", "joined", "restored", "step")
"""Of the new rank, in order: its process runs, has a context on the GPU, the memory again, has measured the GPU's clock
(which a training job has not to), is in its process group, has its state back, has made its first step."""


@dataclass(frozen=True)
class Recovery:
    """Seconds from the SIGKILL to the new rank's first step."""

    held_bytes: int
    lost_steps: int
    parts: dict[str, float]
    """Of each of STAGES, from the one before; the first is from the SIGKILL on: noticed, the old one gone, forked."""

    @property
    def seconds(self) -> float:
        """Without what the job has not to do."""
        return sum(seconds for stage, seconds in self.parts.items() if stage != "calibrated")


def choose_held_bytes() -> int:
    """60 GiB; of a smaller card three quarters of what is free."""
    return min(WANTED_BYTES, read_machine_facts()["free_bytes"] * 3 // 4) if ON_GPU else 64 << 20


def measure_recovery() -> Recovery:
    """Raises RuntimeError, with the output of the job, where it does not train again."""
    with tempfile.TemporaryDirectory(prefix="pacekeeper-gpu-") as path:
        folder, held_bytes = Path(path), choose_held_bytes()
        variables = {
            "FOLDER": path,
            "HOLD_BYTES": str(held_bytes),
            "KERNEL_SECONDS": str(KERNEL_SECONDS),
            "BACKEND": "" if ON_GPU else "gloo",
            "PACEKEEPER_TEST_DEVICE": str(DEVICE),
            "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]),
        }
        command = [sys.executable, "-m", "pacekeeper.cli", "run", "--local", "1", str(SCRIPT)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=PROJECT, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
            )
        try:
            pid = _wait_for_line(folder, process, " kernel")[-1].pid
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            lines = _wait_for_line(folder, process, "round 2 end")
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return parse_diary(lines, killed_at, held_bytes)


@dataclass(frozen=True)
class Line:
    """Of the diary."""

    at: float
    pid: int
    text: str


def parse_diary(lines: Sequence[Line], killed_at: float, held_bytes: int) -> Recovery:
    """From the diary of a rank that was killed at `killed_at` in its first round, and ran through the second one."""
    first = [line.text for line in lines if line.text.startswith("round 1 step")]
    second = [line for line in lines if line.text.startswith("round 2 ")]
    reached_at = {stage: next(line.at for line in second if line.text.split()[2] == stage) for stage in STAGES}
    restored = next(int(line.text.split()[3]) for line in second if line.text.split()[2] == "restored")
    times = [killed_at, *reached_at.values()]
    parts = {stage: round(end - begin, 4) for stage, (begin, end) in zip(STAGES, pairwise(times), strict=True)}
    return Recovery(held_bytes, len(first) - restored, parts)


def _wait_for_line(folder: Path, process: subprocess.Popen[bytes], wanted: str) -> list[Line]:
    """The diary, up to a line with this text."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        path = folder / "diary-0"
        *texts, _ = path.read_text().split("\n") if path.exists() else [""]
        lines = [_parse_line(text) for text in texts]
        for number, line in enumerate(lines):
            if wanted in line.text:
                return lines[: number + 1]
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job has not come to `{wanted}`:\n{(folder / 'log').read_text()[-8000:]}")
        time.sleep(0.01)


def _parse_line(text: str) -> Line:
    at, pid, rest = text.split(maxsplit=2)
    return Line(float(at), int(pid), rest)
