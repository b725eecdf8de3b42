"""Limits on the endpoint's connections, in total and per address: connections over a limit are closed at once.

Connections count from the moment when the kernel hands them over, before TLS and authentication. Connections that are
not authenticated yet have their own limit. When it is reached, the oldest is closed after a grace period.
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

from .. import file_limits, metrics
from ..file_limits import FileLimits

TLS_BUFFER_BYTES = 8 * 2**10
"""Fits a heartbeat; larger messages arrive in several pieces."""
CONNECTION_BYTES = 64 * 2**10
"""Memory of an open connection.

45 KiB were measured with Python 3.11 and OpenSSL 3, `TLS_BUFFER_BYTES` included. A held poll of a worker with eight
GPUs takes 66 KiB, the worker's reports included. A worker has three connections at most.
"""
DEFAULT_MEMORY_BYTES = 512 * 2**20
"""The chart's memory limit of the operator (`resources.limits.memory`)."""
CONNECTION_MEMORY_SHARE = 3 / 8
"""Share of the memory for connections. With the bodies being read (`server.MAX_BODIES_BYTES`) it is less than half."""
MEMORY_LIMIT_PATH = Path("/sys/fs/cgroup/memory.max")
MAX_CONNECTIONS = 32_768
MAX_CONNECTIONS_PER_ADDRESS = 256
"""Generous: workers on the host network share their node's address, and have three connections each."""
MAX_UNAUTHENTICATED_CONNECTIONS = 512
"""Maximum number of connections without a valid token. A sidecar sends its token with its first request."""
UNAUTHENTICATED_GRACE_SECONDS = 10.0
"""Seconds that such a connection is protected at the limit. Then the oldest is closed when more arrive."""
MAX_UNAUTHENTICATED_PER_ADDRESS = 64
"""If an address has more of them at the limit, its oldest is closed at once."""
LISTEN_BACKLOG = 4_096
"""Connections that may wait in the kernel, which has its own limit (net.core.somaxconn)."""
TCP_KEEPALIVE_SECONDS, TCP_KEEPALIVE_TRIES = 3, 3
"""Idle seconds before the first TCP keepalive probe, and the number of unanswered probes that end the connection.

Both kernels probe, then once per second. A held poll thus proves that its worker's machine is alive, as a poll every
three seconds did, without cost to either process.
"""
PEER_SILENCE_TIMEOUT_SECONDS = TCP_KEEPALIVE_SECONDS + TCP_KEEPALIVE_TRIES
"""Maximum seconds without any packet from the peer."""
CONNECTIONS_PER_WORKER = 3
"""Maximum number of connections of a worker: its poll, a concurrent heartbeat, and a fault or evidence."""

_TCP_INFO_LAST_ACK_OFFSET = 56
"""Offset of `tcpi_last_ack_recv` in Linux's struct tcp_info; `tcpi_state` is its first byte."""
_TCP_INFO_STATE_ESTABLISHED = 1
"""The state of a connection that neither side has closed."""

log = logging.getLogger(__name__)


def shrink_tls_buffers() -> None:
    """Use small receive buffers for TLS connections of this process from now on.

    asyncio gives each connection, on either side, a buffer of 256 KiB for its lifetime, and accepts 256 KiB more of an
    unread body. Only these settings change that; asyncio reads them when it creates a connection. They are not part of
    its documented interface. A test fails if a Python version no longer has them.
    """
    asyncio.sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
    asyncio.constants.FLOW_CONTROL_HIGH_WATER_SSL_READ = TLS_BUFFER_BYTES // 2**10  # type: ignore[misc]


def compute_max_connections(limit_path: Path = MEMORY_LIMIT_PATH, limits: FileLimits | None = None) -> int:
    """Return how many connections the file limit and the memory allow."""
    return min(compute_max_by_memory(limit_path), (limits or file_limits.read_file_limits()).connections)


