"""`make fuzz SECONDS=… SEED=…`: mutated values at every border, for longer than `make test` has time for."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

from .border import Finding, trials
from .borders import all_of_them


def main() -> int:
    """1: something was found; it says how to find it again."""
    borders = all_of_them()
    arguments = _parser(sorted(borders)).parse_args()
    chosen = [borders[name] for name in arguments.border or borders]
    found = 0
    for border in chosen:
        seeds = _seeds(arguments, arguments.seconds / len(chosen))
        try:
            print(f"{border.name}: {trials(border, seeds)} values", flush=True)
        except Finding as finding:
            found += 1
            print(finding, flush=True)
    return bool(found)


def _seeds(arguments: argparse.Namespace, seconds: float) -> Iterator[int]:
    """For so many seconds, or so many of them."""
    if arguments.cases is not None:
        yield from range(arguments.seed, arguments.seed + arguments.cases)
        return
    end = time.monotonic() + seconds
    yield from itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(arguments.seed))


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all borders together")
    parser.add_argument("--seed", type=int, default=0, help="the first; each value has one of its own")
    parser.add_argument("--cases", type=int, help="so many values at each border, instead of so many seconds")
    parser.add_argument("--border", action="append", choices=names, help="this one only; may be given again")
    return parser


if __name__ == "__main__":
    sys.exit(main())
