"""An event loop whose time jumps to the next event, and processes that can be killed and paused within it.

There is no selector and no thread: if no task can continue, time advances. Callbacks of the same time run in the order
in which they were scheduled, so that a run depends on its seed only.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import itertools
import sys
import weakref
from asyncio import events, tasks
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Never, TypeVar

Result = TypeVar("Result")
ConnectCallback = Callable[[str, int], Coroutine[Any, Any, None]]
"""Returns if (host, port) accepts a connection. Otherwise, it raises OSError, or hangs."""

MAX_DROPPED_AWAITS = 20
"""Maximum number of awaits of a coroutine while it is dropped."""

_owner: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


MAX_CALLBACKS_PER_INSTANT = 100_000
"""Maximum number of callbacks at the same time. A thousand are many."""


class LoopStuck(Exception):
    """Time does not advance: nothing is scheduled, or the callbacks of one time never end."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """A loop with only what asyncio's tasks, futures, timeouts, and streams need. Use `run`."""

    def __init__(self) -> None:
        self.connect: ConnectCallback = _refuse_connection
        """Opens connections."""
        self.errors: list[dict[str, Any]] = []
        """Uncaught errors."""
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._killed_tasks: list[asyncio.Task[Any]] = []  # a killed task without a reference would run its cleanup
        self._running = False
        self._closed = False

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `main`. Raises LoopStuck if it can never finish."""
        outer_loop = events._get_running_loop()
        events._set_running_loop(self)
        self._running = True
        try:
            task = self.create_task(main)
            while not task.done():
                self._run_ready()
            return task.result()
        finally:
            self._running = False
            events._set_running_loop(outer_loop)

    def _run_ready(self) -> None:
        """Run all ready callbacks; if there are none, advance time first. Raises LoopStuck if they never end."""
        ready = self._ready
        if not ready:
            self._advance_time()
        for _ in range(MAX_CALLBACKS_PER_INSTANT):
            if not ready:
                return
            handle = ready.popleft()
            if handle._cancelled:
                continue
            owner = handle._context.get(_owner)  # type: ignore[attr-defined]
            if owner is not None and owner.must_defer(handle):
                continue
            handle._run()
        raise LoopStuck(f"at {self._now:.3f} s callbacks run endlessly")

    def _advance_time(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise LoopStuck(f"at {self._now:.3f} s nothing is scheduled")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])

    def close(self) -> None:
        """Close the loop. The remaining tasks are dropped, and their errors ignored."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        remaining = tasks.all_tasks(self)
        hook, sys.unraisablehook = sys.unraisablehook, _ignore_await
        outer_loop = events._get_running_loop()
        events._set_running_loop(self)
        try:
            while remaining:
                _drop_task(self, remaining.pop())
            self._killed_tasks.clear()
            gc.collect()
        finally:
            events._set_running_loop(outer_loop)
            sys.unraisablehook = hook

    # Methods that asyncio calls.

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *arguments: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, arguments, self, context)
        if not self._closed:
            self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *arguments: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *arguments, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *arguments: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, arguments, self, context)
        if not self._closed:
            heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_soon_threadsafe(self, *_arguments: Any, **_named: Any) -> Never:  # type: ignore[override]
        raise RuntimeError("a simulation has no threads")

    def run_in_executor(self, *_arguments: Any) -> Never:  # type: ignore[override]
        raise RuntimeError("a simulation has no threads")

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Result], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Result]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        owner = _owner.get() if context is None else context.get(_owner)
        if owner is not None:
            owner.tasks.add(task)
        if self._closed or (owner is not None and owner.dead):
            coro.close()  # it never starts, and Python would warn that the coroutine was never awaited
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Open a connection on which no data arrives."""
        await self.connect(host, port)
        protocol, transport = protocol_factory(), _SilentTransport()
        protocol.connection_made(transport)
        return transport, protocol

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a canceled timer is skipped when it is due."""


class Process:
    """Tasks that run, pause, and end together. A task that a process's task starts belongs to the process."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused = False
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._loop = loop
        self._context = contextvars.Context()
        self._context.run(_owner.set, self)
        self._deferred: list[asyncio.Handle] = []  # callbacks that were due while it was paused
        self._death_callbacks: dict[Callable[[], None], None] = {}

    def spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        return self._loop.create_task(work, name=name, context=self._context.copy())

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Schedule `call` in this process."""
        return self._loop.call_later(seconds, call, *arguments, context=self._context)

    def kill(self) -> None:
        """Kill the process, as SIGKILL: none of its code runs again, not even `finally`."""
        if self.dead:
            return
        self.dead = True
        self._loop._killed_tasks.extend(self.tasks)
        self._deferred.clear()  # only now: nothing else refers to a task that was started while the process was paused
        callbacks, self._death_callbacks = self._death_callbacks, {}
        for callback in callbacks:
            callback()

    def pause(self) -> None:
        """Pause the process, as SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """Resume the process, as SIGCONT: deferred callbacks run now, in order."""
        self.paused = False
        deferred, self._deferred = self._deferred, []
        self._loop._ready.extend(deferred)

    def add_death_callback(self, callback: Callable[[], None]) -> None:
        """Add a callback for when the process is killed. If it is dead, call it at once."""
        if self.dead:
            callback()
        else:
            self._death_callbacks[callback] = None

    def remove_death_callback(self, callback: Callable[[], None]) -> None:
        """Remove the callback."""
        self._death_callbacks.pop(callback, None)

    def must_defer(self, handle: asyncio.Handle) -> bool:
        """Return whether this callback of the process must not run now."""
        if self.dead:
            return True
        if self.paused:
            self._deferred.append(handle)
        return self.paused


def get_current_process() -> Process | None:
    """Return the process whose code runs; None: code of no process."""
    return _owner.get()


class _SilentTransport(asyncio.Transport):
    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


async def _refuse_connection(host: str, port: int) -> None:
    raise ConnectionRefusedError(f"{host}:{port}")


def create_unowned_context() -> contextvars.Context:
    """Create a context that belongs to no process."""
    return contextvars.Context()


def _drop_task(loop: VirtualLoop, task: asyncio.Task[Any]) -> None:
    """End a coroutine as a cancellation does.

    `close` would not reach the asynchronous generator that it waits for. Code that handles errors would take the
    generator's error for its own.
    """
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    tasks._enter_task(loop, task)  # timeouts require a task
    try:
        for _ in range(MAX_DROPPED_AWAITS):  # it may await in each `finally`
            coroutine.throw(asyncio.CancelledError())
        coroutine.close()
    except BaseException:  # it has ended, or was closed before it started
        return
    finally:
        tasks._leave_task(loop, task)


def _ignore_await(_: object) -> None:
    """Ignore the error of a coroutine that awaits in its `finally` while it is dropped."""
