"""The few calls to the kernel about processes that Python's standard library has not."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_COMMAND_CHARACTERS = 80
_libc = ctypes.CDLL(None, use_errno=True)

TERMINATING_SIGNALS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU}
)
"""Signals by which others ask a process to end: a terminal, a batch system, an administrator."""


@functools.cache
def read_initially_ignored_signals() -> frozenset[int]:
    """Those of `TERMINATING` that were ignored when this process, or the one that it was forked from, asked first."""
    return frozenset(signum for signum in TERMINATING_SIGNALS if signal.getsignal(signum) is signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent dies. Does not return where `parent` is dead already."""
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_children(except_for: int) -> None:
    """Takes leave of adopted children that have ended; `except_for` is a child that somebody else waits for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == except_for:
            return
        os.waitpid(ended.si_pid, 0)


def list_adopted_processes(except_for: int) -> dict[int, str]:
    """Processes that ranks have left behind, with their command lines. `except_for` is a child that is no such."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = {}
    for pid in map(int, children):
        with suppress(FileNotFoundError, ProcessLookupError):
            if pid != except_for and (command := _read_command_line(pid)):
                found[pid] = command
    return found


def has_signal_handler(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal. One that has not would die of it."""
    caught = _read_status(pid, "SigCgt") or "0"
    return bool(int(caught, 16) >> (signum - 1) & 1)


def is_traced(pid: int) -> bool:
    """Whether a debugger is attached to the process."""
    return _read_status(pid, "TracerPid") not in ("", "0")


def read_fields(stat: Path) -> list[str]:
    """Return the fields of a stat file, from the state letter on; none where the process is gone."""
    return read_text(stat).rpartition(")")[2].split()  # the name before may hold blanks and brackets


def read_text(path: Path) -> str:
    """Return what a file of /proc holds; "" where the process is gone, or may not be looked into."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_status(pid: int, name: str) -> str:
    """Return one value of /proc/<pid>/status; "" where the process is gone."""
    lines = (line.partition(":") for line in read_text(Path(f"/proc/{pid}/status")).splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


def group_exists(group: int) -> bool:
    """Whether any process of the process group is left, a zombie included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def list_group_members(group: int) -> dict[int, str]:
    """Processes of the group that run, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = read_fields(folder / "stat")
        with suppress(FileNotFoundError, ProcessLookupError):
            if fields and int(fields[2]) == group and (command := _read_command_line(int(folder.name))):
                found[int(folder.name)] = command
    return found


def format_processes(found: Mapping[int, str]) -> str:
    return ", ".join(f"{pid} ({command[:_MAX_COMMAND_CHARACTERS]})" for pid, command in found.items())


def _read_command_line(pid: int) -> str:
    """Its command line; "": it has ended."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def kill_group(group: int, signum: signal.Signals) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return


def _call_prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def flush_c_streams() -> None:
    """Write out what C code has printed."""
    _libc.fflush(None)
