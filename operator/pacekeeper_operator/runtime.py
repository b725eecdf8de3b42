"""What the operator takes from its surroundings besides the network: time, chance, names and tasks.

The one seam of its kind: nothing else in this package reads a clock, sleeps, rolls dice, makes an identifier or starts
a task, so that the whole operator runs under a simulated one as it does under this.
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
    """Something else has come first."""


class Superseded(Exception):
    """The process has to end, and nothing is wrong with it."""


GC_THRESHOLDS = 20_000, 10, 10
"""New objects before the youngest are looked at for circles, and how often before the older ones are. By Python's own
700 a process that holds a million of them spends a fifth of its time so."""


def reduce_gc_frequency() -> None:
    """Of this process."""
    gc.freeze()  # what is loaded by now stays
    gc.set_threshold(*GC_THRESHOLDS)


_MALLOPT_ARENA_MAX = -8
"""glibc's M_ARENA_MAX."""


_NOT_GLIBC_ERRORS = (AttributeError, OSError)
"""By ctypes, where another C library is in its place, or one that is part of Python."""


def limit_malloc_arenas() -> None:
    """For all threads of this process, from now on. glibc gives each of the first ones its own, and what comes and goes
    (answers of Prometheus, say) leaves holes of megabytes in each."""
    with suppress(*_NOT_GLIBC_ERRORS):
        ctypes.CDLL(None).mallopt(_MALLOPT_ARENA_MAX, 1)


FULL_GC_INTERVAL_SECONDS, FULL_GC_REST_RATIO = 600.0, 1000.0
"""Between two looks at all objects, at least, and times the last one's duration."""


async def collect_garbage_periodically(runtime: OperatorRuntime) -> None:
    """For circles, in this process, until cancelled; what is free then goes back to the kernel. An operator with little
    to do makes so few objects that by GARBAGE those that were in use at one look are looked at again after hours, and
    it grows by 4 MB in each of them."""
    pause = FULL_GC_INTERVAL_SECONDS
    while True:
        await runtime.sleep(pause)
        began = runtime.monotonic()
        gc.collect()
        with suppress(*_NOT_GLIBC_ERRORS):  # which by itself gives back only what lies at the end of its memory
            ctypes.CDLL(None).malloc_trim(0)
        pause = max(FULL_GC_INTERVAL_SECONDS, FULL_GC_REST_RATIO * (runtime.monotonic() - began))


MAX_RECURSION_DEPTH, THREAD_STACK_BYTES = 25_000, 2**23
"""Calls within one another, and twice the stack that they need. The API server takes 10,000 levels of an object of a
tenant's; kopf reads it by Python's own parser, and copies it by two calls a level. With the first object that it cannot
read it ends, and so would each operator that follows."""


def raise_recursion_limit() -> None:
    """In this process, and in threads that it begins from now on. Less deep where the process has less of a stack."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    part = 1.0 if stack == resource.RLIM_INFINITY else min(1.0, stack / THREAD_STACK_BYTES)
    if part < 1.0:
        log.warning("stacks are limited to %d of 8,192 KiB: a job nested deeply may end this operator", stack >> 10)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), int(part * MAX_RECURSION_DEPTH)))
    threading.stack_size(THREAD_STACK_BYTES)


class OperatorRuntime:
    """Of the real world; a simulation overrides what it simulates.

    A task that is started here may end only by being cancelled or by coming to its end: one that dies of an error ends
    the process (`failed` is set), because an operator that has lost one of its loops only looks alive.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self._random = random.Random(seed)

    def now(self) -> float:
        """Seconds since the epoch: for what others are to read. It may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment: for durations and deadlines. It never jumps."""
        return time.monotonic()

    def thread_seconds(self) -> float:
        """Seconds of processor time that this thread has had: what a piece of work costs, whoever else works."""
        return time.thread_time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random(self) -> float:
        """Evenly from 0 to below 1."""
        return self._random.random()

    def create_identifier(self) -> str:
        """32 hexadecimal digits that nobody else has."""
        return uuid.uuid4().hex

    async def compute_in_thread(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, in a thread of its own: it takes seconds, and touches nothing that others change."""
        return await asyncio.to_thread(work)

    def yield_thread(self) -> None:
        """Within such work: whoever else wants to run may, at once rather than after the interpreter's own interval."""
        time.sleep(0)

    def start_task(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` beside everything else; should it die of an error, the process ends."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)
        return task

    async def run_with_timeout(self, seconds: float, work: Awaitable[Result]) -> Result:
        """Raises TimeoutError where `work` is not done in time."""
        async with asyncio.timeout(seconds):
            return await work

    async def wait_for_any(self, *waits: Awaitable[Any]) -> None:
        """Returns when one of them is over; the others are cancelled."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def run_unless(self, interruption: Awaitable[Any], work: Awaitable[Result]) -> Result:
        """What `work` returns. Raises Overtaken where `over` is over first: then `work` is cancelled."""
        doing, other = asyncio.ensure_future(work), asyncio.ensure_future(interruption)
        try:
            await asyncio.wait((doing, other), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise Interrupted
            return doing.result()
        finally:
            doing.cancel()
            other.cancel()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Superseded):
            log.warning("the operator ends, and is started anew: %s", error)
        elif error is not None:
            log.critical("%s has died, so the operator ends: %r", task.get_name(), error, exc_info=error)
        if error is not None:
            self.failure = self.failure or error
            self.failed.set()
