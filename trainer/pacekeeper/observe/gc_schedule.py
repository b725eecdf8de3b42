"""Python's garbage collection at planned steps.

Python collects when a rank has created enough objects, on each rank at another moment, and each time all other ranks
wait. If all ranks collect in the same step, they wait once (arXiv 2505.05713, its remedy for garbage collection).
"""

from __future__ import annotations

import gc
import os
import weakref

from pacekeeper_analysis.errors import InputError


class GCSchedule:
    """Collects only at the steps of the plan, if it sets an interval."""

    def __init__(self) -> None:
        self.every = 0
        """Steps between two collections; 0: Python's own schedule."""
        self._automatic = False
        self._last_step = 0
        _schedules.add(self)

    def collect_if_due(self, step: int, every: int) -> None:
        """Collect after step `step` if it is a multiple of `every`, or one was passed since the last call.

        Call it on all ranks with the same arguments, so that all of them collect at once. `every` may change at any
        boundary. Raises InputError if it is negative.
        """
        if every < 0:
            raise InputError(f"gc_every={every} must be 0 (Python's own schedule) or a number of steps")
        if every != self.every:
            self._set_interval(every)
            self._last_step = step - 1
        if every and step // every > self._last_step // every:
            gc.collect()
        self._last_step = step

    def detach_in_child(self) -> None:
        """Restore Python's own schedule in a process that the rank has just forked: no step ends there."""
        if self.every:
            self._set_interval(0)

    def _set_interval(self, every: int) -> None:
        if self.every == 0:
            self._automatic = gc.isenabled()
            gc.disable()
        self.every = every
        if every == 0 and self._automatic:
            gc.enable()


_schedules: weakref.WeakSet[GCSchedule] = weakref.WeakSet()


def _detach_all_in_child() -> None:
    for schedule in list(_schedules):
        schedule.detach_in_child()


os.register_at_fork(after_in_child=_detach_all_in_child)
