"""How soon does `pacekeeper watch` name a slow rank, a hang, and a crash? Seconds from the fault to the line.

Three ranks train in steps of about 20 ms, by forks. One of them takes 80 ms more for its work, is stopped by SIGSTOP,
sleeps outside of collectives, or is killed. `RUNS=5`: runs of each fault. `PYTHONS=PATH:PATH`: the scripts'
interpreters, by default this one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .scripts.watch_fidelity.environment import build_environment

RUNS = int(os.environ.get("RUNS", "2" if os.environ.get("QUICK") else "5"))
PYTHONS = os.environ.get("PYTHONS", sys.executable).split(os.pathsep)
LIMIT_SECONDS = 5.0
TIMEOUT_SECONDS = 120.0
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "testing/training/watched/training.py"
RANKS = 3
FAULTS = {
    "slow rank": ("slow:1:100-2000:0.08", "SLOW: rank 1 "),
    "stopped rank": ("SIGSTOP:2:100", "HANG: rank 2 "),
    "rank in another call": ("sleep:0:100", "HANG: rank 0 "),
    "killed rank": ("SIGKILL:1:100", "CRASH: rank 1 "),
}
"""By name: the action, and how the line begins that names it."""
COMMAND = f"""
import sys
sys.path[:0] = {[str(ROOT / name) for name in ("analysis", "operator", "trainer")]!r}
from pacekeeper.cli import main
sys.exit(main())
"""


def main() -> None:
    """Run all faults. The last line of the output is the result as JSON."""
    rows = []
    for python in PYTHONS:
        for fault, (action, line) in FAULTS.items():
            seconds = [measure_latency(python, action, line) for _ in range(RUNS)]
            print(f"{python}: {fault}: {seconds}", file=sys.stderr, flush=True)
            rows.append(summarize(python, fault, seconds))
    holds = all(row["longest_s"] is not None and row["longest_s"] <= LIMIT_SECONDS for row in rows)
    print(json.dumps({"bench": "watch_latency", "limit_s": LIMIT_SECONDS, "rows": rows, "holds": holds}))


def summarize(python: str, fault: str, seconds: list[float | None]) -> dict[str, Any]:
    named = [value for value in seconds if value is not None]
    return {
        "python": python,
        "fault": fault,
        "runs": len(seconds),
        "named": len(named),
        "median_s": round(statistics.median(named), 2) if named else None,
        "longest_s": round(max(named), 2) if len(named) == len(seconds) else None,
    }


def measure_latency(python: str, action: str, expected: str) -> float | None:
    """Return the seconds from the fault to the line that names it; None: there is no such line in time."""
    with tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-") as folder:
        times = Path(folder) / "times"
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "watch", "--", python, str(SCRIPT), str(RANKS), "2000", action],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=build_environment(None) | {"ACTION_TIMES": str(times)},
            text=True,
            start_new_session=True,
        )
        try:
            return wait_for_line(process, times, expected)
        finally:
            os.killpg(process.pid, 9)
            process.wait()


def wait_for_line(process: subprocess.Popen[str], times: Path, expected: str) -> float | None:
    assert process.stderr is not None
    began = time.monotonic()
    for line in process.stderr:
        if expected in line:
            return round(time.time() - float(times.read_text().split()[1]), 2)
        if time.monotonic() - began > TIMEOUT_SECONDS:
            break
    return None


if __name__ == "__main__":
    main()
