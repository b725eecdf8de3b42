"""Who waits for a job's next plan, and in which order they are told of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

AT_ONCE = 32
"""So many are answered before everything else has its turn again: an answer takes a third of a millisecond, and a job
may have thousands of workers, while the Lease is to be renewed and the next worker may be lost."""


class Readers:
    """Held polls, and faults that wait to be dealt with. Of one job, and of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], str] = {}

    async def next(self, worker: str) -> None:
        """Returns when the next one is written, on behalf of this worker."""
        told = asyncio.get_running_loop().create_future()
        self._waiting[told] = worker
        try:
            await told
        finally:
            self._waiting.pop(told, None)

    def tell(self, first: Collection[str] = ()) -> None:
        """All who wait now: these workers first, the others in the order in which they came."""
        waiting, self._waiting = self._waiting, {}
        _tell(deque(sorted(waiting, key=lambda told: waiting[told] not in first)))


def _tell(waiting: deque[asyncio.Future[None]]) -> None:
    for _ in range(min(AT_ONCE, len(waiting))):
        told = waiting.popleft()
        if not told.done():  # nobody waits for it any more
            told.set_result(None)
    if waiting:
        asyncio.get_running_loop().call_soon(_tell, waiting)
