"""A clock that runs as fast as the test: sleeps and deadlines of a `VirtualRuntime` end in order, without waiting.

timeline = Timeline()
runtime = VirtualRuntime(timeline, clock_off=3600)
await timeline.run(30)      # thirty seconds pass for all that has been started
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable
from typing import Any, TypeVar

from pacekeeper_operator.async_runtime import OperatorRuntime

Result = TypeVar("Result")
SETTLE_ITERATIONS = 50
"""Turns of the event loop after which everything that can go on without time passing has done so."""


class Timeline:
    """Virtual seconds, shared by all runtimes of a test."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    def wait_for(self, seconds: float) -> asyncio.Future[None]:
        """Done when so much time has passed."""
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self.now + seconds, next(self._order), future))
        return future

    async def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        await _run_until_settled()
        while self._waiting and self._waiting[0][0] <= end:
            due_at, _, future = heapq.heappop(self._waiting)
            if not future.done():
                self.now = max(self.now, due_at)
                future.set_result(None)
                await _run_until_settled()
        self.now = end


class VirtualRuntime(OperatorRuntime):
    """Of one machine: its clock is `clock_off` seconds off the others'."""

    def __init__(self, timeline: Timeline, clock_off: float = 0.0, seed: int = 0) -> None:
        super().__init__(seed)
        self._timeline = timeline
        self._clock_off = clock_off

    def now(self) -> float:
        return 1_800_000_000.0 + self._timeline.now + self._clock_off

    def monotonic(self) -> float:
        return self._timeline.now + 7 * self._clock_off

    async def sleep(self, seconds: float) -> None:
        await self._timeline.wait_for(seconds)

    async def run_with_timeout(self, seconds: float, work: Awaitable[Result]) -> Result:
        deadline, task = self._timeline.wait_for(seconds), asyncio.ensure_future(work)
        try:
            futures: list[asyncio.Future[Any]] = [deadline, task]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise TimeoutError
            return task.result()
        finally:
            task.cancel()
            deadline.cancel()


async def _run_until_settled() -> None:
    for _ in range(SETTLE_ITERATIONS):
        await asyncio.sleep(0)
