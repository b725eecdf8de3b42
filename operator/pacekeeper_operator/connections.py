"""How many connections the endpoint holds, in all and from one address: what is too much is closed as it comes.

Counted from the moment when the kernel hands them over: before TLS, and before anybody has proved anything. Whoever has
not proved yet who it is stands at the door, where the oldest makes room for the next.
"""

from __future__ import annotations

import asyncio.constants
import asyncio.sslproto
import contextlib
import logging
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import files, metrics
from .files import Files

TLS_BUFFER_BYTES = 32 * 2**10
"""Two records of TLS: nothing larger ever arrives at once."""
CONNECTION_BYTES = 64 * 2**10
"""What an open connection costs: 58 KiB measured with Python 3.11 and OpenSSL 3, `TLS_BUFFER_BYTES` among them. While
a body lies there that nobody reads yet, it is 165 KiB.
"""
USUAL_MEMORY = 512 * 2**20
"""The chart's limit of the operator's memory (`resources.limits.memory`)."""
SHARE = 3 / 8
"""Of the memory, for connections; with the bodies that are being read (`server.MAX_BODIES_BYTES`) less than half."""
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
MOST_EVER = 32_768
MAX_OF_ADDRESS = 256
"""Generous: workers on the host's network share their node's address, and have three connections each."""
AT_THE_DOOR = 512
"""So many connections may be without a good token at a time. A sidecar sends its own with its first request."""
CONNECTIONS_OF_A_WORKER = 3
"""At most: its poll, a heartbeat beside it, and a fault or evidence."""

log = logging.getLogger(__name__)


def spare_tls_buffers() -> None:
    """From now on a TLS connection of this process has a small buffer for what comes in.

    asyncio gives each connection, on either side, a buffer of 256 KiB for its whole life, and takes 256 KiB more of a
    body that nobody reads yet. It has no other knobs than these, which it looks at when a connection is made. They are
    no part of its documented interface: a test says when a Python no longer has them.
    """
    asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
    asyncio.constants.FLOW_CONTROL_HIGH_WATER_SSL_READ = TLS_BUFFER_BYTES // 2**10  # type: ignore[misc]


def most_connections(limit: Path = MEMORY_LIMIT, held: Files | None = None) -> int:
    """As many as there are files for, and as memory holds."""
    return min(most_by_memory(limit), (held or files.now()).connections)


def most_by_memory(limit: Path = MEMORY_LIMIT) -> int:
    """As many as `SHARE` of the container's memory holds; of the usual limit's, where the container has none."""
    try:
        memory = int(limit.read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        memory = USUAL_MEMORY
    return min(MOST_EVER, int(memory * SHARE) // CONNECTION_BYTES)


@dataclass
class Connections:
    """Those that are open: `total`, how many of each address, and which have proved nothing yet."""

    most: int = field(default_factory=most_connections)
    most_of_address: int = MAX_OF_ADDRESS
    most_at_the_door: int = AT_THE_DOOR
    total: int = 0
    of_address: Counter[str] = field(default_factory=Counter)
    _door: dict[int, _Connection] = field(default_factory=dict)  # by file descriptor, oldest first

    def say_room(self) -> None:
        """For how many connections, and by which limit, for the platform team."""
        metrics.CONNECTIONS_ROOM.set(self.most)
        limit, by_memory = files.now().limit, most_by_memory()
        if self.most < by_memory:
            log.warning(
                "%d open files (RLIMIT_NOFILE) leave room for %d connections of sidecars, where memory would hold %d: "
                "raise LimitNOFILE of the nodes' container runtime where more than %d workers are to be served",
                *(limit, self.most, by_memory, self.most // CONNECTIONS_OF_A_WORKER),
            )
        else:
            log.info("there is room for %d connections of sidecars, by the memory's limit", self.most)

    def listen(self, address: str, port: int) -> socket.socket:
        """A socket that accepts only what there is room for; `address` "": all of this machine."""
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        made = socket.create_server((address, port), family=family, dualstack_ipv6=both)
        return _Listener(self, made)

    def let_in(self, descriptor: int) -> None:
        """Whoever holds this connection has proved who it is."""
        self._door.pop(descriptor, None)

    def admit(self, address: str, accepted: socket.socket) -> socket.socket | None:
        """The connection, to be used in place of `accepted`; None: there is no room, it is closed."""
        if self.total >= self.most or self.of_address[address] >= self.most_of_address:
            metrics.REFUSED_CONNECTIONS.inc()
            accepted.close()
            return None
        self.total += 1
        metrics.CONNECTIONS.set(self.total)
        self.of_address[address] += 1
        if len(self._door) >= self.most_at_the_door:
            self._door.pop(next(iter(self._door))).hang_up()
        connection = _Connection(self, address, accepted)
        self._door[connection.fileno()] = connection
        return connection

    def leave(self, address: str, descriptor: int) -> None:
        self._door.pop(descriptor, None)
        self.total -= 1
        metrics.CONNECTIONS.set(self.total)
        self.of_address[address] -= 1
        if not self.of_address[address]:
            del self.of_address[address]


class _Listener(socket.socket):
    """Takes the place of `made`."""

    def __init__(self, connections: Connections, made: socket.socket) -> None:
        super().__init__(fileno=made.detach())
        self._connections = connections

    def accept(self) -> tuple[socket.socket, Any]:
        while True:  # until one is admitted, or there is none: that raises BlockingIOError
            accepted, peer = super().accept()
            connection = self._connections.admit(peer[0], accepted)
            if connection is not None:
                return connection, peer


class _Connection(socket.socket):
    """Takes the place of `accepted`, and says when it is closed."""

    def __init__(self, connections: Connections, address: str, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        self._connections: Connections | None = connections
        self._address = address

    def hang_up(self) -> None:
        """Ends it in both directions; the event loop sees that as the peer's end, and closes it."""
        with contextlib.suppress(OSError):  # the peer has ended it already
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        descriptor = self.fileno()
        super().close()
        if self._connections is not None:
            self._connections.leave(self._address, descriptor)
            self._connections = None
