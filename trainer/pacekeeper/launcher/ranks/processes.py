"""Process functions of the kernel that Python's standard library lacks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pacekeeper_rank.forking.process_setup import call_prctl

_PR_SET_CHILD_SUBREAPER = 36
_MAX_COMMAND_CHARACTERS = 80


def open_standard_files() -> None:
    """Open /dev/null for standard files that this process was started without (`<&-`, `>&-`).

    Otherwise another file would get the number, and a rank would use it as its input or output.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def adopt_orphans() -> None:
    """Make orphans of the ranks children of this process, as if it were PID 1."""
    call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_children(except_for: int) -> None:
    """Reap adopted children that have exited. `except_for`: the child that another function waits for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == except_for:
            return
        os.waitpid(ended.si_pid, 0)


def list_adopted_processes(except_for: int) -> dict[int, str]:
    """Return the processes that ranks left behind, with their command lines. `except_for`: the warm process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = {}
    for pid in map(int, children):
        with suppress(FileNotFoundError, ProcessLookupError):
            if pid != except_for and (command := _read_command_line(pid)):
                commands[pid] = command
    return commands


def has_signal_handler(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal. Without one, the signal would kill it."""
    caught_mask = _read_status(pid, "SigCgt") or "0"
    return bool(int(caught_mask, 16) >> (signum - 1) & 1)


def is_traced(pid: int) -> bool:
    """Return whether a debugger is attached to the process."""
    return _read_status(pid, "TracerPid") not in ("", "0")


def read_fields(stat: Path) -> list[str]:
    """Return the fields of a stat file, from the state letter on; []: the process does not exist."""
    return read_text(stat).rpartition(")")[2].split()  # the name before it may contain spaces and parentheses


def read_text(path: Path) -> str:
    """Return the content of a file of /proc; "": the process does not exist, or access is denied."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _read_status(pid: int, name: str) -> str:
    """Return one value of /proc/<pid>/status; "": the process does not exist."""
    lines = (line.partition(":") for line in read_text(Path(f"/proc/{pid}/status")).splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


def group_exists(group: int) -> bool:
    """Return whether any process of the process group exists, zombies included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def list_group_members(group: int) -> dict[int, str]:
    """Return the running processes of the group, with their command lines."""
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = read_fields(folder / "stat")
        with suppress(FileNotFoundError, ProcessLookupError):
            if fields and int(fields[2]) == group and (command := _read_command_line(int(folder.name))):
                commands[int(folder.name)] = command
    return commands


def format_processes(commands: Mapping[int, str]) -> str:
    return ", ".join(f"{pid} ({command[:_MAX_COMMAND_CHARACTERS]})" for pid, command in commands.items())


def _read_command_line(pid: int) -> str:
    """Return the command line; "": the process has exited."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def kill_group(group: int, signum: signal.Signals) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return
