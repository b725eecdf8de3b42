"""What a cluster's machines need of the world that they are in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..network import SimulatedNetwork
from ..story import RunLog

if TYPE_CHECKING:
    from .api_server import ApiServer
    from .containers import Containers, ExitCallback
    from .objects import Object


class ClusterWorld(Protocol):
    network: SimulatedNetwork
    log: RunLog

    @property
    def api(self) -> ApiServer: ...

    def now(self) -> float:
        """Virtual seconds."""

    def wall_time(self, place: str = "") -> float:
        """Seconds since the epoch, by the clock of that place."""

    def create_random(self, purpose: str) -> random.Random: ...

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle: ...

    def create_worker(self, pod: Object, node: str, address: str, exited: ExitCallback) -> Containers:
        """The processes of a job's worker, not yet started."""
