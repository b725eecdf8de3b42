"""`make fuzz SECONDS=… SEED=…`: mutated values at every border, for longer than `make test` has time for."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

from .border import Finding, run_trials
from .borders import load_borders


def main() -> int:
    """1: something was found; it is printed with the command that repeats it."""
    borders = load_borders()
    arguments = _build_parser(sorted(borders)).parse_args()
    chosen = [borders[name] for name in arguments.border or borders]
    finding_count = 0
    for border in chosen:
        seeds = _iterate_seeds(arguments, arguments.seconds / len(chosen))
        try:
            print(f"{border.name}: {run_trials(border, seeds)} values", flush=True)
        except Finding as finding:
            finding_count += 1
            print(finding, flush=True)
    return bool(finding_count)


def _iterate_seeds(arguments: argparse.Namespace, seconds: float) -> Iterator[int]:
    """For this many seconds, or this many values."""
    if arguments.cases is not None:
        yield from range(arguments.seed, arguments.seed + arguments.cases)
        return
    end = time.monotonic() + seconds
    yield from itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(arguments.seed))


def _build_parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all borders together")
    parser.add_argument("--seed", type=int, default=0, help="the first; each value has one of its own")
    parser.add_argument("--cases", type=int, help="number of values at each border, instead of a time")
    parser.add_argument("--border", action="append", choices=names, help="this one only; may be given again")
    return parser


if __name__ == "__main__":
    sys.exit(main())
