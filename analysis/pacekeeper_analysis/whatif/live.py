"""Builds a window from the collectives that a live job's ranks recorded, with its stages, microbatches and groups.

The records contain only which collectives each rank entered, with which peers, how long it was inside, and how long it
waited. The time between them is the rank's own work. Stages follow from the first sends, replicas from the chains of
stages, and the mesh from the groups. Clocks of ranks are never compared. The rank that is inside a collective for the
shortest time has not waited, so that time is the transfer (C4, arXiv 2406.04594).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.operations import NO_GROUP
from pacekeeper_analysis.whatif.graph import GraphBuilder, Operation
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import BACKWARD_RECV, BACKWARD_SEND, FORWARD_RECV, FORWARD_SEND, TraceError
from pacekeeper_analysis.whatif.window import RecordedWindow, SkippedStep
from pacekeeper_rank.records import NOTICED_LATE, Collective

COMPUTE = "compute"
"""A rank's own work between two of its collectives."""
MIN_LIVE_STEPS = 3
"""Smallest number of common steps. Fewer are not sufficient."""
_SEND, _RECV = int(Collective.SEND), int(Collective.RECV)
_TRANSFER_TYPES = {
    (_SEND, 1): FORWARD_SEND,
    (_RECV, -1): FORWARD_RECV,
    (_SEND, -1): BACKWARD_SEND,
    (_RECV, 1): BACKWARD_RECV,
}
"""By collective and direction to the peer's stage: toward the end of the model (1) or its beginning (-1)."""


@dataclass(frozen=True)
class RankSteps:
    """One rank's records of its last steps."""

    rank: int
    operations: NDArray[np.void]  # operations.OPERATION
    communicators: Sequence[Communicator]  # the operations' `group` is an index into them
    step_seconds: Mapping[int, float]  # by step


@dataclass(frozen=True)
class LiveWindow:
    """A window, and the rank of each of its workers."""

    window: RecordedWindow
    worker_ranks: Mapping[tuple[int, int], int]
    """Global rank by (replica, stage). Replicas are the flat index into the window's mesh."""


def build_window_from_operations(ranks: Sequence[RankSteps]) -> LiveWindow:
    """Build the window of the steps that all ranks recorded alike.

    Raises TraceError if ranks are missing, or if the records do not form a job of equal replicas. Then only the ranks'
    own work can be judged.
    """
    by_rank = {rank_steps.rank: rank_steps for rank_steps in ranks}
    if not by_rank or sorted(by_rank) != list(range(len(by_rank))):
        rank_list = ", ".join(map(str, sorted(by_rank)[:8])) or "none"
        raise TraceError(f"operations of rank {rank_list}; give those of every rank from 0")
    layout = _ReplicaLayout({rank: _RecordedRank(rank_steps) for rank, rank_steps in by_rank.items()})
    return _LiveWindowBuilder(layout).build()


