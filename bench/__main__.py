"""`python -m bench [NAME …]`: all benches one after the other, or those that are named.

Exit status: 1 where a bench could not measure, or a goal of its result (`holds`) is not reached; NOT_RUN where the only
bench that was asked for needs what this machine lacks (a GPU); 2 for an unknown name. All processes that a bench has
started end with it, also when it is interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .scripts.guard import TIMED_OUT, run_guarded

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
    bench_names = sorted(path.stem for path in HERE.glob("[!_]*.py"))
    unknown = set(names) - set(bench_names)
    if unknown:
        print(f"no bench {', '.join(sorted(unknown))}; there are: {', '.join(bench_names)}", file=sys.stderr)
        return 2
    verdicts = {name: run_bench(name) for name in names or bench_names}
    for name, verdict in verdicts.items():
        if not verdict.ran:
            print(f"{name}: not run", file=sys.stderr)
        elif verdict.failure:
            print(f"{name}: failed: {verdict.failure}", file=sys.stderr)
    if any(verdict.failure for verdict in verdicts.values()):
        return 1
    return NOT_RUN if not any(verdict.ran for verdict in verdicts.values()) else 0


def run_bench(name: str) -> Verdict:
    print(f"== {name}", file=sys.stderr, flush=True)
    last_line = ""

    def on_line(text: str) -> None:
        nonlocal last_line
        print(text, end="", flush=True)
        last_line = text

    return build_verdict(
        run_guarded([sys.executable, "-m", f"bench.{name}"], TIMEOUT_SECONDS, on_line, cwd=HERE.parent), last_line
    )


def build_verdict(status: int, last_line: str) -> Verdict:
    """By a bench's exit status and the last line of its output, its result."""
    if status == NOT_RUN:
        return Verdict(ran=False)
    if status == TIMED_OUT:
        return Verdict(failure="not done in time")
    try:
        result = json.loads(last_line)
    except ValueError:
        result = None
    if isinstance(result, dict) and (missed := list_missed_goals(result)):
        return Verdict(failure=f"not reached: {', '.join(missed)}")
    if status or not isinstance(result, dict):
        return Verdict(failure=f"exit status {status}" if status else "no result")
    return Verdict()


def list_missed_goals(result: Mapping[str, Any]) -> list[str]:
    """`holds` is one truth, or one for each goal; a result without goals misses none."""
    holds = result.get("holds", True)
    goals = holds if isinstance(holds, dict) else {"holds": holds}
    return [goal for goal, reached in goals.items() if reached is not True]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
