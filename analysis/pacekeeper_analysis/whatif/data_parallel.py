"""Jobs without a pipeline: DDP, FSDP and their like, where collectives overlap with computation and ranks wait for
data.

The short way in, for a table of compute times:

    whatif = analyse(compute_seconds)                            # [step, rank]
    whatif.slowdown                                              # S
    whatif.decomposition.by_replica                              # S_w of each rank (None where S is below 1.03)
    whatif.gain(replaced([2]))                                   # rank 2 at its peers' pace: times faster
    whatif.gain(reshared(new=[4, 4, 2], old=[3, 3, 4]))          # batch shares

The long way: a `program` says what every rank does in a step, in order, and `window` takes the seconds of each part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pacekeeper_analysis.whatif.figures import WhatIf
from pacekeeper_analysis.whatif.figures import analyze_window as analyse_window
from pacekeeper_analysis.whatif.graph import GraphBuilder, Operation
from pacekeeper_analysis.whatif.scenario import RECORDED_SCENARIO, PEERS, ScaledSeconds, WhatIfScenario, FixedSeconds, OperationSelection
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.window import RecordedWindow, compute_ideal_seconds

DATA, COMPUTE, FORWARD, BACKWARD, OPTIMIZER = "data", "compute", "forward-compute", "backward-compute", "optimizer"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"

COMPUTATION_TYPES = (COMPUTE, FORWARD, BACKWARD, OPTIMIZER)
"""What becomes faster on a faster rank."""

SAMPLE_WORK_TYPES = (COMPUTE, FORWARD, BACKWARD)
"""What takes longer with more samples."""

COLLECTIVE_TYPES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
"""What waits for other ranks."""


@dataclass(frozen=True)
class RunWork:
    """The rank itself is busy: it computes, or waits for its loader."""

    type: str = COMPUTE


@dataclass(frozen=True)
class LaunchCollective:
    """A collective starts as soon as all ranks along `across` have launched it and its stream is free."""

    type: str
    name: str
    across: tuple[int, ...] = (0,)
    """Axes of the rank mesh that take part."""
    stream: str = "collectives"
    """Collectives of one stream run one after the other."""


@dataclass(frozen=True)
class WaitForCollective:
    """The rank goes on only when this collective has ended."""

    name: str


Instruction = RunWork | LaunchCollective | WaitForCollective


def analyze_compute_seconds(
    compute_seconds: ArrayLike,
    communication_seconds: ArrayLike = 0.0,
    data_seconds: ArrayLike = 0.0,
    *,
    steps: Sequence[int] | None = None,
    measured_seconds: ArrayLike | None = None,
) -> WhatIf:
    """The analysis of a synchronous job in which every rank loads, computes and then joins one collective a step.

    compute_seconds: [step, rank], without any waiting for other ranks. communication_seconds: what the collective
    takes once the last rank is there, as far as nothing overlaps it, broadcastable to [step, rank]. data_seconds:
    each rank's wait for its loader, likewise. steps: their numbers. measured_seconds: wall time of each step
    [step]. Raises ValueError where a value is negative or not a number.
    """
    compute = np.asarray(compute_seconds, dtype=np.float64)
    if compute.ndim != 2 or 0 in compute.shape:
        raise ValueError(
            f"compute_seconds has shape {compute.shape}; it has to be [step, rank], with at least one of each"
        )
    data, communication = (np.asarray(part, dtype=np.float64) for part in (data_seconds, communication_seconds))
    seconds = np.stack([np.broadcast_to(part, compute.shape).T for part in (data, compute, communication)])
    program: list[Instruction] = [RunWork(DATA), RunWork(COMPUTE), LaunchCollective(ALL_REDUCE, "gradients"), WaitForCollective("gradients")]
    return analyse_window(build_window(program, seconds, steps=steps, measured_seconds=measured_seconds))


def build_replacement_scenario(ranks: Iterable[int]) -> WhatIfScenario:
    """These ranks compute and load at their peers' pace: what replacing their worker would win."""
    return RECORDED_SCENARIO.with_change(OperationSelection(replicas=ranks, types=(*COMPUTATION_TYPES, DATA)), takes=PEERS)


