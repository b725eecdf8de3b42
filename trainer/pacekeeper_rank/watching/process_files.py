"""What /proc and the cgroup show of processes, and the signal that asks a rank for its stacks."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path

from .watch_folder import read_start

STACK_SIGNAL = signal.SIGRTMIN + 10
"""On this signal, a rank writes its Python stacks to its stack file."""
SOCKET_SCAN_INTERVAL_SECONDS = 2.0
"""Seconds between two scans. Ranks connect when a round starts, and at the first operation of each kind. A scan of
1,000 open files takes 2 ms."""
MAX_OPEN_FILES_SCANNED = 20_000
"""Maximum per process: the thread that scans does nothing else during the scan."""
_SOCKET_LINK_PREFIX = "socket:["


def read_process_state(pid: int) -> tuple[str, int]:
    """Return the state letter, and the main thread's processor time in clock ticks; ("", 0): no such process."""
    try:
        content = read_start(f"/proc/{pid}/task/{pid}/stat")
    except OSError:
        return "", 0
    fields = content.rpartition(b")")[2].split()  # the name before it may contain spaces and parentheses
    return (fields[0].decode(), int(fields[11]) + int(fields[12])) if fields else ("", 0)


def drop_dumps(path: Path) -> None:
    """Drop the stacks in a rank's file, whose memory may be limited. Its first line names the main thread."""
    with path.open("rb+") as file:
        file.truncate(len(file.readline()))


def catches_stack_signal(pid: int) -> bool:
    """Return whether the process has a handler for STACK_SIGNAL. Without one, the signal would end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (STACK_SIGNAL - 1) & 1)


def count_oom_kills() -> int:
    """Return how many processes of this container the kernel has ended for lack of memory; 0: none, or unknown."""
    try:
        words = read_start("/sys/fs/cgroup/memory.events").split()
    except OSError:
        return 0
    return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0


def list_socket_inodes(pid: int) -> set[int]:
    """Return the inodes of the process's sockets; empty if it does not exist, or access is denied."""
    inodes = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as files:
            for file in islice(files, MAX_OPEN_FILES_SCANNED):
                try:
                    target = os.readlink(file.path)
                except OSError:
                    continue  # closed during the scan
                if target.startswith(_SOCKET_LINK_PREFIX):
                    inodes.add(int(target[len(_SOCKET_LINK_PREFIX) : -1]))
    except OSError:
        return inodes
    return inodes
