"""The few calls to the kernel about processes that Python's standard library has not."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent dies. Does not return where `parent` is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def open_standard_files() -> None:
    """Opens what this process was started without (`<&-`, `>&-`): another file would get its number, and a rank would
    take that for its input or output."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def adopt_orphans() -> None:
    """What the ranks leave behind becomes this process's child, as it would if this were process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap(except_for: int) -> None:
    """Takes leave of adopted children that have ended; `except_for` is a child that somebody else waits for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == except_for:
            return
        os.waitpid(ended.si_pid, 0)


def group_exists(group: int) -> bool:
    """Whether any process of the process group is left, a zombie included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def kill_group(group: int, signum: signal.Signals) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
