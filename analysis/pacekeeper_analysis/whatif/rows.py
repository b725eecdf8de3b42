"""From the rows of a trace to dense arrays: one cell for each operation, data-parallel rank and step.

Steps whose rows are incomplete, doubled or damaged are left out and counted, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import BACKWARD, FORWARD, LONGEST_S, TYPES, Trace, TraceError
from pacekeeper_analysis.whatif.window import Operation, Skipped

Mask = NDArray[np.bool_]


class DenseRows:
    """The complete steps of a trace as arrays [operation, dp_rank, step].

    Operations are numbered by stage, type and seq_id. `included` says which (type, stage) belong to the graph.
    Raises TraceError when the rows contradict the metadata, or no step is complete.
    """

    def __init__(self, trace: Trace, included: Callable[[str, int], bool]) -> None:
        meta = trace.metadata
        _check_metadata(trace)
        numbers, step_of = np.unique(trace.step, return_inverse=True)
        reasons: dict[int, str] = {}
        bad = _damaged_rows(trace, step_of, reasons)
        kind_of = trace.stage.astype(np.int64) * len(TYPES) + trace.optype
        kinds = meta.pp_size * len(TYPES)
        rows = np.flatnonzero(~bad)
        cells = (step_of[rows] * meta.dp_size + trace.dp_rank[rows]) * kinds + kind_of[rows]
        counts = np.bincount(cells, minlength=len(numbers) * meta.dp_size * kinds)
        counts = counts.reshape(len(numbers), meta.dp_size, kinds)
        usual = np.median(counts.reshape(-1, kinds), axis=0).astype(np.int64)
        for step in np.flatnonzero((counts != usual).any(axis=(1, 2))):
            reasons.setdefault(int(step), _count_reason(counts[step], usual))

        in_graph = np.array([included(name, stage) for stage in range(meta.pp_size) for name in TYPES])
        usual = np.where(in_graph, usual, 0)
        first = np.concatenate(([0], np.cumsum(usual)[:-1]))
        rows = rows[in_graph[kind_of[rows]]]
        node_of = first[kind_of[rows]] + trace.seq_id[rows]
        astray = (trace.seq_id[rows] < 0) | (trace.seq_id[rows] >= usual[kind_of[rows]])
        _note(reasons, trace, step_of, rows[astray], "seq_id is out of order")
        rows, node_of = rows[~astray], node_of[~astray]
        size = int(usual.sum())
        seen = np.zeros((len(numbers), meta.dp_size, size), dtype=bool)
        seen[step_of[rows], trace.dp_rank[rows], node_of] = True
        for step in np.flatnonzero(~seen.all(axis=(1, 2))):
            reasons.setdefault(int(step), "an operation is recorded twice, another one is missing")

        kept = np.array([step not in reasons for step in range(len(numbers))])
        self.skipped = tuple(Skipped(int(numbers[step]), reasons[step]) for step in sorted(reasons))
        if not kept.any():
            raise TraceError(f"no step of the trace is complete; step {self.skipped[0].step}: {self.skipped[0].reason}")
        self.steps = tuple(int(number) for number in numbers[kept])
        self._shape = (size, meta.dp_size, len(self.steps))
        use = kept[step_of[rows]]
        self._rows = rows[use]
        place = np.cumsum(kept) - 1
        self._cells = (node_of[use] * meta.dp_size + trace.dp_rank[self._rows]) * len(self.steps) + place[
            step_of[self._rows]
        ]

        model = self._rows[(place[step_of[self._rows]] == 0) & (trace.dp_rank[self._rows] == 0)]
        self.model_rows = model[np.argsort(node_of[use][np.isin(self._rows, model)])]
        """Rows of dp_rank 0 in the first complete step, by operation: the graph is read off them."""
        self.operations = tuple(
            Operation(
                TYPES[trace.optype[row]],
                int(trace.stage[row]),
                int(trace.seq_id[row]),
                chunk=max(int(trace.mc[row]), 0),
                microbatch=int(trace.mb_id[row]),
            )
            for row in self.model_rows
        )

    def fill(self, column: NDArray[np.floating]) -> Array:
        """A column's values by cell [operation, dp_rank, step]."""
        dense = np.empty(int(np.prod(self._shape)))
        dense[self._cells] = column[self._rows]
        return dense.reshape(self._shape)


