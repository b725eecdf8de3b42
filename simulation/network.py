"""Who reaches whom, and how long it takes.

Places are nodes, pods of the operator, and what everybody calls ("api", "prometheus"); each worker's address is its
node's. Cuts are between two places, or around one.
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
"""Seconds that a message takes."""


class SimulatedNetwork:
    """Of a world."""

    def __init__(self, loop: VirtualLoop, random: random.Random) -> None:
        self.addresses: dict[str, str] = {}
        """IP → place."""
        self.is_listening: Callable[[str, int], bool] = lambda _address, _port: True
        """Whether somebody listens there, of a machine that is up. A refusal is an answer, too."""
        self.is_stopped: Callable[[str], bool] = lambda _address: False
        """Whether whoever listens there takes no connection, and as many wait already as the kernel keeps for him."""
        self.get_caller: Callable[[], str] = lambda: API_PLACE
        """The place whose process is calling."""
        self._random = random
        self._down: dict[str, None] = {}
        self._isolated: dict[str, None] = {}
        self._cuts: dict[tuple[str, str], None] = {}
        self._slow: dict[tuple[str, str], float] = {}
        loop.connect = self._connect

    def can_reach(self, one: str, other: str) -> bool:
        """Whether messages pass, in either direction."""
        if one in self._down or other in self._down:
            return False
        if one == other:
            return True
        return not (one in self._isolated or other in self._isolated or _sort_pair(one, other) in self._cuts)

    def draw_delay(self, one: str, other: str) -> float:
        """Seconds that the next message takes."""
        return MIN_MESSAGE_SECONDS if one == other else self._random.uniform(MIN_MESSAGE_SECONDS, MAX_MESSAGE_SECONDS)

    def get_slowdown(self, one: str, other: str) -> float:
        """How much longer it takes to send much from one to the other."""
        return self._slow.get(_sort_pair(one, other), 1.0)

    def set_slowdown(self, one: str, other: str, factor: float) -> None:
        """The link between the two has so much less bandwidth; 1: it is well."""
        if factor == 1.0:
            self._slow.pop(_sort_pair(one, other), None)
        else:
            self._slow[_sort_pair(one, other)] = factor

    def cut(self, one: str, other: str) -> None:
        self._cuts[_sort_pair(one, other)] = None

    def mend(self, one: str, other: str) -> None:
        self._cuts.pop(_sort_pair(one, other), None)

    def isolate(self, place: str) -> None:
        """From all others."""
        self._isolated[place] = None

    def rejoin(self, place: str) -> None:
        self._isolated.pop(place, None)

    def set_power(self, place: str, on: bool) -> None:
        """Of a machine: without, it does not even reach itself."""
        if on:
            self._down.pop(place, None)
        else:
            self._down[place] = None

    def heal(self) -> None:
        """All links; what has no power has none."""
        self._isolated.clear()
        self._cuts.clear()
        self._slow.clear()

    async def _connect(self, host: str, port: int) -> None:
        here, there = self.get_caller(), self.addresses.get(host)
        if there is None or not self.can_reach(here, there) or self.is_stopped(host):
            await asyncio.get_running_loop().create_future()  # silence
            return
        await asyncio.sleep(2 * self.draw_delay(here, there))
        if not self.is_listening(host, port):
            raise ConnectionRefusedError(f"{host}:{port}")


def _sort_pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
