"""What goes wrong with the API server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class RequestOutcome(Enum):
    """What becomes of one request."""

    REFUSED = "it is answered with an error, and does nothing"
    LOST = "it takes effect, and its answer never comes"
    LATE = "it takes effect after its sender has given up"
    DROPPED = "it never arrives"
    BROKEN = "it takes effect, and the connection breaks before the answer"


@dataclass(frozen=True)
class OneShot:
    """The fate of the next request with this method ("": any) whose path has `part` in it."""

    method: str
    part: str
    outcome: RequestOutcome = RequestOutcome.REFUSED
    status: int = 500


@dataclass(frozen=True)
class SlowWebhook:
    """An admission webhook holds up creations whose names begin with `prefix`."""

    plural: str
    prefix: str
    seconds: float


@dataclass(frozen=True)
class Denial:
    """Creations whose names begin with `prefix` are answered with this error, as by an admission plugin."""

    plural: str
    prefix: str
    status: int
    message: str

    def __post_init__(self) -> None:
        assert self.status >= 400


@dataclass
class ApiFaults:
    """Set what you want; what is left as it is makes no trouble. Rates are shares of all requests from 0 to 1."""

    silent: bool = False
    """Requests are taken and never answered, and all streams fall silent."""
    error_rate: float = 0.0
    """Of requests that are answered with 500, 503 or 429, and do nothing."""
    lost_rate: float = 0.0
    """Of writes that take effect, and whose answer never comes."""
    late_rate: float = 0.0
    """Of writes that take effect after the sender has given up."""
    slow: tuple[float, float] = (0.0, 0.0)
    """Between so many and so many seconds are added to each request."""
    watch_lag: tuple[float, float] = (0.0, 0.08)
    """A stream tells of a change between so many and so many seconds after it."""
    collection_lag: tuple[float, float] = (0.05, 1.5)
    """The garbage collector deletes what has lost its owner so many seconds later."""
    quota_lag: tuple[float, float] = (0.01, 0.6)
    """What a pod took of a quota is free again so many seconds after it is gone."""
    history: int = 2000
    """Changes of a kind that a stream may still ask for."""
    slow_webhooks: list[SlowWebhook] = field(default_factory=list)
    denials: list[Denial] = field(default_factory=list)
    one_shots: list[OneShot] = field(default_factory=list)
    """Each is used up by the first request that it fits."""

    restarts: Callable[[], None] = lambda: None
    """Called when the server goes down."""
    _down: bool = False

    @property
    def down(self) -> bool:
        """Connections are refused. When this began, all streams broke; none can go on from before (its history is in
        the server's memory)."""
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        if down:
            self.restarts()

    @property
    def is_unavailable(self) -> bool:
        """Whether nobody gets an answer."""
        return self._down or self.silent