def _check_metadata(trace: Trace) -> None:
    """Every rank, stage and chunk that the metadata speaks of is recorded, and in most rows no other."""
    meta = trace.metadata
    compute = np.isin(trace.optype, [TYPES.index(FORWARD), TYPES.index(BACKWARD)])
    for name, column, size, key in (
        ("dp_rank", trace.dp_rank, meta.dp_size, "dp_size"),
        ("stage", trace.stage, meta.pp_size, "pp_size"),
        ("model chunk (mc)", np.maximum(trace.mc[compute], 0), meta.vpp_size, "vpp_size"),
    ):
        recorded = np.bincount(column[(column >= 0) & (column < size)], minlength=size)
        if (recorded == 0).any():
            raise TraceError(
                f"metadata says {key} {size}, but the trace has no row of {name} {int(np.argmin(recorded))}; "
                f"give the metadata of this trace"
            )
        beyond = column >= size
        if beyond.mean() > 0.05:
            raise TraceError(
                f"metadata says {key} {size}, but {int(beyond.sum())} rows are of a higher {name}; "
                "give the metadata of this trace"
            )


def _damaged_rows(trace: Trace, step_of: NDArray[np.intp], reasons: dict[int, str]) -> Mask:
    """Rows with impossible values; a reason is noted for the step of each."""
    meta = trace.metadata
    checks: tuple[tuple[Mask, str], ...] = (
        (~np.isfinite(trace.start_ts) | ~np.isfinite(trace.duration), "start_ts or duration is not a number"),
        (trace.duration < 0, "duration is negative"),
        (trace.duration > LONGEST_S, "duration is longer than a day"),
        ((trace.dp_rank < 0) | (trace.dp_rank >= meta.dp_size), f"dp_rank is outside of dp_size {meta.dp_size}"),
        ((trace.stage < 0) | (trace.stage >= meta.pp_size), f"stage is outside of pp_size {meta.pp_size}"),
        ((trace.mc < -1) | (trace.mc >= meta.vpp_size), f"mc is outside of vpp_size {meta.vpp_size}"),
    )
    bad = np.zeros(len(trace), dtype=bool)
    for mask, reason in checks:
        bad |= mask
        _note(reasons, trace, step_of, np.flatnonzero(mask), reason)
    _check_starts(trace, step_of, bad, reasons)
    return bad


def _check_starts(trace: Trace, step_of: NDArray[np.intp], bad: Mask, reasons: dict[int, str]) -> None:
    """No operation starts more than a day after the first of its step."""
    earliest = np.full(int(step_of.max()) + 1, np.inf)
    np.minimum.at(earliest, step_of[~bad], trace.start_ts[~bad].astype(np.float64))
    late = ~bad & (trace.start_ts - earliest[step_of] > LONGEST_S)
    _note(reasons, trace, step_of, np.flatnonzero(late), "starts more than a day after the step's first operation")
    bad |= late


def _note(
    reasons: dict[int, str], trace: Trace, step_of: NDArray[np.intp], rows: NDArray[np.intp], reason: str
) -> None:
    """Notes why the steps of these rows are left out, by the first such row of each."""
    steps, first = np.unique(step_of[rows], return_index=True)
    for step, row in zip(steps, rows[first], strict=True):
        reasons.setdefault(int(step), f"{trace.where(row)}: {reason}")


def _count_reason(counts: NDArray[np.int64], usual: NDArray[np.int64]) -> str:
    """What is wrong with a step whose counts [dp_rank, stage and type] are not the usual ones [stage and type]."""
    dp_rank, kind = (int(index) for index in np.argwhere(counts != usual)[0])
    stage, name = divmod(kind, len(TYPES))
    return (
        f"dp_rank {dp_rank}, stage {stage} has {counts[dp_rank, kind]} operations {TYPES[name]}; "
        f"the other steps and ranks have {usual[kind]}"
    )
