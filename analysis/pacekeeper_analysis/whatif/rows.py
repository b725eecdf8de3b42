"""From the rows of a trace to dense arrays: one cell for each operation, data-parallel rank and step.

Steps whose rows are incomplete, doubled or damaged are left out and counted, with the reason.
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
"""Some rows of a trace; all of them as a slice, since a sound trace of ten million takes no copies then."""
ALL_ROWS = slice(None)


class DenseRows:
    """The complete steps of a trace as arrays [operation, dp_rank, step].

    Operations are numbered by stage, type and seq_id. `included` says which (type, stage) belong to the graph.
    Raises TraceError when the rows contradict the metadata, or no step is complete.
    """

    def __init__(self, trace: JobTrace, included: Callable[[str, int], bool]) -> None:
        _check_metadata(trace)
        numbers, self._step_of = _number_values(trace.step)
        self._trace, self._reasons = trace, dict[int, str]()
        kinds = np.array([included(name, stage) for stage in range(trace.metadata.pp_size) for name in OPERATION_TYPES])

        sound = self._select_sound_rows()
        kind_of = trace.stage[sound].astype(np.int32) * len(OPERATION_TYPES) + trace.optype[sound]
        usual = np.where(kinds, self._count_usual_operations(sound, kind_of, len(kinds), len(numbers)), 0)
        is_included = kinds[kind_of]
        rows, node_of = self._number_operations(_select_rows(sound, is_included), kind_of[_get_selector(is_included)], usual)
        self._shape = (int(usual.sum()), trace.metadata.dp_size, len(numbers))
        cells = self._compute_cells(rows, node_of, self._step_of)
        self._find_gaps(cells)

        kept = np.array([step not in self._reasons for step in range(len(numbers))])
        self.skipped = tuple(SkippedStep(int(numbers[step]), self._reasons[step]) for step in sorted(self._reasons))
        if not kept.any():
            raise TraceError(f"no step of the trace is complete; step {self.skipped[0].step}: {self.skipped[0].reason}")
        self.steps = tuple(int(number) for number in numbers[kept])
        if not kept.all():
            use = kept[self._step_of[rows]]
            rows, node_of = _select_rows(rows, use), node_of[_get_selector(use)]
            self._shape = (*self._shape[:2], len(self.steps))
            cells = self._compute_cells(rows, node_of, (np.cumsum(kept) - 1).astype(np.int32)[self._step_of])
        self._rows, self._cells = rows, cells
        first = np.empty(self._shape[0], dtype=np.intp)  # row of each operation on dp_rank 0 in the first step
        of_first = cells % (self._shape[1] * self._shape[2]) == 0
        first[node_of[of_first]] = np.flatnonzero(of_first) if isinstance(rows, slice) else rows[of_first]
        self.operations = _build_operations(trace, first)

    def fill_column(self, column: NDArray[np.floating]) -> Array:
        """A column's values by cell [operation, dp_rank, step]."""
        dense = np.empty(int(np.prod(self._shape)))
        dense[self._cells] = column[self._rows]
        return dense.reshape(self._shape)

    def _select_sound_rows(self) -> Rows:
        """Rows without impossible values; a reason is noted for the step of each of the others."""
        trace, meta = self._trace, self._trace.metadata
        checks: tuple[tuple[bool, Callable[[], Mask], str], ...] = (
            (
                _are_within(trace.start_ts) and _are_within(trace.duration),
                lambda: ~np.isfinite(trace.start_ts) | ~np.isfinite(trace.duration),
                "start_ts or duration is not a number",
            ),
            (_are_within(trace.duration, 0), lambda: trace.duration < 0, "duration is negative"),
            (
                _are_within(trace.duration, most=MAX_DURATION_S),
                lambda: trace.duration > MAX_DURATION_S,
                "duration is longer than a day",
            ),
            *(
                (
                    _are_within(column, least, size - 1),
                    partial(_find_outside, column, least, size),
                    f"{name} is outside of {key} {size}",
                )
                for name, column, least, key, size in (
                    ("dp_rank", trace.dp_rank, 0, "dp_size", meta.dp_size),
                    ("stage", trace.stage, 0, "pp_size", meta.pp_size),
                    ("mc", trace.mc, -1, "vpp_size", meta.vpp_size),
                )
            ),
        )
        bad: Mask | None = None
        for holds, found, reason in checks:
            if not holds:
                mask = found()
                bad = mask if bad is None else bad | mask
                self._leave_out(np.flatnonzero(mask), reason)
        if bad is None and trace.start_ts.max() - trace.start_ts.min() <= MAX_DURATION_S:
            return ALL_ROWS
        bad = np.zeros(len(trace), dtype=bool) if bad is None else bad
        sound = np.flatnonzero(~bad)
        earliest = np.full(int(self._step_of.max()) + 1, np.inf)
        np.minimum.at(earliest, self._step_of[sound], trace.start_ts[sound].astype(np.float64))
        late = sound[trace.start_ts[sound] - earliest[self._step_of[sound]] > MAX_DURATION_S]
        self._leave_out(late, "starts more than a day after the step's first operation")
        bad[late] = True
        return np.flatnonzero(~bad)

    def _count_usual_operations(self, rows: Rows, kind_of: NDArray[np.int32], kinds: int, steps: int) -> Numbers:
        """How many operations of each kind (stage and type) most steps and ranks have; the others are left out.

        kind_of: of each of the rows.
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

    def _number_operations(self, rows: Rows, kind_of: NDArray[np.int32], usual: Numbers) -> tuple[Rows, NDArray[np.int32]]:
        """The rows with a valid seq_id, and the operation's number of each."""
        first = np.concatenate(([0], np.cumsum(usual)[:-1])).astype(np.int32)
        seq = self._trace.seq_id[rows]
        in_order = seq >= 0
        in_order &= seq < usual.astype(np.int32)[kind_of]
        if not in_order.all():
            self._leave_out(np.arange(len(self._trace))[rows][~in_order], "seq_id is out of order")
        at = _get_selector(in_order)
        return _select_rows(rows, in_order), (first[kind_of[at]] + seq[at].astype(np.int32)).astype(np.int32)

    def _compute_cells(self, rows: Rows, node_of: NDArray[np.int32], step_of: NDArray[np.int32]) -> NDArray[np.intp]:
        """Where each row's values stand in a dense array."""
        cells = node_of.astype(np.intp)
        cells *= self._shape[1]
        cells += self._trace.dp_rank[rows]
        cells *= self._shape[2]
        cells += step_of[rows]
        return cells

    def _find_gaps(self, cells: NDArray[np.intp]) -> None:
        """Leaves out steps in which not every operation of every rank has a row."""
        seen = np.zeros(int(np.prod(self._shape)), dtype=bool)
        seen[cells] = True
        for step in np.flatnonzero(~seen.reshape(self._shape).all(axis=(0, 1))):
            self._reasons.setdefault(int(step), "an operation is recorded twice, another one is missing")

    def _leave_out(self, rows: NDArray[np.intp], reason: str) -> None:
        """Leaves out the steps of these rows; the first row of each is in the reason."""
        steps, first = np.unique(self._step_of[rows], return_index=True)
        for step, row in zip(steps, rows[first], strict=True):
            self._reasons.setdefault(int(step), f"{self._trace.describe_row(row)}: {reason}")


