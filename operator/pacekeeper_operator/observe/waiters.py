"""The polls that wait for a job's next plan or requests, and the order in which they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from itertools import islice

MAX_NOTIFIED_PER_ITERATION = 8
"""Waiters that are answered in one iteration of the event loop.

An answer, and the poll that follows it, take 1.5 ms, and a job may have thousands of workers. At the same time the
Lease has to be renewed, and the reaction to a lost worker needs a dozen iterations.
"""


class Waiters:
    """Held polls, or faults that wait for a decision, of one job and one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._due: dict[asyncio.Future[None], str] = {}  # to be notified, in this order

    async def wait(self, worker: str) -> None:
        """Return when the next state is written, on behalf of this worker."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = worker
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)
            self._due.pop(waiter, None)

    def notify(self, first: Collection[str] = ()) -> None:
        """Notify all present waiters: these workers first, the others in the order of arrival.

        Waiters of the previous state stand in the same queue: a spare that joins need not wait until thousands have
        been notified of that.
        """
        under_way = bool(self._due)
        due = self._due | self._waiting
        self._due = {waiter: worker for waiter, worker in due.items() if worker in first} | due
        self._waiting = {}
        if not under_way:
            self._notify_batch()

    def notify_workers(self, workers: Collection[str]) -> None:
        """Notify the present waiters of these workers only."""
        under_way = bool(self._due)
        concerned = {waiter: worker for waiter, worker in self._waiting.items() if worker in workers}
        self._due |= concerned
        self._waiting = {waiter: worker for waiter, worker in self._waiting.items() if waiter not in concerned}
        if concerned and not under_way:
            self._notify_batch()

    def _notify_batch(self) -> None:
        for waiter in list(islice(self._due, MAX_NOTIFIED_PER_ITERATION)):
            del self._due[waiter]
            if not waiter.done():  # its waiter is gone
                waiter.set_result(None)
        if self._due:
            asyncio.get_running_loop().call_soon(self._notify_batch)
