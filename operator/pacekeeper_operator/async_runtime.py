"""What the operator takes from its environment in addition to the network: time, randomness, identifiers, and tasks.

This is the only seam of this kind. Nothing else in this package reads a clock, sleeps, draws a random number, creates
an identifier, or starts a task. The whole operator therefore runs in a simulation as it does in production.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import random
import resource
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Interrupted(Exception):
    """Raised when the interruption finishes before the work."""


class Superseded(Exception):
    """Raised when the process has to end although it has no fault."""


GC_THRESHOLDS = 20_000, 10, 10
"""Thresholds of Python's garbage collector, per generation.

The first is the number of new objects before the youngest generation is collected. With Python's default of 700, a
process that holds a million objects spends a fifth of its time in the collector.
"""


def reduce_gc_frequency() -> None:
    """Collect garbage less often in this process."""
    gc.freeze()  # exclude what is loaded by now from collections
    gc.set_threshold(*GC_THRESHOLDS)


_MALLOPT_ARENA_MAX = -8
"""glibc's M_ARENA_MAX."""


_NOT_GLIBC_ERRORS = (AttributeError, OSError)
"""Errors that ctypes raises if the C library is not glibc, or is linked statically into Python."""


def limit_malloc_arenas() -> None:
    """Limit glibc to one malloc arena for all threads of this process, from now on.

    By default glibc gives each of the first threads its own arena. Short-lived data, such as Prometheus answers, leaves
    holes of megabytes in each of them.
    """
    with suppress(*_NOT_GLIBC_ERRORS):
        ctypes.CDLL(None).mallopt(_MALLOPT_ARENA_MAX, 1)


FULL_GC_INTERVAL_SECONDS, FULL_GC_REST_RATIO = 600.0, 1000.0
"""Bounds of the pause between two full collections: seconds, and a multiple of the last collection's duration.

The longer of the two applies.
"""


async def collect_garbage_periodically(runtime: OperatorRuntime) -> None:
    """Run a full garbage collection periodically, until cancelled, and return free memory to the kernel.

    An idle operator creates few objects. With `GC_THRESHOLDS` alone, older generations would be collected only after
    hours, and the process would grow by 4 MB per hour.
    """
    pause = FULL_GC_INTERVAL_SECONDS
    while True:
        await runtime.sleep(pause)
        began = runtime.monotonic()
        gc.collect()
        with suppress(*_NOT_GLIBC_ERRORS):  # glibc itself returns only the end of the heap
            ctypes.CDLL(None).malloc_trim(0)
        pause = max(FULL_GC_INTERVAL_SECONDS, FULL_GC_REST_RATIO * (runtime.monotonic() - began))


MAX_RECURSION_DEPTH, THREAD_STACK_BYTES = 25_000, 2**23
"""Maximum depth of calls, and bytes of a thread's stack (twice what that depth needs).

The API server accepts objects of tenants with 10,000 levels. kopf parses them in pure Python, and copies them with two
calls per level. One object that it cannot read would end this operator, and each of its successors.
"""


def raise_recursion_limit() -> None:
    """Raise the recursion limit of this process, and the stack size of threads that start from now on.

    The recursion limit is lower if the process has a smaller stack.
    """
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    share = 1.0 if stack == resource.RLIM_INFINITY else min(1.0, stack / THREAD_STACK_BYTES)
    if share < 1.0:
        log.warning("stacks are limited to %d of 8,192 KiB: a deeply nested job may crash this operator", stack >> 10)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), int(share * MAX_RECURSION_DEPTH)))
    threading.stack_size(THREAD_STACK_BYTES)


class OperatorRuntime:
    """The real environment; a simulation overrides what it simulates.

    A task that is started here may end only by cancellation or by finishing. If it fails, the process ends (`failed` is
    set), because an operator that lost one of its loops only looks alive.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self._random = random.Random(seed)

    def now(self) -> float:
        """Return the seconds since the epoch, for timestamps that others read. This clock may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Return the seconds of a monotonic clock, for durations and deadlines."""
        return time.monotonic()

    def thread_seconds(self) -> float:
        """Return the CPU seconds of this thread: what a piece of work costs, independent of other processes."""
        return time.thread_time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random(self) -> float:
        """Return a random number, uniform in [0, 1)."""
        return self._random.random()

    def create_identifier(self) -> str:
        """Return a unique identifier of 32 hexadecimal digits."""
        return uuid.uuid4().hex

    async def compute_in_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work` in its own thread and return its result.

        `work` may take seconds, and must not touch state that other tasks change.
        """
        return await asyncio.to_thread(work)

    def yield_thread(self) -> None:
        """Let other threads run now, from within `work`, rather than after the interpreter's switch interval."""
        time.sleep(0)

    def start_task(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` as a background task. If it fails, the process ends."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)
        return task

    async def run_with_timeout(self, seconds: float, work: Awaitable[Result]) -> Result:
        """Return the result of `work`. Raises TimeoutError if it takes longer than `seconds`."""
        async with asyncio.timeout(seconds):
            return await work

    async def wait_for_any(self, *waits: Awaitable[Any]) -> None:
        """Return when one of `waits` is done, and cancel the others."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def run_unless(self, interruption: Awaitable[Any], work: Awaitable[Result]) -> Result:
        """Return the result of `work`. Raises Interrupted, and cancels `work`, if `interruption` finishes first."""
        work_task, interruption_task = asyncio.ensure_future(work), asyncio.ensure_future(interruption)
        try:
            await asyncio.wait((work_task, interruption_task), return_when=asyncio.FIRST_COMPLETED)
            if not work_task.done():
                raise Interrupted
            return work_task.result()
        finally:
            work_task.cancel()
            interruption_task.cancel()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Superseded):
            log.warning("the operator exits, and is started again: %s", error)
        elif error is not None:
            log.critical("background task %s failed, so the operator exits: %r", task.get_name(), error, exc_info=error)
        if error is not None:
            self.failure = self.failure or error
            self.failed.set()
