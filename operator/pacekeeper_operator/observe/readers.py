"""Who waits for a job's next plan, and in which order they are told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import islice

MAX_NOTIFIED_PER_ITERATION = 8
"""So many are answered before everything else has its turn again: an answer, and the poll that follows it, take a
millisecond and a half, and a job may have thousands of workers, while the Lease is to be renewed and the next worker
may be lost: what is done about it needs a dozen turns."""


class Waiters:
    """Held polls, and faults that wait to be dealt with. Of one job, and of one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._due: dict[asyncio.Future[None], str] = {}  # these are to be told, in this order

    async def wait(self, worker: str) -> None:
        """Returns when the next one is written, on behalf of this worker."""
        told = asyncio.get_running_loop().create_future()
        self._waiting[told] = worker
        try:
            await told
        finally:
            self._waiting.pop(told, None)
            self._due.pop(told, None)

    def notify(self, first: Collection[str] = ()) -> None:
        """All who wait now: these workers first, the others in the order in which they came. Who is still to be told of
        the one before stands in the same row: a spare that joins need not wait until thousands have heard of that."""
        under_way = bool(self._due)
        due = self._due | self._waiting
        self._due = {told: worker for told, worker in due.items() if worker in first} | due
        self._waiting = {}
        if not under_way:
            self._notify_batch()

    def _notify_batch(self) -> None:
        for told in list(islice(self._due, MAX_NOTIFIED_PER_ITERATION)):
            del self._due[told]
            if not told.done():  # nobody waits for it any more
                told.set_result(None)
        if self._due:
            asyncio.get_running_loop().call_soon(self._notify_batch)
