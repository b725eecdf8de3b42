"""How many connections the endpoint holds, in all and from one address: what is too much is closed as it comes.

Counted from the moment when the kernel hands them over: before TLS, and before anybody has proved anything.
"""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_CONNECTIONS = 32_768
MAX_OF_ADDRESS = 1_024
"""Generous: workers on the host's network share their node's address, and have three connections each."""


@dataclass
class Connections:
    """Those that are open: `total`, and how many of each address."""

    most: int = MAX_CONNECTIONS
    most_of_address: int = MAX_OF_ADDRESS
    total: int = 0
    of_address: Counter[str] = field(default_factory=Counter)

    def listen(self, address: str, port: int) -> socket.socket:
        """A socket that accepts only what there is room for; `address` "": all of this machine."""
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        made = socket.create_server((address, port), family=family, dualstack_ipv6=both)
        return _Listener(self, made)

    def admit(self, address: str) -> bool:
        if self.total >= self.most or self.of_address[address] >= self.most_of_address:
            return False
        self.total += 1
        self.of_address[address] += 1
        return True

    def leave(self, address: str) -> None:
        self.total -= 1
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
            if self._connections.admit(peer[0]):
                return _Connection(self._connections, peer[0], accepted), peer
            accepted.close()


class _Connection(socket.socket):
    """Takes the place of `accepted`, and says when it is closed."""

    def __init__(self, connections: Connections, address: str, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        self._connections: Connections | None = connections
        self._address = address

    def close(self) -> None:
        super().close()
        if self._connections is not None:
            self._connections.leave(self._address)
            self._connections = None
