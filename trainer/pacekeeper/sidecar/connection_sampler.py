"""The connections between ranks, from the kernel's TCP_INFO by NETLINK_SOCK_DIAG.

    connections = ConnectionSampler(runtime)
    connections.sample(time.monotonic())      # once a second
    connections.windows()                     # the last three windows of 5 s, of the ranks' connections

The sidecar shares its pod's network namespace. So it sees the ranks' connections without a hook in them and without
privileges. It does not see their processes: the launcher, or the process monitor of a watched container, writes down
which rank holds a socket (`runtime.sockets`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from pacekeeper.runtime_folder import RuntimeFolder, read_json, write_json
from pacekeeper_analysis.protocol.reports import BlockedConnection, Evidence, FaultKind, FaultReport, LinkWindow

CONNECTION_SAMPLE_INTERVAL_SECONDS = 1.0
"""Seconds between two samples. A sample of 1,000 connections takes 3 ms."""
SAMPLES_PER_LINK_WINDOW = 5
"""Samples per window. `busy` counts in ticks of 4 ms, so a short window would be coarse."""
LINK_WINDOW_COUNT = 3
EARLY_CONNECTION_SAMPLES = 20 * SAMPLES_PER_LINK_WINDOW
"""Number of first samples of a connection. Their windows show its normal speed."""
MIN_EARLY_WINDOW_BYTES = 1_000_000
"""Minimum size of a window that counts for the normal speed."""
MAX_LINK_WINDOWS = 4096
"""Maximum of an answer. The connections that moved least are omitted."""
QUIET_CONNECTION_BYTES = 1_000_000
"""A connection that moved less than this, in both directions and all windows, is no evidence about its link, unless
data waits to be sent."""
MAX_BLOCKED_CONNECTIONS = 64
"""Maximum in a fault."""
BLOCKED_TIME_SHARE = 0.9
"""Share of the time since the last acknowledgement in which there was data to send and the receiver's window was
open."""

MAX_LINK_QUERIES, LINK_ANSWER_RETENTION_SECONDS = 8, 60.0
"""Queries of users (`kubectl pacekeeper links`): how many are answered per second, and how long an answer is kept."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionCounters:
    """Counters of one end of a connection, since it was opened."""

    acked_bytes: int
    received_bytes: int
    unsent_bytes: int
    least_round_trip: float  # seconds
    busy: float  # seconds with data to send or unacknowledged
    receiver_limited: float  # of these
    sender_limited: float
    retransmitted_bytes: int


@dataclass(frozen=True)
class _ConnectionSample:
    """The ranks' connections at one time: by the kernel's name of each, its socket's inode and its raw counters.

    On the node's own network there may be many thousands of other connections. Entries that do not change are the same
    object in all samples, so that thousands of idle connections take little memory.
    """

    taken_at: float
    ends: Mapping[bytes, tuple[int, bytes]]