class _RecordedRank:
    """One rank's operations, step by step in the order in which it entered them."""

    def __init__(self, rank_steps: RankSteps) -> None:
        self.step_seconds = rank_steps.step_seconds
        self._operations = rank_steps.operations
        self._groups = rank_steps.communicators
        self._ranks_of: dict[int, tuple[int, ...]] = {}  # only requested groups: there may be many

    @cached_property
    def steps(self) -> dict[int, NDArray[np.void]]:
        """Operations of each step whose duration is known, by number."""
        if not len(self._operations):
            return {}
        order = np.lexsort((self._operations["start"], self._operations["step"]))
        ordered = self._operations[order]
        numbers, first = np.unique(ordered["step"], return_index=True)
        parts = np.split(ordered, first[1:])
        return {int(n): part for n, part in zip(numbers, parts, strict=True) if int(n) in self.step_seconds}

    def get_group_ranks(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group. () if not known."""
        if group == NO_GROUP or group >= len(self._groups):
            return ()
        if group not in self._ranks_of:
            self._ranks_of[group] = self._groups[group].ranks
        return self._ranks_of[group]

    def select_transfers(self, operations: NDArray[np.void]) -> NDArray[np.void]:
        """Return sends and receives whose peer is known."""
        is_transfer = np.isin(operations["collective"], (_SEND, _RECV)) & (operations["peer"] >= 0)
        return operations[is_transfer]


class _ReplicaLayout:
    """The stage and replica of each rank, and the mesh that the replicas' groups form."""

    def __init__(self, ranks: Mapping[int, _RecordedRank]) -> None:
        self.ranks = ranks
        self.common = sorted(set.intersection(*(set(rank.steps) for rank in ranks.values())))
        if len(self.common) < MIN_LIVE_STEPS:
            raise TraceError(f"the ranks have recorded {len(self.common)} steps in common; {MIN_LIVE_STEPS} are needed")
        self.stage_of = self._assign_stages()
        self.stages = 1 + max(self.stage_of.values())
        self.chains = self._build_chains()
        self._arrange()

    def _find_first_transfer(self, rank: int) -> np.void | None:
        """Return the first transfer of the newest common step."""
        transfers = self.ranks[rank].select_transfers(self.ranks[rank].steps[self.common[-1]])
        return transfers[0] if len(transfers) else None

    def _assign_stages(self) -> dict[int, int]:
        """Assign stages. Activations precede gradients: the rank that sends first is the model's beginning.

        Other ranks follow their sender.
        """
        first = {rank: self._find_first_transfer(rank) for rank in self.ranks}
        silent = [rank for rank, transfer in first.items() if transfer is None]
        if len(silent) == len(first):
            return dict.fromkeys(self.ranks, 0)
        if silent:
            raise TraceError(f"rank {silent[0]} sends and receives nothing, but others do")
        senders = {r: int(t["peer"]) for r, t in first.items() if t is not None and int(t["collective"]) == _RECV}
        stages: dict[int, int] = {}
        for rank in self.ranks:
            path = [rank]
            while path[-1] in senders and path[-1] not in stages and len(path) <= len(self.ranks):
                path.append(senders[path[-1]])
            if len(path) > len(self.ranks) or path[-1] not in self.ranks:
                raise TraceError(f"rank {rank} first waits for ranks that wait for it")
            first_stage = stages.get(path[-1], 0)
            stages.update((path_rank, first_stage + distance) for distance, path_rank in enumerate(reversed(path)))
        return stages

    def _build_chains(self) -> list[tuple[int, ...]]:
        """Return the ranks of each replica, by stage."""
        chains = []
        for rank in sorted(self.ranks):
            if self.stage_of[rank] == 0:
                chain = [rank]
                while len(chain) < self.stages:
                    chain.append(self._find_next_stage_rank(chain[-1]))
                chains.append(tuple(chain))
        if sorted(rank for chain in chains for rank in chain) != sorted(self.ranks):
            raise TraceError("the stages have different numbers of ranks; replicas must be alike")
        return chains

    def _find_next_stage_rank(self, rank: int) -> int:
        """Return the rank that this rank sends to in the next stage."""
        transfers = self.ranks[rank].select_transfers(self.ranks[rank].steps[self.common[-1]])
        sent = [int(peer) for peer in transfers["peer"][transfers["collective"] == _SEND]]
        forward = [peer for peer in sent if self.stage_of.get(peer) == self.stage_of[rank] + 1]
        if not forward:
            raise TraceError(f"rank {rank} of stage {self.stage_of[rank]} sends to no rank of the next stage")
        return forward[0]

    def _arrange(self) -> None:
        """Arrange the chains in the order of the mesh: one axis, or two if groups hold only a part of the replicas."""
        chain_of = {rank: index for index, chain in enumerate(self.chains) for rank in chain}
        count = len(self.chains)
        partitions = {
            frozenset(chain_of[member] for member in members)
            for rank in self.ranks.values()
            for group in np.unique(rank.steps[self.common[-1]]["group"])
            if (members := rank.get_group_ranks(int(group))) and all(member in chain_of for member in members)
        }
        parts = sorted({part for part in partitions if 1 < len(part) < count}, key=lambda part: sorted(part))
        if not parts:
            self.mesh: tuple[int, ...] = (count,)
            self.place: dict[int, tuple[int, ...]] = {rank: (chain_of[rank],) for rank in chain_of}
            return
        inner = parts[0]
        rows = [part for part in parts if len(part) == len(inner) and (part == inner or not part & inner)]
        if sorted(index for row in rows for index in row) != list(range(count)):
            raise TraceError("the groups do not divide the replicas into equal parts")
        place_of_chain = {
            index: (row_index, sorted(row).index(index)) for row_index, row in enumerate(rows) for index in row
        }
        self.mesh = (len(rows), len(inner))
        self.chains = sorted(self.chains, key=lambda chain: place_of_chain[chain_of[chain[0]]])
        self.place = {rank: place_of_chain[index] for rank, index in chain_of.items()}

    def get_extent(self, members: Sequence[int]) -> tuple[frozenset[int], tuple[int, ...]]:
        """Return the stages and mesh axes that a group spans. Raises TraceError if it is not a part of the mesh."""
        stages = frozenset(self.stage_of[member] for member in members)
        places = {self.place[member] for member in members}
        axes = tuple(axis for axis in range(len(self.mesh)) if len({place[axis] for place in places}) > 1)
        if len(members) != len(stages) * int(np.prod([self.mesh[axis] for axis in axes])):
            raise TraceError(f"the group of ranks {list(members)[:8]} is not a row, a column, or all of the replicas")
        return stages, axes


@dataclass(frozen=True)
class _OperationKind:
    """What an operation has in common on all replicas: its type and its participants."""

    type: str
    stages: frozenset[int]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class _StageEvent:
    """One event in a stage's sequence of a step."""

    time: float
    is_launch: bool  # launch of an operation; otherwise the rank waits for its end
    operation: int  # in the order in which they are entered


class _LiveWindowBuilder:
    """Combines graph and durations."""

    def __init__(self, layout: _ReplicaLayout) -> None:
        self._layout = layout
        self._kinds = [self._list_kinds(rank) for rank in layout.chains[0]]
        usual = {rank: self._kinds[stage] for rank, stage in layout.stage_of.items()}
        self._is_usual = {rank: self._list_kinds(rank) == kinds for rank, kinds in usual.items()}
        """Whether each rank did in the newest step what most ranks do. Equal steps are then compared quickly."""
        self._steps, self._skipped = self._select_common_steps()
        self._graph = GraphBuilder()
        self._operations: list[Operation] = []
        self._seconds: list[Array] = []
        self._counts: Counter[tuple[str, int]] = Counter()
        self._sizes: list[tuple[object, ...]] = []
        """For each operation: a key shared by operations with the same ideal time."""
        self._together: dict[tuple[object, int], list[int]] = defaultdict(list)
        self._axes: dict[tuple[object, int], tuple[int, ...]] = {}

    def build(self) -> LiveWindow:
        layout = self._layout
        for stage in range(layout.stages):
            self._add_stage(stage)
        seconds = np.stack(self._seconds)
        for start_key, members in self._together.items():
            axes = self._axes[start_key]
            self._graph.start_together(members, across=axes)
            transfer = seconds[members].min(axis=(0, *(axis + 1 for axis in axes)), keepdims=True)
            seconds[members] = np.broadcast_to(transfer, seconds[members].shape)
        window = RecordedWindow(
            graph=self._graph.build(),
            operations=tuple(self._operations),
            seconds=seconds,
            ideal=_compute_ideal_seconds(self._operations, self._sizes, seconds),
            steps=tuple(self._steps),
            measured_s=np.array([max(r.step_seconds[step] for r in layout.ranks.values()) for step in self._steps]),
            skipped=self._skipped,
        )
        workers = {
            (replica, stage): rank for replica, chain in enumerate(layout.chains) for stage, rank in enumerate(chain)
        }
        return LiveWindow(window, workers)

    def _add_stage(self, stage: int) -> None:
        """Add own work and collectives of one stage, in their order."""
        events = self._list_stage_events(stage)
        own, inside = self._compute_durations(stage, events)
        sizes = np.median(self._collect_column(stage, "bytes"), axis=(1, 2))
        nodes: dict[int, int] = {}
        counts: dict[_OperationKind, int] = defaultdict(int)
        last_of: dict[_OperationKind, int] = {}
        before: list[int] = []
        for index, event in enumerate(events):
            work = self._add(COMPUTE, stage, before, own[index], (COMPUTE,))
            before = [work]
            if not event.is_launch:
                before.append(nodes[event.operation])
                continue
            kind = self._kinds[stage][event.operation]
            stream = [last_of[kind]] if kind in last_of else []
            size = (kind.type, len(kind.stages), kind.axes, float(sizes[event.operation]))
            node = self._add(kind.type, stage, [work, *stream], inside[event.operation], size)
            nodes[event.operation] = last_of[kind] = node
            start_key = (self._build_start_key(kind, stage), counts[kind])
            self._together[start_key].append(node)
            self._axes[start_key] = kind.axes
            counts[kind] += 1
        self._add(COMPUTE, stage, before, own[-1], (COMPUTE,))

    def _add(self, type_: str, stage: int, after: Sequence[int], seconds: Array, size: tuple[object, ...]) -> int:
        index = self._counts[type_, stage]
        self._counts[type_, stage] += 1
        self._operations.append(Operation(type_, stage, index))
        self._seconds.append(seconds)
        self._sizes.append(size)
        return self._graph.add_operation(f"{type_} {index} of stage {stage}", after)

    def _list_kinds(self, rank: int, step: int | None = None) -> list[_OperationKind]:
        """Return the kinds of the operations of a step, by default the newest, in the order of entering."""
        recorded_rank = self._layout.ranks[rank]
        operations = recorded_rank.steps[self._layout.common[-1] if step is None else step]
        return [self._classify_operation(rank, operation) for operation in operations]

    def _classify_operation(self, rank: int, operation: np.void) -> _OperationKind:
        layout, collective = self._layout, int(operation["collective"])
        stage = layout.stage_of[rank]
        if collective in (_SEND, _RECV):
            peer = int(operation["peer"])
            if peer not in layout.stage_of:
                raise TraceError(f"rank {rank} sends to or receives from rank {peer}, which is not in the job")
            distance = layout.stage_of[peer] - stage
            direction = 1 if distance == 1 or distance < -1 else -1  # interleaved: the last stage sends on to the first
            type_ = _TRANSFER_TYPES.get((collective, direction))
            if type_ is None or distance == 0:
                raise TraceError(f"ranks {rank} and {peer} of stage {stage} send to each other")
            return _OperationKind(type_, frozenset({stage}), ())
        members = layout.ranks[rank].get_group_ranks(int(operation["group"]))
        if not members:
            raise TraceError(f"rank {rank} has entered a collective of a group whose ranks are not known")
        stages, axes = layout.get_extent(members)
        return _OperationKind(Collective(collective).name.lower().replace("_", "-"), stages, axes)

    def _build_start_key(self, kind: _OperationKind, stage: int) -> object:
        """Return a key shared by all that start together: both ends of a transfer, or a collective on all stages."""
        direction, _, end = kind.type.partition("-")
        if end not in ("send", "recv"):
            return kind
        stage_step = 1 if direction == "forward" else -1
        return direction, stage if end == "send" else (stage - stage_step) % self._layout.stages

    def _select_common_steps(self) -> tuple[list[int], tuple[SkippedStep, ...]]:
        """Return the steps in which all replicas did the same in the same order."""
        steps, skipped = [], []
        for step in self._layout.common:
            deviating_rank = next((rank for rank in self._layout.ranks if not self._is_usual_step(rank, step)), None)
            if deviating_rank is None:
                steps.append(step)
            else:
                skipped.append(SkippedStep(step, f"rank {deviating_rank} entered other collectives than its peers"))
        if len(steps) < MIN_LIVE_STEPS:
            raise TraceError(f"the ranks did the same in only {len(steps)} steps; {skipped[-1].reason}")
        return steps, tuple(skipped)

    def _is_usual_step(self, rank: int, step: int) -> bool:
        operations, newest = (self._layout.ranks[rank].steps[number] for number in (step, self._layout.common[-1]))
        if self._is_usual[rank] and len(operations) == len(newest):
            return all(np.array_equal(operations[name], newest[name]) for name in ("collective", "group", "peer"))
        usual = self._kinds[self._layout.stage_of[rank]]
        return len(operations) == len(usual) and self._list_kinds(rank, step) == usual

    def _collect_column(self, stage: int, name: str) -> Array:
        """Return a column of the operations [operation, replica, step]."""
        ranks = [self._layout.ranks[chain[stage]] for chain in self._layout.chains]
        table = [[rank.steps[step][name] for step in self._steps] for rank in ranks]
        return np.moveaxis(np.array(table, dtype=np.float64), 2, 0)

    def _list_stage_events(self, stage: int) -> list[_StageEvent]:
        """Return the events of a stage in a step, in the order of most replicas and steps."""
        start, end, waits = (
            np.median(self._collect_column(stage, name), axis=(1, 2)) for name in ("start", "end", "wait")
        )
        late = np.median(self._collect_column(stage, "flags").astype(int) & NOTICED_LATE, axis=(1, 2)) > 0
        events = [_StageEvent(float(time), True, index) for index, time in enumerate(start)]
        events += [
            _StageEvent(float(time), False, index)
            for index, time in enumerate(end)
            if not late[index] or waits[index] > 0
        ]
        # A wait precedes operations that are launched at the moment of its end.
        return sorted(events, key=lambda event: (event.time, event.is_launch, event.operation))

    def _compute_durations(self, stage: int, events: Sequence[_StageEvent]) -> tuple[Array, Array]:
        """Return the own work and the time inside operations.

        Own work is before each event and after the last one, [event + 1, *mesh, step]. Time inside is [operation,
        *mesh, step].
        """
        start, end, waits = (self._collect_column(stage, name) for name in ("start", "end", "wait"))
        step_seconds = np.array(
            [
                [self._layout.ranks[chain[stage]].step_seconds[step] for step in self._steps]
                for chain in self._layout.chains
            ]
        )
        shape = (*self._layout.mesh, len(self._steps))
        now, own = np.zeros(step_seconds.shape), []
        for event in events:
            busy_until = start[event.operation] if event.is_launch else (end - waits)[event.operation]
            own.append(np.maximum(busy_until - now, 0.0))
            now = np.maximum(now, start[event.operation] if event.is_launch else end[event.operation])
        own.append(np.maximum(step_seconds - now, 0.0))
        inside = end - start
        return np.stack(own).reshape(-1, *shape), inside.reshape(-1, *shape)


def _compute_ideal_seconds(
    operations: Sequence[Operation], sizes: Sequence[tuple[object, ...]], seconds: Array
) -> Array:
    """Return the ideal seconds of each operation.

    For own work it is the mean over replicas and steps, as if all stages had the same total. For communication it is
    the median of its type, group and size (arXiv 2505.05713, where a type has one size).
    """
    usual = seconds.reshape(len(operations), -1).mean(axis=1)
    ideal = np.empty(len(operations))
    stages = np.array([operation.stage for operation in operations])
    nodes_by_size: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for node, size in enumerate(sizes):
        nodes_by_size[size].append(node)
    for size, nodes in nodes_by_size.items():
        if size == (COMPUTE,):
            sums = np.bincount(stages[nodes], weights=usual[nodes])
            ideal[nodes] = usual[nodes] * (sums.mean() / np.maximum(sums, 1e-12))[stages[nodes]]
        else:
            ideal[nodes] = np.median(seconds[nodes])
    return ideal
