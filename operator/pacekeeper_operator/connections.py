"""How many connections the endpoint holds, in all and from one address: what is too much is closed as it comes.

Counted from the moment when the kernel hands them over: before TLS, and before anybody has proved anything. Whoever has
not proved yet who it is stands at the door, where the oldest makes room for the next after a while.
"""

from __future__ import annotations

import asyncio.constants
import asyncio.sslproto
import contextlib
import logging
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from . import files, metrics
from .files import Files

TLS_BUFFER_BYTES = 8 * 2**10
"""A heartbeat; what is larger arrives in so many pieces more."""
CONNECTION_BYTES = 64 * 2**10
"""What an open connection costs: 45 KiB measured with Python 3.11 and OpenSSL 3, `TLS_BUFFER_BYTES` among them; 66 KiB
where a poll of a worker with eight GPUs is held, with what that worker has said. A worker has three at most.
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
DOOR_SECONDS = 10.0
"""So long each has its place at a full door; then the oldest makes room, where more come."""
DOOR_OF_ADDRESS = 64
"""Of an address that has more there, the oldest makes room at once."""
WAITING = 4_096
"""So many may wait for a place in the kernel, which has its own limit (net.core.somaxconn)."""
KEEPALIVE_SECONDS, KEEPALIVE_TRIES = 3, 3
"""A connection that is quiet for so long is asked for by the kernels of both sides, then once a second; without an
answer to so many questions it has ended. So a poll that is held tells that its worker's machine is there, as one every
three seconds did, and costs neither process anything.
"""
UNHEARD_SECONDS = KEEPALIVE_SECONDS + KEEPALIVE_TRIES
"""So long nothing may come from the other side."""
CONNECTIONS_OF_A_WORKER = 3
"""At most: its poll, a heartbeat beside it, and a fault or evidence."""

_LAST_ACKNOWLEDGED = 56
"""Where `tcpi_last_ack_recv` stands in Linux' struct tcp_info; `tcpi_state` is its first byte."""
_ESTABLISHED = 1
"""The state of a connection that neither side has ended."""

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
    patience: float = DOOR_SECONDS
    total: int = 0
    of_address: Counter[str] = field(default_factory=Counter)
    _door: dict[int, Connection] = field(default_factory=dict)  # by file descriptor, oldest first
    _at_the_door: Counter[str] = field(default_factory=Counter)  # how many of each address
    _open: dict[int, Connection] = field(default_factory=dict)  # all, by file descriptor
    _moved: asyncio.Event = field(default_factory=asyncio.Event)  # somebody has left the door

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

    async def accept(self, listener: socket.socket) -> Connection:
        """The next one that there is room for; what there is none for is closed."""
        loop = asyncio.get_running_loop()
        while True:
            accepted, peer = await loop.sock_accept(listener)
            try:
                await self._free_door()
            except BaseException:
                accepted.close()
                raise
            if has_left(accepted):  # while it waited: a handshake with nobody takes the time of those who are there
                accepted.close()
                continue
            connection = self.admit(peer[0], accepted)
            if connection is not None:
                return connection

    async def _free_door(self) -> None:
        """Whoever is at the door has time to prove who it is: what all of them have cost would be lost if those who
        come next, after a restart of thousands at once, had them hung up on. The kernel lets these wait."""
        loop = asyncio.get_running_loop()
        while len(self._door) >= self.most_at_the_door:
            oldest = self._crowding() or next(iter(self._door.values()))
            left = oldest.came_at + self.patience - loop.time()
            if left <= 0 or self._at_the_door[oldest.address] > DOOR_OF_ADDRESS:
                oldest.hang_up()
                self.let_in(oldest.fileno())
                return
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._moved.wait()

    def _crowding(self) -> Connection | None:
        """The oldest of an address that has too many at the door."""
        address, count = self._at_the_door.most_common(1)[0]
        if count <= DOOR_OF_ADDRESS:
            return None
        return next(connection for connection in self._door.values() if connection.address == address)

    def let_in(self, descriptor: int) -> None:
        """Whoever holds this connection has proved who it is."""
        connection = self._door.pop(descriptor, None)
        if connection is not None:
            _count_down(self._at_the_door, connection.address)
            self._moved.set()

    def admit(self, address: str, accepted: socket.socket) -> Connection | None:
        """The connection, to be used in place of `accepted`; None: there is no room, it is closed."""
        if self.total >= self.most or self.of_address[address] >= self.most_of_address:
            metrics.REFUSED_CONNECTIONS.inc()
            accepted.close()
            return None
        self.total += 1
        metrics.CONNECTIONS.set(self.total)
        self.of_address[address] += 1
        connection = Connection(self, address, accepted)
        self._door[connection.fileno()] = self._open[connection.fileno()] = connection
        self._at_the_door[address] += 1
        return connection

    def of(self, descriptor: int) -> Connection | None:
        return self._open.get(descriptor)

    def leave(self, address: str, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        self.let_in(descriptor)
        self.total -= 1
        metrics.CONNECTIONS.set(self.total)
        _count_down(self.of_address, address)


def listen(address: str, port: int) -> socket.socket:
    """`address` "": all of this machine."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    made = socket.create_server((address, port), family=family, dualstack_ipv6=both, backlog=WAITING)
    made.setblocking(False)
    return made


class Connection(socket.socket):
    """Takes the place of `accepted`, and says when it is closed."""

    def __init__(self, connections: Connections, address: str, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        self._connections: Connections | None = connections
        self.address = address
        self._unheard = 0.0
        self.came_at = asyncio.get_running_loop().time()
        _keep_alive(self)

    @property
    def unheard_seconds(self) -> float:
        """For how long nothing has come from the other side's machine; of a closed one, had come when it was closed."""
        return self._unheard if self._connections is None else _unheard_seconds(self)

    def hang_up(self) -> None:
        """Ends it in both directions; the event loop sees that as the peer's end, and closes it."""
        with contextlib.suppress(OSError):  # the peer has ended it already
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        descriptor = self.fileno()
        if self._connections is not None:
            self._unheard = _unheard_seconds(self)
        super().close()
        if self._connections is not None:
            self._connections.leave(self.address, descriptor)
            self._connections = None


def _count_down(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, KEEPALIVE_TRIES),
        (socket.TCP_USER_TIMEOUT, 1000 * UNHEARD_SECONDS),  # for what is on its way, which keeps no questions going
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def has_left(connection: socket.socket) -> bool:
    """Whether the other side has ended it, by the kernel's `tcp_info`."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
    return False


def _unheard_seconds(connection: socket.socket) -> float:
    """Since the kernel had the last acknowledgement, by its `tcp_info`; 0 where it does not say."""
    with contextlib.suppress(OSError, struct.error):
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACKNOWLEDGED + 4)
        milliseconds: int = struct.unpack_from("I", told, _LAST_ACKNOWLEDGED)[0]
        return milliseconds / 1000
    return 0.0
