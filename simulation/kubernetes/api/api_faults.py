"""Faults of the API server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class RequestOutcome(Enum):
    """The outcome of one request."""

    REFUSED = "it is answered with an error, and does nothing"
    LOST = "it takes effect, and its answer is lost"
    LATE = "it takes effect after its sender has given up"
    DROPPED = "it never arrives"
    BROKEN = "it takes effect, and the connection breaks before the answer"


@dataclass(frozen=True)
class OneShot:
    """The outcome of the next request with this method ("": any) whose path contains `part`."""

    method: str
    part: str
    outcome: RequestOutcome = RequestOutcome.REFUSED
    status: int = 500


@dataclass(frozen=True)
class SlowWebhook:
    """An admission webhook delays the creation of objects whose names begin with `prefix`."""

    plural: str
    prefix: str
    seconds: float


@dataclass(frozen=True)
class Denial:
    """The creation of objects whose names begin with `prefix` fails with this error, as by an admission plugin."""

    plural: str
    prefix: str
    status: int
    message: str

    def __post_init__(self) -> None:
        assert self.status >= 400


@dataclass
class ApiFaults:
    """The API server's faults. The defaults are no faults. Rates are shares of all requests, from 0 to 1."""

    silent: bool = False
    """Requests are accepted and never answered, and all watches fall silent."""
    error_rate: float = 0.0
    """Rate of requests that are answered with 500, 503, or 429, and have no effect."""
    lost_rate: float = 0.0
    """Rate of writes that take effect, but are never answered."""
    late_rate: float = 0.0
    """Rate of writes that take effect after the client has timed out."""
    slow: tuple[float, float] = (0.0, 0.0)
    """Bounds of the additional delay of each request, in seconds."""
    watch_lag: tuple[float, float] = (0.0, 0.08)
    """Bounds of the delay of a watch event, in seconds."""
    collection_lag: tuple[float, float] = (0.05, 1.5)
    """Bounds of the delay until the garbage collector deletes an orphan, in seconds."""
    quota_lag: tuple[float, float] = (0.01, 0.6)
    """Bounds of the delay until a removed pod's quota is free again, in seconds."""
    history: int = 2000
    """Number of changes of a kind from which a watch may resume."""
    slow_webhooks: list[SlowWebhook] = field(default_factory=list)
    denials: list[Denial] = field(default_factory=list)
    one_shots: list[OneShot] = field(default_factory=list)
    """Each is used up by the first matching request."""

    restarts: Callable[[], None] = lambda: None
    """Called when the server goes down."""
    _down: bool = False

    @property
    def down(self) -> bool:
        """Whether connections are refused.

        When the server goes down, all watches break. None can resume: the history is in the server's memory.
        """
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        if down:
            self.restarts()

    @property
    def is_unavailable(self) -> bool:
        """Whether no client gets an answer."""
        return self._down or self.silent
