"""Knocks: connections by which one launcher tells another from which ports its rank is to connect.

All that is said on them is one byte: at how many ports of that path the launcher has been let in; 0: it has found none.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pacekeeper_analysis.plan import WorkerPath

from .hops import poll_answers
from .network import bind_socket


def knock_ports(own: str, port: int, address: str, ports: Collection[int], seconds: float, *, found: bool = True) -> None:
    """From one port of ours at several of a peer, says how many have let us in, and hangs up first. Blocks until all
    have, or so long. `found`: False: there is nothing to connect from; it says 0."""
    poll, inside = select.poll(), list[socket.socket]()
    with contextlib.ExitStack() as opened:
        knocking: dict[int, socket.socket] = {}
        for door in ports:
            with contextlib.suppress(OSError):
                each = opened.enter_context(bind_socket(own, port))
                each.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    each.connect((address, door))
                poll.register(each, select.POLLOUT)
                knocking[each.fileno()] = each
        for descriptor in poll_answers(poll, lambda: bool(knocking), seconds):
            poll.unregister(descriptor)
            each = knocking.pop(descriptor)
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                inside.append(each)
        for each in inside:
            with contextlib.suppress(OSError):  # who is not there any more is not told
                each.send(bytes((len(inside) if found else 0,)))


@dataclass
class _ExpectedKnocks:
    """Who may knock for a path, and what has come of it."""

    path: WorkerPath
    source_port: int  # port
    count: int | None = None  # of knocks; None: nobody has said
    ports: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.count is not None and len(self.ports) >= self.count


class KnockListeners:
    """Ports at which peers may knock. Who knocks before anybody listens to it waits in the kernel."""

    def __init__(self, own: str) -> None:
        """`own`: this worker's address."""
        self._own = own
        self._expected: list[_ExpectedKnocks] = []
        self._sockets: dict[int, tuple[socket.socket, int, _ExpectedKnocks, bool]] = {}
        """By descriptor: whose port, for what, and whether it is a door rather than a guest."""

    def open(self, path: WorkerPath, source_port: int, ports: Iterable[int]) -> None:
        """For the peer of a path to here, who knocks from its port `knocker`. Leaves out those that are taken."""
        expected = _ExpectedKnocks(path, source_port)
        self._expected.append(expected)
        for port in ports:
            with contextlib.suppress(OSError):
                door = bind_socket(self._own, port)
                self._sockets[door.fileno()] = door, port, expected, True
                door.setblocking(False)
                door.listen(1)

    def wait_for_knocks(self, seconds: float) -> dict[tuple[int, int], list[int]]:
        """Ports at which was knocked, by source and destination of their paths. Closes all, so that they are free.

        Blocks until all have knocked who may, or so long.
        """
        poll = select.poll()
        for descriptor in self._sockets:
            poll.register(descriptor, select.POLLIN)
        for descriptor in poll_answers(poll, lambda: not all(each.is_done for each in self._expected), seconds):
            self._handle_readable(descriptor, poll)
        heard = {(each.path.source, each.path.destination): each.ports for each in self._expected if each.ports}
        self.close()
        return heard

    def close(self) -> None:
        for each, *_ in self._sockets.values():
            each.close()
        self._expected, self._sockets = [], {}

    def _handle_readable(self, descriptor: int, poll: select.poll) -> None:
        each, port, expected, is_door = self._sockets[descriptor]
        try:
            if is_door:
                guest, (address, source, *_) = each.accept()
                if (address, source) != (expected.path.address, expected.source_port):
                    guest.close()
                    return
                self._sockets[guest.fileno()] = guest, port, expected, False
                guest.setblocking(False)
                poll.register(guest, select.POLLIN)
            elif said := each.recv(1):
                expected.count = said[0]
                return
            elif expected.count:
                expected.ports.append(port)
        except OSError:
            pass
        # Who hangs up first keeps the connection in memory for a minute, and the port with it. That is the guest: it
        # does so from a port from which nobody connects.
        poll.unregister(descriptor)
        del self._sockets[descriptor]
        each.close()
