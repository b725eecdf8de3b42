"""Which place can reach which, and how long a message takes.

Places are nodes, operator pods, and the shared services ("api", "prometheus"). A worker's address belongs to its node.
A cut is between two places, or around one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from .loop import VirtualLoop

API_PLACE = "api"
PROMETHEUS_PLACE = "prometheus"
SIMULATED_KUBELET_PORT = 10250
MIN_MESSAGE_SECONDS, MAX_MESSAGE_SECONDS = 0.0005, 0.008
"""Bounds of a message's delay, in seconds."""


class SimulatedNetwork:
    """The network of a world."""

    def __init__(self, loop: VirtualLoop, random: random.Random) -> None:
        self.addresses: dict[str, str] = {}
        """IP → place."""
        self.is_listening: Callable[[str, int], bool] = lambda _address, _port: True
        """Whether a process listens there, on a machine that is up. A refusal is an answer, too."""
        self.is_stopped: Callable[[str], bool] = lambda _address: False
        """Whether the listener accepts no connection, and its accept queue in the kernel is full."""
        self.get_caller: Callable[[], str] = lambda: API_PLACE
        """Returns the place whose process is calling."""
        self._random = random
        self._down: dict[str, None] = {}
        self._isolated: dict[str, None] = {}
        self._cuts: dict[tuple[str, str], None] = {}
        self._slow: dict[tuple[str, str], float] = {}
        loop.connect = self._connect

    def can_reach(self, place: str, peer: str) -> bool:
        """Return whether messages pass, in either direction."""
        if place in self._down or peer in self._down:
            return False
        if place == peer:
            return True
        return not (place in self._isolated or peer in self._isolated or _sort_pair(place, peer) in self._cuts)

    def draw_delay(self, place: str, peer: str) -> float:
        """Draw the delay of the next message, in seconds."""
        return MIN_MESSAGE_SECONDS if place == peer else self._random.uniform(MIN_MESSAGE_SECONDS, MAX_MESSAGE_SECONDS)

    def get_slowdown(self, place: str, peer: str) -> float:
        """Return the factor by which large transfers between the two places are slower."""
        return self._slow.get(_sort_pair(place, peer), 1.0)

    def set_slowdown(self, place: str, peer: str, factor: float) -> None:
        """Reduce the bandwidth of the link between two places by this factor; 1: the link is healthy."""
        if factor == 1.0:
            self._slow.pop(_sort_pair(place, peer), None)
        else:
            self._slow[_sort_pair(place, peer)] = factor

    def cut(self, place: str, peer: str) -> None:
        self._cuts[_sort_pair(place, peer)] = None

    def mend(self, place: str, peer: str) -> None:
        self._cuts.pop(_sort_pair(place, peer), None)

    def isolate(self, place: str) -> None:
        """Cut a place off from all others."""
        self._isolated[place] = None

    def rejoin(self, place: str) -> None:
        self._isolated.pop(place, None)

    def set_power(self, place: str, on: bool) -> None:
        """Turn a machine on or off. Without power, it does not reach even itself."""
        if on:
            self._down.pop(place, None)
        else:
            self._down[place] = None

    def heal(self) -> None:
        """Restore all links. Machines without power stay off."""
        self._isolated.clear()
        self._cuts.clear()
        self._slow.clear()

    async def _connect(self, host: str, port: int) -> None:
        source, destination = self.get_caller(), self.addresses.get(host)
        if destination is None or not self.can_reach(source, destination) or self.is_stopped(host):
            await asyncio.get_running_loop().create_future()  # silence
            return
        await asyncio.sleep(2 * self.draw_delay(source, destination))
        if not self.is_listening(host, port):
            raise ConnectionRefusedError(f"{host}:{port}")


def _sort_pair(place: str, peer: str) -> tuple[str, str]:
    return (place, peer) if place < peer else (peer, place)
