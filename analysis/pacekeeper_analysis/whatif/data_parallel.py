"""Jobs without a pipeline (DDP, FSDP and similar): collectives overlap with computation, and ranks wait for data.

The short form, for a table of compute times:

    whatif = analyze_compute_seconds(compute_seconds)            # [step, rank]
    whatif.slowdown                                              # S
    whatif.decomposition.by_replica                              # S_w of each rank (None if S is below 1.03)
    whatif.compute_gain(build_replacement_scenario([2]))         # rank 2 at its peers' speed: times faster
    whatif.compute_gain(build_reshare_scenario(new=[4, 4, 2], old=[3, 3, 4]))   # batch shares

The long form: a program defines what every rank does in a step, in order, and `build_window` takes the seconds of each
part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pacekeeper_analysis.whatif.graph import GraphBuilder, Operation
from pacekeeper_analysis.whatif.scenario import (
    PEERS,
    RECORDED_SCENARIO,
    FixedSeconds,
    OperationSelection,
    ScaledSeconds,
    WhatIfScenario,
)
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.slowdown_statistics import WhatIf
from pacekeeper_analysis.whatif.slowdown_statistics import analyze_window as analyse_window
from pacekeeper_analysis.whatif.window import RecordedWindow, compute_ideal_seconds

DATA, COMPUTE, FORWARD, BACKWARD, OPTIMIZER = "data", "compute", "forward-compute", "backward-compute", "optimizer"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"

COMPUTATION_TYPES = (COMPUTE, FORWARD, BACKWARD, OPTIMIZER)
"""Types that become faster on a faster rank."""

SAMPLE_WORK_TYPES = (COMPUTE, FORWARD, BACKWARD)
"""Types that take longer with more samples."""

COLLECTIVE_TYPES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
"""Types that wait for other ranks."""

_STEPS_AND_RANKS_DIMENSIONS = 2
_PROGRAM_TABLE_DIMENSIONS = 3
"""Instructions, ranks, and steps."""


@dataclass(frozen=True)
class RunWork:
    """Work of the rank itself: it computes, or waits for its loader."""

    type: str = COMPUTE


@dataclass(frozen=True)
class LaunchCollective:
    """A collective that starts when all ranks along `across` have launched it and its stream is free."""

    type: str
    name: str
    across: tuple[int, ...] = (0,)
    """Axes of the rank mesh that take part."""
    stream: str = "collectives"
    """Collectives of one stream run one after another."""


@dataclass(frozen=True)
class WaitForCollective:
    """The rank continues only after this collective has ended."""

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
    """Analyze a synchronous job in which every rank loads, computes, and then joins one collective per step.

    `compute_seconds` is [step, rank], without waits for other ranks. `communication_seconds` is the time of the
    collective after the last rank has arrived, without overlapped parts, broadcastable to [step, rank]. `data_seconds`
    is each rank's wait for its loader, likewise. `steps` are the step numbers. `measured_seconds` is the wall time of
    each step [step]. Raises ValueError if a value is negative or not a number.
    """
    compute = np.asarray(compute_seconds, dtype=np.float64)
    if compute.ndim != _STEPS_AND_RANKS_DIMENSIONS or 0 in compute.shape:
        raise ValueError(
            f"compute_seconds has shape {compute.shape}; it must be [step, rank], with at least one of each"
        )
    data, communication = (np.asarray(part, dtype=np.float64) for part in (data_seconds, communication_seconds))
    seconds = np.stack([np.broadcast_to(part, compute.shape).T for part in (data, compute, communication)])
    program: list[Instruction] = [
        RunWork(DATA),
        RunWork(COMPUTE),
        LaunchCollective(ALL_REDUCE, "gradients"),
        WaitForCollective("gradients"),
    ]
    return analyse_window(build_window(program, seconds, steps=steps, measured_seconds=measured_seconds))


def build_replacement_scenario(ranks: Iterable[int]) -> WhatIfScenario:
    """Return a scenario with these ranks at their peers' speed: the gain of replacing their workers."""
    return RECORDED_SCENARIO.with_change(
        OperationSelection(replicas=ranks, types=(*COMPUTATION_TYPES, DATA)), takes=PEERS
    )


def build_reshare_scenario(new: Sequence[float], old: Sequence[float], fixed: float = 0.0) -> WhatIfScenario:
    """Return a scenario in which rank r computes new[r] samples per step instead of old[r].

    `fixed` is the part of each computation's seconds that does not depend on the samples (a of the step time a + b·n).
    """
    if len(new) != len(old) or min(old) <= 0 or min(new) < 0:
        raise ValueError(f"batch shares {list(new)} instead of {list(old)}: give one share per rank, old ones above 0")
    factors = tuple(float(after) / float(before) for after, before in zip(new, old, strict=True))
    return RECORDED_SCENARIO.with_change(
        OperationSelection(types=SAMPLE_WORK_TYPES), takes=ScaledSeconds(factors, fixed)
    )


