"""Who reaches whom, and how long it takes.

Places are nodes, pods of the operator, and what everybody calls ("api", "prometheus"); each worker's address is its
node's. Cuts are between two places, or around one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from .loop import VirtualLoop

API = "api"
PROMETHEUS = "prometheus"
KUBELET_PORT = 10250
NEAR, FAR = 0.0005, 0.008
"""Seconds that a message takes."""


class Network:
    """Of a world."""

    def __init__(self, loop: VirtualLoop, random: random.Random) -> None:
        self.addresses: dict[str, str] = {}
        """IP → place."""
        self.listens: Callable[[str, int], bool] = lambda _address, _port: True
        """Whether somebody listens there, of a machine that is up. A refusal is an answer, too."""
        self.stopped: Callable[[str], bool] = lambda _address: False
        """Whether whoever listens there takes no connection, and as many wait already as the kernel keeps for him."""
        self.caller: Callable[[], str] = lambda: API
        """The place whose process is calling."""
        self._random = random
        self._down: dict[str, None] = {}
        self._alone: dict[str, None] = {}
        self._cuts: dict[tuple[str, str], None] = {}
        self._slow: dict[tuple[str, str], float] = {}
        loop.connect = self._connect

    def reaches(self, one: str, other: str) -> bool:
        """Whether messages pass, in either direction."""
        if one in self._down or other in self._down:
            return False
        if one == other:
            return True
        return not (one in self._alone or other in self._alone or _pair(one, other) in self._cuts)

    def delay(self, one: str, other: str) -> float:
        """Seconds that the next message takes."""
        return NEAR if one == other else self._random.uniform(NEAR, FAR)

    def slowness(self, one: str, other: str) -> float:
        """How much longer it takes to send much from one to the other."""
        return self._slow.get(_pair(one, other), 1.0)

    def slow(self, one: str, other: str, factor: float) -> None:
        """The link between the two has so much less bandwidth; 1: it is well."""
        if factor == 1.0:
            self._slow.pop(_pair(one, other), None)
        else:
            self._slow[_pair(one, other)] = factor

    def cut(self, one: str, other: str) -> None:
        self._cuts[_pair(one, other)] = None

    def mend(self, one: str, other: str) -> None:
        self._cuts.pop(_pair(one, other), None)

    def isolate(self, place: str) -> None:
        """From all others."""
        self._alone[place] = None

    def rejoin(self, place: str) -> None:
        self._alone.pop(place, None)

    def power(self, place: str, on: bool) -> None:
        """Of a machine: without, it does not even reach itself."""
        if on:
            self._down.pop(place, None)
        else:
            self._down[place] = None

    def heal(self) -> None:
        """All links; what has no power has none."""
        self._alone.clear()
        self._cuts.clear()
        self._slow.clear()

    async def _connect(self, host: str, port: int) -> None:
        here, there = self.caller(), self.addresses.get(host)
        if there is None or not self.reaches(here, there) or self.stopped(host):
            await asyncio.get_running_loop().create_future()  # silence
            return
        await asyncio.sleep(2 * self.delay(here, there))
        if not self.listens(host, port):
            raise ConnectionRefusedError(f"{host}:{port}")


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
