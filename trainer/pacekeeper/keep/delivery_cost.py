"""What copies to and from neighbours take from the training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from pacekeeper import cgroup

_LAST = 5
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
        waited: Callable[[], float | None] = cgroup.waited_for_processor,
    ) -> None:
        """
        processor_seconds: that the calling thread has computed. waited: seconds for which somebody has waited for a
        processor, or None. Both since some moment.
        """
        self._processor_seconds = processor_seconds
        self._waited = waited
        self._lock = threading.Lock()
        self._at_work = 0
        self._waited_before: float | None = None
        """When the first thread that is at work now began."""
        self._computing = self._waiting = 0.0
        """Of the copy that is under way."""
        self._unknown = False
        """Whether nobody knows how long was waited."""
        self._costs: deque[float] = deque(maxlen=_LAST)

    @property
    def seconds(self) -> float:
        """That a snapshot's copy takes from the training: of the last few, the mean; 0: not known yet."""
        return fmean(self._costs) if self._costs else 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What the calling thread does inside is for a copy."""
        start = self._processor_seconds()
        with self._lock:
            self._at_work += 1
            if self._at_work == 1:
                self._waited_before = self._waited()
        try:
            yield
        finally:
            with self._lock:
                self._computing += self._processor_seconds() - start
                self._at_work -= 1
                if not self._at_work:
                    self._end_waiting()

    def next_copy(self) -> None:
        """The one before is delivered everywhere, or has been given up."""
        with self._lock:
            self._costs.append(self._computing if self._unknown else min(self._computing, self._waiting))
            self._computing = self._waiting = 0.0
            self._unknown = False

    def _end_waiting(self) -> None:
        now = self._waited()
        if now is None or self._waited_before is None:
            self._unknown = True
        else:
            self._waiting += now - self._waited_before
