"""The roles in which lower layers use what is put together above them.

A layer imports only those below it (`pyproject.toml`). Where it must call up, it calls one of these.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Protocol

from .loop import Process, VirtualLoop
from .network import SimulatedNetwork
from .run_log import RunLog

KILLED_EXIT_CODE = 137
"""Exit code: 128 + SIGKILL."""


class SharedWorld(Protocol):
    """What all parts of a world share: virtual time, randomness, the network, and the log."""

    loop: VirtualLoop
    network: SimulatedNetwork
    log: RunLog

    def now(self) -> float:
        """Return the virtual time in seconds."""

    def wall_time(self, place: str = "") -> float:
        """Return the seconds since the epoch on the clock of `place`."""

    def create_random(self, purpose: str) -> random.Random:
        """Create the random stream for a purpose."""

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Schedule a call that belongs to no process."""


class ExitCallback(Protocol):
    """A pod's kubelet, when the main container has exited. Further calls are ignored."""

    def __call__(self, code: int, reason: str, message: str = "") -> None: ...


class Containers(Protocol):
    """The containers of a pod, for its kubelet. They call an `ExitCallback` when the main container has exited."""

    def start(self) -> None: ...

    def terminate(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace` seconds. Another call can only shorten the time."""

    def kill(self, code: int = KILLED_EXIT_CODE, reason: str = "") -> None:
        """Kill all containers at once."""

    @property
    def sidecar(self) -> Process | None: ...

    def restart_sidecar(self) -> None:
        """Kill the sidecar if it still runs, and start another process."""


class ScrapeTarget(Protocol):
    """A worker's sidecar, for Prometheus."""

    namespace: str
    job: str
    node: str

    def export_steps(self) -> list[int] | None:
        """Return the step of each rank; None: the sidecar does not answer."""
