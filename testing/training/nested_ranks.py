"""A small simulator of ranks in nested groups, each with own work that is known, and what they would report of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.operations import OPERATION, encode_operations
from pacekeeper_analysis.protocol.reports import Evidence, RankOperations
from pacekeeper_rank.collectives.communicators import format_ranks
from pacekeeper_rank.records import Collective


@dataclass
class NestedRanks:
    """Ranks of a mesh (by default data × tensor), each of which waits for all others of a group in each collective."""

    mesh: tuple[int, ...]
    transfer: float = 0.001
    now: NDArray[np.float64] = field(init=False)
    step: int = 0
    waited: NDArray[np.float64] = field(init=False)
    """By rank, seconds beyond transfers."""

    def __post_init__(self) -> None:
        world = int(np.prod(self.mesh))
        rank_grid = np.arange(world).reshape(self.mesh)
        self.axes = [np.moveaxis(rank_grid, axis, -1).reshape(-1, size) for axis, size in enumerate(self.mesh)]
        self.groups: list[tuple[int, ...]] = []
        self._number: dict[tuple[int, ...], int] = {}
        self._sequence: dict[tuple[int, int], int] = {}
        self.now, self.waited = np.zeros(world), np.zeros(world)
        self._began = np.zeros(world)
        self._rows: list[list[tuple[object, ...]]] = [[] for _ in range(world)]

    def begin_step(self) -> None:
        self.step += 1
        self._began = self.now.copy()

    def work(self, seconds: NDArray[np.float64]) -> None:
        """Each rank by itself; what is below 0 takes no time."""
        self.now += np.maximum(seconds, 0.0)

    def run_collective(
        self, axis: int, nbytes: float = 1e6, slow: Callable[[tuple[int, ...]], float] = lambda _: 1.0
    ) -> None:
        """In all groups along an axis of the mesh. `slow`: how many times as long a group's transfer takes."""
        for ranks in self.axes[axis]:
            self.enter_collective(tuple(int(rank) for rank in ranks), nbytes, slow(tuple(ranks)))

    def enter_collective(
        self, ranks: tuple[int, ...], nbytes: float = 1e6, factor: float = 1.0, collectives: Sequence[Collective] = ()
    ) -> None:
        """All `ranks` enter a collective of theirs. `collectives`: what each takes it for."""
        end = self.now[list(ranks)].max() + self.transfer * factor
        group = self._number.setdefault(ranks, len(self.groups))
        if group == len(self.groups):
            self.groups.append(ranks)
        for index, rank in enumerate(ranks):
            sequence = self._sequence[group, rank] = self._sequence.get((group, rank), 0) + 1
            start, stop = self.now[rank] - self._began[rank], end - self._began[rank]
            kind = collectives[index] if collectives else Collective.ALL_REDUCE
            peer = ranks[1 - index] if collectives else -1
            self._rows[rank].append((self.step, kind, 0, group, sequence, peer, nbytes, start, stop, stop - start))
            self.waited[rank] += end - self.now[rank] - self.transfer * factor
            self.now[rank] = end

    def build_evidence(self, ranks_of_a_worker: int = 4) -> tuple[Evidence, ...]:
        evidence = []
        for first_rank in range(0, len(self._rows), ranks_of_a_worker):
            ranks = range(first_rank, min(first_rank + ranks_of_a_worker, len(self._rows)))
            numbers = sorted({int(row[3]) for rank in ranks for row in self._rows[rank]})  # type: ignore[call-overload]  # a number
            communicators = tuple(Communicator(1 + number, format_ranks(self.groups[number])) for number in numbers)
            operations = []
            for rank in ranks:
                rows = np.array(self._rows[rank], OPERATION)
                rows["group"] = np.searchsorted(numbers, rows["group"])
                operations.append(RankOperations(rank, encode_operations(rows[-4096:])))
            evidence.append(
                Evidence("e", f"w{first_rank}", 1, communicators=communicators, operations=tuple(operations))
            )
        return tuple(evidence)
