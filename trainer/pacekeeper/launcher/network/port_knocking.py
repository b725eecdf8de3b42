"""Knocks: connections by which one launcher shows another from which ports its rank is to connect.

Each transfers a single byte: the number of ports of that path at which the launcher was admitted; 0: it has found none.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pacekeeper_analysis.protocol.plan import WorkerPath

from .hop_trace import poll_answers
from .interfaces import bind_socket


def knock_ports(
    own_address: str, port: int, address: str, ports: Collection[int], seconds: float, *, has_ports: bool = True
) -> None:
    """Knock from one local port at several ports of a peer, send how many were admitted, and close first.

    It blocks until all are admitted, or for `seconds`. `has_ports` False: there is no fitting port; it sends 0.
    """
    poll, admitted = select.poll(), list[socket.socket]()
    with contextlib.ExitStack() as opened:
        knocking: dict[int, socket.socket] = {}
        for peer_port in ports:
            with contextlib.suppress(OSError):
                knock = opened.enter_context(bind_socket(own_address, port))
                knock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    knock.connect((address, peer_port))
                poll.register(knock, select.POLLOUT)
                knocking[knock.fileno()] = knock
        for descriptor in poll_answers(poll, lambda: bool(knocking), seconds):
            poll.unregister(descriptor)
            knock = knocking.pop(descriptor)
            if knock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                admitted.append(knock)
        for knock in admitted:
            with contextlib.suppress(OSError):  # the peer has disconnected
                knock.send(bytes((len(admitted) if has_ports else 0,)))


@dataclass
class _ExpectedKnocks:
    """The knocks that are expected for a path, and those that have arrived."""

    path: WorkerPath
    source_port: int  # from which the peer knocks
    count: int | None = None  # number of knocks; None: not received yet
    ports: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.count is not None and len(self.ports) >= self.count


class KnockListeners:
    """Ports at which peers may knock. Early knocks wait in the kernel's backlog."""

    def __init__(self, own_address: str) -> None:
        """`own_address`: this worker's address."""
        self._own = own_address
        self._expected: list[_ExpectedKnocks] = []
        self._sockets: dict[int, tuple[socket.socket, int, _ExpectedKnocks, bool]] = {}
        """By descriptor: socket, port, expected knocks, and whether it is a listener (True) or a connection."""

    def open(self, path: WorkerPath, source_port: int, ports: Iterable[int]) -> None:
        """Listen for the peer of a path to here, which knocks from `source_port`. Ports that are taken are skipped."""
        expected = _ExpectedKnocks(path, source_port)
        self._expected.append(expected)
        for port in ports:
            with contextlib.suppress(OSError):
                listener = bind_socket(self._own, port)
                self._sockets[listener.fileno()] = listener, port, expected, True
                listener.setblocking(False)
                listener.listen(1)

    def wait_for_knocks(self, seconds: float) -> dict[tuple[int, int], list[int]]:
        """Return the ports that were knocked at, by source and destination of their paths. Close all listeners.

        It blocks until all expected knocks have arrived, or for `seconds`.
        """
        poll = select.poll()
        for descriptor in self._sockets:
            poll.register(descriptor, select.POLLIN)
        for descriptor in poll_answers(poll, lambda: not all(expected.is_done for expected in self._expected), seconds):
            self._handle_readable(descriptor, poll)
        knocked_ports = {
            (expected.path.source, expected.path.destination): expected.ports
            for expected in self._expected
            if expected.ports
        }
        self.close()
        return knocked_ports

    def close(self) -> None:
        for open_socket, *_ in self._sockets.values():
            open_socket.close()
        self._expected, self._sockets = [], {}

    def _handle_readable(self, descriptor: int, poll: select.poll) -> None:
        ready_socket, port, expected, is_listener = self._sockets[descriptor]
        try:
            if is_listener:
                client, (address, source, *_) = ready_socket.accept()
                if (address, source) != (expected.path.address, expected.source_port):
                    client.close()
                    return
                self._sockets[client.fileno()] = client, port, expected, False
                client.setblocking(False)
                poll.register(client, select.POLLIN)
            elif data := ready_socket.recv(1):
                expected.count = data[0]
                return
            elif expected.count:
                expected.ports.append(port)
        except OSError:
            pass
        # The side that closes first keeps the connection, and its port, in TIME_WAIT for a minute. That is the client:
        # no rank connects from its port.
        poll.unregister(descriptor)
        del self._sockets[descriptor]
        ready_socket.close()
