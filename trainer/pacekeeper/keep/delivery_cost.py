"""What copies to and from neighbours take from the training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from pacekeeper import cgroup

_COUNTED_COPIES = 5
"""Copies that count."""


class DeliveryCost:
    """Of one rank: of the copy that it sends, and of those that it takes, which go on at about the same time.

    The threads at work do not hold the training up for longer than they compute themselves, and not at all while
    there is a processor for everybody: so a copy costs the smaller of their processor time and the time in which
    somebody waited for a processor meanwhile. Where the kernel does not say how long that was, it is the former.
    """

    def __init__(
        self,
        processor_seconds: Callable[[], float] = time.thread_time,
        read_wait_seconds: Callable[[], float | None] = cgroup.read_cpu_wait_seconds,
    ) -> None:
        """
        processor_seconds: that the calling thread has computed. waited: seconds for which somebody has waited for a
        processor, or None. Both since some moment.
        """
        self._processor_seconds = processor_seconds
        self._read_wait_seconds = read_wait_seconds
        self._lock = threading.Lock()
        self._active_threads = 0
        self._wait_seconds_at_start: float | None = None
        """When the first thread that is at work now began."""
        self._compute_seconds = self._wait_seconds = 0.0
        """Of the copy that is under way."""
        self._is_wait_unknown = False
        """Whether nobody knows how long was waited."""
        self._costs: deque[float] = deque(maxlen=_COUNTED_COPIES)

    @property
    def seconds(self) -> float:
        """That a snapshot's copy takes from the training: of the last few, the mean; 0: not known yet."""
        return fmean(self._costs) if self._costs else 0.0

    @contextmanager
    def count_work(self) -> Iterator[None]:
        """What the calling thread does inside is for a copy."""
        start = self._processor_seconds()
        with self._lock:
            self._active_threads += 1
            if self._active_threads == 1:
                self._wait_seconds_at_start = self._read_wait_seconds()
        try:
            yield
        finally:
            with self._lock:
                self._compute_seconds += self._processor_seconds() - start
                self._active_threads -= 1
                if not self._active_threads:
                    self._add_wait()

    def finish_copy(self) -> None:
        """The one before is delivered everywhere, or has been given up."""
        with self._lock:
            self._costs.append(self._compute_seconds if self._is_wait_unknown else min(self._compute_seconds, self._wait_seconds))
            self._compute_seconds = self._wait_seconds = 0.0
            self._is_wait_unknown = False

    def _add_wait(self) -> None:
        now = self._read_wait_seconds()
        if now is None or self._wait_seconds_at_start is None:
            self._is_wait_unknown = True
        else:
            self._wait_seconds += now - self._wait_seconds_at_start