def compute_max_by_memory(limit_path: Path = MEMORY_LIMIT_PATH) -> int:
    """Return how many connections fit into `CONNECTION_MEMORY_SHARE` of the container's memory limit.

    Without a limit, `DEFAULT_MEMORY_BYTES` applies.
    """
    try:
        memory = int(limit_path.read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        memory = DEFAULT_MEMORY_BYTES
    return min(MAX_CONNECTIONS, int(memory * CONNECTION_MEMORY_SHARE) // CONNECTION_BYTES)


@dataclass
class EndpointConnections:
    """The open connections: the total, the number per address, and those without authentication."""

    max_total: int = field(default_factory=compute_max_connections)
    max_per_address: int = MAX_CONNECTIONS_PER_ADDRESS
    max_unauthenticated: int = MAX_UNAUTHENTICATED_CONNECTIONS
    grace_seconds: float = UNAUTHENTICATED_GRACE_SECONDS
    total: int = 0
    counts_by_address: Counter[str] = field(default_factory=Counter)
    _unauthenticated: dict[int, EndpointConnection] = field(default_factory=dict)  # by file descriptor, oldest first
    _unauthenticated_counts: Counter[str] = field(default_factory=Counter)  # by address
    _open: dict[int, EndpointConnection] = field(default_factory=dict)  # all, by file descriptor
    _slot_freed: asyncio.Event = field(default_factory=asyncio.Event)  # an unauthenticated slot is free

    def report_capacity(self) -> None:
        """Report how many connections fit, and which limit applies, for the platform team."""
        metrics.CONNECTION_CAPACITY.set(self.max_total)
        limit, by_memory = file_limits.read_file_limits().limit, compute_max_by_memory()
        if self.max_total < by_memory:
            log.warning(
                "the limit of %d open files (RLIMIT_NOFILE) allows %d connections of sidecars, memory would allow %d: "
                "raise LimitNOFILE of the nodes' container runtime to serve more than %d workers",
                *(limit, self.max_total, by_memory, self.max_total // CONNECTIONS_PER_WORKER),
            )
        else:
            log.info("the memory limit allows %d connections of sidecars", self.max_total)

    async def accept(self, listener: socket.socket) -> EndpointConnection:
        """Return the next connection within the limits, and close others."""
        loop = asyncio.get_running_loop()
        while True:
            accepted, peer = await loop.sock_accept(listener)
            try:
                await self._free_unauthenticated_slot()
            except BaseException:
                accepted.close()
                raise
            if is_closed_by_peer(accepted):  # closed while it waited: do not spend a handshake on it
                accepted.close()
                continue
            connection = self.admit(peer[0], accepted)
            if connection is not None:
                return connection

    async def _free_unauthenticated_slot(self) -> None:
        """Wait until there is a slot for one more unauthenticated connection.

        Each connection has a grace period to authenticate. After a restart, thousands connect at once. If new ones
        displaced them immediately, the work on all their handshakes would be lost. New connections wait in the kernel.
        """
        loop = asyncio.get_running_loop()
        while len(self._unauthenticated) >= self.max_unauthenticated:
            oldest = self._find_crowding_connection() or next(iter(self._unauthenticated.values()))
            remaining = oldest.accepted_at + self.grace_seconds - loop.time()
            if remaining <= 0 or self._unauthenticated_counts[oldest.address] > MAX_UNAUTHENTICATED_PER_ADDRESS:
                oldest.disconnect()
                self.mark_authenticated(oldest.fileno())
                return
            self._slot_freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._slot_freed.wait()

    def _find_crowding_connection(self) -> EndpointConnection | None:
        """Return the oldest connection of an address with too many unauthenticated ones, or None."""
        address, count = self._unauthenticated_counts.most_common(1)[0]
        if count <= MAX_UNAUTHENTICATED_PER_ADDRESS:
            return None
        return next(connection for connection in self._unauthenticated.values() if connection.address == address)

    def mark_authenticated(self, descriptor: int) -> None:
        """Record that the client of this connection has authenticated."""
        connection = self._unauthenticated.pop(descriptor, None)
        if connection is not None:
            _decrement_count(self._unauthenticated_counts, connection.address)
            self._slot_freed.set()

    def admit(self, address: str, accepted: socket.socket) -> EndpointConnection | None:
        """Return the connection, to be used instead of `accepted`; None: a limit is reached, and it is closed."""
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
    """Open a listening socket. `address` empty: all addresses of this machine."""
    dual_stack = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack or ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, dualstack_ipv6=dual_stack, backlog=LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


class EndpointConnection(socket.socket):
    """Replaces `accepted`, and releases its slot when it is closed."""

    def __init__(self, connections: EndpointConnections, address: str, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        self._connections: EndpointConnections | None = connections
        self.address = address
        self._silent_seconds: float | None = None
        self.accepted_at = asyncio.get_running_loop().time()
        _enable_keepalive(self)

    @property
    def silent_seconds(self) -> float | None:
        """Return the seconds since the last packet from the peer's machine, or until the close; None: unknown."""
        return self._silent_seconds if self._connections is None else _read_silent_seconds(self)

    def disconnect(self) -> None:
        """Shut down both directions. The event loop sees that as the peer's end, and closes the connection."""
        with contextlib.suppress(OSError):  # the peer closed it already
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
        (
            socket.TCP_USER_TIMEOUT,
            1000 * PEER_SILENCE_TIMEOUT_SECONDS,
        ),  # for unacknowledged data, during which no keepalive probes are sent
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Return whether the peer has closed the connection, by the kernel's `tcp_info`."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_INFO_STATE_ESTABLISHED
    return False


def _read_silent_seconds(connection: socket.socket) -> float | None:
    """Return the seconds since the kernel received the last acknowledgment, by its `tcp_info`; None: unknown."""
    with contextlib.suppress(OSError, struct.error):
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_LAST_ACK_OFFSET + 4)
        milliseconds: int = struct.unpack_from("I", tcp_info, _TCP_INFO_LAST_ACK_OFFSET)[0]
        return milliseconds / 1000
    return None
