"""The connections between ranks as the kernel's own records show them: TCP_INFO, by NETLINK_SOCK_DIAG.

    connections = Connections(runtime)
    connections.look(time.monotonic())        # once a second
    connections.windows()                     # the last three windows of 5 s, of the ranks' connections

The sidecar shares its pod's network namespace, so it sees what the ranks send without a hook in them and without
privileges. It does not see their processes: which rank holds a socket the launcher writes down (`runtime.sockets`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pacekeeper.runtime import RuntimeFolder, read_json, write_json
from pacekeeper_analysis.reports import BlockedConnection, Evidence, FaultReport, FaultKind, LinkWindow

CONNECTION_SAMPLE_INTERVAL_SECONDS = 1.0
"""Between two looks; one of 1,000 connections takes 3 ms."""
SAMPLES_PER_LINK_WINDOW = 5
"""A window's looks: `busy` goes on in ticks of 4 ms, so a short one would be coarse."""
LINK_WINDOW_COUNT = 3
EARLY_CONNECTION_SAMPLES = 20 * SAMPLES_PER_LINK_WINDOW
"""A connection's first looks: the windows in them say how fast it is by nature."""
MIN_EARLY_WINDOW_BYTES = 1_000_000
"""That a window has to carry for that."""
MAX_LINK_WINDOWS = 4096
"""That an answer holds: the connections that moved least are left out."""
QUIET_CONNECTION_BYTES = 1_000_000
"""A connection that moved less than this both ways in all windows together tells nothing of its link, unless something
waits at its end."""
MAX_BLOCKED_CONNECTIONS = 64
"""That a fault holds."""
BLOCKED_TIME_SHARE = 0.9
"""Of the time since the last acknowledgement: with something to send, and no closed window of the receiver's."""

