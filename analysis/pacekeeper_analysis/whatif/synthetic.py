"""Synthetic traces of jobs with known faults: for tests, benchmarks and trying out the analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.published import build_graph_filter, build_pipeline_graph
from pacekeeper_analysis.whatif.simulate import Array, Timeline, simulate_graph
from pacekeeper_analysis.whatif.trace import (
    ALL_GATHER,
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    CLIP,
    EMBEDDING,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    GC,
    LAYERNORM,
    OPERATION_TYPES,
    OPTIMIZER,
    REDUCE_SCATTER,
    SEPARATE_ALL_REDUCE,
    JobTrace,
    TraceMetadata,
)

HEALTHY_SECONDS = {
    FORWARD: 0.050,
    BACKWARD: 0.100,
    FORWARD_SEND: 0.001,
    FORWARD_RECV: 0.001,
    BACKWARD_SEND: 0.001,
    BACKWARD_RECV: 0.001,
    ALL_GATHER: 0.010,
    REDUCE_SCATTER: 0.020,
    SEPARATE_ALL_REDUCE: 0.002,
    LAYERNORM: 0.0005,
    EMBEDDING: 0.003,
    CLIP: 0.001,
    OPTIMIZER: 0.015,
    GC: 0.0,
}
"""Seconds of each type in a healthy job."""


@dataclass(frozen=True)
class JobShape:
    """The shape of a job."""

    dp: int = 4
    pp: int = 4
    vpp: int = 1
    microbatches: int = 8
    steps: int = 8
    overlapped: bool = False
    """Whether gradients of a chunk are reduced while the backwards of others run."""

    @property
    def metadata(self) -> TraceMetadata:
        return TraceMetadata(self.dp, self.pp, vpp_size=self.vpp, world_size=self.dp * self.pp)


def list_operations(shape: JobShape) -> list[Operation]:
    """Return the operations of a step in launch order, stage by stage.

    The schedule is 1F1B, interleaved if a stage has several chunks.
    """
    operations: list[Operation] = []
    for stage in range(shape.pp):
        counts = dict.fromkeys(OPERATION_TYPES, 0)
        add = partial(_add_operation, operations, counts, stage)
        for chunk in range(shape.vpp):
            add(ALL_GATHER, chunk)
        for name, chunk, microbatch in order_computations(shape, stage):
            first, last = chunk == 0 and stage == 0, chunk == shape.vpp - 1 and stage == shape.pp - 1
            receive, send = (FORWARD_RECV, FORWARD_SEND) if name == FORWARD else (BACKWARD_RECV, BACKWARD_SEND)
            if not (first if name == FORWARD else last):
                add(receive)
            add(name, chunk, microbatch)
            if not (last if name == FORWARD else first):
                add(send)
        for name in (GC, LAYERNORM, EMBEDDING):
            add(name)
        for chunk in reversed(range(shape.vpp)):
            add(REDUCE_SCATTER, chunk)
        for name in (*([SEPARATE_ALL_REDUCE] if shape.overlapped else []), CLIP, OPTIMIZER):
            add(name)
    included = build_graph_filter(shape.metadata)
    return [operation for operation in operations if included(operation.type, operation.stage)]


def _add_operation(
    operations: list[Operation],
    counts: dict[str, int],
    stage: int,
    name: str,
    chunk: int = 0,
    microbatch: int | None = None,
) -> None:
    operations.append(Operation(name, stage, counts[name], chunk, microbatch))
    counts[name] += 1


def order_computations(shape: JobShape, stage: int) -> list[tuple[str, int, int]]:
    """Return forwards and backwards of a stage in the order in which they run: (type, chunk, microbatch)."""
    pp, vpp, total = shape.pp, shape.vpp, shape.microbatches * shape.vpp
    if vpp > 1 and shape.microbatches % pp:
        raise ValueError(
            f"{shape.microbatches} microbatches on {pp} stages: interleaving needs a multiple of the stages"
        )
    warm_up = pp - stage - 1 if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp
    warm_up = min(total, warm_up)

    def place(k: int, *, forward: bool) -> tuple[str, int, int]:
        if vpp == 1:
            return (FORWARD if forward else BACKWARD), 0, k
        round_, position = divmod(k, pp * vpp)
        chunk = position // pp
        return (FORWARD, chunk, round_ * pp + k % pp) if forward else (BACKWARD, vpp - 1 - chunk, round_ * pp + k % pp)

    order = [place(k, forward=True) for k in range(warm_up)]
    for k in range(total - warm_up):
        order += [place(warm_up + k, forward=True), place(k, forward=False)]
    return order + [place(k, forward=False) for k in range(total - warm_up, total)]


def draw_healthy_seconds(
    operations: Sequence[Operation], shape: JobShape, noise: float, rng: np.random.Generator
) -> Array:
    """Draw durations of a healthy job [operation, dp_rank, step], each varied by a relative `noise`."""
    usual = np.array([HEALTHY_SECONDS[operation.type] for operation in operations])
    varied = rng.normal(1.0, noise, (len(operations), shape.dp, shape.steps)).clip(0.5, 2.0)
    return np.asarray(usual[:, None, None] * varied)


def make_trace(shape: JobShape, operations: Sequence[Operation], seconds: Array) -> JobTrace:
    """Return the trace of a job whose operations take `seconds` [operation, dp_rank, step]. Waits are added."""
    launch_order = np.arange(len(operations), dtype=np.float64)
    graph = build_pipeline_graph(operations, launch_order, launch_order, shape.metadata)
    timeline: Timeline = {}
    simulate_graph(graph, seconds[:, None], timeline)
    cells = (shape.dp, shape.steps)
    starts = np.stack([np.broadcast_to(timeline[node][0], (1, *cells))[0] for node in range(graph.size)])
    ends = np.stack([timeline[node][1][0] for node in range(graph.size)])

    def repeat_per_operation(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.repeat(np.array(values, dtype=np.int32), shape.dp * shape.steps)

    step, dp_rank = np.tile(np.arange(shape.steps), shape.dp), np.repeat(np.arange(shape.dp), shape.steps)
    stage = repeat_per_operation([operation.stage for operation in operations])
    dp_rank = np.tile(dp_rank, graph.size).astype(np.int32)
    computes = [operation.type in (FORWARD, BACKWARD, ALL_GATHER, REDUCE_SCATTER) for operation in operations]
    return JobTrace(
        step=np.tile(step, graph.size),
        dp_rank=dp_rank,
        stage=stage,
        rank=stage * shape.dp + dp_rank,
        optype=repeat_per_operation([OPERATION_TYPES.index(operation.type) for operation in operations]).astype(
            np.int8
        ),
        seq_id=repeat_per_operation([operation.index for operation in operations]),
        mc=repeat_per_operation(
            [o.chunk if has_chunk else -1 for o, has_chunk in zip(operations, computes, strict=True)]
        ),
        mb_id=repeat_per_operation([-1 if o.microbatch is None else o.microbatch for o in operations]),
        start_ts=starts.ravel().astype(np.float32),
        duration=(ends - starts).ravel().astype(np.float32),
        metadata=shape.metadata,
    )
