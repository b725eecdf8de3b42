"""Builds a window from a trace in the published schema: dependencies and own durations of the operations.

The rules are those of arXiv 2505.05713 and its analyzer's published results (methods, section W). The graph is derived
from data-parallel rank 0 of the first complete step, and serves every step and rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from pacekeeper_analysis.whatif.dense_rows import DenseRows
from pacekeeper_analysis.whatif.graph import GraphBuilder, Operation, OperationGraph
from pacekeeper_analysis.whatif.simulate import Array
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
    OPTIMIZER,
    REDUCE_SCATTER,
    SEPARATE_ALL_REDUCE,
    JobTrace,
    TraceError,
    TraceMetadata,
)
from pacekeeper_analysis.whatif.window import RecordedWindow, compute_ideal_seconds

MEAN_TYPES = frozenset({FORWARD, BACKWARD, GC, OPTIMIZER})
"""Types whose ideal duration is the mean. For all others it is the median."""

MAX_CLOCK_DIFFERENCE_S = 5e-5
"""Insignificant difference between the clocks of a job."""

NEGATIVE_TRANSFER_S = -0.010
"""A transfer that ended this long before its last participant arrived is a clock error, and counts as 0."""


def build_window_from_trace(trace: JobTrace) -> RecordedWindow:
    """Build the window of all complete steps. Raises TraceError if none exists, or the rows contradict the metadata."""
    rows = DenseRows(trace, build_graph_filter(trace.metadata))
    starts, durations = rows.fill_column(trace.start_ts), rows.fill_column(trace.duration)
    ends = rows.fill_column(trace.start_ts + trace.duration)  # added in the trace's own precision, as its authors do
    graph = build_pipeline_graph(rows.operations, starts[:, 0, 0], ends[:, 0, 0], trace.metadata)
    seconds = compute_own_seconds(graph, starts, durations, ends)
    return RecordedWindow(
        graph=graph,
        operations=rows.operations,
        seconds=seconds,
        ideal=compute_ideal_seconds(rows.operations, seconds, MEAN_TYPES),
        steps=rows.steps,
        measured_s=ends.max(axis=(0, 1)) - starts.min(axis=(0, 1)),
        skipped=rows.skipped,
        recorded_at=(starts, ends),
    )


def build_graph_filter(meta: TraceMetadata) -> Callable[[str, int], bool]:
    """Return a predicate: whether operations of a type belong to the graph in a stage."""

    def included(name: str, stage: int) -> bool:
        if name in (ALL_GATHER, REDUCE_SCATTER, SEPARATE_ALL_REDUCE):
            return meta.dp_size * meta.dsp_size > 1
        if name == EMBEDDING:
            return stage in (0, meta.pp_size - 1)
        return True

    return included


def compute_own_seconds(graph: OperationGraph, starts: Array, durations: Array, ends: Array) -> Array:
    """Return durations without the wait for others: end minus the latest start among those that start together.

    `starts`, `durations` and `ends` are [operation, replica, step].
    """
    seconds = durations.copy()
    for unit in graph.units:
        members = list(unit.members)
        if len(members) > 1 or unit.across:
            latest = starts[members].max(axis=0)
            if unit.across:
                latest = latest.max(axis=0, keepdims=True)
            transfer = ends[members] - latest
            seconds[members] = np.where(transfer <= NEGATIVE_TRANSFER_S, 0.0, transfer)
    return seconds


def build_pipeline_graph(
    operations: Sequence[Operation], starts: Array, ends: Array, meta: TraceMetadata
) -> OperationGraph:
    """Build the graph of one step from one data-parallel rank's start and end times [operation].

    Raises TraceError if operations have no counterpart: a stage without optimizer, or a send without its receive.
    """
    pipeline = _PipelineGraphBuilder(operations, starts, ends, meta)
    for stage in range(meta.pp_size):
        pipeline.add_computations(stage)
        pipeline.add_data_parallel(stage)
        pipeline.add_tail(stage)
    if meta.pp_size > 1:
        pipeline.add_point_to_point()
    pipeline.add_collectives()
    return pipeline.build()


class _PipelineGraphBuilder:
    """Builds the graph rule by rule (methods, section W: rules 1 to 8)."""

    def __init__(self, operations: Sequence[Operation], starts: Array, ends: Array, meta: TraceMetadata) -> None:
        self._operations = operations
        self._starts, self._ends = starts, ends
        self._meta = meta
        self._graph = GraphBuilder()
        self._of: dict[tuple[str, int], list[int]] = defaultdict(list)
        for node in sorted(range(len(operations)), key=lambda node: (starts[node], operations[node].index)):
            self._of[operations[node].type, operations[node].stage].append(node)
        for operation in operations:
            self._graph.add_operation(str(operation))

    def build(self) -> OperationGraph:
        return self._graph.build(
            final=[node for stage in range(self._meta.pp_size) for node in self._of[OPTIMIZER, stage]]
        )

    def add_computations(self, stage: int) -> None:
        """Order forwards and backwards of a stage in sequence. Each chunk's parameters are gathered first."""
        forwards, backwards = self._of[FORWARD, stage], self._of[BACKWARD, stage]
        if not forwards or len(forwards) != len(backwards):
            raise TraceError(
                f"stage {stage} has {len(forwards)} {FORWARD} and {len(backwards)} {BACKWARD}; "
                "it needs the same number of each, and at least one"
            )
        self._graph.add_chain(self._list_computations(stage))
        last_of_chunk = {self._operations[gather].chunk: gather for gather in self._of[ALL_GATHER, stage]}
        for chunk, gather in last_of_chunk.items():
            self._graph.add_wait(self._select_chunk(forwards, chunk)[0], on=gather)

    def add_data_parallel(self, stage: int) -> None:
        """Order all-gathers and reduce-scatters on their common stream.

        If overlapped, gradients leave after their chunk's last backward.
        """
        gathers, scatters = self._of[ALL_GATHER, stage], self._of[REDUCE_SCATTER, stage]
        self._graph.add_chain(self._sort_by_start([*gathers, *scatters]))
        if self._is_overlapped():
            first_of_chunk = {self._operations[scatter].chunk: scatter for scatter in reversed(scatters)}
            for chunk, scatter in first_of_chunk.items():
                backwards = self._select_chunk(self._of[BACKWARD, stage], chunk)
                self._graph.add_wait(scatter, on=max(backwards, key=lambda node: float(self._ends[node])))

    def add_tail(self, stage: int) -> None:
        """Order the operations after the last computation, which have a fixed sequence."""
        last = max(self._list_computations(stage), key=lambda node: float(self._ends[node]))
        if not self._of[OPTIMIZER, stage]:
            raise TraceError(f"stage {stage} has no operation {OPTIMIZER}; a step ends with it, record it too")
        scatters = self._of[REDUCE_SCATTER, stage]
        gradients = self._of[SEPARATE_ALL_REDUCE, stage] if self._is_overlapped() else scatters
        synchronized = [*self._of[LAYERNORM, stage], *self._of[EMBEDDING, stage], *gradients]
        tail = [*synchronized, *self._of[CLIP, stage], *self._of[OPTIMIZER, stage]]
        self._graph.add_chain([last, *self._of[GC, stage], *tail])
        if self._is_overlapped() and scatters:
            self._graph.add_wait(tail[0], on=scatters[-1])

    def add_point_to_point(self) -> None:
        """Order sends and receives between adjacent stages, in both directions."""
        stages = self._meta.pp_size
        for compute, send, receive, step in (
            (FORWARD, FORWARD_SEND, FORWARD_RECV, 1),
            (BACKWARD, BACKWARD_SEND, BACKWARD_RECV, -1),
        ):
            sends = [self._order_transfers(compute, send, stage, step) for stage in range(stages)]
            receives = [self._order_transfers(compute, receive, stage, step) for stage in range(stages)]
            for stage in range(stages):
                next_stage = (stage + step) % stages
                if len(sends[stage]) != len(receives[next_stage]):
                    raise TraceError(
                        f"stage {stage} has {len(sends[stage])} {send} for {len(receives[next_stage])} {receive} "
                        f"of stage {next_stage}; rows are missing"
                    )
                for pair in zip(sends[stage], receives[next_stage], strict=True):
                    self._graph.start_together(pair)
        for stage in range(stages):
            self._order_first_backward(stage)

    def _order_transfers(self, compute: str, transfer: str, stage: int, step: int) -> list[int]:
        """Order the transfers of one type and stage among themselves and with computations.

        `step` is the direction of the data: to the next stage (1) or to the previous one (-1). Returns the transfers
        that have a counterpart in an adjacent stage.
        """
        receives = transfer in (FORWARD_RECV, BACKWARD_RECV)
        direction = -step if receives else step
        computes = self._of[compute, stage]
        self._graph.add_chain(self._of[transfer, stage])
        connected = []
        for operation, computation in self._match_computations(transfer, computes, stage, direction, receives=receives):
            index = computes.index(computation)
            if not receives:
                self._graph.add_wait(operation, on=computation)
            else:
                self._graph.add_wait(computation, on=operation)
                if index > 0:
                    self._graph.add_wait(operation, on=computes[index - 1])
            if self._has_neighbor(computation, direction):
                connected.append(operation)
        return connected

    def _match_computations(
        self, transfer: str, computes: list[int], stage: int, direction: int, *, receives: bool
    ) -> list[tuple[int, int]]:
        """Return pairs of a transfer and the computation that it serves.

        Profilers record either the transfers that take place, or one for every computation. The latter include the ends
        of the model, which have no neighbor. (There the very first receive or the last send may be missing, and some
        may be recorded before or after all computations, although they are never launched.)
        """
        transfers = self._of[transfer, stage]
        needing = [node for node in computes if self._has_neighbor(node, direction)]
        if len(transfers) == len(needing):
            return list(zip(transfers, needing, strict=True))
        if receives:
            limit = max(self._starts[node] for node in computes) + MAX_CLOCK_DIFFERENCE_S
            launched = [node for node in transfers if self._starts[node] <= limit]
        else:
            limit = min(self._ends[node] for node in computes) - MAX_CLOCK_DIFFERENCE_S
            launched = [node for node in transfers if self._ends[node] >= limit]
        if not launched and not needing:
            return []
        if len(launched) == len(computes):
            return list(zip(launched, computes, strict=True))
        if launched and len(launched) == len(computes) - 1:
            return list(zip(launched, computes[1:] if receives else computes[:-1], strict=True))
        raise TraceError(
            f"stage {stage} has {len(transfers)} {transfer} for {len(needing)} computations that need one; "
            "rows are missing"
        )

    def _has_neighbor(self, compute: int, direction: int) -> bool:
        """Return whether the model has a chunk next to this computation's, toward its end (1) or its beginning (-1)."""
        operation = self._operations[compute]
        position = operation.chunk * self._meta.pp_size + operation.stage
        return 0 <= position + direction < self._meta.pp_size * self._meta.vpp_size

    def _order_first_backward(self, stage: int) -> None:
        """Launch the first backward transfers after the last computation but one before the first backward."""
        computes = self._list_computations(stage)
        first = next(index for index, node in enumerate(computes) if self._operations[node].type == BACKWARD)
        if first > 1:
            for name in (BACKWARD_RECV, BACKWARD_SEND):
                for transfer in self._of[name, stage][:1]:
                    self._graph.add_wait(transfer, on=computes[first - 2])

    def add_collectives(self) -> None:
        """Add operations that all participants start together."""
        stages = range(self._meta.pp_size)
        for name in (ALL_GATHER, REDUCE_SCATTER, SEPARATE_ALL_REDUCE):
            for stage in stages:
                for node in self._of[name, stage]:
                    self._graph.start_together([node], across=(0,))
        for name, across, ends in ((EMBEDDING, (), sorted({0, self._meta.pp_size - 1})), (CLIP, (0,), list(stages))):
            members = [self._of[name, stage] for stage in ends]
            if len({len(nodes) for nodes in members}) > 1:
                raise TraceError(f"stages {ends} have different numbers of {name}; rows are missing")
            for group in zip(*members, strict=True):
                self._graph.start_together(group, across=across)

    def _list_computations(self, stage: int) -> list[int]:
        return self._sort_by_start([*self._of[FORWARD, stage], *self._of[BACKWARD, stage]])

    def _sort_by_start(self, nodes: list[int]) -> list[int]:
        return sorted(
            nodes, key=lambda node: (self._starts[node], self._operations[node].index, self._operations[node].type)
        )

    def _select_chunk(self, nodes: list[int], chunk: int) -> list[int]:
        """Return the nodes of one model chunk."""
        chosen = [node for node in nodes if self._operations[node].chunk == chunk]
        if not chosen:
            raise TraceError(
                f"no computation of stage {self._operations[nodes[0]].stage} belongs to model chunk mc {chunk}"
            )
        return chosen

    def _is_overlapped(self) -> bool:
        """Return whether gradients are reduced while backwards still run. Such a job has separate all-reduces."""
        return any(self._of[SEPARATE_ALL_REDUCE, stage] for stage in range(self._meta.pp_size))