MAX_LINK_QUERIES, LINK_ANSWER_RETENTION_SECONDS = 8, 60.0
"""Of people: so many are looked at in a second, and so long an answer lies there."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionCounters:
    """Of one end of a connection, since it was opened."""

    acked_bytes: int
    received_bytes: int
    unsent_bytes: int
    least_round_trip: float  # seconds
    busy: float  # seconds with something to send or unacknowledged
    receiver_limited: float  # of these
    sender_limited: float
    retransmitted_bytes: int


@dataclass(frozen=True)
class _ConnectionSample:
    """The ranks' connections at one moment: by the kernel's name for each, its socket's inode and its counters as they
    came. On a node's own network there may be many thousands of others.

    What stands still is the same object in all looks, so that thousands of idle connections cost little memory.
    """

    taken_at: float
    ends: Mapping[bytes, tuple[int, bytes]]


@dataclass
class _EarlyWindows:
    """A connection's first windows."""

    counters: bytes  # when the present one began
    samples: int = 0
    windows: list[tuple[int, float]] = field(default_factory=list)  # bytes acknowledged and busy seconds, fastest first

    @property
    def typical(self) -> tuple[int, float]:
        """Of the fast ones, since a fault may begin when a third of them is over; not of the fastest, in which small
        messages may have been acknowledged at once, and later are so after the kernel's usual delay."""
        return self.windows[len(self.windows) // 4] if self.windows else (0, 0.0)

    def add_sample(self, info: bytes) -> None:
        self.samples += 1
        if self.samples > EARLY_CONNECTION_SAMPLES or self.samples % SAMPLES_PER_LINK_WINDOW:
            return
        was, now = _parse_counters(self.counters), _parse_counters(info)
        self.counters = info
        if was is None or now is None:
            return
        acked, busy = now.acked_bytes - was.acked_bytes, max(0.0, now.busy - was.busy)
        if acked >= MIN_EARLY_WINDOW_BYTES:
            self.windows.append((acked, busy))
            self.windows.sort(key=lambda window: window[1] / window[0])


class ConnectionSampler:
    """The last looks. Where the kernel does not answer, or does not count, there are no windows: links are unknown."""

    def __init__(self, runtime: RuntimeFolder) -> None:
        self._runtime = runtime
        self._samples: deque[_ConnectionSample] = deque(maxlen=LINK_WINDOW_COUNT * SAMPLES_PER_LINK_WINDOW + 1)
        self._early: dict[bytes, _EarlyWindows] = {}
        self._failed = ""

    def sample(self, now: float) -> None:
        """`now`: seconds, monotonic."""
        ranks, before = self._read_socket_ranks(), self._samples[-1].ends if self._samples else {}
        try:
            ends = {name: _reuse_unchanged(before.get(name), end) for name, end in _dump_connections() if end[0] in ranks}
        except OSError as error:
            if str(error) != self._failed:  # once: it comes again with every look
                log.warning("the kernel does not tell of connections, so links stay unknown: %s", error)
            self._failed = str(error)
            return
        self._samples.append(_ConnectionSample(now, ends))
        self._early = {name: self._early.get(name) or _EarlyWindows(info) for name, (_, info) in ends.items()}
        for name, (_, info) in ends.items():
            self._early[name].add_sample(info)

    def windows(self) -> tuple[LinkWindow, ...]:
        """One for each end that a rank here holds and each window in which it was there; the busiest ends first.

        An end that only receives is told, too: without it, nobody could tell whose connection it is.
        """
        ranks = self._read_socket_ranks()
        looks = list(self._samples)[::-1]
        if not ranks or len(looks) <= SAMPLES_PER_LINK_WINDOW:
            return ()
        spans = [
            (age, looks[start + SAMPLES_PER_LINK_WINDOW], looks[start])
            for age, start in enumerate(range(0, len(looks) - SAMPLES_PER_LINK_WINDOW, SAMPLES_PER_LINK_WINDOW))
        ]
        told: list[tuple[int, list[LinkWindow]]] = []
        for name, (inode, _) in looks[0].ends.items():
            if inode in ranks:
                moved, windows = _build_windows(name, ranks[inode], self._early[name], spans)
                if windows and (moved >= QUIET_CONNECTION_BYTES or windows[0].unsent_bytes):
                    told.append((moved, windows))
        told.sort(key=lambda item: -item[0])
        return tuple(window for _, windows in told[: MAX_LINK_WINDOWS // LINK_WINDOW_COUNT] for window in windows)

    def answer_link_queries(self, worker: str, round_: int) -> None:
        """Tells a person who has made an empty file for it (`kubectl pacekeeper links`); old answers go. Raises
        nothing: questions, and the folder, are the trainer's."""
        for path in itertools.islice(self._runtime.links.glob("*"), MAX_LINK_QUERIES):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if time.time() - status.st_mtime > LINK_ANSWER_RETENTION_SECONDS:
                    path.unlink()
                elif not status.st_size:
                    write_json(path, Evidence("links", worker, round_, links=self.windows()).to_json())

    def add_blocked(self, fault: FaultReport, now: float) -> FaultReport:
        """A stall with what is blocked; any other fault as it is."""
        return replace(fault, blocked=self.find_blocked(now)) if fault.kind is FaultKind.STALLED else fault

    def find_blocked(self, now: float) -> tuple[BlockedConnection, ...]:
        """The ranks' ends that have something to send and get nothing through, those that have been so for longest
        first: packets are lost, or their acknowledgements. Where the receiver does not read, the link is well.

        `now`: seconds, monotonic. Raises nothing: where the kernel does not answer, nothing is known.
        """
        ranks = self._read_socket_ranks()
        try:
            ends = [(name, end) for name, end in _dump_connections() if end[0] in ranks]
        except OSError:
            return ()
        found = []
        for name, (inode, info) in ends:
            seconds = self._blocked_seconds(name, info, now)
            if seconds > 0.0:
                found.append(BlockedConnection(ranks[inode], _parse_addresses(name)[1], round(seconds, 3)))
        return tuple(sorted(found, key=lambda end: -end.seconds)[:MAX_BLOCKED_CONNECTIONS])

    def _blocked_seconds(self, name: bytes, info: bytes, now: float) -> float:
        """By the oldest look since which nothing has been acknowledged."""
        newest, found = _parse_counters(info), 0.0
        for look in reversed(self._samples):
            before = look.ends.get(name)
            was = None if before is None else _parse_counters(before[1])
            if newest is None or was is None or was.acked_bytes != newest.acked_bytes:
                break
            tried = (newest.busy - was.busy) - (newest.receiver_limited - was.receiver_limited)
            if tried < BLOCKED_TIME_SHARE * (now - look.taken_at):
                break
            found = now - look.taken_at
        return found

    def sum_by_rank(self) -> dict[int, tuple[int, float]]:
        """Of each rank here: bytes acknowledged and busy seconds, over the connections that are open."""
        ranks, found = self._read_socket_ranks(), dict[int, tuple[int, float]]()
        for inode, info in self._samples[-1].ends.values() if self._samples else ():
            counters = _parse_counters(info)
            if inode in ranks and counters is not None:
                acked, busy = found.get(ranks[inode], (0, 0.0))
                found[ranks[inode]] = acked + counters.acked_bytes, busy + counters.busy
        return found

    def _read_socket_ranks(self) -> dict[int, int]:
        """Socket's inode → rank, as the launcher has seen it last."""
        try:
            written = read_json(self._runtime.sockets) or {}
            return {int(inode): int(rank) for inode, rank in written.items()}
        except (ValueError, TypeError, AttributeError):
            return {}


def _build_windows(
    name: bytes, rank: int, early: _EarlyWindows, spans: list[tuple[int, _ConnectionSample, _ConnectionSample]]
) -> tuple[int, list[LinkWindow]]:
    """Bytes that it moved both ways, and its windows, newest first."""
    local, remote = _parse_addresses(name)
    early_bytes, early_busy = early.typical
    moved, windows = 0, []
    for age, first, last in spans:
        before, after = first.ends.get(name), last.ends.get(name)
        if before is None or after is None:
            break  # it is younger than this window
        was, now = _parse_counters(before[1]), _parse_counters(after[1])
        if was is None or now is None:
            break
        moved += now.acked_bytes - was.acked_bytes + now.received_bytes - was.received_bytes
        windows.append(
            LinkWindow(
                local=local,
                remote=remote,
                rank=rank,
                age=age,
                seconds=round(last.taken_at - first.taken_at, 3),
                acked_bytes=now.acked_bytes - was.acked_bytes,
                busy_seconds=round(max(0.0, now.busy - was.busy), 3),
                receiver_limited_seconds=round(max(0.0, now.receiver_limited - was.receiver_limited), 3),
                sender_limited_seconds=round(max(0.0, now.sender_limited - was.sender_limited), 3),
                retransmitted_bytes=now.retransmitted_bytes - was.retransmitted_bytes,
                unsent_bytes=now.unsent_bytes,
                least_round_trip_seconds=now.least_round_trip,
                early_bytes=early_bytes,
                early_busy_seconds=round(early_busy, 3),
            )
        )
    return moved, windows


def _reuse_unchanged(before: tuple[int, bytes] | None, now: tuple[int, bytes]) -> tuple[int, bytes]:
    return before if before == now else now


# --- linux/sock_diag.h, linux/inet_diag.h, linux/tcp.h: numbers of the kernel, which never change.

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
"""Of tcp_info: from bytes_acked to bytes_retrans. Linux 4.19 has all of it; in what is shorter busy time, or what was
sent again, is missing."""
_TCP_INFO_STRUCT = struct.Struct("=QQ8xII8x8xQQQ8x8xQ")
_UNKNOWN_ROUND_TRIP = 0xFFFFFFFF


def _dump_connections() -> Iterator[tuple[bytes, tuple[int, bytes]]]:
    """(the kernel's name of it, (inode, counters)) of each TCP connection of this network namespace; a name begins with
    the address family. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_NETLINK_TIMEOUT_SECONDS)
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = _INET_DIAG_REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, _CONNECTED_STATES, bytes(48))
            netlink.send(_NETLINK_HEADER.pack(_NETLINK_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + asked)
            done = False
            while not done:
                found, done = _parse_datagram(netlink.recv(_NETLINK_BUFFER_BYTES))
                yield from found


def _parse_datagram(datagram: bytes) -> tuple[list[tuple[bytes, tuple[int, bytes]]], bool]:
    """The connections in it, and whether it is the last one. Raises OSError where it says that something failed."""
    found: list[tuple[bytes, tuple[int, bytes]]] = []
    position = 0
    while position + _NETLINK_HEADER.size <= len(datagram):
        length, kind, *_ = _NETLINK_HEADER.unpack_from(datagram, position)
        body = datagram[position + _NETLINK_HEADER.size : position + length]
        if kind == _NLMSG_DONE:
            return found, True
        if kind == _NLMSG_ERROR:
            number = -int.from_bytes(body[:4], "little", signed=True)
            raise OSError(number, "NETLINK_SOCK_DIAG")
        info = _find_attribute(body[_INET_DIAG_MESSAGE_BYTES:], _INET_DIAG_INFO)
        if info is not None:
            found.append((body[:1] + body[_SOCKET_ID_SLICE], (_SOCKET_INODE_STRUCT.unpack_from(body)[0], info[_TCP_INFO_SLICE])))
        position += max(_NETLINK_HEADER.size, (length + 3) & ~3)
    return found, False


def _find_attribute(attributes: bytes, wanted: int) -> bytes | None:
    position = 0
    while position + _NETLINK_ATTRIBUTE.size <= len(attributes):
        length, kind = _NETLINK_ATTRIBUTE.unpack_from(attributes, position)
        if kind == wanted:
            return attributes[position + _NETLINK_ATTRIBUTE.size : position + length]
        position += max(_NETLINK_ATTRIBUTE.size, (length + 3) & ~3)
    return None


def _parse_counters(info: bytes) -> ConnectionCounters | None:
    """None: this kernel does not count (all of) it."""
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
    """address:port of both ends, the local one first. An IPv4 address in IPv6's form is written as what it is: the
    other end may hold it either way."""
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
