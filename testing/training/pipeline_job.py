"""A job of stages, replicas and tensor groups that is only reckoned: what each of its ranks would have recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.operations import NO_GROUP, OPERATION
from pacekeeper_analysis.whatif.live import RankSteps
from pacekeeper_rank.collectives.communicators import format_ranks
from pacekeeper_rank.records import Collective

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
            Communicator(1000 * index + ranks[0], format_ranks(ranks), name)
            for index, (ranks, name) in enumerate(zip(members, ("data", "tensor", "world"), strict=True))
        ]


def build_1f1b_schedule(shape: PipelineShape, rank: int) -> Iterator[tuple[str, int]]:
    """The instructions of a rank in a step: (instruction, argument), with the schedule 1F1B (non-interleaved)."""
    stage, data, tensor = shape.get_coordinates(rank)
    next_rank = shape.get_rank(stage + 1, data, tensor) if stage + 1 < shape.stages else -1
    previous_rank = shape.get_rank(stage - 1, data, tensor) if stage else -1

    def forward() -> Iterator[tuple[str, int]]:
        if previous_rank >= 0:
            yield "recv", previous_rank
        yield "forward", 0
        yield from (("collective", 1),) if shape.tensor > 1 else ()
        if next_rank >= 0:
            yield "send", next_rank

    def backward() -> Iterator[tuple[str, int]]:
        if next_rank >= 0:
            yield "recv", next_rank
        yield "backward", 0
        yield from (("collective", 1),) if shape.tensor > 1 else ()
        if previous_rank >= 0:
            yield "send", previous_rank

    warmup = min(shape.stages - 1 - stage, shape.microbatches)
    for _ in range(warmup):
        yield from forward()
    for _ in range(shape.microbatches - warmup):
        yield from forward()
        yield from backward()
    for _ in range(warmup):
        yield from backward()
    yield from (("collective", 0),) if shape.data > 1 else ()
    yield "optimizer", 0
    yield "collective", 2


_Row = tuple[int, int, int, int, float, float, float, float]
"""Collective, group, sequence, peer, bytes, start, end, held: times by the job's clock."""


@dataclass
class _RankProgress:
    """One rank during a step."""

    now: float
    instructions: list[tuple[str, int]]
    operations: list[_Row] = field(default_factory=list)


class _PipelineStep:
    """One step of all ranks: each does what it can until it waits for another rank."""

    def __init__(self, shape: PipelineShape, step: int, clock: Mapping[int, float], work: OwnSeconds) -> None:
        self._shape, self._step, self._work = shape, step, work
        self.ranks = {rank: _RankProgress(clock[rank], [*build_1f1b_schedule(shape, rank)]) for rank in shape.ranks}
        self._mailbox: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._arrivals: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._entered: dict[tuple[int, int], int] = defaultdict(lambda: 1)

    def run(self) -> None:
        while any(rank.instructions for rank in self.ranks.values()):
            advanced = [number for number in self.ranks if self._advance(number)]
            assert advanced, "the ranks' courses have a deadlock"

    def _advance(self, number: int) -> bool:
        """Whether the rank has come on at all."""
        rank, advanced = self.ranks[number], False
        while rank.instructions and self._execute(number, rank, *rank.instructions[0]):
            rank.instructions.pop(0)
            advanced = True
        return advanced

    def _execute(self, number: int, rank: _RankProgress, instruction: str, argument: int) -> bool:
        """One instruction; False: it waits for another rank."""
        start = rank.now
        match instruction:
            case "send":
                self._mailbox[number, argument].append(start + TRANSFER_SECONDS)
                rank.operations.append(
                    _build_row(Collective.SEND, NO_GROUP, 0, argument, start, start + TRANSFER_SECONDS, 0.0)
                )
            case "recv":
                arrivals = self._mailbox[argument, number]
                if not arrivals:
                    return False
                rank.now = max(start + TRANSFER_SECONDS, arrivals.pop(0))
                rank.operations.append(
                    _build_row(Collective.RECV, NO_GROUP, 0, argument, start, rank.now, rank.now - start)
                )
            case "collective":
                return self._enter_collective(number, rank, argument)
            case part:
                rank.now += self._work(number, self._step, part)
        return True

    def _enter_collective(self, number: int, rank: _RankProgress, group_index: int) -> bool:
        group, start = self._shape.list_groups(number)[group_index], rank.now
        sequence = self._entered[number, group.identity]
        arrived = self._arrivals[group.identity, sequence]
        arrived[number] = start
        if len(arrived) < len(group.ranks):
            return False
        self._entered[number, group.identity] += 1
        rank.now = max(arrived.values()) + TRANSFER_SECONDS
        rank.operations.append(
            _build_row(Collective.ALL_REDUCE, group_index, sequence, -1, start, rank.now, rank.now - start)
        )
        return True


def record_steps(shape: PipelineShape, steps: int, work: OwnSeconds) -> tuple[list[RankSteps], list[float]]:
    """What all ranks have recorded, and how long each step took. Sends go on by themselves; all else is waited for."""
    rows: dict[int, list[tuple[float, ...]]] = {rank: [] for rank in shape.ranks}
    seconds: dict[int, dict[int, float]] = {rank: {} for rank in shape.ranks}
    clock, durations = dict.fromkeys(shape.ranks, 0.0), []
    for number in range(steps):
        step = _PipelineStep(shape, number, clock, work)
        step.run()
        durations.append(max(rank.now for rank in step.ranks.values()) - max(clock.values()))
        for rank, progress in step.ranks.items():
            step_start = clock[rank]
            for collective, group, sequence, peer, nbytes, start, end, held in progress.operations:
                rows[rank].append(
                    (number, collective, 0, group, sequence, peer, nbytes, start - step_start, end - step_start, held)
                )
            clock[rank], seconds[rank][number] = progress.now, progress.now - step_start
    recorded = [
        RankSteps(rank, np.array(rows[rank], OPERATION), shape.list_groups(rank), seconds[rank]) for rank in shape.ranks
    ]
    return recorded, durations


def _build_row(
    collective: Collective, group: int, sequence: int, peer: int, start: float, end: float, held: float
) -> _Row:
    return int(collective), group, sequence, peer, 1e6, start, end, held


def build_steady_work(
    forward: float = 0.010, backward: float = 0.020, slow: Sequence[int] = (), factor: float = 1.0
) -> OwnSeconds:
    """Own work of ranks that are all alike, but those in `slow`, which take `factor` times as long."""

    def seconds(rank: int, _step: int, part: str) -> float:
        base_seconds = {"forward": forward, "backward": backward, "optimizer": 0.002}[part]
        return base_seconds * (factor if rank in slow else 1.0)

    return seconds
