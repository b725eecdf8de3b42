"""Converts the rows of a trace to dense arrays: one cell for each operation, data-parallel rank and step.

Steps with incomplete, duplicate or damaged rows are left out and counted, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import BACKWARD, FORWARD, MAX_DURATION_S, OPERATION_TYPES, JobTrace, TraceError
from pacekeeper_analysis.whatif.window import SkippedStep

Mask = NDArray[np.bool_]
Numbers = NDArray[np.int64]
Rows = NDArray[np.intp] | slice
"""Some rows of a trace. All rows are a slice, so that a valid trace of ten million rows needs no copies."""
ALL_ROWS = slice(None)
MAX_OUT_OF_RANGE_ROWS_SHARE = 0.05
"""Share of the rows beyond a size in the metadata above which the metadata is of another trace."""


class DenseRows:
    """The complete steps of a trace as arrays [operation, dp_rank, step].

    Operations are numbered by stage, type and seq_id. `included` returns whether a (type, stage) belongs to the graph.
    Raises TraceError if the rows contradict the metadata, or if no step is complete.
    """

    def __init__(self, trace: JobTrace, included: Callable[[str, int], bool]) -> None:
        _check_metadata(trace)
        numbers, self._step_of = _number_values(trace.step)
        self._trace, self._reasons = trace, dict[int, str]()
        kinds = np.array([included(name, stage) for stage in range(trace.metadata.pp_size) for name in OPERATION_TYPES])

        valid = self._select_sound_rows()
        kind_of = trace.stage[valid].astype(np.int32) * len(OPERATION_TYPES) + trace.optype[valid]
        usual = np.where(kinds, self._count_usual_operations(valid, kind_of, len(kinds), len(numbers)), 0)
        is_included = kinds[kind_of]
        rows, node_of = self._number_operations(
            _select_rows(valid, is_included), kind_of[_get_selector(is_included)], usual
        )
        self._shape = (int(usual.sum()), trace.metadata.dp_size, len(numbers))
        cells = self._compute_cells(rows, node_of, self._step_of)
        self._find_gaps(cells)

        complete = np.array([step not in self._reasons for step in range(len(numbers))])
        self.skipped = tuple(SkippedStep(int(numbers[step]), self._reasons[step]) for step in sorted(self._reasons))
        if not complete.any():
            raise TraceError(f"no step of the trace is complete; step {self.skipped[0].step}: {self.skipped[0].reason}")
        self.steps = tuple(int(number) for number in numbers[complete])
        if not complete.all():
            selected = complete[self._step_of[rows]]
            rows, node_of = _select_rows(rows, selected), node_of[_get_selector(selected)]
            self._shape = (*self._shape[:2], len(self.steps))
            cells = self._compute_cells(rows, node_of, (np.cumsum(complete) - 1).astype(np.int32)[self._step_of])
        self._rows, self._cells = rows, cells
        first = np.empty(self._shape[0], dtype=np.intp)  # row of each operation on dp_rank 0 in the first step
        in_first_step = cells % (self._shape[1] * self._shape[2]) == 0
        first[node_of[in_first_step]] = (
            np.flatnonzero(in_first_step) if isinstance(rows, slice) else rows[in_first_step]
        )
        self.operations = _build_operations(trace, first)

    def fill_column(self, column: NDArray[np.floating]) -> Array:
        """Return a column's values by cell [operation, dp_rank, step]."""
        dense = np.empty(int(np.prod(self._shape)))
        dense[self._cells] = column[self._rows]
        return dense.reshape(self._shape)

    def _select_sound_rows(self) -> Rows:
        """Return rows without impossible values. The steps of the others are left out, with a reason."""
        trace, meta = self._trace, self._trace.metadata
        checks: tuple[tuple[bool, Callable[[], Mask], str], ...] = (
            (
                _are_within(trace.start_ts) and _are_within(trace.duration),
                lambda: ~np.isfinite(trace.start_ts) | ~np.isfinite(trace.duration),
                "start_ts or duration is not a number",
            ),
            (_are_within(trace.duration, 0), lambda: trace.duration < 0, "duration is negative"),
            (
                _are_within(trace.duration, maximum=MAX_DURATION_S),
                lambda: trace.duration > MAX_DURATION_S,
                "duration is longer than a day",
            ),
            *(
                (
                    _are_within(column, low, size - 1),
                    partial(_find_outside, column, low, size),
                    f"{name} is outside of {key} {size}",
                )
                for name, column, low, key, size in (
                    ("dp_rank", trace.dp_rank, 0, "dp_size", meta.dp_size),
                    ("stage", trace.stage, 0, "pp_size", meta.pp_size),
                    ("mc", trace.mc, -1, "vpp_size", meta.vpp_size),
                )
            ),
        )
        invalid: Mask | None = None
        for holds, find_invalid, reason in checks:
            if not holds:
                mask = find_invalid()
                invalid = mask if invalid is None else invalid | mask
                self._leave_out(np.flatnonzero(mask), reason)
        if invalid is None and trace.start_ts.max() - trace.start_ts.min() <= MAX_DURATION_S:
            return ALL_ROWS
        invalid = np.zeros(len(trace), dtype=bool) if invalid is None else invalid
        valid = np.flatnonzero(~invalid)
        earliest = np.full(int(self._step_of.max()) + 1, np.inf)
        np.minimum.at(earliest, self._step_of[valid], trace.start_ts[valid].astype(np.float64))
        late = valid[trace.start_ts[valid] - earliest[self._step_of[valid]] > MAX_DURATION_S]
        self._leave_out(late, "starts more than a day after the step's first operation")
        invalid[late] = True
        return np.flatnonzero(~invalid)

    def _count_usual_operations(self, rows: Rows, kind_of: NDArray[np.int32], kinds: int, steps: int) -> Numbers:
        """Return the usual number of operations of each kind (stage and type) in a step of a rank.

        Steps that differ are left out. `kind_of` is the kind of each row.
        """
        ranks = self._trace.metadata.dp_size
        cells = self._step_of[rows].astype(np.intp)
        cells *= ranks
        cells += self._trace.dp_rank[rows]
        cells *= kinds
        cells += kind_of
        counts = np.bincount(cells, minlength=steps * ranks * kinds).reshape(steps, ranks, kinds)
        usual: Numbers = np.median(counts.reshape(-1, kinds), axis=0).astype(np.int64)
        for step in np.flatnonzero((counts != usual).any(axis=(1, 2))):
            self._reasons.setdefault(int(step), _explain_count(counts[step], usual))
        return usual

    def _number_operations(
        self, rows: Rows, kind_of: NDArray[np.int32], usual: Numbers
    ) -> tuple[Rows, NDArray[np.int32]]:
        """Return the rows with a valid seq_id, and the operation number of each."""
        first = np.concatenate(([0], np.cumsum(usual)[:-1])).astype(np.int32)
        seq = self._trace.seq_id[rows]
        in_order = seq >= 0
        in_order &= seq < usual.astype(np.int32)[kind_of]
        if not in_order.all():
            self._leave_out(np.arange(len(self._trace))[rows][~in_order], "seq_id is out of order")
        selector = _get_selector(in_order)
        return _select_rows(rows, in_order), (first[kind_of[selector]] + seq[selector].astype(np.int32)).astype(
            np.int32
        )

    def _compute_cells(self, rows: Rows, node_of: NDArray[np.int32], step_of: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the position of each row's values in a dense array."""
        cells = node_of.astype(np.intp)
        cells *= self._shape[1]
        cells += self._trace.dp_rank[rows]
        cells *= self._shape[2]
        cells += step_of[rows]
        return cells

    def _find_gaps(self, cells: NDArray[np.intp]) -> None:
        """Leave out steps in which an operation of a rank has no row."""
        seen = np.zeros(int(np.prod(self._shape)), dtype=bool)
        seen[cells] = True
        for step in np.flatnonzero(~seen.reshape(self._shape).all(axis=(0, 1))):
            self._reasons.setdefault(int(step), "an operation is recorded twice, and another one is missing")

    def _leave_out(self, rows: NDArray[np.intp], reason: str) -> None:
        """Leave out the steps of these rows. The reason contains the first row of each."""
        steps, first = np.unique(self._step_of[rows], return_index=True)
        for step, row in zip(steps, rows[first], strict=True):
            self._reasons.setdefault(int(step), f"{self._trace.describe_row(row)}: {reason}")


def _number_values(values: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
    """Return the distinct values in order, and the index of each value among them.

    Steps are usually contiguous, and then need not be sorted.
    """
    low, high = int(values.min()), int(values.max())
    if high - low >= max(1024, len(values)):
        distinct, positions = np.unique(values, return_inverse=True)
        return distinct, positions.astype(np.int32)
    present = np.zeros(high - low + 1, dtype=bool)
    present[values - low] = True
    position_of = (np.cumsum(present) - 1).astype(np.int32)
    return (np.flatnonzero(present) + low).astype(values.dtype), position_of[values - low]


def _are_within(column: NDArray[np.generic], minimum: float = -np.inf, maximum: float = np.inf) -> bool:
    """Return whether all values are finite numbers within the limits."""
    low, high = float(column.min()), float(column.max())
    return bool(np.isfinite(low) and np.isfinite(high) and minimum <= low and high <= maximum)


def _find_outside(column: NDArray[np.integer], minimum: int, size: int) -> Mask:
    return np.asarray((column < minimum) | (column >= size))


def _select_rows(rows: Rows, chosen: Mask) -> Rows:
    """Return the chosen rows."""
    if chosen.all():
        return rows
    return np.flatnonzero(chosen) if isinstance(rows, slice) else rows[chosen]


def _get_selector(chosen: Mask) -> Mask | slice:
    """Return an index that selects the chosen rows, without a copy if it is all of them."""
    return ALL_ROWS if chosen.all() else chosen


def _build_operations(trace: JobTrace, rows: NDArray[np.intp]) -> tuple[Operation, ...]:
    """Return the operation of each row."""
    columns = (trace.optype, trace.stage, trace.seq_id, np.maximum(trace.mc, 0), trace.mb_id)
    table = zip(*(column[rows].tolist() for column in columns), strict=True)
    return tuple(
        Operation(OPERATION_TYPES[optype], stage, seq, chunk, mb if mb >= 0 else None)
        for optype, stage, seq, chunk, mb in table
    )


def _check_metadata(trace: JobTrace) -> None:
    """Check that every rank, stage and chunk of the metadata is recorded, and that most rows have no other."""
    meta = trace.metadata
    compute = np.isin(trace.optype, [OPERATION_TYPES.index(FORWARD), OPERATION_TYPES.index(BACKWARD)])
    for name, column, size, key in (
        ("dp_rank", trace.dp_rank, meta.dp_size, "dp_size"),
        ("stage", trace.stage, meta.pp_size, "pp_size"),
        ("model chunk (mc)", np.maximum(trace.mc[compute], 0), meta.vpp_size, "vpp_size"),
    ):
        in_range = column if _are_within(column, 0, size - 1) else column[(column >= 0) & (column < size)]
        recorded = np.bincount(in_range, minlength=size)
        if (recorded == 0).any():
            raise TraceError(
                f"the metadata has {key} {size}, but the trace has no row of {name} {int(np.argmin(recorded))}; "
                "give the metadata of this trace"
            )
        too_high = column >= size if len(in_range) < len(column) else np.zeros(1, dtype=bool)
        if too_high.mean() > MAX_OUT_OF_RANGE_ROWS_SHARE:
            raise TraceError(
                f"the metadata has {key} {size}, but {int(too_high.sum())} rows are of a higher {name}; "
                "give the metadata of this trace"
            )


def _explain_count(counts: NDArray[np.int64], usual: NDArray[np.int64]) -> str:
    """Explain why a step's counts [dp_rank, stage and type] differ from the usual ones [stage and type]."""
    dp_rank, kind = (int(index) for index in np.argwhere(counts != usual)[0])
    stage, type_index = divmod(kind, len(OPERATION_TYPES))
    return (
        f"dp_rank {dp_rank}, stage {stage} has {counts[dp_rank, kind]} operations {OPERATION_TYPES[type_index]}; "
        f"the other steps and ranks have {usual[kind]}"
    )
