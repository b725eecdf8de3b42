"""Everything there is, put together: a cluster, its network, operators, jobs' workers; nothing happens by itself yet.

All of it shares one loop. What is left to chance comes from streams of its own for each purpose, so that one thing more
that happens does not change how all others fall out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .loop import VirtualLoop, nobodys
from .network import Network
from .story import Story

EPOCH = 1_800_000_000.0
"""Seconds since the epoch at which all runs begin."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class WorldSettings:
    nodes: int = 6
    slots: int = 2
    """Workers that a node has room for."""
    operators: int = 1
    """Replicas."""
    operator: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `pacekeeper_operator.settings.Settings`."""


class World:
    """Use its parts; `run` lets time pass."""

    def __init__(self, seed: int, settings: WorldSettings = WorldSettings()) -> None:  # it is frozen
        self.seed = seed
        self.settings = settings
        self.loop = VirtualLoop()  # type: ignore[abstract]  # asyncio itself needs no more of a loop
        self.story = Story(self.loop.time)
        self.network = Network(self.loop, self.random("network"))
        self.clocks: dict[str, float] = {}
        """Seconds by which a place's clock is off."""

    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def wall(self, place: str = "") -> float:
        """Seconds since the epoch, by the clock of that place."""
        return EPOCH + self.loop.time() + self.clocks.get(place, 0.0)

    def random(self, purpose: str) -> random.Random:
        """A stream of its own."""
        return random.Random(f"{self.seed}/{purpose}")

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        """Of no process."""
        return self.loop.call_later(seconds, call, *arguments, context=nobodys())

    def spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """Of no process."""
        return self.loop.create_task(work, name=name, context=nobodys())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """As long as `work` takes, in virtual time."""
        return self.loop.run(work)
