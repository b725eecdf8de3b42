"""Cost to the training of snapshot copies to and from peers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from pacekeeper import cgroup

_COUNTED_COPIES = 5
"""Number of recent copies that count."""


class DeliveryCost:
    """Cost for one rank of the copy that it sends and of those that it receives, which run at about the same time.

    The copying threads delay training at most by their own processor time, and not at all while every thread has a
    processor. A copy therefore costs the smaller of their processor time and the time in which a thread waited for a
    processor. If the kernel does not report that time, it is the former.
    """

    def __init__(
        self,
        processor_seconds: Callable[[], float] = time.thread_time,
        read_wait_seconds: Callable[[], float | None] = cgroup.read_cpu_wait_seconds,
    ) -> None:
        """Create the counter.

        `processor_seconds`: returns the processor time of the calling thread. `read_wait_seconds`: returns the seconds
        in which a thread waited for a processor, or None. Both count from an arbitrary moment.
        """
        self._processor_seconds = processor_seconds
        self._read_wait_seconds = read_wait_seconds
        self._lock = threading.Lock()
        self._active_threads = 0
        self._wait_seconds_at_start: float | None = None
        """Waiting time when the first thread that is active now began."""
        self._compute_seconds = self._wait_seconds = 0.0
        """Times of the present copy."""
        self._is_wait_unknown = False
        """Whether the waiting time of the present copy is unknown."""
        self._costs: deque[float] = deque(maxlen=_COUNTED_COPIES)

    @property
    def seconds(self) -> float:
        """Mean time that the copies of the last few snapshots cost the training; 0: unknown."""
        return fmean(self._costs) if self._costs else 0.0

    @contextmanager
    def count_work(self) -> Iterator[None]:
        """Count the calling thread's work inside the context as copying."""
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
        """Finish the copy of the previous snapshot, which is delivered everywhere or given up."""
        with self._lock:
            self._costs.append(
                self._compute_seconds if self._is_wait_unknown else min(self._compute_seconds, self._wait_seconds)
            )
            self._compute_seconds = self._wait_seconds = 0.0
            self._is_wait_unknown = False

    def _add_wait(self) -> None:
        wait_seconds = self._read_wait_seconds()
        if wait_seconds is None or self._wait_seconds_at_start is None:
            self._is_wait_unknown = True
        else:
            self._wait_seconds += wait_seconds - self._wait_seconds_at_start
