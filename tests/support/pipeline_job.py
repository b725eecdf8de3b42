"""A job of stages, replicas and tensor groups that is only reckoned: what each of its ranks would have recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pacekeeper_analysis.communicators import Communicator, format_ranks
from pacekeeper_analysis.operations import NO_GROUP, OPERATION
from pacekeeper_analysis.records import Collective
from pacekeeper_analysis.whatif.live import RankSteps

TRANSFER_SECONDS = 0.001
"""Seconds that each collective, send or receive takes once all are there."""

OwnSeconds = Callable[[int, int, str], float]
"""Own seconds of (rank, step, part); part: forward, backward or optimizer."""


@dataclass(frozen=True)
class PipelineShape:
    """Ranks are numbered with the tensor axis fastest, then data, then stages."""

    stages: int = 2
    data: int = 2
    tensor: int = 2
    microbatches: int = 4

    @property
    def ranks(self) -> range:
        return range(self.stages * self.data * self.tensor)

    def get_coordinates(self, rank: int) -> tuple[int, int, int]:
        """Stage, data and tensor coordinate."""
        return rank // (self.data * self.tensor), rank // self.tensor % self.data, rank % self.tensor

    def get_rank(self, stage: int, data: int, tensor: int) -> int:
        return (stage * self.data + data) * self.tensor + tensor

    def list_groups(self, rank: int) -> list[Communicator]:
        """Its data group, its tensor group, and all ranks."""
        stage, data, tensor = self.get_coordinates(rank)
        members = [
            [self.get_rank(stage, d, tensor) for d in range(self.data)],
            [self.get_rank(stage, data, t) for t in range(self.tensor)],
            list(self.ranks),
        ]
        return [
            Communicator(1000 * at + of[0], format_ranks(of), name)
            for at, (of, name) in enumerate(zip(members, ("data", "tensor", "world"), strict=True))
        ]


def build_1f1b_schedule(shape: PipelineShape, rank: int) -> Iterator[tuple[str, int]]:
    """The course of a rank through a step: (instruction, argument), with the schedule 1F1B (non-interleaved)."""
    stage, data, tensor = shape.get_coordinates(rank)
    after = shape.get_rank(stage + 1, data, tensor) if stage + 1 < shape.stages else -1
    before = shape.get_rank(stage - 1, data, tensor) if stage else -1

    def forward() -> Iterator[tuple[str, int]]:
        if before >= 0:
            yield "recv", before
        yield "forward", 0
        yield from (("collective", 1),) if shape.tensor > 1 else ()
        if after >= 0:
            yield "send", after

    def backward() -> Iterator[tuple[str, int]]:
        if after >= 0:
            yield "recv", after
        yield "backward", 0
        yield from (("collective", 1),) if shape.tensor > 1 else ()
        if before >= 0:
            yield "send", before

    ahead = min(shape.stages - 1 - stage, shape.microbatches)
    for _ in range(ahead):
        yield from forward()
    for _ in range(shape.microbatches - ahead):
        yield from forward()
        yield from backward()
    for _ in range(ahead):
        yield from backward()
    yield from (("collective", 0),) if shape.data > 1 else ()
    yield "optimizer", 0
    yield "collective", 2


_Row = tuple[int, int, int, int, float, float, float, float]
"""Collective, group, sequence, peer, bytes, start, end, held: times by the job's clock."""


@dataclass
class _RankProgress:
    """One rank in the course of a step."""

    now: float
    instructions: list[tuple[str, int]]
    operations: list[_Row] = field(default_factory=list)


