"""`python -m bench [NAME …]`: all benches one after the other, or those that are named.

Exit status: 1 where a bench could not measure, or a goal of its result (`holds`) is not reached; NOT_RUN where the only
bench that was asked for needs what this machine has not (a GPU); 2 for a name that there is not. Whatever a bench has
started is gone at its end, also when it is interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .scripts.guard import TIMED_OUT, run

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 3 * 3600.0
NOT_RUN = 77
"""Exit status, as automake's tests have it."""


@dataclass(frozen=True)
class Verdict:
    """What became of a bench."""

    ran: bool = True
    failure: str = ""
    """Empty: it has measured, and reached its goals."""


def main(names: list[str]) -> int:
    known = sorted(path.stem for path in HERE.glob("[!_]*.py"))
    unknown = set(names) - set(known)
    if unknown:
        print(f"no bench {', '.join(sorted(unknown))}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    verdicts = {name: bench(name) for name in names or known}
    for name, of_bench in verdicts.items():
        if not of_bench.ran:
            print(f"{name}: not run", file=sys.stderr)
        elif of_bench.failure:
            print(f"{name}: failed: {of_bench.failure}", file=sys.stderr)
    if any(of_bench.failure for of_bench in verdicts.values()):
        return 1
    return NOT_RUN if not any(of_bench.ran for of_bench in verdicts.values()) else 0


def bench(name: str) -> Verdict:
    print(f"== {name}", file=sys.stderr, flush=True)
    last = ""

    def line(text: str) -> None:
        nonlocal last
        print(text, end="", flush=True)
        last = text

    return verdict(run([sys.executable, "-m", f"bench.{name}"], TIMEOUT_SECONDS, line, cwd=HERE.parent), last)


def verdict(status: int, last_line: str) -> Verdict:
    """By a bench's exit status and the last line of its output, its result."""
    if status == NOT_RUN:
        return Verdict(ran=False)
    if status == TIMED_OUT:
        return Verdict(failure="not done in time")
    try:
        result = json.loads(last_line)
    except ValueError:
        result = None
    if isinstance(result, dict) and (missed := goals_missed(result)):
        return Verdict(failure=f"not reached: {', '.join(missed)}")
    if status or not isinstance(result, dict):
        return Verdict(failure=f"exit status {status}" if status else "no result")
    return Verdict()


def goals_missed(result: Mapping[str, Any]) -> list[str]:
    """`holds` is one truth, or one for each goal; a result without goals misses none."""
    holds = result.get("holds", True)
    goals = holds if isinstance(holds, dict) else {"holds": holds}
    return [goal for goal, reached in goals.items() if reached is not True]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
