"""What a cluster's controllers and machines need of their world."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..network import SimulatedNetwork
from ..run_log import RunLog

if TYPE_CHECKING:
    from .api.api_server import ApiServer
    from .api.objects import Object
    from .containers import Containers, ExitCallback


class ClusterWorld(Protocol):
    network: SimulatedNetwork
    log: RunLog

    @property
    def api(self) -> ApiServer: ...

    def now(self) -> float:
        """Return the virtual time in seconds."""

    def wall_time(self, place: str = "") -> float:
        """Return the seconds since the epoch on the clock of `place`."""

    def create_random(self, purpose: str) -> random.Random: ...

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle: ...

    def create_worker(self, pod: Object, node: str, address: str, exited: ExitCallback) -> Containers:
        """Create the processes of a job's worker, without starting them."""
