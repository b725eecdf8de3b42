"""`python -m tests.run [--direct] [NAME…]`: all parts side by side, or some of them."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .lanes import Runner
from .parts import LOGS, PARTS, ROOT, Part, select_parts
from .summary import exceeds_budget, summarize_run

_STOPPING = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str], available: Sequence[Part] = PARTS, folder: Path = LOGS) -> int:
    """Return 1 if a part failed or the run used too much processor time, 128 + N if signal N stopped it."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="Run the parts of `make test`.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(part.name for part in available))
    parser.add_argument("--direct", action="store_true", help="one after the other, without logs: for a terminal")
    options = parser.parse_args(arguments)
    try:
        parts = select_parts(options.names, available)
    except ValueError as error:
        parser.error(str(error))
    return run_directly(parts) if options.direct else run_lanes(parts, folder)


def run_lanes(parts: Sequence[Part], folder: Path) -> int:
    start = time.monotonic()
    runner = Runner(parts, folder, report=partial(print, flush=True))
    previous_handlers = {number: signal.signal(number, lambda number, _: runner.stop(number)) for number in _STOPPING}
    try:
        results = runner.run()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    if runner.stopped_by is not None:
        print(f"Stopped by {signal.Signals(runner.stopped_by).name}.")
        return 128 + runner.stopped_by
    results = [result.normalize(runner.slowdown) for result in results]
    print(summarize_run(results, time.monotonic() - start, folder, runner.slowdown))
    return int(any(result.status for result in results) or exceeds_budget(results))


def run_directly(parts: Sequence[Part]) -> int:
    try:
        return max([_run_directly(part) for part in parts])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run_directly(part: Part) -> int:
    print(f"{part.name}: {part.command}", flush=True)
    return int(subprocess.run(part.build_command(), cwd=ROOT, check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
