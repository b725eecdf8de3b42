"""Signals that end a run: which ones, and what a rank is sent."""

from __future__ import annotations

import signal

import pytest

from pacekeeper.launcher.ranks.end_signals import choose_rank_signal, parse_signals
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.forking.handled_signals import (
    END_SIGNALS_VARIABLE,
    choose_default_signals,
    read_handled_signals,
)
from pacekeeper_rank.forking.process_setup import read_initially_ignored_signals


def test_named_signals_end_a_run_and_sigterm_and_sigint_always_do() -> None:
    assert parse_signals("SIGTERM,SIGUSR1, SIGUSR2") == (
        signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
    )  # fmt: skip
    assert read_handled_signals({END_SIGNALS_VARIABLE: "SIGUSR1"}) == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    assert read_handled_signals({}) == choose_default_signals()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SIGTERM,USR1", "'USR1' is no signal's name"),
        ("SIGKILL", "'SIGKILL' cannot be handled"),
        ("SIGCHLD", "'SIGCHLD' cannot be handled"),
        ("", "'' is no signal's name"),
    ],
)
def test_other_names_are_rejected(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_signals(text)


def test_a_signal_that_nohup_ignores_remains_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    read_initially_ignored_signals.cache_clear()
    try:
        assert signal.SIGHUP not in choose_default_signals()
        assert signal.SIGQUIT in choose_default_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
        read_initially_ignored_signals.cache_clear()


@pytest.mark.parametrize(
    ("received", "caught", "sent"),
    [
        (signal.SIGTERM, set(), signal.SIGTERM),
        (signal.SIGUSR1, set(), signal.SIGUSR1),
        (signal.SIGUSR1, {signal.SIGUSR1, signal.SIGTERM}, signal.SIGUSR1),
        (signal.SIGUSR1, {signal.SIGTERM}, signal.SIGTERM),
        (signal.SIGHUP, {signal.SIGTERM}, signal.SIGTERM),
        (signal.SIGINT, {signal.SIGINT}, signal.SIGINT),
        (signal.SIGINT, {signal.SIGINT, signal.SIGTERM}, signal.SIGTERM),
    ],
)
def test_a_rank_receives_the_signal_in_the_form_that_it_handles(
    received: signal.Signals, caught: set[signal.Signals], sent: signal.Signals
) -> None:
    assert choose_rank_signal(received, caught.__contains__) is sent
