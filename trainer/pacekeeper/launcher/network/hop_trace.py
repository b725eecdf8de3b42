"""Which route packets take through the network, found without privileges: with packets whose hop limit runs out.

A TCP handshake starts with a packet whose hop limit can be set. The switch at which the limit runs out reports it by
ICMP. The kernel keeps the switch's address for a socket that requests errors (IP_RECVERR). Everything else that decides
on the route, ports included, is the same as for a real connection.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_IP_RECVERR, _IPV6_RECVERR = 11, 25  # linux/in.h, linux/in6.h: Python names them from 3.14 on
_EXTENDED_SOCKET_ERROR = struct.Struct(
    "=IBBBBII"
)  # sock_extended_err (linux/errqueue.h), followed by the sockaddr of the sender
_TIME_EXCEEDED = {(2, 11), (3, 3)}
"""(origin, type) of an error for an exceeded hop limit: of ICMP, of ICMPv6."""
_ARRIVED_ERRNOS = {errno.ECONNREFUSED, 0}
"""Socket errors of a connection whose packet has arrived at the peer."""


class HopProbe(NamedTuple):
    """One packet: from a local port to a peer's address and port, with a limit of `hops` hops."""

    source_port: int
    address: str
    port: int
    hops: int = 0


@dataclass
class HopTrace:
    """Results of probes. A probe that is in neither field got no answer in time."""

    end_addresses: dict[HopProbe, str] = field(
        default_factory=dict
    )  # the address of the switch, or of the peer, at which the probe ended
    unavailable: set[HopProbe] = field(default_factory=set)  # probes whose local port is not available


def trace_hops(
    own_address: str, probes: Iterable[HopProbe], seconds: float, kind: int = socket.SOCK_STREAM
) -> HopTrace:
    """Send all probes, and block until all are answered or `seconds` have passed.

    `own_address`: the local address. `kind`: SOCK_DGRAM for UDP. The probes must differ in more than their hops.
    """
    trace = HopTrace()
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        waiting: dict[int, tuple[socket.socket, HopProbe]] = {}
        for probe in probes:
            try:
                probe_socket = opened.enter_context(_send_probe(own_address, probe, kind))
            except OSError:
                trace.unavailable.add(probe)
                continue
            waiting[probe_socket.fileno()] = (probe_socket, probe)
            poll.register(probe_socket, select.POLLOUT if kind == socket.SOCK_STREAM else 0)
        for descriptor in poll_answers(poll, lambda: bool(waiting), seconds):
            poll.unregister(descriptor)
            answered_socket, probe = waiting.pop(descriptor)
            address = _read_answering_address(answered_socket, probe)
            if address:
                trace.end_addresses[probe] = address
    return trace


def poll_answers(poll: select.poll, has_pending: Callable[[], bool], seconds: float) -> Iterator[int]:
    """Yield ready descriptors while `has_pending()` is true and the time has not passed.

    The last poll happens after the deadline, so that answers count even if the process got no processor time until
    then.
    """
    deadline = time.monotonic() + seconds
    while has_pending():
        remaining = deadline - time.monotonic()
        for descriptor, _ in poll.poll(max(0.0, remaining * 1000)):
            yield descriptor
        if remaining <= 0:
            return


def _send_probe(own_address: str, probe: HopProbe, kind: int) -> socket.socket:
    """Send a probe and return its socket. Raises OSError if the port is taken, or there is no route."""
    v6 = ":" in own_address
    probe_socket = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, kind)
    try:
        probe_socket.setblocking(False)
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == socket.SOCK_STREAM:
            # The socket is reset when it is closed, so that no state holds the port.
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        level = socket.IPPROTO_IPV6 if v6 else socket.IPPROTO_IP
        probe_socket.setsockopt(level, socket.IPV6_UNICAST_HOPS if v6 else socket.IP_TTL, probe.hops)
        probe_socket.setsockopt(level, _IPV6_RECVERR if v6 else _IP_RECVERR, 1)
        probe_socket.bind((own_address, probe.source_port))
        with contextlib.suppress(BlockingIOError):
            probe_socket.connect((probe.address, probe.port))
        if kind == socket.SOCK_DGRAM:
            probe_socket.send(b"")
    except OSError:
        probe_socket.close()
        raise
    return probe_socket


def _read_answering_address(probe_socket: socket.socket, probe: HopProbe) -> str:
    """Return the address at which the probe ended; "": the answer does not report that."""
    try:
        _, ancillary, _, _ = probe_socket.recvmsg(512, 512, socket.MSG_ERRQUEUE)
    except OSError:
        error = probe_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return probe.address if error in _ARRIVED_ERRNOS else ""
    for level, kind, content in ancillary:
        if (level, kind) in {(socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR)}:
            return _parse_switch_address(content)
    return ""


def _parse_switch_address(content: bytes) -> str:
    """Return the address of the switch that reported an exceeded hop limit; "": it is another error."""
    if len(content) < _EXTENDED_SOCKET_ERROR.size + 2:
        return ""
    _, origin, kind, *_ = _EXTENDED_SOCKET_ERROR.unpack_from(content)
    (family,) = struct.unpack_from("=H", content, _EXTENDED_SOCKET_ERROR.size)
    # sockaddr_in, sockaddr_in6: family, port, (flow,) address.
    start, length = (
        _EXTENDED_SOCKET_ERROR.size + (4 if family == socket.AF_INET else 8),
        4 if family == socket.AF_INET else 16,
    )
    address = content[start : start + length]
    if (origin, kind) not in _TIME_EXCEEDED or len(address) < length:
        return ""
    return str(ipaddress.ip_address(address))
