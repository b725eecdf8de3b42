"""Which rank holds which socket, for the sidecar, which sees the pod's connections but not the ranks' processes; and
those connections as the launcher sees them."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pacekeeper.runtime import write_json

PERIOD = 2.0
"""Seconds between two looks: ranks open their connections when a round begins, and with the first operation of each
kind. One look at 1,000 open files takes 2 ms."""
MOST_LINES = 20_000
"""Of the kernel's table of connections that are looked at: on a node's own network there may be many."""
MOST_FILES = 20_000
"""Of a process that are looked at: the launcher waits meanwhile."""
_SOCKET = "socket:["
_ESTABLISHED = "01"


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


class Connection(NamedTuple):
    """One end of an established TCP connection of this network namespace. Addresses as text."""

    address: str
    port: int
    remote: str
    remote_port: int


def connections(tables: Sequence[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))) -> list[Connection]:
    """What the kernel's tables hold (Documentation/networking/proc_net_tcp)."""
    found = []
    for table in tables:
        with contextlib.suppress(OSError), table.open() as lines:
            rows = (line.split() for line in islice(lines, 1, MOST_LINES))
            found += [Connection(*_end(row[1]), *_end(row[2])) for row in rows if row[3] == _ESTABLISHED]
    return found


def _end(text: str) -> tuple[str, int]:
    """Of "0100007F:1F90": words of the address in the machine's order, the port as a number."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return str(ip_address(struct.pack(f"={len(words)}I", *words))), int(port, 16)


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
