"""Which rank holds which socket, and the established TCP connections of this network namespace.

The sidecar needs the sockets' ranks: it sees the pod's connections, but not the ranks' processes.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pacekeeper.runtime_folder import write_json
from pacekeeper_rank.watching.process_files import SOCKET_SCAN_INTERVAL_SECONDS, list_socket_inodes

MAX_SOCKET_TABLE_LINES = 20_000
"""Maximum of lines that are read from the kernel's table: the node's own network may have many connections."""
_PROC_NET_ESTABLISHED = "01"


class SocketFile:
    """The file that maps sockets to ranks. It is written when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refreshed_at: float | None = None
        self._written: dict[int, int] = {}

    def refresh(self, pids: Mapping[int, int], now: float) -> None:
        """Update the file if it is due. `pids`: global rank → its process; `now`: seconds, monotonic."""
        if self._refreshed_at is not None and now - self._refreshed_at < SOCKET_SCAN_INTERVAL_SECONDS:
            return
        self._refreshed_at = now
        ranks_by_inode = {inode: rank for rank, pid in pids.items() for inode in list_socket_inodes(pid)}
        if ranks_by_inode != self._written:
            write_json(self._path, {str(inode): rank for inode, rank in ranks_by_inode.items()})
            self._written = ranks_by_inode


class TcpConnection(NamedTuple):
    """One end of an established TCP connection of this network namespace. Addresses are text."""

    address: str
    port: int
    remote: str
    remote_port: int


def list_connections(tables: Sequence[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))) -> list[TcpConnection]:
    """Return the connections in the kernel's tables (Documentation/networking/proc_net_tcp)."""
    connections = []
    for table in tables:
        with contextlib.suppress(OSError), table.open() as lines:
            rows = (line.split() for line in islice(lines, 1, MAX_SOCKET_TABLE_LINES))
            connections += [
                TcpConnection(*_parse_endpoint(row[1]), *_parse_endpoint(row[2]))
                for row in rows
                if row[3] == _PROC_NET_ESTABLISHED
            ]
    return connections


def _parse_endpoint(text: str) -> tuple[str, int]:
    """Parse "0100007F:1F90": words of the address in the machine's byte order, and the port."""
    address, _, port = text.partition(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    return str(ip_address(struct.pack(f"={len(words)}I", *words))), int(port, 16)
