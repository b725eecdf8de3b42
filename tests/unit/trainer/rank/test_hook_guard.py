"""Errors of hooks, of what they are in front of, and of the script's signal handlers."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pacekeeper_rank.hook_guard import HookGuard, log_failure


class HookError(Exception):
    pass


class ScriptError(Exception):
    pass


def fail_as_hook(*_: Any) -> None:
    raise HookError("a bug")


def fail_as_script(*_: Any) -> None:
    raise ScriptError


def test_all_hooks_are_inactive_after_the_first_error_and_it_is_reported_once() -> None:
    failures: list[tuple[str, str]] = []
    guard = HookGuard(lambda hook, error: failures.append((hook, str(error))))
    guard.call_when_disabled(fail_as_hook)
    guard.call_when_disabled(lambda: failures.append(("", "reacts, though another one has failed")))
    calls: list[int] = []
    other = guard.protect("other", calls.append)
    undo = guard.protect("undo", calls.append, even_inactive=True)
    other(1)
    guard.protect("one", fail_as_hook)()
    guard.protect("two", fail_as_hook)()
    other(2)
    undo(3)
    assert calls == [1, 3]
    assert failures == [("", "reacts, though another one has failed"), ("one", "a bug")]


@pytest.mark.parametrize("begin", [lambda: "begun", fail_as_hook])
@pytest.mark.parametrize("end", [lambda *_: None, fail_as_hook])
def test_a_bracket_changes_neither_result_nor_error(begin: Callable[[], Any], end: Callable[..., None]) -> None:
    guard = HookGuard(lambda *_: None)
    assert guard.bracket("hook", lambda a, b: a + b, begin, end)(1, b=2) == 3
    with pytest.raises(ScriptError):
        guard.bracket("hook", fail_as_script, begin, end)()
    assert guard.active == (begin is not fail_as_hook and end is not fail_as_hook)


def test_what_has_begun_ends_though_hooks_are_inactive() -> None:
    guard = HookGuard(lambda *_: None)
    ends: list[Any] = []
    guard.bracket("hook", lambda *_: guard.disable("other", HookError()), lambda: 7, lambda *end: ends.append(end))("x")
    assert ends == [(7, "x")]


@pytest.mark.parametrize("place", ["none", "enter", "exit"])
def test_a_context_changes_neither_result_nor_error(place: str) -> None:
    @contextmanager
    def build() -> Iterator[None]:
        if place == "enter":
            fail_as_hook()
        try:
            yield
        finally:
            if place == "exit":
                fail_as_hook()

    guard = HookGuard(lambda *_: None)
    with pytest.raises(ScriptError), guard.build_contexts("hook", build)():
        fail_as_script()
    assert guard.active == (place == "none")


class TimeLimit:
    def __call__(self, *_: Any) -> None:
        raise ScriptError

    def end(self, *_: Any) -> None:
        raise ScriptError


@pytest.mark.parametrize(
    "handler", [fail_as_script, TimeLimit(), TimeLimit().end, functools.partial(fail_as_script, "x")]
)
def test_an_error_of_the_scripts_signal_handler_reaches_the_script(handler: Any) -> None:
    """It runs wherever Python is at that moment, in a hook, too."""
    guard = HookGuard(lambda *_: None)
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(ScriptError):
            guard.protect("hook", lambda: signal.raise_signal(signal.SIGUSR2))()
        with pytest.raises(ScriptError):
            guard.bracket("hook", int, lambda: signal.raise_signal(signal.SIGUSR2), fail_as_hook)()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert guard.active


def test_a_failure_is_logged_with_its_hook_and_error(caplog: pytest.LogCaptureFixture) -> None:
    HookGuard(log_failure).protect("gc", fail_as_hook)()
    assert "the hook of gc has failed" in caplog.text
    assert "HookError: a bug" in caplog.text
