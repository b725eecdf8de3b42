"""Python's garbage collection at planned steps, and how long collections take.

Python collects when a rank has made enough objects, each rank at another moment, and at each of them all the others
wait. Collected in the same step on all ranks, they wait once (arXiv 2505.05713, its remedy for garbage collection).
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable

from pacekeeper_analysis.errors import InputError

GCReport = Callable[[int, int, int], None]
"""Of one collection: start and end (ns of time.monotonic_ns), and its generation (2: everything)."""


class GCSchedule:
    """Collects at the steps of the plan alone, while there is one."""

    def __init__(self) -> None:
        self.every = 0
        """Steps between two collections; 0: Python collects as it likes."""
        self._automatic = False
        self._last_step = 0
        _schedules.add(self)

    def collect_if_due(self, step: int, every: int) -> None:
        """After step number `step`; collects where it is a multiple of `every`, or one was passed since the last call.

        On all ranks with the same arguments, so that all of them collect at once. `every` may change at any boundary.
        Raises InputError where it is negative.
        """
        if every < 0:
            raise InputError(f"garbage_every={every} must be 0 (as Python likes) or a number of steps")
        if every != self.every:
            self._set_interval(every)
            self._last_step = step - 1
        if every and step // every > self._last_step // every:
            gc.collect()
        self._last_step = step

    def detach_in_child(self) -> None:
        """Gives collection back to Python in a process that the rank has just forked: no step ends there."""
        if self.every:
            self._set_interval(0)

    def _set_interval(self, every: int) -> None:
        if self.every == 0:
            self._automatic = gc.isenabled()
            gc.disable()
        self.every = every
        if every == 0 and self._automatic:
            gc.enable()


def time_collections(
    report: GCReport, at_least_ns: int = 0, begins: Callable[[int], None] | None = None
) -> Callable[[], None]:
    """Calls `report` after each collection of this process that took `at_least_ns`; returns what ends that.

    begins: called before each collection, with its generation. The youngest generation is collected many times a step:
    what is called must be quick, and must not fail.
    """
    clock, began = time.monotonic_ns, 0

    def collecting(event: str, facts: dict[str, int]) -> None:
        nonlocal began
        if event == "start":
            if begins is not None:
                begins(facts["generation"])
            began = clock()
        elif (now := clock()) - began >= at_least_ns:
            report(began, now, facts["generation"])

    gc.callbacks.append(collecting)
    return lambda: gc.callbacks.remove(collecting)


_schedules: weakref.WeakSet[GCSchedule] = weakref.WeakSet()


def _detach_all_in_child() -> None:
    for planned in list(_schedules):
        planned.detach_in_child()


os.register_at_fork(after_in_child=_detach_all_in_child)
