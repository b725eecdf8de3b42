"""Which way packets take through the network, found without privileges: by packets that end on their way.

A TCP handshake begins with a packet that may take so many hops only. The switch at which they are used up says so by
ICMP, and the kernel keeps the switch's address for a socket that asks for errors (IP_RECVERR). Whatever else decides on
the way, ports included, is as it would be for a connection.
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
_EXTENDED_SOCKET_ERROR = struct.Struct("=IBBBBII")  # sock_extended_err (linux/errqueue.h); behind it the sockaddr of who sent it
_TIME_EXCEEDED = {(2, 11), (3, 3)}
"""(origin, type) of an error: of ICMP, of ICMPv6."""
_ARRIVED_ERRNOS = {errno.ECONNREFUSED, 0}
"""What a connection comes to whose packet has arrived."""


class HopProbe(NamedTuple):
    """One packet: from a port of ours to a peer's address and port, `hops` hops far."""

    source_port: int
    address: str
    port: int
    hops: int = 0


@dataclass
class HopTrace:
    """What has come of probes. Whose are in neither: nobody answered in time."""

    end_addresses: dict[HopProbe, str] = field(
        default_factory=dict
    )  # the address of the switch, or of the peer, at which it ended
    unavailable: set[HopProbe] = field(default_factory=set)  # those whose port cannot be had here


def trace_hops(own: str, probes: Iterable[HopProbe], seconds: float, kind: int = socket.SOCK_STREAM) -> HopTrace:
    """Sends them all, and blocks until all are answered or `seconds` are over.

    `own`: the address that they come from. `kind`: SOCK_DGRAM for UDP. They must differ in more than their hops.
    """
    found = HopTrace()
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        waiting: dict[int, tuple[socket.socket, HopProbe]] = {}
        for probe in probes:
            try:
                sent = opened.enter_context(_send_probe(own, probe, kind))
            except OSError:
                found.unavailable.add(probe)
                continue
            waiting[sent.fileno()] = (sent, probe)
            poll.register(sent, select.POLLOUT if kind == socket.SOCK_STREAM else 0)
        for descriptor in poll_answers(poll, lambda: bool(waiting), seconds):
            poll.unregister(descriptor)
            answered, probe = waiting.pop(descriptor)
            address = _read_answering_address(answered, probe)
            if address:
                found.end_addresses[probe] = address
    return found


def poll_answers(poll: select.poll, more: Callable[[], bool], seconds: float) -> Iterator[int]:
    """Descriptors with something to say, as long as there is `more` to come and the time is not over. What has come is
    heard even by a process that got no processor for so long."""
    deadline = time.monotonic() + seconds
    while more():
        left = deadline - time.monotonic()
        for descriptor, _ in poll.poll(max(0.0, left * 1000)):
            yield descriptor
        if left <= 0:
            return


def _send_probe(own: str, probe: HopProbe, kind: int) -> socket.socket:
    """Raises OSError where the port is taken, or there is no way at all."""
    v6 = ":" in own
    sending = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, kind)
    try:
        sending.setblocking(False)
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == socket.SOCK_STREAM:
            # Closed, it leaves nothing behind that would hold the port.
            sending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        level = socket.IPPROTO_IPV6 if v6 else socket.IPPROTO_IP
        sending.setsockopt(level, socket.IPV6_UNICAST_HOPS if v6 else socket.IP_TTL, probe.hops)
        sending.setsockopt(level, _IPV6_RECVERR if v6 else _IP_RECVERR, 1)
        sending.bind((own, probe.source_port))
        with contextlib.suppress(BlockingIOError):
            sending.connect((probe.address, probe.port))
        if kind == socket.SOCK_DGRAM:
            sending.send(b"")
    except OSError:
        sending.close()
        raise
    return sending


def _read_answering_address(answered: socket.socket, probe: HopProbe) -> str:
    """ "": somebody who does not say that the packet has come to an end at his place."""
    try:
        _, ancillary, _, _ = answered.recvmsg(512, 512, socket.MSG_ERRQUEUE)
    except OSError:
        error = answered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return probe.address if error in _ARRIVED_ERRNOS else ""
    for level, kind, content in ancillary:
        if (level, kind) in {(socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR)}:
            return _parse_switch_address(content)
    return ""


def _parse_switch_address(content: bytes) -> str:
    """From an error of the queue, the address of the switch at which the packet's hops were used up; "": another."""
    if len(content) < _EXTENDED_SOCKET_ERROR.size + 2:
        return ""
    _, origin, kind, *_ = _EXTENDED_SOCKET_ERROR.unpack_from(content)
    (family,) = struct.unpack_from("=H", content, _EXTENDED_SOCKET_ERROR.size)
    # Of sockaddr_in, sockaddr_in6: family, port, (flow,) address.
    start, length = _EXTENDED_SOCKET_ERROR.size + (4 if family == socket.AF_INET else 8), 4 if family == socket.AF_INET else 16
    address = content[start : start + length]
    if (origin, kind) not in _TIME_EXCEEDED or len(address) < length:
        return ""
    return str(ipaddress.ip_address(address))
