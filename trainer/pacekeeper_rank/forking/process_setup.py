"""Process functions of the kernel that Python's standard library lacks, for the warm process and its ranks."""

from __future__ import annotations

import ctypes
import functools
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

TERMINATING_SIGNALS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
)
"""Signals by which a terminal, a batch system, or an administrator ends a process."""


@functools.cache
def read_initially_ignored_signals() -> frozenset[int]:
    """Return the TERMINATING_SIGNALS that were ignored at the first call, in this process or the one that forked it."""
    return frozenset(signum for signum in TERMINATING_SIGNALS if signal.getsignal(signum) is signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent exits. If `parent` has exited already, exit at once."""
    call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def call_prctl(option: int, argument: int) -> None:
    """Call prctl(2). Raises OSError."""
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def flush_c_streams() -> None:
    """Flush the standard I/O streams of C code."""
    _libc.fflush(None)