def build_reshare_scenario(new: Sequence[float], old: Sequence[float], fixed: float = 0.0) -> WhatIfScenario:
    """Rank r computes new[r] samples a step instead of old[r].

    fixed: seconds of each computation that do not depend on the samples (a of the step time a + b·n).
    """
    if len(new) != len(old) or min(old) <= 0 or min(new) < 0:
        raise ValueError(f"batch shares {list(new)} in place of {list(old)}: one share for each rank, old ones above 0")
    factors = tuple(float(after) / float(before) for after, before in zip(new, old, strict=True))
    return RECORDED_SCENARIO.with_change(OperationSelection(types=SAMPLE_WORK_TYPES), takes=ScaledSeconds(factors, fixed))


def estimate_local_sgd_step_seconds(whatif: WhatIf, every: int, sync_seconds: float, *, by_clock: bool = False) -> float:
    """Mean seconds for one step's worth of samples under Local-SGD: ranks wait for each other only at
    synchronisations.

    every: steps between two synchronisations. sync_seconds: what one costs. by_clock: ranks synchronise by the
    clock and do as many steps as they can meanwhile (A-EDiT, arXiv 2412.07210), so that a slow rank costs only its
    own samples; otherwise all do the same number of steps, and whoever is slow throughout still makes the others
    wait.
    """
    if every < 1:
        raise ValueError(f"every is {every}; synchronise every 1 or more steps")
    apart = RECORDED_SCENARIO.with_independent_replicas(OperationSelection(types=COLLECTIVE_TYPES)).with_change(OperationSelection(types=COLLECTIVE_TYPES), takes=FixedSeconds(0.0))
    (own,) = whatif.window.simulate_finish([apart])
    if by_clock:
        return float(1.0 / np.mean(1.0 / own.mean(axis=1)) + sync_seconds / every)
    rounds = [own[:, first : first + every].sum(axis=1).max() + sync_seconds for first in range(0, own.shape[1], every)]
    return float(np.sum(rounds) / own.shape[1])


def estimate_sync_wait_seconds(step_seconds: ArrayLike) -> float:
    """Mean wait for the last rank where ranks meet by the clock: each ends the step that it has in hand.

    step_seconds: mean own seconds of each rank's steps [rank]. Nobody knows how far a step is when the clock strikes,
    so what is left of it is uniform on [0, step].
    """
    own = np.asarray(step_seconds, dtype=np.float64)
    left = np.linspace(0.0, own.max(), 256)
    all_there = np.minimum(1.0, left[:, None] / own).prod(axis=1)
    missing = 1.0 - all_there
    area = ((missing[1:] + missing[:-1]) / 2 * np.diff(left)).sum()
    return float(area - own.mean() / 2)


def build_ddp_program(buckets: int) -> list[Instruction]:
    """DDP: the gradients of each bucket are reduced while the backward of the next one runs."""
    program: list[Instruction] = [RunWork(DATA), RunWork(FORWARD)]
    for bucket in range(buckets):
        program += [RunWork(BACKWARD), LaunchCollective(ALL_REDUCE, f"bucket {bucket}")]
    return [*program, *(WaitForCollective(f"bucket {bucket}") for bucket in range(buckets)), RunWork(OPTIMIZER)]


