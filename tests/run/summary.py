"""What is printed at the end of a run: failures, the table of costs, the verdict, and one closing line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .lanes import Result, format_minutes, prefix_lines
from .parts import BUDGET_LIMIT

_LINES_OF_OTHERS = 60
"""A failed part that is not pytest's is shown again by this many last lines."""

_NAMED_FAILURES = 12
_MESSAGE_LENGTH = 200


@dataclass(frozen=True)
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


def summarize_run(results: Sequence[Result], wall_seconds: float, folder: Path, slowdown: float = 1.0) -> str:
    """Return what a person or CI reads last. Its last line counts the tests of all parts.

    `results` have the processor seconds of the usual machine, and `slowdown` is that of this one.
    """
    failures = [_repeat_failures(result.part.name, folder) for result in results if result.status]
    over_budget = [result.part.name for result in results if result.processor_seconds > result.part.budget_seconds]
    verdict = [f"This machine was {slowdown:.3g} times as slow as usual: processor times are divided by that."]
    if over_budget:
        verdict.append(f"Over their budget: {', '.join(over_budget)}.")
    if exceeds_budget(results):
        verdict.append(
            f"FAILED: the run used more than {BUDGET_LIMIT:g} times its budget of processor time."
            ' CONTRIBUTING.md ("What a test may cost") has the remedies.'
        )
    total = sum((count_tests(result, folder) for result in results), Counts())
    failure_lines = [line for result in results if result.status for line in name_failures(result.part.name, folder)]
    table = format_table(results, wall_seconds)
    # Failures are named again below the table: CI keeps the last lines of a log.
    return "\n".join([*failures, table, *verdict, *failure_lines[:_NAMED_FAILURES], format_closing_line(total)])


def exceeds_budget(results: Sequence[Result]) -> bool:
    """Return whether the parts together used too much: by processor time, which load changes little."""
    used, budget = _sum_up(results)
    return used > BUDGET_LIMIT * budget


def count_tests(result: Result, folder: Path) -> Counts:
    """Return the counts of a part's junit file. A part that failed without a failed test counts as one failure."""
    counts = Counts()
    for suite in _read_elements(result.part.name, folder, "testsuite"):
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        counts += Counts(int(suite.get("tests", 0)) - failed - skipped, failed, skipped)
    return counts + Counts(failed=1) if result.status and not counts.failed else counts


def name_failures(name: str, folder: Path) -> list[str]:
    """Return one line a failed test of a part: its file and name, and how its message begins."""
    return [
        f"{name} FAILED {case.get('classname', '')}::{case.get('name', '')}: "
        + " ".join(outcome.get("message", "").split())[:_MESSAGE_LENGTH]
        for case in _read_elements(name, folder, "testcase")
        for outcome in case
        if outcome.tag in ("failure", "error")
    ]


def format_closing_line(counts: Counts) -> str:
    skipped = f", {counts.skipped} skipped" if counts.skipped else ""
    return f"{counts.passed} passed, {counts.failed} failed{skipped}"


def format_table(results: Sequence[Result], wall_seconds: float) -> str:
    """Return one row a part, and the total. Wall times are minutes and seconds."""
    used, budget = _sum_up(results)
    rows: list[tuple[str, ...]] = [("part", "wall", "processor", "budget", "share", "result")]
    for result in results:
        part, outcome = result.part, "failed" if result.status else "passed"
        rows.append(_format_row(part.name, result.wall_seconds, result.processor_seconds, part.budget_seconds, outcome))
    outcome = "failed" if any(result.status for result in results) else "passed"
    rows.append(_format_row("total", wall_seconds, used, budget, outcome))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, 6))])
        for row in rows
    )


def _format_row(name: str, wall: float, used: float, budget: float, outcome: str) -> tuple[str, ...]:
    share = f"{used / budget:.0%}" if budget else "-"
    return name, format_minutes(wall), f"{used:.0f} s", f"{budget:.0f} s", share, outcome


def _sum_up(results: Sequence[Result]) -> tuple[float, float]:
    """Return the used and the allowed processor seconds."""
    return sum(result.processor_seconds for result in results), sum(result.part.budget_seconds for result in results)


def extract_failures(log: str) -> str:
    """Return the part of pytest's output with the reason of the failure, or else the last lines."""
    if found := re.search(r"^=+ (?:ERRORS|FAILURES) =+$", log, re.MULTILINE):
        return log[found.start() :]
    return "\n".join(log.splitlines()[-_LINES_OF_OTHERS:])


def _read_elements(name: str, folder: Path, tag: str) -> list[ElementTree.Element]:
    """Return all elements of a kind in the part's junit file, none if it wrote no file."""
    path = folder / f"{name}.xml"
    return list(ElementTree.parse(path).iter(tag)) if path.exists() else []


def _repeat_failures(name: str, folder: Path) -> str:
    log = (folder / f"{name}.log").read_text(errors="replace")
    return f"{name} failed:\n{prefix_lines(name, extract_failures(log))}\n"
