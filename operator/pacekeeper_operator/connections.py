"""How many connections the endpoint holds, in all and from one address: what is too much is closed at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

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

    def guard(self, factory: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """For `create_server`: each connection speaks by a protocol of `factory`, if there is room for it."""
        return lambda: _Guarded(self, factory)

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


class _Guarded(asyncio.Protocol):
    """Stands between a connection and its protocol, which never hears of one that is refused."""

    def __init__(self, connections: Connections, factory: Callable[[], asyncio.Protocol]) -> None:
        self._connections = connections
        self._factory = factory
        self._inner: asyncio.Protocol | None = None
        self._address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._address = (transport.get_extra_info("peername") or [""])[0]
        if not self._connections.admit(self._address):
            assert isinstance(transport, asyncio.WriteTransport)
            transport.abort()
            return
        self._inner = self._factory()
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._inner is not None:
            self._connections.leave(self._address)
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
