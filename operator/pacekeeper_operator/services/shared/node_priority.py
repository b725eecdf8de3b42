"""If hundreds of nodes fail at once, holding them precedes all other work for jobs.

That other work takes the API server more time than holding the nodes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...async_runtime import OperatorRuntime

NODE_PRIORITY_THRESHOLD = 16
"""Up to this many waiting nodes block nothing else."""
MAX_NODE_PRIORITY_SECONDS = 20.0
"""Maximum seconds without a break for which more waiting nodes block everything else."""
NODE_PRIORITY_SPACING_SECONDS = 0.005
"""Pause between two jobs' actions that were blocked, so that most still wait if more nodes fail."""


class NodePriorityGate:
    """Counts what waits: nodes to reconcile, changed nodes, and suspicions to raise."""

    def __init__(self, runtime: OperatorRuntime) -> None:
        self.backlog = 0
        """Nodes that wait to be reconciled, as last counted."""
        self._changed = 0
        self._requests = 0
        self._closed_since = math.inf
        self._open = asyncio.Event()
        self._open.set()
        self._turns = asyncio.Lock()
        self._runtime = runtime

    async def wait_for_turn(self) -> None:
        """Return when few nodes wait, or after `MAX_NODE_PRIORITY_SECONDS`.

        Callers that were blocked return one by one.
        """
        if not (self.is_closed or self._turns.locked()):
            return
        async with self._turns:
            with suppress(TimeoutError):
                await self._runtime.run_with_timeout(self._get_remaining_seconds(), self._open.wait())
            await self._runtime.sleep(NODE_PRIORITY_SPACING_SECONDS)

    @property
    def is_closed(self) -> bool:
        """Return whether all other work waits."""
        return not self._open.is_set() and self._get_remaining_seconds() > 0

    def set_backlog(self, nodes: int) -> None:
        """Set the number of nodes that wait to be reconciled, and reset the number of changed ones."""
        self.backlog, self._changed = nodes, 0
        self._update()

    def set_changed(self, nodes: int) -> None:
        """Set the number of changed nodes that are not in the backlog yet."""
        self._changed = nodes
        self._update()

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a suspicion that is being raised within the context."""
        self._requests += 1
        self._update()
        try:
            yield
        finally:
            self._requests -= 1
            self._update()

    def _update(self) -> None:
        if self._requests + self._changed + self.backlog <= NODE_PRIORITY_THRESHOLD:
            self._open.set()
        elif self._open.is_set():
            self._closed_since = self._runtime.monotonic()
            self._open.clear()

    def _get_remaining_seconds(self) -> float:
        return max(0.0, self._closed_since + MAX_NODE_PRIORITY_SECONDS - self._runtime.monotonic())