class _PipelineStep:
    """One step of all ranks: each does what it can until it waits for somebody."""

    def __init__(self, shape: PipelineShape, step: int, clock: Mapping[int, float], work: OwnSeconds) -> None:
        self._shape, self._step, self._work = shape, step, work
        self.ranks = {rank: _RankProgress(clock[rank], [*build_1f1b_schedule(shape, rank)]) for rank in shape.ranks}
        self._mailbox: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._arrivals: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._entered: dict[tuple[int, int], int] = defaultdict(lambda: 1)

    def run(self) -> None:
        while any(rank.instructions for rank in self.ranks.values()):
            moved = [number for number in self.ranks if self._advance(number)]
            assert moved, "the ranks' courses have a deadlock"

    def _advance(self, number: int) -> bool:
        """Whether the rank has come on at all."""
        rank, moved = self.ranks[number], False
        while rank.instructions and self._execute(number, rank, *rank.instructions[0]):
            rank.instructions.pop(0)
            moved = True
        return moved

    def _execute(self, number: int, rank: _RankProgress, what: str, argument: int) -> bool:
        """One instruction; False: it waits for somebody."""
        start = rank.now
        match what:
            case "send":
                self._mailbox[number, argument].append(start + TRANSFER_SECONDS)
                rank.operations.append(_build_row(Collective.SEND, NO_GROUP, 0, argument, start, start + TRANSFER_SECONDS, 0.0))
            case "recv":
                waiting = self._mailbox[argument, number]
                if not waiting:
                    return False
                rank.now = max(start + TRANSFER_SECONDS, waiting.pop(0))
                rank.operations.append(_build_row(Collective.RECV, NO_GROUP, 0, argument, start, rank.now, rank.now - start))
            case "collective":
                return self._enter_collective(number, rank, argument)
            case part:
                rank.now += self._work(number, self._step, part)
        return True

    def _enter_collective(self, number: int, rank: _RankProgress, place: int) -> bool:
        group, start = self._shape.list_groups(number)[place], rank.now
        sequence = self._entered[number, group.identity]
        arrived = self._arrivals[group.identity, sequence]
        arrived[number] = start
        if len(arrived) < len(group.ranks):
            return False
        self._entered[number, group.identity] += 1
        rank.now = max(arrived.values()) + TRANSFER_SECONDS
        rank.operations.append(_build_row(Collective.ALL_REDUCE, place, sequence, -1, start, rank.now, rank.now - start))
        return True


def record_steps(shape: PipelineShape, steps: int, work: OwnSeconds) -> tuple[list[RankSteps], list[float]]:
    """What all ranks have recorded, and how long each step took. Sends go on by themselves; all else is waited for."""
    rows: dict[int, list[tuple[float, ...]]] = {rank: [] for rank in shape.ranks}
    seconds: dict[int, dict[int, float]] = {rank: {} for rank in shape.ranks}
    clock, walls = dict.fromkeys(shape.ranks, 0.0), []
    for number in range(steps):
        step = _PipelineStep(shape, number, clock, work)
        step.run()
        walls.append(max(rank.now for rank in step.ranks.values()) - max(clock.values()))
        for rank, of in step.ranks.items():
            begun = clock[rank]
            for collective, group, sequence, peer, nbytes, start, end, held in of.operations:
                rows[rank].append(
                    (number, collective, 0, group, sequence, peer, nbytes, start - begun, end - begun, held)
                )
            clock[rank], seconds[rank][number] = of.now, of.now - begun
    found = [
        RankSteps(rank, np.array(rows[rank], OPERATION), shape.list_groups(rank), seconds[rank]) for rank in shape.ranks
    ]
    return found, walls


def _build_row(collective: Collective, group: int, sequence: int, peer: int, start: float, end: float, held: float) -> _Row:
    return int(collective), group, sequence, peer, 1e6, start, end, held


def build_steady_work(forward: float = 0.010, backward: float = 0.020, slow: Sequence[int] = (), factor: float = 1.0) -> OwnSeconds:
    """Own work of ranks that are all alike, but those in `slow`, which take `factor` times as long."""

    def seconds(rank: int, _step: int, part: str) -> float:
        usual = {"forward": forward, "backward": backward, "optimizer": 0.002}[part]
        return usual * (factor if rank in slow else 1.0)

    return seconds
