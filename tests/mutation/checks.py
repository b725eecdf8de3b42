"""What a mutant meets: every unit test is a check, every simulated disaster another."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from simulation.generator import generate_schedule
from simulation.run import run_schedule

Line = tuple[str, int]
"""A file, by its absolute path, and a line of it."""


@dataclass(frozen=True)
class Check:
    name: str
    holds: Callable[[], bool]  # raises what it likes where it does not


def iterate_tests(session: pytest.Session) -> Iterator[Check]:
    """The tests that a session has collected; each sets up and tears down all that it needs."""
    for item in session.items:
        yield Check(item.nodeid, partial(_passes_test, item))


def _passes_test(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def iterate_disasters(seeds: int) -> Iterator[Check]:
    """Simulated disasters 1 to `seeds`."""
    for seed in range(1, seeds + 1):
        yield Check(f"seed {seed}", partial(_heals_disaster, seed))


def _heals_disaster(seed: int) -> bool:
    return not run_schedule(generate_schedule(seed)).violations


@dataclass(frozen=True)
class Reach:
    """What a check comes to while it holds."""

    seconds: float  # under a tracer: more than without
    lines: frozenset[Line]


def trace_check(check: Check, files: Sequence[Path]) -> Reach:
    """Raises AssertionError where the check does not hold: then it cannot check mutants."""
    traced = {str(path): True for path in files}
    lines: set[Line] = set()

    def trace_call(frame: FrameType, _event: str, _argument: object) -> Any:
        return trace_line if frame.f_code.co_filename in traced else None

    def trace_line(frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_line

    start = time.perf_counter()
    threading.settrace(trace_call)
    sys.settrace(trace_call)
    try:
        holds = check.holds()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    assert holds, f"{check.name} does not hold without any mutation"
    return Reach(time.perf_counter() - start, frozenset(lines))
