"""Which nodes preflight checks probe at the moment, and whose free GPUs their probe pods hold.

Two probe pods on one node would measure each other, so a node belongs to one check at a time. Checks of different nodes
run concurrently. Free GPUs are not part of the quota of the job whose nodes are probed. Therefore few nodes give theirs
at a time, and each of them rarely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ...async_runtime import OperatorRuntime

FLIGHTS_AT_ONCE = 4
"""Concurrent batches of all checks. It bounds the probe pods of the whole cluster. Checks are served in order."""
GPU_NODES_AT_ONCE = 16
"""Nodes whose free GPUs probe pods hold at the same time: two full groups. Other nodes are probed without theirs."""
GPU_REST_SECONDS = 600.0
"""Minimum seconds between two probes of a node's free GPUs, as long as an unknown result is kept."""


@dataclass
class ProbeClaims:
    """The claims of one running operator. A new leader deletes its predecessor's pods, and starts without claims."""

    runtime: OperatorRuntime
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(FLIGHTS_AT_ONCE))
    """Held while a batch's pods run. A check that holds a turn never waits for nodes."""
    flights: set[str] = field(default_factory=set)
    """Batches that are running, so that their pods are not taken for those of an earlier operator."""
    _nodes: set[str] = field(default_factory=set)
    _gpu_nodes: set[str] = field(default_factory=set)
    _rest_until: dict[str, float] = field(default_factory=dict)  # by node, by the monotonic clock
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def released(self) -> asyncio.Event:
        """Return an event that is set at the next release of nodes."""
        return self._released

    async def wait_for(self, released: asyncio.Event, seconds: float) -> None:
        """Return when `released` is set, after `seconds` at the latest."""
        with suppress(TimeoutError):
            await self.runtime.run_with_timeout(seconds, released.wait())

    def is_free(self, node: str) -> bool:
        return node not in self._nodes

    def claim(self, nodes: Iterable[str]) -> None:
        """Claim nodes that are free: the caller has not awaited since it checked."""
        self._nodes.update(nodes)

    def release(self, nodes: Iterable[str]) -> None:
        self._nodes.difference_update(nodes)
        self._released.set()
        self._released = asyncio.Event()

    def has_gpu_room(self, nodes: int) -> bool:
        """Return whether the free GPUs of `nodes` more nodes may be held."""
        return len(self._gpu_nodes) + nodes <= GPU_NODES_AT_ONCE

    def is_resting(self, node: str) -> bool:
        """Return whether the node's free GPUs were probed recently, and are not probed now."""
        return self.runtime.monotonic() < self._rest_until.get(node, 0.0)

    def claim_gpus(self, nodes: Iterable[str]) -> None:
        self._gpu_nodes.update(nodes)

    def release_gpus(self, nodes: Iterable[str], probed: Iterable[str]) -> None:
        """Release GPUs. `probed`: nodes of which all free GPUs were held; one was held of each comparison node."""
        now = self.runtime.monotonic()
        self._gpu_nodes.difference_update(nodes)
        self._rest_until = {node: until for node, until in self._rest_until.items() if now < until}
        self._rest_until |= dict.fromkeys(probed, now + GPU_REST_SECONDS)