def build_fsdp_program(
    units: int, shard_axes: tuple[int, ...] = (0,), replicate_axes: tuple[int, ...] = ()
) -> list[Instruction]:
    """FSDP: each unit's parameters are gathered before its forward and backward, one unit ahead; gradients are
    scattered.

    With `replicate_axes` (HSDP) each unit's gradients are also reduced over those axes of the mesh.
    """
    program: list[Instruction] = [RunWork(DATA)]
    for type_, order in ((FORWARD, list(range(units))), (BACKWARD, list(range(units))[::-1])):
        gathers = [LaunchCollective(ALL_GATHER, f"{type_} parameters {unit}", shard_axes, "all-gather") for unit in order]
        program.append(gathers[0])
        for at, unit in enumerate(order):
            program += [WaitForCollective(gathers[at].name), *gathers[at + 1 : at + 2], RunWork(type_)]
            if type_ == BACKWARD:
                program.append(LaunchCollective(REDUCE_SCATTER, f"gradients {unit}", shard_axes, "reduce-scatter"))
                if replicate_axes:
                    program.append(LaunchCollective(ALL_REDUCE, f"shards {unit}", replicate_axes, "reduce-scatter"))
    last = [
        instruction.name
        for instruction in program
        if isinstance(instruction, LaunchCollective) and instruction.stream != "all-gather"
    ]
    return [*program, *(WaitForCollective(name) for name in last), RunWork(OPTIMIZER)]


def build_window(
    program: Sequence[Instruction],
    seconds: ArrayLike,
    *,
    steps: Sequence[int] | None = None,
    measured_seconds: ArrayLike | None = None,
) -> RecordedWindow:
    """The window of a job whose ranks all run `program` in each step.

    seconds: [instruction, *mesh, step], one row for each Run (own seconds) and Launch (seconds once the last rank
    is there), in the program's order; the mesh is usually one axis of ranks. steps: their numbers, by default from
    0.
    measured_seconds: wall time of each step. Raises ValueError where the rows do not fit, or a value is negative or
    NaN.
    """
    timed = [instruction for instruction in program if not isinstance(instruction, WaitForCollective)]
    table: Array = np.asarray(seconds, dtype=np.float64)
    if table.ndim < 3 or table.shape[0] != len(timed):
        raise ValueError(f"seconds has shape {table.shape}; the program needs [{len(timed)}, rank, step]")
    bad = np.argwhere(~(np.isfinite(table) & (table >= 0)))
    if bad.size:
        row, *rank, step = (int(index) for index in bad[0])
        raise ValueError(
            f"{timed[row]}: {table[tuple(bad[0])]} seconds on rank {rank[0]} at step {step}; drop that step"
        )
    graph = GraphBuilder()
    operations: list[Operation] = []
    counts = dict.fromkeys((instruction.type for instruction in timed), 0)
    previous: int | None = None
    streams: dict[str, int] = {}
    launched: dict[str, int] = {}
    waited_on: list[int] = []
    for instruction in program:
        if isinstance(instruction, WaitForCollective):
            if instruction.name not in launched:
                raise ValueError(f"the program waits for {instruction.name!r} before it is launched")
            waited_on.append(launched[instruction.name])
            continue
        node = graph.add_operation(str(instruction), after=[] if previous is None else [previous])
        operations.append(Operation(instruction.type, index=counts[instruction.type]))
        counts[instruction.type] += 1
        for collective in waited_on:
            graph.add_wait(node, on=collective)
        if isinstance(instruction, RunWork):
            previous, waited_on = node, []
        else:
            if instruction.stream in streams:
                graph.add_wait(node, on=streams[instruction.stream])
            streams[instruction.stream] = launched[instruction.name] = node
            graph.start_together([node], across=instruction.across)
    collectives = frozenset(instruction.type for instruction in timed if isinstance(instruction, LaunchCollective))
    return RecordedWindow(
        graph=graph.build(),
        operations=tuple(operations),
        seconds=table,
        ideal=compute_ideal_seconds(operations, table, frozenset(counts) - collectives),
        steps=tuple(range(table.shape[-1])) if steps is None else tuple(steps),
        measured_s=None if measured_seconds is None else np.asarray(measured_seconds, dtype=np.float64),
    )


def compute_transfer_seconds(durations: Array) -> Array:
    """What collectives take once the last rank is there, from how long each rank was inside them.

    The rank that comes last waits for nobody: the shortest duration of a group is the transfer, without any common
    clock.
    durations: [rank, step], result [1, step].
    """
    return np.asarray(durations.min(axis=0, keepdims=True))
