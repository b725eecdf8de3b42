"""Which nodes preflights probe at the moment, and whose free GPUs their probe pods hold.

Two probe pods on one node would measure each other, so a node belongs to one preflight at a time. Preflights of
different nodes run next to each other. Free GPUs are no part of the quota of the job whose nodes are probed, so few
nodes give theirs at a time, and each of them rarely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ..runtime import OperatorRuntime

FLIGHTS_AT_ONCE = 4
"""Of all preflights: bounds the probe pods of the whole cluster. They take turns in the order in which they ask."""
GPU_NODES_AT_ONCE = 16
"""Nodes whose free GPUs probe pods hold at the same time: two full circles. Other nodes are probed without theirs."""
GPU_REST_SECONDS = 600.0
"""Between two probes of a node's free GPUs, however often jobs are created: as long as an unknown result is kept."""


@dataclass
class ProbeClaims:
    """Of one running operator. An operator that takes over deletes the pods of the one before, and starts empty."""

    runtime: OperatorRuntime
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(FLIGHTS_AT_ONCE))
    """Held while a preflight's pods run. Nobody waits for nodes while they hold a turn."""
    flights: set[str] = field(default_factory=set)
    """Circles whose pods are somebody's, so that they are not taken for an earlier operator's."""
    _nodes: set[str] = field(default_factory=set)
    _gpu_nodes: set[str] = field(default_factory=set)
    _rest_until: dict[str, float] = field(default_factory=dict)  # by node, by the monotonic clock
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def released(self) -> asyncio.Event:
        """Set once nodes are released from now on."""
        return self._released

    async def wait_for(self, released: asyncio.Event, seconds: float) -> None:
        """Return when `released` is set, after `seconds` at the latest."""
        with suppress(TimeoutError):
            await self.runtime.run_with_timeout(seconds, released.wait())

    def is_free(self, node: str) -> bool:
        return node not in self._nodes

    def claim(self, nodes: Iterable[str]) -> None:
        """All of them are free: whoever asked has not awaited anything since."""
        self._nodes.update(nodes)

    def release(self, nodes: Iterable[str]) -> None:
        self._nodes.difference_update(nodes)
        self._released.set()
        self._released = asyncio.Event()

    def has_gpu_room(self, nodes: int) -> bool:
        """Whether the free GPUs of so many more nodes may be held."""
        return len(self._gpu_nodes) + nodes <= GPU_NODES_AT_ONCE

    def is_resting(self, node: str) -> bool:
        """Whether the node's free GPUs were probed so recently that they are left alone."""
        return self.runtime.monotonic() < self._rest_until.get(node, 0.0)

    def claim_gpus(self, nodes: Iterable[str]) -> None:
        self._gpu_nodes.update(nodes)

    def release_gpus(self, nodes: Iterable[str], probed: Iterable[str]) -> None:
        """`probed`: those of which all free GPUs were held; of the others it was one, next to somebody's probe."""
        now = self.runtime.monotonic()
        self._gpu_nodes.difference_update(nodes)
        self._rest_until = {node: until for node, until in self._rest_until.items() if now < until}
        self._rest_until |= dict.fromkeys(probed, now + GPU_REST_SECONDS)
