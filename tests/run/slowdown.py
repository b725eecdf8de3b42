"""How slow the machine is during a run, by the processor time of a fixed piece of work.

Neighbors on a host make the same instructions cost up to 1.7 times the processor time.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable

USUAL_SECONDS = 0.0115
"""Processor seconds of the work during a run on the machine for which the budgets are made."""
INTERVAL_SECONDS = 10.0


class SlowdownMeter:
    """Measures from time to time, next to what runs."""

    def __init__(self, measure: Callable[[], float] | None = None) -> None:
        """`measure` does the work once, and returns its processor seconds."""
        self._measure = measure or measure_work
        self._measurements: list[float] = []
        self._due = -math.inf

    def update(self, now: float) -> None:
        """Measure if it is due. `now`: seconds, monotonic."""
        if now >= self._due:
            self._due = now + INTERVAL_SECONDS
            self._measurements.append(self._measure())

    @property
    def slowdown(self) -> float:
        """Return how many times as slow as usual the machine was, at least 1."""
        return max(1.0, statistics.median(self._measurements or [0.0]) / USUAL_SECONDS)


def measure_work() -> float:
    """Return the processor seconds of parsing, sorting, and copying some megabytes, as tests do."""
    began = time.thread_time()
    rows = [{"name": f"worker-{number * 7919 % 10_007}", "step": number} for number in range(6_000)]
    copied = json.loads(json.dumps(rows))
    copied.sort(key=lambda row: row["name"])
    bytes(bytearray(2**22))
    return time.thread_time() - began
