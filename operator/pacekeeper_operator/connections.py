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
from .files import FileLimits

TLS_BUFFER_BYTES = 8 * 2**10
"""A heartbeat; what is larger arrives in so many pieces more."""
CONNECTION_BYTES = 64 * 2**10
"""What an open connection costs: 45 KiB measured with Python 3.11 and OpenSSL 3, `TLS_BUFFER_BYTES` among them; 66 KiB
where a poll of a worker with eight GPUs is held, with what that worker has said. A worker has three at most.
"""
DEFAULT_MEMORY_BYTES = 512 * 2**20
"""The chart's limit of the operator's memory (`resources.limits.memory`)."""
CONNECTION_MEMORY_SHARE = 3 / 8
"""Of the memory, for connections; with the bodies that are being read (`server.MAX_BODIES_BYTES`) less than half."""
MEMORY_LIMIT_PATH = Path("/sys/fs/cgroup/memory.max")
MAX_CONNECTIONS = 32_768
MAX_CONNECTIONS_PER_ADDRESS = 256
"""Generous: workers on the host's network share their node's address, and have three connections each."""
MAX_UNAUTHENTICATED_CONNECTIONS = 512
"""So many connections may be without a good token at a time. A sidecar sends its own with its first request."""
UNAUTHENTICATED_GRACE_SECONDS = 10.0
"""So long each has its place at a full door; then the oldest makes room, where more come."""
MAX_UNAUTHENTICATED_PER_ADDRESS = 64
"""Of an address that has more there, the oldest makes room at once."""
LISTEN_BACKLOG = 4_096
"""So many may wait for a place in the kernel, which has its own limit (net.core.somaxconn)."""
TCP_KEEPALIVE_SECONDS, TCP_KEEPALIVE_TRIES = 3, 3
"""A connection that is quiet for so long is asked for by the kernels of both sides, then once a second; without an
answer to so many questions it has ended. So a poll that is held tells that its worker's machine is there, as one every
three seconds did, and costs neither process anything.
"""
PEER_SILENCE_TIMEOUT_SECONDS = TCP_KEEPALIVE_SECONDS + TCP_KEEPALIVE_TRIES
"""So long nothing may come from the other side."""
CONNECTIONS_PER_WORKER = 3
"""At most: its poll, a heartbeat beside it, and a fault or evidence."""

_TCP_INFO_LAST_ACK_OFFSET = 56
"""Where `tcpi_last_ack_recv` stands in Linux' struct tcp_info; `tcpi_state` is its first byte."""
_TCP_INFO_STATE_ESTABLISHED = 1
"""The state of a connection that neither side has ended."""

log = logging.getLogger(__name__)


def shrink_tls_buffers() -> None:
    """From now on a TLS connection of this process has a small buffer for what comes in.

    asyncio gives each connection, on either side, a buffer of 256 KiB for its whole life, and takes 256 KiB more of a
    body that nobody reads yet. It has no other knobs than these, which it looks at when a connection is made. They are
    no part of its documented interface: a test says when a Python no longer has them.
    """
    asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
    asyncio.constants.FLOW_CONTROL_HIGH_WATER_SSL_READ = TLS_BUFFER_BYTES // 2**10  # type: ignore[misc]


def compute_max_connections(limit: Path = MEMORY_LIMIT_PATH, limits: FileLimits | None = None) -> int:
    """As many as there are files for, and as memory holds."""
    return min(compute_max_by_memory(limit), (limits or files.read_file_limits()).connections)


