"""SIGKILL of one of four ranks → first optimizer step of the next round: `pacekeeper run` against torchrun.

All run the same script in turns, on CPU and gloo; every try is a run of its own, so that a failed one does not affect
the others. The checkpoint is the script's own: measured are the detection of the crash and the restart.
torchrun runs at its best, with a fresh store for each restart (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), and a few times
as it comes: there the restarted ranks read the dead ones' addresses from the store. QUICK=1: fewer tries.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANKS = 4
TRIES, TRIES_AS_IT_COMES = (5, 1) if os.environ.get("QUICK") else (20, 3)
START_TIMEOUT_SECONDS = 180.0
RECOVERY_TIMEOUT_SECONDS = 60.0
"""A run that does not train again within this many seconds hangs."""
MAX_ERROR_OUTPUT_CHARACTERS = 2000
"""Characters."""
SCRIPT = Path(__file__).parent / "scripts" / "small_job.py"
MAX_MEDIAN_SECONDS, MIN_RATIO = 0.5, 6.0


@dataclass
class Side:
    """One launcher's results."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    hung: int = 0
    not_started: list[str] = field(default_factory=list)
    """The last lines of runs in which not all ranks came to train."""

    def to_json(self) -> dict[str, Any]:
        return {
            "succeeded": len(self.seconds),
            "failed": self.failed,
            "hung": self.hung,
            "not_started": self.not_started,
            "median_s": round(statistics.median(self.seconds), 3) if self.seconds else None,
            "max_s": round(max(self.seconds), 3) if self.seconds else None,
            "seconds": [round(value, 3) for value in self.seconds],
        }


def main() -> None:
    ours = Side("pacekeeper", [sys.executable, "-m", "pacekeeper.cli", "run", "--local", str(RANKS)])
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    theirs = Side("torchrun", torchrun, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    as_it_comes = Side("torchrun as it comes", torchrun)
    for number in range(1, TRIES + 1):
        for side in (ours, theirs, as_it_comes) if number <= TRIES_AS_IT_COMES else (ours, theirs):
            measure_recovery(side)
            print(f"try {number} of {TRIES}: {side.name} {_format_newest(side)}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "bench": "recovery",
        "tries": TRIES,
        "ours": ours.to_json(),
        "torchrun": theirs.to_json(),
        "torchrun_as_it_comes": as_it_comes.to_json(),
    }
    median, their_median = (statistics.median(side.seconds) if side.seconds else math.inf for side in (ours, theirs))
    if ours.seconds and theirs.seconds:
        result["ratio"] = round(their_median / median, 1)
    result["holds"] = {
        "all_recovered": len(ours.seconds) == TRIES,
        "median_half_a_second": median <= MAX_MEDIAN_SECONDS,
        "ratio_6": "ratio" in result and their_median / median >= MIN_RATIO,
    }
    print(json.dumps(result))


def measure_recovery(side: Side) -> None:
    """One run: start, kill a rank in the midst of it, wait for the next step of all ranks."""
    folder = Path(tempfile.mkdtemp(prefix="bench-of-pacekeeper-", dir="/dev/shm"))
    log = (folder / "log").open("wb")
    ranks = {"FOLDER": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **ranks, **side.environment}
    process = subprocess.Popen(
        [*side.command, str(SCRIPT)], env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        if not _wait_for(
            lambda: all(len(steps) >= 5 for steps in _read_diaries(folder)), process, START_TIMEOUT_SECONDS
        ):
            side.not_started.append((folder / "log").read_text(errors="replace")[-MAX_ERROR_OUTPUT_CHARACTERS:])
        else:
            _kill_rank(side, folder, process)
    finally:
        _end_run(process)
        log.close()
        shutil.rmtree(folder)


def _kill_rank(side: Side, folder: Path, process: subprocess.Popen[bytes]) -> None:
    time.sleep(random.uniform(0.0, 0.1))  # anywhere within a step
    victim = random.randrange(RANKS)
    incarnations = {step.incarnation for steps in _read_diaries(folder) for step in steps}
    killed_at = time.monotonic()
    os.kill(_read_diaries(folder)[victim][-1].pid, signal.SIGKILL)

    def trains_again() -> bool:
        return all(any(step.incarnation not in incarnations for step in steps) for steps in _read_diaries(folder))

    if _wait_for(trains_again, process, RECOVERY_TIMEOUT_SECONDS):
        first_steps_at = [
            next(step.at for step in steps if step.incarnation not in incarnations) for steps in _read_diaries(folder)
        ]
        side.seconds.append(max(first_steps_at) - killed_at)
    elif process.poll() is None:
        side.hung += 1
    else:
        side.failed += 1


@dataclass(frozen=True)
class DiaryStep:
    """One line of a rank's diary."""

    at: float
    pid: int
    incarnation: str
    number: int


def _read_diaries(folder: Path) -> list[list[DiaryStep]]:
    """Of every rank."""
    return [_read_diary(folder / f"rank-{rank}") for rank in range(RANKS)]


def _read_diary(path: Path) -> list[DiaryStep]:
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    fields = (line.split() for line in lines)
    return [DiaryStep(float(at), int(pid), incarnation, int(step)) for at, pid, incarnation, step in fields]


def _wait_for(condition: Any, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the condition came true in time, while the run was alive."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _end_run(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, then what it may have left behind: ranks lead process groups of their own, in its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == process.pid:
            os.kill(int(path.parent.name), signal.SIGKILL)


def _format_newest(side: Side) -> str:
    counts = f"({len(side.seconds)} recovered, {side.failed} failed, {side.hung} hung, "
    counts += f"{len(side.not_started)} not started)"
    return f"{side.seconds[-1]:.2f} s {counts}" if side.seconds else counts


if __name__ == "__main__":
    main()
