"""Which rank holds which socket, for the sidecar: it sees the pod's connections, but not the ranks' processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from pacekeeper.runtime import write_json

PERIOD = 2.0
"""Seconds between two looks: ranks open their connections when a round begins, and with the first operation of each
kind. One look at 1,000 open files takes 2 ms."""
MOST_FILES = 20_000
"""Of a process that are looked at: the launcher waits meanwhile."""
_SOCKET = "socket:["


class SocketFile:
    """Written when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at = float("-inf")
        self._written: dict[int, int] = {}

    def look(self, pids: Mapping[int, int], now: float) -> None:
        """`pids`: global rank → its process; `now`: seconds, monotonic."""
        if now - self._looked_at < PERIOD:
            return
        self._looked_at = now
        held = {inode: rank for rank, pid in pids.items() for inode in sockets_of(pid)}
        if held != self._written:
            write_json(self._path, {str(inode): rank for inode, rank in held.items()})
            self._written = held


def sockets_of(pid: int) -> set[int]:
    """Inodes of the sockets that the process holds; none where it has gone, or may not be looked at."""
    held = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as files:
            for file in islice(files, MOST_FILES):
                try:
                    target = os.readlink(file.path)
                except OSError:
                    continue  # closed meanwhile
                if target.startswith(_SOCKET):
                    held.add(int(target[len(_SOCKET) : -1]))
    except OSError:
        return held
    return held