def compute_max_by_memory(limit: Path = MEMORY_LIMIT_PATH) -> int:
    """As many as `SHARE` of the container's memory holds; of the usual limit's, where the container has none."""
    try:
        memory = int(limit.read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        memory = DEFAULT_MEMORY_BYTES
    return min(MAX_CONNECTIONS, int(memory * CONNECTION_MEMORY_SHARE) // CONNECTION_BYTES)


@dataclass
class EndpointConnections:
    """Those that are open: `total`, how many of each address, and which have proved nothing yet."""

    max_total: int = field(default_factory=compute_max_connections)
    max_per_address: int = MAX_CONNECTIONS_PER_ADDRESS
    max_unauthenticated: int = MAX_UNAUTHENTICATED_CONNECTIONS
    grace_seconds: float = UNAUTHENTICATED_GRACE_SECONDS
    total: int = 0
    counts_by_address: Counter[str] = field(default_factory=Counter)
    _unauthenticated: dict[int, EndpointConnection] = field(default_factory=dict)  # by file descriptor, oldest first
    _unauthenticated_counts: Counter[str] = field(default_factory=Counter)  # how many of each address
    _open: dict[int, EndpointConnection] = field(default_factory=dict)  # all, by file descriptor
    _slot_freed: asyncio.Event = field(default_factory=asyncio.Event)  # somebody has left the door

    def report_capacity(self) -> None:
        """For how many connections, and by which limit, for the platform team."""
        metrics.CONNECTION_CAPACITY.set(self.max_total)
        limit, by_memory = files.read_file_limits().limit, compute_max_by_memory()
        if self.max_total < by_memory:
            log.warning(
                "%d open files (RLIMIT_NOFILE) leave room for %d connections of sidecars, where memory would hold %d: "
                "raise LimitNOFILE of the nodes' container runtime where more than %d workers are to be served",
                *(limit, self.max_total, by_memory, self.max_total // CONNECTIONS_PER_WORKER),
            )
        else:
            log.info("there is room for %d connections of sidecars, by the memory's limit", self.max_total)

    async def accept(self, listener: socket.socket) -> EndpointConnection:
        """The next one that there is room for; what there is none for is closed."""
        loop = asyncio.get_running_loop()
        while True:
            accepted, peer = await loop.sock_accept(listener)
            try:
                await self._free_unauthenticated_slot()
            except BaseException:
                accepted.close()
                raise
            if is_closed_by_peer(accepted):  # while it waited: a handshake with nobody takes the time of those who are there
                accepted.close()
                continue
            connection = self.admit(peer[0], accepted)
            if connection is not None:
                return connection

    async def _free_unauthenticated_slot(self) -> None:
        """Whoever is at the door has time to prove who it is: what all of them have cost would be lost if those who
        come next, after a restart of thousands at once, had them hung up on. The kernel lets these wait."""
        loop = asyncio.get_running_loop()
        while len(self._unauthenticated) >= self.max_unauthenticated:
            oldest = self._find_crowding_connection() or next(iter(self._unauthenticated.values()))
            left = oldest.accepted_at + self.grace_seconds - loop.time()
            if left <= 0 or self._unauthenticated_counts[oldest.address] > MAX_UNAUTHENTICATED_PER_ADDRESS:
                oldest.disconnect()
                self.mark_authenticated(oldest.fileno())
                return
            self._slot_freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._slot_freed.wait()

    def _find_crowding_connection(self) -> EndpointConnection | None:
        """The oldest of an address that has too many at the door."""
        address, count = self._unauthenticated_counts.most_common(1)[0]
        if count <= MAX_UNAUTHENTICATED_PER_ADDRESS:
            return None
        return next(connection for connection in self._unauthenticated.values() if connection.address == address)

    def mark_authenticated(self, descriptor: int) -> None:
        """Whoever holds this connection has proved who it is."""
        connection = self._unauthenticated.pop(descriptor, None)
        if connection is not None:
            _decrement_count(self._unauthenticated_counts, connection.address)
            self._slot_freed.set()

    def admit(self, address: str, accepted: socket.socket) -> EndpointConnection | None:
        """The connection, to be used in place of `accepted`; None: there is no room, it is closed."""
        if self.total >= self.max_total or self.counts_by_address[address] >= self.max_per_address:
            metrics.REFUSED_CONNECTIONS.inc()
            accepted.close()
            return None
        self.total += 1
        metrics.OPEN_CONNECTIONS.set(self.total)
        self.counts_by_address[address] += 1
        connection = EndpointConnection(self, address, accepted)
        self._unauthenticated[connection.fileno()] = self._open[connection.fileno()] = connection
        self._unauthenticated_counts[address] += 1
        return connection

    def find(self, descriptor: int) -> EndpointConnection | None:
        return self._open.get(descriptor)

    def release(self, address: str, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        self.mark_authenticated(descriptor)
        self.total -= 1
        metrics.OPEN_CONNECTIONS.set(self.total)
        _decrement_count(self.counts_by_address, address)


def open_listener(address: str, port: int) -> socket.socket:
    """`address` "": all of this machine."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    made = socket.create_server((address, port), family=family, dualstack_ipv6=both, backlog=LISTEN_BACKLOG)
    made.setblocking(False)
    return made


class EndpointConnection(socket.socket):
    """Takes the place of `accepted`, and says when it is closed."""

    def __init__(self, connections: EndpointConnections, address: str, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        self._connections: EndpointConnections | None = connections
        self.address = address
        self._silent_seconds = 0.0
        self.accepted_at = asyncio.get_running_loop().time()
        _enable_keepalive(self)

    @property
    def silent_seconds(self) -> float:
        """For how long nothing has come from the other side's machine; of a closed one, had come when it was closed."""
        return self._silent_seconds if self._connections is None else _read_silent_seconds(self)

    def disconnect(self) -> None:
        """Ends it in both directions; the event loop sees that as the peer's end, and closes it."""
        with contextlib.suppress(OSError):  # the peer has ended it already
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        descriptor = self.fileno()
        if self._connections is not None:
            self._silent_seconds = _read_silent_seconds(self)
        super().close()
        if self._connections is not None:
            self._connections.release(self.address, descriptor)
            self._connections = None


def _decrement_count(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _enable_keepalive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, TCP_KEEPALIVE_SECONDS),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, TCP_KEEPALIVE_TRIES),
        (socket.TCP_USER_TIMEOUT, 1000 * PEER_SILENCE_TIMEOUT_SECONDS),  # for what is on its way, which keeps no questions going
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Whether the other side has ended it, by the kernel's `tcp_info`."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_INFO_STATE_ESTABLISHED
    return False


def _read_silent_seconds(connection: socket.socket) -> float:
    """Since the kernel had the last acknowledgement, by its `tcp_info`; 0 where it does not say."""
    with contextlib.suppress(OSError, struct.error):
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_LAST_ACK_OFFSET + 4)
        milliseconds: int = struct.unpack_from("I", told, _TCP_INFO_LAST_ACK_OFFSET)[0]
        return milliseconds / 1000
    return 0.0
