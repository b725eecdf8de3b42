"""Signals that end the launcher and its ranks: those that the launcher handles.

The list is in the environment variable that torchrun uses, so that the warm process and the ranks can read it, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from .process_setup import TERMINATING_SIGNALS, read_initially_ignored_signals

END_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
ALWAYS_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def read_handled_signals(environment: Mapping[str, str] = os.environ) -> tuple[signal.Signals, ...]:
    """Return the signals that the launcher handles. It has checked the names before it published them."""
    text = environment.get(END_SIGNALS_VARIABLE)
    if not text:
        return choose_default_signals()
    named = [signal.Signals.__members__[name] for name in text.split(",")]
    return tuple(dict.fromkeys((*ALWAYS_HANDLED_SIGNALS, *named)))


def choose_default_signals() -> tuple[signal.Signals, ...]:
    """Return the terminating signals, except those that this process was started to ignore, such as SIGHUP by nohup."""
    return tuple(sorted(TERMINATING_SIGNALS - read_initially_ignored_signals()))


def publish_signals(signals: tuple[signal.Signals, ...]) -> None:
    """Set the variable to these signals, before the warm process is started."""
    os.environ[END_SIGNALS_VARIABLE] = ",".join(signum.name for signum in signals)
