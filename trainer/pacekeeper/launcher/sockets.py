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

SOCKET_SCAN_INTERVAL_SECONDS = 2.0
"""Seconds between two looks: ranks open their connections when a round begins, and with the first operation of each
kind. One look at 1,000 open files takes 2 ms."""
MAX_SOCKET_TABLE_LINES = 20_000
"""Of the kernel's table of connections that are looked at: on a node's own network there may be many."""
MAX_OPEN_FILES_SCANNED = 20_000
"""Of a process that are looked at: the launcher waits meanwhile."""
_SOCKET_LINK_PREFIX = "socket:["
_PROC_NET_ESTABLISHED = "01"


class SocketFile:
    """Written when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refreshed_at = float("-inf")
        self._written: dict[int, int] = {}

    def refresh(self, pids: Mapping[int, int], now: float) -> None:
        """`pids`: global rank → its process; `now`: seconds, monotonic."""
        if now - self._refreshed_at < SOCKET_SCAN_INTERVAL_SECONDS:
            return
        self._refreshed_at = now
        held = {inode: rank for rank, pid in pids.items() for inode in list_socket_inodes(pid)}
        if held != self._written:
            write_json(self._path, {str(inode): rank for inode, rank in held.items()})
            self._written = held


class TcpConnection(NamedTuple):
    """One end of an established TCP connection of this network namespace. Addresses as text."""

    address: str
    port: int
    remote: str
    remote_port: int


def list_connections(tables: Sequence[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))) -> list[TcpConnection]:
    """What the kernel's tables hold (Documentation/networking/proc_net_tcp)."""
    found = []
    for table in tables:
        with contextlib.suppress(OSError), table.open() as lines:
            rows = (line.split() for line in islice(lines, 1, MAX_SOCKET_TABLE_LINES))
            found += [TcpConnection(*_parse_endpoint(row[1]), *_parse_endpoint(row[2])) for row in rows if row[3] == _PROC_NET_ESTABLISHED]
    return found


def _parse_endpoint(text: str) -> tuple[str, int]:
    """Of "0100007F:1F90": words of the address in the machine's order, the port as a number."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return str(ip_address(struct.pack(f"={len(words)}I", *words))), int(port, 16)


def list_socket_inodes(pid: int) -> set[int]:
    """Inodes of the sockets that the process holds; none where it has gone, or may not be looked at."""
    held = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as files:
            for file in islice(files, MAX_OPEN_FILES_SCANNED):
                try:
                    target = os.readlink(file.path)
                except OSError:
                    continue  # closed meanwhile
                if target.startswith(_SOCKET_LINK_PREFIX):
                    held.add(int(target[len(_SOCKET_LINK_PREFIX) : -1]))
    except OSError:
        return held
    return held
