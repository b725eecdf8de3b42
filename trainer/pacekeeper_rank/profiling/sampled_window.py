"""A profile window in progress: stacks of the training thread, and its waits for peers."""

from __future__ import annotations

from typing import Any

from ..recorder import Recorder
from ..records import Phase
from ..work_clock import HostClock, Mark
from .stack_sampler import StackSampler

MAX_WINDOW_DURATION_FACTOR = 3.0
"""Largest duration of a window as a multiple of its seconds, including skipped time."""


class SampledWindow:
    """Samples from creation until `stop`. Both are called in the training thread, at ends of steps."""

    def __init__(self, recorder: Recorder, steps: int, seconds: float, now: float) -> None:
        """`steps`, `seconds`: duration, whichever comes first. `now`: seconds, monotonic."""
        self._recorder = recorder
        self._steps, self._seconds = steps, seconds
        self._began_at, self._first_step = now, recorder.step
        self.waits: list[tuple[Mark, Mark]] = []
        if isinstance(recorder.clock, HostClock):  # kernels include the waits of a device
            recorder.notice_wait = lambda start, end: self.waits.append((start, end))
        self.sampler = StackSampler(recorder.training_thread, lambda: recorder.phase in (Phase.TRAIN, Phase.LOAD))
        self.began = self.ended = recorder.last_end

    def is_over(self, now: float) -> bool:
        """Return whether the window is over. `now`: seconds, monotonic."""
        seconds = now - self._began_at
        training_seconds = seconds - self.sampler.skipped_seconds
        is_complete = self._recorder.step - self._first_step >= self._steps or training_seconds >= self._seconds
        return is_complete or seconds >= MAX_WINDOW_DURATION_FACTOR * self._seconds

    def stop(self) -> None:
        """Stop sampling."""
        self.sampler.stop()
        self._recorder.notice_wait = ignore_wait
        self.ended = self._recorder.last_end


def ignore_wait(_start: Any, _end: Any) -> None:
    """Do nothing with a wait, outside of windows."""
