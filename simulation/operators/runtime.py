"""The operator's interface to time and randomness, in a simulation."""

from __future__ import annotations

from collections.abc import Callable

from pacekeeper_operator.async_runtime import OperatorRuntime, Result

from ..ports import SharedWorld


class SimulatedRuntime(OperatorRuntime):
    """The runtime of one process at a place, whose clock may be wrong. The loop implements sleeping."""

    def __init__(self, world: SharedWorld, place: str, purpose: str) -> None:
        super().__init__()
        self._world = world
        self._place = place
        self._random = world.create_random(purpose)
        self._booted = self._random.uniform(1e3, 1e6)

    def now(self) -> float:
        return self._world.wall_time(self._place)

    def monotonic(self) -> float:
        return self._booted + self._world.now()

    def thread_seconds(self) -> float:
        return 0.0

    async def compute_in_thread(self, work: Callable[[], Result]) -> Result:
        return work()

    def create_identifier(self) -> str:
        return f"{self._random.getrandbits(128):032x}"
