"""From a command line to two ranks that have imported torch: `pacekeeper run` against torchrun.

Both run the same script, in pairs whose order changes from pair to pair, so that what else the machine does meets both.
The files are in the page cache, unless COLD=1: then each run begins without them, which needs root, and slows down
everything else that runs on the machine. QUICK=1: fewer pairs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2
PAIRS = 3 if os.environ.get("QUICK") else 15
COLD = bool(os.environ.get("COLD"))
TIMEOUT_SECONDS = 300.0
"""Seconds in which a run must end."""
SCRIPT = Path(__file__).parent / "scripts" / "starting.py"
COMMANDS = {
    "pacekeeper": ["pacekeeper.cli", "run", "--local", str(RANKS)],
    "torchrun": ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"],
}


def main() -> None:
    """Runs all pairs; the last line of the output is the result as JSON."""
    for name in COMMANDS:
        time_start(name)  # compiles what is not compiled yet
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for pair in range(PAIRS):
        for name in [*COMMANDS] if pair % 2 else reversed([*COMMANDS]):
            seconds[name].append(time_start(name))
            print(f"pair {pair + 1} of {PAIRS}: {name} {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    print(json.dumps(build_result(seconds)))


def build_result(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """`ratio`: the median of the pairs' own, pacekeeper by torchrun."""
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    ratio = statistics.median(ratios)
    return {
        "bench": "start",
        "pairs": len(ratios),
        "cold": COLD,
        **{f"{name}_median_s": round(statistics.median(name_seconds), 2) for name, name_seconds in seconds.items()},
        "ratio": round(ratio, 3),
        "ratios": [round(value, 3) for value in ratios],
        "holds": {"no_later_than_torchrun": ratio <= 1.0},
    }


def time_start(name: str) -> float:
    """Seconds until the last rank has imported torch. Raises RuntimeError with the output of a run that fails."""
    folder = Path(tempfile.mkdtemp(prefix="bench-of-pacekeeper-", dir="/dev/shm"))
    environment = {**os.environ, "FOLDER": str(folder)}
    environment.pop("OMP_NUM_THREADS", None)
    if COLD:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    with (folder / "log").open("wb") as log:
        began = time.monotonic()
        command = [sys.executable, "-m", *COMMANDS[name], str(SCRIPT)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(TIMEOUT_SECONDS)
            if status:
                raise RuntimeError(f"{name} ends with code {status}:\n{(folder / 'log').read_text(errors='replace')}")
            return max(float((folder / f"rank-{rank}").read_text()) for rank in range(RANKS)) - began
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