def estimate_local_sgd_step_seconds(
    whatif: WhatIf, every: int, sync_seconds: float, *, by_clock: bool = False
) -> float:
    """Return the mean seconds of one step's worth of samples under Local-SGD.

    Ranks wait for each other only at synchronizations. `every` is the number of steps between two synchronizations, and
    `sync_seconds` the cost of one. With `by_clock`, ranks synchronize by the clock and do as many steps as they can in
    between (A-EDiT, arXiv 2412.07210), so a slow rank costs only its own samples. Otherwise all do the same number of
    steps, and a constantly slow rank still makes the others wait.
    """
    if every < 1:
        raise ValueError(f"every is {every}; synchronize every 1 or more steps")
    independent = RECORDED_SCENARIO.with_independent_replicas(OperationSelection(types=COLLECTIVE_TYPES)).with_change(
        OperationSelection(types=COLLECTIVE_TYPES), takes=FixedSeconds(0.0)
    )
    (own,) = whatif.window.simulate_finish([independent])
    if by_clock:
        return float(1.0 / np.mean(1.0 / own.mean(axis=1)) + sync_seconds / every)
    rounds = [own[:, first : first + every].sum(axis=1).max() + sync_seconds for first in range(0, own.shape[1], every)]
    return float(np.sum(rounds) / own.shape[1])


def estimate_sync_wait_seconds(step_seconds: ArrayLike) -> float:
    """Return the mean wait for the last rank if ranks synchronize by the clock: each ends its current step.

    `step_seconds` is the mean own seconds of each rank's steps [rank]. The position within a step at that time is
    unknown, so the remaining time is uniform on [0, step].
    """
    own = np.asarray(step_seconds, dtype=np.float64)
    remaining = np.linspace(0.0, own.max(), 256)
    all_arrived = np.minimum(1.0, remaining[:, None] / own).prod(axis=1)
    missing = 1.0 - all_arrived
    area = ((missing[1:] + missing[:-1]) / 2 * np.diff(remaining)).sum()
    return float(area - own.mean() / 2)


def build_ddp_program(buckets: int) -> list[Instruction]:
    """Return the program of DDP: the gradients of each bucket are reduced while the backward of the next one runs."""
    program: list[Instruction] = [RunWork(DATA), RunWork(FORWARD)]
    for bucket in range(buckets):
        program += [RunWork(BACKWARD), LaunchCollective(ALL_REDUCE, f"bucket {bucket}")]
    return [*program, *(WaitForCollective(f"bucket {bucket}") for bucket in range(buckets)), RunWork(OPTIMIZER)]


def build_fsdp_program(
    units: int, shard_axes: tuple[int, ...] = (0,), replicate_axes: tuple[int, ...] = ()
) -> list[Instruction]:
    """Return the program of FSDP.

    Each unit's parameters are gathered before its forward and backward, one unit ahead, and gradients are scattered.
    With `replicate_axes` (HSDP) each unit's gradients are also reduced over those axes of the mesh.
    """
    program: list[Instruction] = [RunWork(DATA)]
    for type_, order in ((FORWARD, list(range(units))), (BACKWARD, list(range(units))[::-1])):
        gathers = [
            LaunchCollective(ALL_GATHER, f"{type_} parameters {unit}", shard_axes, "all-gather") for unit in order
        ]
        program.append(gathers[0])
        for index, unit in enumerate(order):
            program += [WaitForCollective(gathers[index].name), *gathers[index + 1 : index + 2], RunWork(type_)]
            if type_ == BACKWARD:
                program.append(LaunchCollective(REDUCE_SCATTER, f"gradients {unit}", shard_axes, "reduce-scatter"))
                if replicate_axes:
                    program.append(LaunchCollective(ALL_REDUCE, f"shards {unit}", replicate_axes, "reduce-scatter"))
    reductions = [
        instruction.name
        for instruction in program
        if isinstance(instruction, LaunchCollective) and instruction.stream != "all-gather"
    ]
    return [*program, *(WaitForCollective(name) for name in reductions), RunWork(OPTIMIZER)]


def build_window(
    program: Sequence[Instruction],
    seconds: ArrayLike,
    *,
    steps: Sequence[int] | None = None,
    measured_seconds: ArrayLike | None = None,
) -> RecordedWindow:
    """Build the window of a job whose ranks all run `program` in each step.

    `seconds` is [instruction, *mesh, step], with one row for each RunWork (own seconds) and LaunchCollective (seconds
    after the last rank has arrived), in the program's order. The mesh is usually one axis of ranks. `steps` are the
    step numbers, by default from 0. `measured_seconds` is the wall time of each step. Raises ValueError if the rows do
    not fit, or if a value is negative or NaN.
    """
    timed = [instruction for instruction in program if not isinstance(instruction, WaitForCollective)]
    table: Array = np.asarray(seconds, dtype=np.float64)
    if table.ndim < _PROGRAM_TABLE_DIMENSIONS or table.shape[0] != len(timed):
        raise ValueError(f"seconds has shape {table.shape}; the program needs [{len(timed)}, rank, step]")
    invalid = np.argwhere(~(np.isfinite(table) & (table >= 0)))
    if invalid.size:
        row, *rank, step = (int(index) for index in invalid[0])
        raise ValueError(
            f"{timed[row]}: {table[tuple(invalid[0])]} seconds on rank {rank[0]} at step {step}; drop that step"
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
    """Return the transfer time of collectives, from the time that each rank was inside them.

    The last rank to arrive does not wait, so the shortest duration of a group is the transfer, without a common clock.
    `durations` is [rank, step], and the result [1, step].
    """
    return np.asarray(durations.min(axis=0, keepdims=True))