def _number_values(values: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
    """The distinct values in their order, and the place of each value among them. Steps stand close together most
    often, and need not be sorted then."""
    least, most = int(values.min()), int(values.max())
    if most - least >= max(1024, len(values)):
        distinct, places = np.unique(values, return_inverse=True)
        return distinct, places.astype(np.int32)
    there = np.zeros(most - least + 1, dtype=bool)
    there[values - least] = True
    place_of = (np.cumsum(there) - 1).astype(np.int32)
    return (np.flatnonzero(there) + least).astype(values.dtype), place_of[values - least]


def _are_within(column: NDArray[np.generic], least: float = -np.inf, most: float = np.inf) -> bool:
    """Whether all values do, and are numbers."""
    low, high = float(column.min()), float(column.max())
    return bool(np.isfinite(low) and np.isfinite(high) and least <= low and high <= most)


def _find_outside(column: NDArray[np.integer], least: int, size: int) -> Mask:
    return np.asarray((column < least) | (column >= size))


def _select_rows(rows: Rows, chosen: Mask) -> Rows:
    """The chosen ones of the rows."""
    if chosen.all():
        return rows
    return np.flatnonzero(chosen) if isinstance(rows, slice) else rows[chosen]


def _get_selector(chosen: Mask) -> Mask | slice:
    """By which the chosen ones are taken from an array, without a copy where it is all of them."""
    return ALL_ROWS if chosen.all() else chosen


def _build_operations(trace: JobTrace, rows: NDArray[np.intp]) -> tuple[Operation, ...]:
    """What the operation of each row is."""
    columns = (trace.optype, trace.stage, trace.seq_id, np.maximum(trace.mc, 0), trace.mb_id)
    table = zip(*(column[rows].tolist() for column in columns), strict=True)
    return tuple(Operation(OPERATION_TYPES[optype], stage, seq, chunk, mb) for optype, stage, seq, chunk, mb in table)


def _check_metadata(trace: JobTrace) -> None:
    """Every rank, stage and chunk that the metadata speaks of is recorded, and in most rows no other."""
    meta = trace.metadata
    compute = np.isin(trace.optype, [OPERATION_TYPES.index(FORWARD), OPERATION_TYPES.index(BACKWARD)])
    for name, column, size, key in (
        ("dp_rank", trace.dp_rank, meta.dp_size, "dp_size"),
        ("stage", trace.stage, meta.pp_size, "pp_size"),
        ("model chunk (mc)", np.maximum(trace.mc[compute], 0), meta.vpp_size, "vpp_size"),
    ):
        known = column if _are_within(column, 0, size - 1) else column[(column >= 0) & (column < size)]
        recorded = np.bincount(known, minlength=size)
        if (recorded == 0).any():
            raise TraceError(
                f"metadata says {key} {size}, but the trace has no row of {name} {int(np.argmin(recorded))}; "
                "give the metadata of this trace"
            )
        beyond = column >= size if len(known) < len(column) else np.zeros(1, dtype=bool)
        if beyond.mean() > 0.05:
            raise TraceError(
                f"metadata says {key} {size}, but {int(beyond.sum())} rows are of a higher {name}; "
                "give the metadata of this trace"
            )


def _explain_count(counts: NDArray[np.int64], usual: NDArray[np.int64]) -> str:
    """What is wrong with a step whose counts [dp_rank, stage and type] are not the usual ones [stage and type]."""
    dp_rank, kind = (int(index) for index in np.argwhere(counts != usual)[0])
    stage, name = divmod(kind, len(OPERATION_TYPES))
    return (
        f"dp_rank {dp_rank}, stage {stage} has {counts[dp_rank, kind]} operations {OPERATION_TYPES[name]}; "
        f"the other steps and ranks have {usual[kind]}"
    )
