"""Signals that end a run: which ones, and what a rank is sent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pacekeeper.launcher.end_signals import (
    DEFAULT,
    VARIABLE,
    caught_signals,
    default_signals,
    handled_signals,
    parse_signals,
    signal_for_rank,
)
from pacekeeper_analysis.errors import InputError


def test_named_signals_end_a_run_and_sigterm_and_sigint_always_do() -> None:
    assert parse_signals("SIGTERM,SIGUSR1, SIGUSR2") == (
        signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
    )  # fmt: skip
    assert handled_signals({VARIABLE: "SIGUSR1"}) == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    assert handled_signals({}) == DEFAULT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SIGTERM,USR1", "'USR1' is no signal's name"),
        ("SIGKILL", "'SIGKILL' cannot be handled"),
        ("SIGCHLD", "'SIGCHLD' cannot be handled"),
        ("", "'' is no signal's name"),
    ],
)
def test_other_names_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_signals(text)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in default_signals()
        assert signal.SIGQUIT in default_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def mask(*signals: signal.Signals) -> int:
    return sum(1 << each - 1 for each in signals)


@pytest.mark.parametrize(
    ("received", "caught", "sent"),
    [
        (signal.SIGTERM, mask(), signal.SIGTERM),
        (signal.SIGUSR1, mask(), signal.SIGUSR1),
        (signal.SIGUSR1, mask(signal.SIGUSR1, signal.SIGTERM), signal.SIGUSR1),
        (signal.SIGUSR1, mask(signal.SIGTERM), signal.SIGTERM),
        (signal.SIGHUP, mask(signal.SIGTERM), signal.SIGTERM),
        (signal.SIGINT, mask(signal.SIGINT), signal.SIGINT),
        (signal.SIGINT, mask(signal.SIGINT, signal.SIGTERM), signal.SIGTERM),
    ],
)
def test_a_rank_gets_the_signal_in_the_form_that_it_handles(
    received: signal.Signals, caught: int, sent: signal.Signals
) -> None:
    assert signal_for_rank(received, caught) is sent


def test_what_a_process_handles_is_read_of_the_kernel() -> None:
    code = "import signal; signal.signal(signal.SIGUSR2, print); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        caught = caught_signals(process.pid)
        process.communicate(b"\n", timeout=60)
    assert caught & mask(signal.SIGUSR2)
    assert caught & mask(signal.SIGINT), "Python's own"
    assert not caught & mask(signal.SIGTERM, signal.SIGUSR1)
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    assert caught_signals(gone) == 0
