"""What a cluster's machines need of the world that they are in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..network import Network
from ..story import Story

if TYPE_CHECKING:
    from .api_server import ApiServer
    from .containers import Containers, Exited
    from .objects import Object


class Surroundings(Protocol):
    network: Network
    story: Story

    @property
    def api(self) -> ApiServer: ...

    def now(self) -> float:
        """Virtual seconds."""

    def wall(self, place: str = "") -> float:
        """Seconds since the epoch, by the clock of that place."""

    def random(self, purpose: str) -> random.Random: ...

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle: ...

    def launch(self, pod: Object, node: str, address: str, exited: Exited) -> Containers:
        """The processes of a job's worker, not yet started."""
