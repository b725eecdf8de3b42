"""An event loop whose time jumps to whatever comes next, and processes that are killed and paused within it.

There is no selector and no thread: what cannot go on without time passing lets time pass. Callbacks of one moment run
in the order in which they were scheduled, so that a run follows from its seed alone.
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
"""Returns where (host, port) takes a connection; raises OSError where it does not, or hangs."""

MAX_DROPPED_AWAITS = 20
"""So many times a coroutine that is dropped may wait for something."""

_owner: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


MAX_CALLBACKS_PER_INSTANT = 100_000
"""Callbacks: a thousand are many."""


class LoopStuck(Exception):
    """Time does not pass any more: nothing is scheduled, or what is never ends."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Use `run`. Only what asyncio's own tasks, futures, timeouts and streams need of a loop."""

    def __init__(self) -> None:
        self.connect: ConnectCallback = _refuse_connection
        """Where connections go."""
        self.errors: list[dict[str, Any]] = []
        """What nobody has caught."""
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._killed_tasks: list[asyncio.Task[Any]] = []  # of dead processes: a task without a reference would clean up
        self._running = False
        self._closed = False

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """What `main` returns. Raises Stuck where it never will."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        self._running = True
        try:
            task = self.create_task(main)
            while not task.done():
                self._run_ready()
            return task.result()
        finally:
            self._running = False
            events._set_running_loop(before)

    def _run_ready(self) -> None:
        """All that is ready; where nothing is, the next moment. Raises Stuck where a moment does not end."""
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
            if owner is not None and owner.stands_still(handle):
                continue
            handle._run()
        raise LoopStuck(f"at {self._now:.3f} s something goes round in circles")

    def _advance_time(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise LoopStuck(f"at {self._now:.3f} s nothing is scheduled any more")
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])

    def close(self) -> None:
        """Nothing runs any more. What is left of tasks is dropped without a word, whatever they would say to it."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        left = tasks.all_tasks(self)
        complain, sys.unraisablehook = sys.unraisablehook, _ignore_await
        running = events._get_running_loop()
        events._set_running_loop(self)
        try:
            while left:
                _drop_task(self, left.pop())
            self._killed_tasks.clear()
            gc.collect()
        finally:
            events._set_running_loop(running)
            sys.unraisablehook = complain

    # What asyncio asks of a loop.

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
            coro.close()  # it never begins, and Python would warn that the coroutine was never awaited
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **_: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """One that is there, and says nothing."""
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
        """It is passed over when its time comes."""


class Process:
    """Tasks that live, stand still and die together: whatever is started by a task of a process belongs to it."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused = False
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._loop = loop
        self._context = contextvars.Context()
        self._context.run(_owner.set, self)
        self._deferred: list[asyncio.Handle] = []  # what would have run while it was paused
        self._death_callbacks: dict[Callable[[], None], None] = {}

    def spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        return self._loop.create_task(work, name=name, context=self._context.copy())

    def call_after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """`call` in so many seconds, by this process."""
        return self._loop.call_later(seconds, call, *arguments, context=self._context)

    def kill(self) -> None:
        """SIGKILL: nothing of it runs ever again, no `finally` either."""
        if self.dead:
            return
        self.dead = True
        self._loop._killed_tasks.extend(self.tasks)
        self._deferred.clear()  # only now: nothing else holds a task that was begun while the process stood still
        mourners, self._death_callbacks = self._death_callbacks, {}
        for callback in mourners:
            callback()

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: what has come meanwhile runs now, in order."""
        self.paused = False
        behind, self._deferred = self._deferred, []
        self._loop._ready.extend(behind)

    def add_death_callback(self, callback: Callable[[], None]) -> None:
        """Called once when it is killed; at once where it is dead already."""
        if self.dead:
            callback()
        else:
            self._death_callbacks[callback] = None

    def remove_death_callback(self, callback: Callable[[], None]) -> None:
        """It is not called any more."""
        self._death_callbacks.pop(callback, None)

    def must_defer(self, handle: asyncio.Handle) -> bool:
        """Whether this callback of the process does not run now."""
        if self.dead:
            return True
        if self.paused:
            self._deferred.append(handle)
        return self.paused


def get_current_process() -> Process | None:
    """Whose code runs; None: the world's own."""
    return _owner.get()


class _SilentTransport(asyncio.Transport):
    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


async def _refuse_connection(host: str, port: int) -> None:
    raise ConnectionRefusedError(f"{host}:{port}")


def create_unowned_context() -> contextvars.Context:
    """The context of what belongs to no process."""
    return contextvars.Context()


def _drop_task(loop: VirtualLoop, task: asyncio.Task[Any]) -> None:
    """End a coroutine as a cancellation ends it: `close` would not reach the asynchronous generator that it waits for,
    and code that handles errors would take the generator's complaint for one of its own."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    tasks._enter_task(loop, task)  # without a task there are no time-outs
    try:
        for _ in range(MAX_DROPPED_AWAITS):  # it waits in a `finally`: until there is none left
            coroutine.throw(asyncio.CancelledError())
        coroutine.close()
    except BaseException:  # it has ended, or has been closed before it began
        return
    finally:
        tasks._leave_task(loop, task)


def _ignore_await(_: object) -> None:
    """Of a coroutine that waits in its `finally` while it is dropped."""
