"""Knocks: connections by which one launcher tells another from which ports its rank is to connect.

All that is said on them is one byte: at how many ports of that path the launcher knocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Collection, Iterable

from pacekeeper_analysis.plan import WorkerPath

from .hops import answers
from .network import bind


def knock(own: str, port: int, address: str, doors: Collection[int], seconds: float) -> None:
    """From one port of ours at several of a peer, and hangs up first. Blocks until all are answered, or so long."""
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        knocking: dict[int, socket.socket] = {}
        for door in doors:
            with contextlib.suppress(OSError):
                each = opened.enter_context(bind(own, port))
                each.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    each.connect((address, door))
                poll.register(each, select.POLLOUT)
                knocking[each.fileno()] = each
        for descriptor in answers(poll, len(knocking), seconds):
            with contextlib.suppress(OSError):  # who is not there is not told
                knocking[descriptor].send(bytes((len(doors),)))


class Doors:
    """Ports at which peers may knock."""

    def __init__(self, own: str, on_knock: Callable[[WorkerPath], None]) -> None:
        """`own`: this worker's address."""
        self.knocked: dict[tuple[int, int], list[int]] = {}
        """Ports, by source and destination of the path for which somebody has knocked there; they are free again."""
        self.expected: dict[tuple[int, int], int] = {}
        """How many they will be."""
        self._own, self._on_knock = own, on_knock
        self._sockets: set[socket.socket] = set()

    def open(self, path: WorkerPath, knocker: int, ports: Iterable[int]) -> None:
        """For the peer of a path to here, who knocks from its port `knocker`. Leaves out those that are taken."""
        for port in ports:
            with contextlib.suppress(OSError):
                door = bind(self._own, port)
                try:
                    door.listen(1)
                except OSError:
                    door.close()
                    raise
                self._watch(door, self._answer, path, knocker, port)

    def close(self) -> None:
        for each in tuple(self._sockets):
            self._drop(each)

    def forget(self) -> None:
        """Closes all, and is as new."""
        self.close()
        self.knocked, self.expected = {}, {}

    def _answer(self, door: socket.socket, path: WorkerPath, knocker: int, port: int) -> None:
        try:
            guest, (address, source, *_) = door.accept()
        except OSError:
            return
        if (address, source) != (path.address, knocker):
            guest.close()
            return
        self._drop(door)
        self._watch(guest, self._hear_out, path, port)

    def _hear_out(self, guest: socket.socket, path: WorkerPath, port: int) -> None:
        """Who hangs up first keeps the connection in memory for a minute, and the port with it: that must be the guest,
        from whose port nobody connects."""
        ends = path.source, path.destination
        try:
            said = guest.recv(1)
        except OSError:
            self._drop(guest)
            return
        if said:
            self.expected[ends] = said[0]
            return
        self._drop(guest)
        self.knocked.setdefault(ends, []).append(port)
        self._on_knock(path)

    def _watch(self, watched: socket.socket, call: Callable[..., None], *arguments: object) -> None:
        watched.setblocking(False)
        self._sockets.add(watched)
        asyncio.get_running_loop().add_reader(watched, call, watched, *arguments)

    def _drop(self, dropped: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(dropped)
        self._sockets.discard(dropped)
        dropped.close()
