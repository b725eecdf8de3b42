"""Signals that tell the launcher to end: which ones, and what it sends on to its ranks.

The list is in the environment, where torchrun has it, so that the warm process and the ranks find it, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from pacekeeper_analysis.errors import InputError

VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
ALWAYS = (signal.SIGTERM, signal.SIGINT)
DEFAULT = (*ALWAYS, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""torchrun's, and those that batch systems send."""
_NOT_TO_HANDLE = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Return the signals of torchrun's --signals-to-handle, and SIGTERM and SIGINT. Raises InputError."""
    named = []
    for name in text.split(","):
        known = signal.Signals.__members__.get(name.strip())
        if known is None or known in _NOT_TO_HANDLE:
            why = "is no signal's name" if known is None else "cannot be handled"
            raise InputError(f"--signals-to-handle {text}: {name.strip()!r} {why}; give names such as SIGTERM,SIGUSR1")
        named.append(known)
    return tuple(dict.fromkeys((*ALWAYS, *named)))


def default_signals() -> tuple[signal.Signals, ...]:
    """Return `DEFAULT` without what this process was started to ignore: SIGHUP under nohup."""
    return tuple(each for each in DEFAULT if each in ALWAYS or signal.getsignal(each) is not signal.SIG_IGN)


def publish_signals(signals: tuple[signal.Signals, ...]) -> None:
    """Name them in the environment, before the warm process is forked."""
    os.environ[VARIABLE] = ",".join(each.name for each in signals)


def handled_signals(environment: Mapping[str, str] = os.environ) -> tuple[signal.Signals, ...]:
    """Return the signals that the launcher of this process handles."""
    text = environment.get(VARIABLE)
    return parse_signals(text) if text else DEFAULT


def signal_for_rank(received: signal.Signals, caught: int) -> signal.Signals:
    """Choose what a rank is sent when the launcher received a signal. `caught`: bit mask of what the rank handles.

    The rank gets the same signal, as under torchrun. A rank that handles SIGTERM but not this one gets SIGTERM
    instead: that is what checkpoints (pk.init, and the integrations). Python's own KeyboardInterrupt is no handler in
    this sense.
    """
    handles = received is not signal.SIGINT and bool(caught >> (received - 1) & 1)
    return signal.SIGTERM if not handles and caught >> (signal.SIGTERM - 1) & 1 else received


def caught_signals(pid: int) -> int:
    """Return the bit mask of the signals that a process has handlers for; 0 where there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.partition(":")[2], 16) for line in lines if line.startswith("SigCgt:")), 0)
