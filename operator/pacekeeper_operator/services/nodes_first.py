"""Where hundreds of nodes fail at once, holding them goes before all else that jobs want done: that takes the API
server more time than they do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..runtime import OperatorRuntime

NODE_PRIORITY_THRESHOLD = 16
"""So many nodes that wait to be held keep nothing else waiting."""
MAX_NODE_PRIORITY_SECONDS = 20.0
"""So long, in one go, more of them go before all else."""
NODE_PRIORITY_SPACING_SECONDS = 0.005
"""Between two of those that had to wait: most of them wait still where the next hundreds of nodes fail meanwhile."""


class NodePriorityGate:
    """How many wait: nodes to be looked after, those of which there is news, and suspicions to be raised."""

    def __init__(self, runtime: OperatorRuntime) -> None:
        self.backlog = 0
        """Nodes that wait to be looked after, as counted last."""
        self._changed = 0
        self._requests = 0
        self._closed_since = math.inf
        self._open = asyncio.Event()
        self._open.set()
        self._turns = asyncio.Lock()
        self._runtime = runtime

    async def wait_for_turn(self) -> None:
        """Returns when only a few wait, or after FIRST_SECONDS; to one after the other, where they had to wait."""
        if not (self.is_closed or self._turns.locked()):
            return
        async with self._turns:
            with suppress(TimeoutError):
                await self._runtime.run_with_timeout(self._get_remaining_seconds(), self._open.wait())
            await self._runtime.sleep(NODE_PRIORITY_SPACING_SECONDS)

    @property
    def is_closed(self) -> bool:
        """Whether all else waits."""
        return not self._open.is_set() and self._get_remaining_seconds() > 0

    def set_backlog(self, behind: int) -> None:
        """So many nodes wait to be looked after, and of no other is there news."""
        self.backlog, self._changed = behind, 0
        self._update()

    def set_changed(self, news: int) -> None:
        """Of so many nodes there is news, beside those that wait."""
        self._changed = news
        self._update()

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """A suspicion is being raised."""
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
