"""Keeps errors of hooks away from the script: the first one makes all hooks of the process inactive.

Inactive hooks stay installed, since torch may be iterating over its own at that moment. They then only call what they
are in front of.
"""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, TracebackType
from typing import Any, TypeVar

from .tracebacks import hide_frame

log = logging.getLogger(__name__)

FailureReport = Callable[[str, Exception], None]
"""Takes the name of the hook that has failed, and its error. Called once."""
Result = TypeVar("Result")


def log_failure(hook: str, error: Exception) -> None:
    """Report the failure in the log of the rank."""
    log.error(
        "recording has ended in this rank, which goes on: the hook of %s has failed. Report this error of Pacekeeper",
        hook,
        exc_info=error,
    )


def call_after(function: Callable[..., Result], react: Callable[..., object]) -> Callable[..., Result]:
    """Return `function` with `react(result, *arguments)` after each call that succeeds. `react` raises nothing."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Result:
        try:
            result = function(*args, **options)
        except BaseException as error:
            hide_frame(error)
            raise
        react(result, *args)
        return result

    return call


class HookGuard:
    """Whether the hooks of this process are active, and what happens to their errors."""

    def __init__(self, report_failure: FailureReport = log_failure) -> None:
        self.active = True
        self.report_failure = report_failure
        self._reactions: list[Callable[[], None]] = []

    def call_when_disabled(self, reaction: Callable[[], None]) -> None:
        """Call `reaction` when the hooks become inactive."""
        self._reactions.append(reaction)

    def disable(self, hook: str, error: Exception) -> None:
        """Make all hooks inactive, because the one with this name has raised `error`.

        Raises `error` again if a signal handler of the script has raised it while the hook ran.
        """
        if is_raised_by_signal_handler(error):
            raise error
        if not self.active:
            return
        self.active = False
        reactions: list[Callable[[], None]] = [*self._reactions, lambda: self.report_failure(hook, error)]
        for react in reactions:
            try:
                react()
            except Exception:
                log.debug("after a failure of the hook of %s", hook, exc_info=True)

    def protect(self, hook: str, function: Callable[..., Any], *, even_inactive: bool = False) -> Callable[..., Any]:
        """Return `function` as a hook of this name: it returns None while inactive, or if it fails.

        `even_inactive`: for what undoes the effects of hooks.
        """

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if self.active or even_inactive:
                try:
                    return function(*args, **options)
                except Exception as error:
                    self.disable(hook, error)
            return None

        return call

    def bracket(
        self,
        hook: str,
        function: Callable[..., Result],
        begin: Callable[[], Any],
        end: Callable[..., None],
    ) -> Callable[..., Result]:
        """Return `function` with `begin()` before each call, and `end(begun, *arguments of the call)` after it.

        `begun`: what `begin` has returned; None: `end` is not called. What has begun ends, even while inactive.
        """

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Result:
            begun = None
            if self.active:
                try:
                    begun = begin()
                except Exception as error:
                    self.disable(hook, error)
            try:
                return function(*args, **options)
            except BaseException as error:
                hide_frame(error)
                raise
            finally:
                if begun is not None:
                    try:
                        end(begun, *args)
                    except Exception as error:
                        self.disable(hook, error)

        return call

    def build_contexts(
        self, hook: str, create: Callable[..., AbstractContextManager[None]]
    ) -> Callable[..., AbstractContextManager[None]]:
        """Return a function that creates the same contexts, without their own errors."""
        return lambda *args: _GuardedContext(self, hook, lambda: create(*args))


class _GuardedContext(AbstractContextManager[None]):
    def __init__(self, guard: HookGuard, hook: str, create: Callable[[], AbstractContextManager[None]]) -> None:
        self._guard = guard
        self._hook = hook
        self._create = create
        self._context: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if self._guard.active:
            try:
                context = self._create()
                context.__enter__()
                self._context = context
            except Exception as error:
                self._guard.disable(self._hook, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._context is not None:
            try:
                self._context.__exit__(None, None, None)  # its body's error is the script's
            except Exception as own_error:
                self._guard.disable(self._hook, own_error)


def is_raised_by_signal_handler(error: Exception) -> bool:
    """Return whether a handler that the script has set, such as a time limit's, has raised `error`."""
    codes = set(map(_find_code, map(signal.getsignal, signal.valid_signals())))
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _find_code(handler: Any) -> CodeType | None:
    """Return the code of a function, method, or object that can be called; None: it is not Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if handler is None or isinstance(handler, int):  # not set by Python, or SIG_DFL and SIG_IGN
        return None
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
