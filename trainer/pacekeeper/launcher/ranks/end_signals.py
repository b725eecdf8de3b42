"""Signals that end the launcher: those that the user names, and what it forwards to its ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable

from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.forking.handled_signals import ALWAYS_HANDLED_SIGNALS

_UNHANDLEABLE_SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Return the signals of torchrun's --signals-to-handle, plus SIGTERM and SIGINT. Raises InputError."""
    signals = []
    for name in text.split(","):
        signum = signal.Signals.__members__.get(name.strip())
        if signum is None or signum in _UNHANDLEABLE_SIGNALS:
            problem = "is no signal's name" if signum is None else "cannot be handled"
            raise InputError(
                f"--signals-to-handle {text}: {name.strip()!r} {problem}; give names such as SIGTERM,SIGUSR1"
            )
        signals.append(signum)
    return tuple(dict.fromkeys((*ALWAYS_HANDLED_SIGNALS, *signals)))


def choose_rank_signal(received: signal.Signals, has_handler: Callable[[signal.Signals], bool]) -> signal.Signals:
    """Return the signal to send to a rank after the launcher received one. `has_handler`: whether the rank handles it.

    The rank gets the same signal, as in torchrun. A rank that handles SIGTERM but not this signal gets SIGTERM, on
    which pk.init and the integrations checkpoint. Python's own KeyboardInterrupt does not count as a handler.
    """
    handles = received is not signal.SIGINT and has_handler(received)
    return signal.SIGTERM if not handles and has_handler(signal.SIGTERM) else received
