"""Whether this machine's clock agrees with the API server's, which dates each of its answers.

What cannot be taken back (a job that fails or is deleted because its time is over, an Incident that is deleted, a pod
that is deleted by force) waits until it does. A node whose clock is hours ahead would do all of that at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cluster import REQUEST_SECONDS
from .runtime import OperatorRuntime

CLOCK_TOLERANCE_SECONDS = 2.0 * REQUEST_SECONDS
"""An answer may be as old as a request may take, and dates are whole seconds."""


@dataclass
class ServerClock:
    """The API server's time by its newest answer."""

    runtime: OperatorRuntime
    _date: float = field(default=0.0, init=False)  # seconds since the epoch; 0: no answer was dated so far
    _received_at: float = field(default=0.0, init=False)  # seconds of the monotonic clock

    def record_date(self, date: float) -> None:
        """Take the date of an answer that has just come, in seconds since the epoch."""
        self._date, self._received_at = date, self.runtime.monotonic()

    @property
    def seconds_ahead(self) -> float:
        """By how many seconds this machine's clock is ahead of the API server's; negative: behind."""
        if not self._date:
            return 0.0
        return self.runtime.now() - (self._date + self.runtime.monotonic() - self._received_at)

    @property
    def agrees(self) -> bool:
        """Whether both clocks show the same time. A server, or a proxy before it, that dates nothing contradicts
        nobody."""
        return abs(self.seconds_ahead) <= CLOCK_TOLERANCE_SECONDS
