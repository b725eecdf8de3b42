"""From the rows of a trace to dense arrays: one cell for each operation, data-parallel rank and step.

Steps whose rows are incomplete, doubled or damaged are left out and counted, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import BACKWARD, FORWARD, LONGEST_S, TYPES, Trace, TraceError
from pacekeeper_analysis.whatif.window import Skipped

Mask = NDArray[np.bool_]


class DenseRows:
    """The complete steps of a trace as arrays [operation, dp_rank, step].

    Operations are numbered by stage, type and seq_id. `included` says which (type, stage) belong to the graph.
    Raises TraceError when the rows contradict the metadata, or no step is complete.
    """

    def __init__(self, trace: Trace, included: Callable[[str, int], bool]) -> None:
        _check_metadata(trace)
        numbers, self._step_of = np.unique(trace.step, return_inverse=True)
        self._trace, self._reasons = trace, dict[int, str]()
        kind_of = trace.stage.astype(np.int64) * len(TYPES) + trace.optype
        kinds = [included(name, stage) for stage in range(trace.metadata.pp_size) for name in TYPES]

        sound = np.flatnonzero(~self._damaged())
        usual = np.where(kinds, self._usual_counts(sound, kind_of, len(kinds), len(numbers)), 0)
        rows, node_of = self._number(sound[np.array(kinds)[kind_of[sound]]], kind_of, usual)
        self._find_gaps(rows, node_of, int(usual.sum()), len(numbers))

        kept = np.array([step not in self._reasons for step in range(len(numbers))])
        self.skipped = tuple(Skipped(int(numbers[step]), self._reasons[step]) for step in sorted(self._reasons))
        if not kept.any():
            raise TraceError(f"no step of the trace is complete; step {self.skipped[0].step}: {self.skipped[0].reason}")
        self.steps = tuple(int(number) for number in numbers[kept])
        use = kept[self._step_of[rows]]
        self._rows, node_of = rows[use], node_of[use]
        step = (np.cumsum(kept) - 1)[self._step_of[self._rows]]
        self._shape = (int(usual.sum()), trace.metadata.dp_size, len(self.steps))
        self._cells = np.ravel_multi_index((node_of, trace.dp_rank[self._rows], step), self._shape)
        first = (step == 0) & (trace.dp_rank[self._rows] == 0)
        self.operations = _operations(trace, self._rows[first][np.argsort(node_of[first])])

    def fill(self, column: NDArray[np.floating]) -> Array:
        """A column's values by cell [operation, dp_rank, step]."""
        dense = np.empty(int(np.prod(self._shape)))
        dense[self._cells] = column[self._rows]
        return dense.reshape(self._shape)

    def _damaged(self) -> Mask:
        """Rows with impossible values; a reason is noted for the step of each."""
        trace, meta = self._trace, self._trace.metadata
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
            self._leave_out(np.flatnonzero(mask), reason)
        sound = np.flatnonzero(~bad)
        earliest = np.full(int(self._step_of.max()) + 1, np.inf)
        np.minimum.at(earliest, self._step_of[sound], trace.start_ts[sound].astype(np.float64))
        late = sound[trace.start_ts[sound] - earliest[self._step_of[sound]] > LONGEST_S]
        self._leave_out(late, "starts more than a day after the step's first operation")
        bad[late] = True
        return bad

    def _usual_counts(
        self, rows: NDArray[np.intp], kind_of: NDArray[np.int64], kinds: int, steps: int
    ) -> NDArray[np.int64]:
        """How many operations of each kind (stage and type) most steps and ranks have; the others are left out."""
        ranks = self._trace.metadata.dp_size
        cells = (self._step_of[rows] * ranks + self._trace.dp_rank[rows]) * kinds + kind_of[rows]
        counts = np.bincount(cells, minlength=steps * ranks * kinds).reshape(steps, ranks, kinds)
        usual: NDArray[np.int64] = np.median(counts.reshape(-1, kinds), axis=0).astype(np.int64)
        for step in np.flatnonzero((counts != usual).any(axis=(1, 2))):
            self._reasons.setdefault(int(step), _count_reason(counts[step], usual))
        return usual

    def _number(
        self, rows: NDArray[np.intp], kind_of: NDArray[np.int64], usual: NDArray[np.int64]
    ) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """The rows with a valid seq_id, and the operation's number of each."""
        first = np.concatenate(([0], np.cumsum(usual)[:-1]))
        seq = self._trace.seq_id[rows].astype(np.int64)
        astray = (seq < 0) | (seq >= usual[kind_of[rows]])
        self._leave_out(rows[astray], "seq_id is out of order")
        return rows[~astray], (first[kind_of[rows]] + seq)[~astray]

    def _find_gaps(self, rows: NDArray[np.intp], node_of: NDArray[np.int64], size: int, steps: int) -> None:
        """Leaves out steps in which not every operation of every rank has a row."""
        seen = np.zeros((steps, self._trace.metadata.dp_size, size), dtype=bool)
        seen[self._step_of[rows], self._trace.dp_rank[rows], node_of] = True
        for step in np.flatnonzero(~seen.all(axis=(1, 2))):
            self._reasons.setdefault(int(step), "an operation is recorded twice, another one is missing")

    def _leave_out(self, rows: NDArray[np.intp], reason: str) -> None:
        """Leaves out the steps of these rows; the first row of each is in the reason."""
        steps, first = np.unique(self._step_of[rows], return_index=True)
        for step, row in zip(steps, rows[first], strict=True):
            self._reasons.setdefault(int(step), f"{self._trace.where(row)}: {reason}")


def _operations(trace: Trace, rows: NDArray[np.intp]) -> tuple[Operation, ...]:
    """What the operation of each row is."""
    columns = (trace.optype, trace.stage, trace.seq_id, np.maximum(trace.mc, 0), trace.mb_id)
    table = zip(*(column[rows].tolist() for column in columns), strict=True)
    return tuple(Operation(TYPES[optype], stage, seq, chunk, mb) for optype, stage, seq, chunk, mb in table)


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
                "give the metadata of this trace"
            )
        beyond = column >= size
        if beyond.mean() > 0.05:
            raise TraceError(
                f"metadata says {key} {size}, but {int(beyond.sum())} rows are of a higher {name}; "
                "give the metadata of this trace"
            )


def _count_reason(counts: NDArray[np.int64], usual: NDArray[np.int64]) -> str:
    """What is wrong with a step whose counts [dp_rank, stage and type] are not the usual ones [stage and type]."""
    dp_rank, kind = (int(index) for index in np.argwhere(counts != usual)[0])
    stage, name = divmod(kind, len(TYPES))
    return (
        f"dp_rank {dp_rank}, stage {stage} has {counts[dp_rank, kind]} operations {TYPES[name]}; "
        f"the other steps and ranks have {usual[kind]}"
    )
