"""Where hundreds of nodes fail at once, holding them goes before all else that jobs want done: that takes the API
server more time than they do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..runtime import Runtime

FEW = 16
"""So many nodes that wait to be held keep nothing else waiting."""
FIRST_SECONDS = 20.0
"""So long, in one go, more of them go before all else."""
BETWEEN_SECONDS = 0.005
"""Between two of those that had to wait: most of them wait still where the next hundreds of nodes fail meanwhile."""


class NodesFirst:
    """How many wait: nodes to be looked after, those of which there is news, and suspicions to be raised."""

    def __init__(self, runtime: Runtime) -> None:
        self.behind = 0
        """Nodes that wait to be looked after, as counted last."""
        self._news = 0
        self._asking = 0
        self._many_since = math.inf
        self._calm = asyncio.Event()
        self._calm.set()
        self._turns = asyncio.Lock()
        self._runtime = runtime

    async def calm(self) -> None:
        """Returns when only a few wait, or after FIRST_SECONDS; to one after the other, where they had to wait."""
        if not (self.many or self._turns.locked()):
            return
        async with self._turns:
            with suppress(TimeoutError):
                await self._runtime.within(self._left(), self._calm.wait())
            await self._runtime.sleep(BETWEEN_SECONDS)

    @property
    def many(self) -> bool:
        """Whether all else waits."""
        return not self._calm.is_set() and self._left() > 0

    def count(self, behind: int) -> None:
        """So many nodes wait to be looked after, and of no other is there news."""
        self.behind, self._news = behind, 0
        self._look()

    def hear(self, news: int) -> None:
        """Of so many nodes there is news, beside those that wait."""
        self._news = news
        self._look()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A suspicion is being raised."""
        self._asking += 1
        self._look()
        try:
            yield
        finally:
            self._asking -= 1
            self._look()

    def _look(self) -> None:
        if self._asking + self._news + self.behind <= FEW:
            self._calm.set()
        elif self._calm.is_set():
            self._many_since = self._runtime.monotonic()
            self._calm.clear()

    def _left(self) -> float:
        return max(0.0, self._many_since + FIRST_SECONDS - self._runtime.monotonic())
