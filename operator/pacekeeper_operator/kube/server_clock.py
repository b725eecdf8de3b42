"""Comparison of this machine's clock with the API server's, which dates each of its answers.

Irreversible actions wait until both agree: failing or deleting a job because its time is over, deleting an Incident,
and deleting a pod by force. A node whose clock is hours ahead would do all of that at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..async_runtime import OperatorRuntime
from .client import REQUEST_SECONDS

CLOCK_TOLERANCE_SECONDS = 2.0 * REQUEST_SECONDS
"""The largest difference that counts as agreement.

An answer may be as old as a request may take, and dates are whole seconds.
"""


@dataclass
class ServerClock:
    """The API server's time by its newest answer."""

    runtime: OperatorRuntime
    _date: float | None = field(default=None, init=False)  # seconds since the epoch; None: no dated answer yet
    _received_at: float = field(default=0.0, init=False)  # when it arrived, by the monotonic clock

    def record_date(self, date: float) -> None:
        """Record the date of an answer that has just arrived, in seconds since the epoch."""
        self._date, self._received_at = date, self.runtime.monotonic()

    @property
    def seconds_ahead(self) -> float:
        """The seconds that this machine's clock is ahead of the API server's; negative: behind."""
        if self._date is None:
            return 0.0
        return self.runtime.now() - (self._date + self.runtime.monotonic() - self._received_at)

    @property
    def agrees(self) -> bool:
        """Whether both clocks agree. They do if the API server, or a proxy in front of it, sends no dates."""
        return abs(self.seconds_ahead) <= CLOCK_TOLERANCE_SECONDS