@dataclass
class _EarlyWindows:
    """The first windows of a connection."""

    counters: bytes  # at the start of the present window
    samples: int = 0
    windows: list[tuple[int, float]] = field(default_factory=list)  # bytes acknowledged and busy seconds, fastest first

    @property
    def typical(self) -> tuple[int, float] | None:
        """The window at the first quartile, fastest first: acknowledged bytes and busy seconds. None: not known.

        Not the median: a fault may begin after a third of the windows. Not the fastest: there, small messages may have
        been acknowledged at once, and later ones after the kernel's usual delay.
        """
        return self.windows[len(self.windows) // 4] if self.windows else None

    def add_sample(self, info: bytes) -> None:
        self.samples += 1
        if self.samples > EARLY_CONNECTION_SAMPLES or self.samples % SAMPLES_PER_LINK_WINDOW:
            return
        previous, current = _parse_counters(self.counters), _parse_counters(info)
        self.counters = info
        if previous is None or current is None:
            return
        acked, busy = current.acked_bytes - previous.acked_bytes, max(0.0, current.busy - previous.busy)
        if acked >= MIN_EARLY_WINDOW_BYTES:
            self.windows.append((acked, busy))
            self.windows.sort(key=lambda window: window[1] / window[0])


class ConnectionSampler:
    """The last samples. If the kernel does not answer or count, there are no windows, and links stay unknown."""

    def __init__(
        self, runtime: RuntimeFolder, read_socket_ranks: Callable[[], Mapping[int, int]] | None = None
    ) -> None:
        """`read_socket_ranks` returns the rank that holds each socket, by inode. None: it is in the launcher's file."""
        self._runtime = runtime
        self._read_socket_ranks = read_socket_ranks or partial(read_launcher_sockets, runtime)
        self._samples: deque[_ConnectionSample] = deque(maxlen=LINK_WINDOW_COUNT * SAMPLES_PER_LINK_WINDOW + 1)
        self._early: dict[bytes, _EarlyWindows] = {}
        self._failed = ""

    def sample(self, now: float) -> None:
        """Take a sample. `now`: seconds, monotonic."""
        ranks, previous_ends = self._read_socket_ranks(), self._samples[-1].ends if self._samples else {}
        try:
            ends = {
                name: _reuse_unchanged(previous_ends.get(name), end)
                for name, end in _dump_connections()
                if end[0] in ranks
            }
        except OSError as error:
            if str(error) != self._failed:  # log it once: each sample raises it again
                log.warning("the kernel does not report connections, so links stay unknown: %s", error)
            self._failed = str(error)
            return
        self._samples.append(_ConnectionSample(now, ends))
        self._early = {name: self._early.get(name) or _EarlyWindows(info) for name, (_, info) in ends.items()}
        for name, (_, info) in ends.items():
            self._early[name].add_sample(info)

    def windows(self) -> tuple[LinkWindow, ...]:
        """Return a window for each end that a rank here holds and each period in which it existed, busiest ends first.

        Ends that only receive are included: without them, the rank at the other end of a connection is unknown.
        """
        ranks = self._read_socket_ranks()
        samples = list(self._samples)[::-1]
        if not ranks or len(samples) <= SAMPLES_PER_LINK_WINDOW:
            return ()
        spans = [
            (age, samples[start + SAMPLES_PER_LINK_WINDOW], samples[start])
            for age, start in enumerate(range(0, len(samples) - SAMPLES_PER_LINK_WINDOW, SAMPLES_PER_LINK_WINDOW))
        ]
        busy_ends: list[tuple[int, list[LinkWindow]]] = []
        for name, (inode, _) in samples[0].ends.items():
            if inode in ranks:
                moved_bytes, windows = _build_windows(name, ranks[inode], self._early[name], spans)
                if windows and (moved_bytes >= QUIET_CONNECTION_BYTES or windows[0].unsent_bytes):
                    busy_ends.append((moved_bytes, windows))
        busy_ends.sort(key=lambda item: -item[0])
        return tuple(window for _, windows in busy_ends[: MAX_LINK_WINDOWS // LINK_WINDOW_COUNT] for window in windows)

    def answer_link_queries(self, worker: str, round_: int) -> None:
        """Answer users' queries, and delete old answers. A query is an empty file (`kubectl pacekeeper links`).

        It suppresses OSError: the trainer can write anything to the folder.
        """
        for path in itertools.islice(self._runtime.links.glob("*"), MAX_LINK_QUERIES):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if time.time() - status.st_mtime > LINK_ANSWER_RETENTION_SECONDS:
                    path.unlink()
                elif not status.st_size:
                    write_json(path, Evidence("links", worker, round_, links=self.windows()).to_json())

    def add_blocked(self, fault: FaultReport, now: float) -> FaultReport:
        """Add the blocked connections to a stall; return any other fault unchanged."""
        return replace(fault, blocked=self.find_blocked(now)) if fault.kind is FaultKind.STALLED else fault

    def find_blocked(self, now: float) -> tuple[BlockedConnection, ...]:
        """Return the ranks' ends that have data to send and get nothing acknowledged, longest first.

        Packets are lost, or their acknowledgements. If the receiver does not read, the link is not to blame. `now`:
        seconds, monotonic. If the kernel does not answer, the result is empty.
        """
        ranks = self._read_socket_ranks()
        try:
            ends = [(name, end) for name, end in _dump_connections() if end[0] in ranks]
        except OSError:
            return ()
        blocked = []
        for name, (inode, info) in ends:
            seconds = self._blocked_seconds(name, info, now)
            if seconds is not None:
                blocked.append(BlockedConnection(ranks[inode], _parse_addresses(name)[1], round(seconds, 3)))
        return tuple(sorted(blocked, key=lambda end: -end.seconds)[:MAX_BLOCKED_CONNECTIONS])

    def _blocked_seconds(self, name: bytes, info: bytes, now: float) -> float | None:
        """Return the age of the oldest sample since which nothing has been acknowledged; None: not blocked."""
        newest = _parse_counters(info)
        blocked_seconds: float | None = None
        for sample in reversed(self._samples):
            end = sample.ends.get(name)
            counters = None if end is None else _parse_counters(end[1])
            if newest is None or counters is None or counters.acked_bytes != newest.acked_bytes:
                break
            sending_seconds = (newest.busy - counters.busy) - (newest.receiver_limited - counters.receiver_limited)
            if sending_seconds < BLOCKED_TIME_SHARE * (now - sample.taken_at):
                break
            blocked_seconds = now - sample.taken_at
        return blocked_seconds

    def sum_by_rank(self) -> dict[int, tuple[int, float]]:
        """Return each rank's acknowledged bytes and busy seconds, over the open connections."""
        ranks, totals = self._read_socket_ranks(), dict[int, tuple[int, float]]()
        for inode, info in self._samples[-1].ends.values() if self._samples else ():
            counters = _parse_counters(info)
            if inode in ranks and counters is not None:
                acked, busy = totals.get(ranks[inode], (0, 0.0))
                totals[ranks[inode]] = acked + counters.acked_bytes, busy + counters.busy
        return totals


def read_launcher_sockets(runtime: RuntimeFolder) -> dict[int, int]:
    """Return the rank of each socket inode, as the launcher last wrote it."""
    try:
        content = read_json(runtime.sockets) or {}
        return {int(inode): int(rank) for inode, rank in content.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _build_windows(
    name: bytes, rank: int, early: _EarlyWindows, spans: list[tuple[int, _ConnectionSample, _ConnectionSample]]
) -> tuple[int, list[LinkWindow]]:
    """Return the bytes that a connection moved in both directions, and its windows, newest first."""
    local, remote = _parse_addresses(name)
    early_bytes, early_busy = early.typical or (None, None)
    moved_bytes, windows = 0, []
    for age, first, last in spans:
        before, after = first.ends.get(name), last.ends.get(name)
        if before is None or after is None:
            break  # the connection is younger than this window
        previous, current = _parse_counters(before[1]), _parse_counters(after[1])
        if previous is None or current is None:
            break
        moved_bytes += current.acked_bytes - previous.acked_bytes + current.received_bytes - previous.received_bytes
        windows.append(
            LinkWindow(
                local=local,
                remote=remote,
                rank=rank,
                age=age,
                seconds=round(last.taken_at - first.taken_at, 3),
                acked_bytes=current.acked_bytes - previous.acked_bytes,
                busy_seconds=round(max(0.0, current.busy - previous.busy), 3),
                receiver_limited_seconds=round(max(0.0, current.receiver_limited - previous.receiver_limited), 3),
                sender_limited_seconds=round(max(0.0, current.sender_limited - previous.sender_limited), 3),
                retransmitted_bytes=current.retransmitted_bytes - previous.retransmitted_bytes,
                unsent_bytes=current.unsent_bytes,
                min_round_trip_seconds=current.least_round_trip,
                early_bytes=early_bytes,
                early_busy_seconds=None if early_busy is None else round(early_busy, 3),
            )
        )
    return moved_bytes, windows


def _reuse_unchanged(previous: tuple[int, bytes] | None, current: tuple[int, bytes]) -> tuple[int, bytes]:
    return previous if previous == current else current


# --- linux/sock_diag.h, linux/inet_diag.h, linux/tcp.h: constants of the kernel, which never change.

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_NLMSG_ERROR, _NLMSG_DONE = 2, 3  # types of netlink messages
_INET_DIAG_INFO = 2  # INET_DIAG_INFO, the attribute that holds a tcp_info
_CONNECTED_STATES = sum(1 << state for state in (1, 4, 5, 8))  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
_NETLINK_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_NETLINK_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_INET_DIAG_REQUEST = struct.Struct("=BBBBI48s")  # inet_diag_req_v2: family, protocol, extensions, padding, states, id
_INET_DIAG_MESSAGE_BYTES = 72  # inet_diag_msg: family at 0, id at 4, inode at 68
_SOCKET_ID_SLICE = slice(4, 52)
_SOCKET_INODE_STRUCT = struct.Struct("=68xI")
_NETLINK_BUFFER_BYTES = 1 << 18
_NETLINK_TIMEOUT_SECONDS = 1.0

_TCP_INFO_SLICE = slice(120, 216)
"""Of tcp_info: from bytes_acked to bytes_retrans. Linux 4.19 and later have all of it. A shorter one lacks busy time,
or retransmissions."""
_TCP_INFO_STRUCT = struct.Struct("=QQ8xII8x8xQQQ8x8xQ")
_UNKNOWN_ROUND_TRIP = 0xFFFFFFFF


def _dump_connections() -> Iterator[tuple[bytes, tuple[int, bytes]]]:
    """Yield the kernel's name of each TCP connection of this network namespace, with its inode and counters.

    A name begins with the address family. Raises OSError.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_NETLINK_TIMEOUT_SECONDS)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _INET_DIAG_REQUEST.pack(
                family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, _CONNECTED_STATES, bytes(48)
            )
            netlink.send(
                _NETLINK_HEADER.pack(_NETLINK_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0)
                + request
            )
            done = False
            while not done:
                connections, done = _parse_datagram(netlink.recv(_NETLINK_BUFFER_BYTES))
                yield from connections


def _parse_datagram(datagram: bytes) -> tuple[list[tuple[bytes, tuple[int, bytes]]], bool]:
    """Return the connections in a datagram, and whether it is the last one. Raises OSError for an error message."""
    connections: list[tuple[bytes, tuple[int, bytes]]] = []
    position = 0
    while position + _NETLINK_HEADER.size <= len(datagram):
        length, kind, *_ = _NETLINK_HEADER.unpack_from(datagram, position)
        body = datagram[position + _NETLINK_HEADER.size : position + length]
        if kind == _NLMSG_DONE:
            return connections, True
        if kind == _NLMSG_ERROR:
            number = -int.from_bytes(body[:4], "little", signed=True)
            raise OSError(number, "NETLINK_SOCK_DIAG")
        info = _find_attribute(body[_INET_DIAG_MESSAGE_BYTES:], _INET_DIAG_INFO)
        if info is not None:
            connections.append(
                (body[:1] + body[_SOCKET_ID_SLICE], (_SOCKET_INODE_STRUCT.unpack_from(body)[0], info[_TCP_INFO_SLICE]))
            )
        position += max(_NETLINK_HEADER.size, (length + 3) & ~3)
    return connections, False


def _find_attribute(attributes: bytes, wanted_kind: int) -> bytes | None:
    position = 0
    while position + _NETLINK_ATTRIBUTE.size <= len(attributes):
        length, kind = _NETLINK_ATTRIBUTE.unpack_from(attributes, position)
        if kind == wanted_kind:
            return attributes[position + _NETLINK_ATTRIBUTE.size : position + length]
        position += max(_NETLINK_ATTRIBUTE.size, (length + 3) & ~3)
    return None


def _parse_counters(info: bytes) -> ConnectionCounters | None:
    """Parse the counters; None: this kernel does not provide all of them."""
    if len(info) < _TCP_INFO_STRUCT.size:
        return None
    acked, received, unsent, round_trip, busy, receiver, sender, retransmitted = _TCP_INFO_STRUCT.unpack(info)
    return ConnectionCounters(
        acked_bytes=acked,
        received_bytes=received,
        unsent_bytes=unsent,
        least_round_trip=0.0 if round_trip == _UNKNOWN_ROUND_TRIP else round_trip * 1e-6,
        busy=busy * 1e-6,
        receiver_limited=receiver * 1e-6,
        sender_limited=sender * 1e-6,
        retransmitted_bytes=retransmitted,
    )


def _parse_addresses(name: bytes) -> tuple[str, str]:
    """Return address:port of both ends, the local one first.

    An IPv4-mapped IPv6 address is written as IPv4: the other end may hold it in either form.
    """
    family, ports = name[0], struct.unpack_from("!HH", name, 1)
    ends = []
    for port, start in zip(ports, (5, 21), strict=True):
        packed = name[start : start + 16]
        if family == socket.AF_INET:
            ends.append(f"{socket.inet_ntoa(packed[:4])}:{port}")
        elif packed[:12] == bytes(10) + b"\xff\xff":
            ends.append(f"{socket.inet_ntoa(packed[12:])}:{port}")
        else:
            ends.append(f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{port}")
    return ends[0], ends[1]
