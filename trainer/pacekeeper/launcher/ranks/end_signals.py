"""Signals that end the launcher: which it handles, and what it forwards to its ranks.

The list is in the environment variable that torchrun uses, so that the warm process and the ranks can read it, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from pacekeeper_analysis.errors import InputError

from .processes import TERMINATING_SIGNALS, read_initially_ignored_signals

END_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
ALWAYS_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
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


def choose_default_signals() -> tuple[signal.Signals, ...]:
    """Return the terminating signals, except those that this process was started to ignore, such as SIGHUP by nohup."""
    return tuple(sorted(TERMINATING_SIGNALS - read_initially_ignored_signals()))


def publish_signals(signals: tuple[signal.Signals, ...]) -> None:
    """Set the variable to these signals, before the warm process is forked."""
    os.environ[END_SIGNALS_VARIABLE] = ",".join(signum.name for signum in signals)


def read_handled_signals(environment: Mapping[str, str] = os.environ) -> tuple[signal.Signals, ...]:
    """Return the signals that the launcher handles."""
    text = environment.get(END_SIGNALS_VARIABLE)
    return parse_signals(text) if text else choose_default_signals()


def choose_rank_signal(received: signal.Signals, has_handler: Callable[[signal.Signals], bool]) -> signal.Signals:
    """Return the signal to send to a rank after the launcher received one. `has_handler`: whether the rank handles it.

    The rank gets the same signal, as in torchrun. A rank that handles SIGTERM but not this signal gets SIGTERM, on
    which pk.init and the integrations checkpoint. Python's own KeyboardInterrupt does not count as a handler.
    """
    handles = received is not signal.SIGINT and has_handler(received)
    return signal.SIGTERM if not handles and has_handler(signal.SIGTERM) else received
