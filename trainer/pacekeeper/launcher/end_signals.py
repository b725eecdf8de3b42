"""Signals that tell the launcher to end: which ones, and what it sends on to its ranks.

The list is in the environment, where torchrun has it, so that the warm process and the ranks find it, too.
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
    """Return the signals of torchrun's --signals-to-handle, and SIGTERM and SIGINT. Raises InputError."""
    named = []
    for name in text.split(","):
        known = signal.Signals.__members__.get(name.strip())
        if known is None or known in _UNHANDLEABLE_SIGNALS:
            why = "is no signal's name" if known is None else "cannot be handled"
            raise InputError(f"--signals-to-handle {text}: {name.strip()!r} {why}; give names such as SIGTERM,SIGUSR1")
        named.append(known)
    return tuple(dict.fromkeys((*ALWAYS_HANDLED_SIGNALS, *named)))


def choose_default_signals() -> tuple[signal.Signals, ...]:
    """Return all that ask a process to end, but what this one was started to ignore: SIGHUP under nohup."""
    return tuple(sorted(TERMINATING_SIGNALS - read_initially_ignored_signals()))


def publish_signals(signals: tuple[signal.Signals, ...]) -> None:
    """Name them in the environment, before the warm process is forked."""
    os.environ[END_SIGNALS_VARIABLE] = ",".join(each.name for each in signals)


def read_handled_signals(environment: Mapping[str, str] = os.environ) -> tuple[signal.Signals, ...]:
    """Return the signals that the launcher of this process handles."""
    text = environment.get(END_SIGNALS_VARIABLE)
    return parse_signals(text) if text else choose_default_signals()


def choose_rank_signal(received: signal.Signals, has_handler: Callable[[signal.Signals], bool]) -> signal.Signals:
    """Choose what a rank is sent when the launcher received a signal. `catches`: whether the rank handles one.

    The rank gets the same signal, as under torchrun. A rank that handles SIGTERM but not this one gets SIGTERM
    instead: that is what checkpoints (pk.init, and the integrations). Python's own KeyboardInterrupt is no handler in
    this sense.
    """
    handles = received is not signal.SIGINT and has_handler(received)
    return signal.SIGTERM if not handles and has_handler(signal.SIGTERM) else received
