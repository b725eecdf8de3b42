"""Reduces samples of the Python stack and spans of known work to the pattern of a window. It runs on the rank.

Work recorded from beginning to end (kernels, waits for peers, the loader, collections) is summed exactly. The rest of
the time belongs to Python, and is distributed by the samples within it. An instant has one owner: the first in the
order of `TimeOwner` that is active in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..protocol.requests import SourceNaming
from .pattern import (
    MAX_FUNCTION_NAME_LENGTH,
    MAX_PATTERN_FUNCTIONS,
    MAX_PATTERN_NAMES,
    MAX_PATTERN_STACKS,
    MAX_RANK_PATTERN_BYTES,
    MAX_STACK_DEPTH,
    NOT_MEASURED,
    ProcessSetup,
    RankPattern,
    TimeOwner,
    encode_compact_json,
)

MAX_FUNCTION_BYTES = MAX_RANK_PATTERN_BYTES * 5 // 8
"""Upper limit of a pattern before its stacks, which get the rest."""

MIN_KEPT_FUNCTIONS = 8
"""Number of functions that a pattern keeps, however long their names are."""
MIN_FUNCTION_SHARE = 0.001
"""Share of the window below which functions are combined as `OTHER_FUNCTIONS`."""
OTHER_FUNCTIONS = "(others)"
UNSAMPLED_LOADER = "(loader)"
"""Name of the loader's time that contains no sample."""
MAX_SAMPLE_GAP_MEDIANS = 5.0
"""Upper limit of the time that one sample stands for, in medians of the interval."""
MIN_CORRELATION_STEPS = 8
"""Smallest number of steps for a correlation."""


@dataclass(frozen=True)
class StackSamples:
    """Samples of the training thread's stack, in order of time."""

    taken_ns: NDArray[np.int64]
    ran_ns: NDArray[np.int64]
    """CPU time of the thread until then. All 0: not known."""
    stack_index: NDArray[np.int64]
    """Position in `stacks`."""
    stacks: Sequence[tuple[str, ...]]
    """Names of the frames, outermost first. None is empty."""

    @classmethod
    def from_lists(cls, samples: Sequence[tuple[int, int, int]], stacks: Sequence[tuple[str, ...]]) -> Self:
        """Build them. `samples`: when each was taken, the CPU time until then (both ns), and its stack."""
        columns = np.array(samples, np.int64).reshape(-1, 3)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], stacks)


@dataclass(frozen=True)
class KnownSpans:
    """Intervals of known work, in any order. They may overlap."""

    owner: NDArray[np.uint8]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    name: NDArray[np.int64]
    """Position in `names`. Not used for data spans: the samples within them give their names."""
    names: Sequence[str]


@dataclass(frozen=True)
class WindowRecording:
    """A rank's raw data of a window."""

    rank: int
    round: int
    first_step: int
    step_seconds: NDArray[np.float64]  # of each step, without other phases
    own_seconds: NDArray[np.float64]  # own work in each step
    lengths: NDArray[np.float64]  # sum over each step's samples; (): not known
    samples: int  # of this rank per step
    stack_samples: StackSamples
    spans: KnownSpans
    mode: str = ""
    sources: SourceNaming = SourceNaming.HASH
    setup: ProcessSetup = field(default_factory=ProcessSetup)


def reduce_window(window: WindowRecording) -> RankPattern:
    """Return the pattern, which takes at most MAX_RANK_PATTERN_BYTES. Raises ValueError for a window without steps."""
    if not len(window.step_seconds):
        raise ValueError("a window without a step has no pattern")
    rows = _compute_function_rows(window)
    head = RankPattern(
        rank=window.rank,
        round=window.round,
        first_step=window.first_step,
        steps=len(window.step_seconds),
        seconds=round(float(window.step_seconds.sum()), 6),
        stack_samples=len(window.stack_samples.taken_ns),
        mode=window.mode,
        samples=window.samples or None,
        length=round(float(window.lengths.mean()), 3) if len(window.lengths) else None,
        follows_lengths=_correlate_lengths(window.own_seconds, window.lengths),
        sources=window.sources,
        setup=window.setup,
    )
    max_functions = MAX_PATTERN_FUNCTIONS - len(TimeOwner)
    while (
        _measure_size(pattern := _add_functions(head, rows, max_functions)) > MAX_FUNCTION_BYTES
        and max_functions > MIN_KEPT_FUNCTIONS
    ):
        max_functions = max_functions * 3 // 4
    return _add_stacks(pattern, window.stack_samples)


_FunctionRow = tuple[TimeOwner, str, float, float, float, float]
"""Owner, name, share, error, use, spread."""


def _compute_function_rows(window: WindowRecording) -> list[_FunctionRow]:
    """Return the rows, the largest share first."""
    total = float(window.step_seconds.sum())
    rows, covered_time = _sum_known_spans(window.spans, total)
    weights, ran = _weigh_samples(window.stack_samples)
    sample_owners = covered_time.owners(window.stack_samples.taken_ns)
    data_share = covered_time.seconds(TimeOwner.DATA) / total
    covered_share = sum(share for _, _, share, *_ in rows) + data_share
    if covered_share > 1.0:  # steps end by the device's clock, loading and waits by the host's
        rows = [
            (owner, name, share / covered_share, error, use, spread) for owner, name, share, error, use, spread in rows
        ]
        data_share /= covered_share
    for owner, share in ((TimeOwner.DATA, data_share), (TimeOwner.PYTHON, max(0.0, 1.0 - covered_share))):
        rows += _share_out_samples(owner, share, sample_owners == owner, weights, ran, window.stack_samples)
    return sorted(rows, key=lambda row: -row[2])


def _add_functions(head: RankPattern, rows: Sequence[_FunctionRow], max_functions: int) -> RankPattern:
    """Add at most `max_functions` functions. The others are combined by owner."""
    retained = [row for row in rows[:max_functions] if row[2] >= MIN_FUNCTION_SHARE]
    remaining = rows[len(retained) :]
    for owner in TimeOwner:
        share = sum(row[2] for row in remaining if row[0] is owner)
        if share > 0:
            retained.append((owner, OTHER_FUNCTIONS, share, 0.0, NOT_MEASURED, NOT_MEASURED))
    names = _NameTable()
    return replace(
        head,
        functions=np.array([names.position(name) for _, name, *_ in retained], np.uint16),
        names=names.all,
        owners=np.array([owner for owner, *_ in retained], np.uint8),
        statistics=np.array([statistics for _, _, *statistics in retained], np.float32).reshape(-1, 4),
    )


class _CoveredTime:
    """The time of each owner, after the owners before it have had theirs."""

    def __init__(self) -> None:
        self._starts = self._ends = np.zeros(0, np.int64)
        self._by_owner: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], float]] = {}

    def take(self, owner: TimeOwner, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds that each span has exclusively. `starts` must be ascending."""
        latest_end = np.maximum.accumulate(np.concatenate(([np.iinfo(np.int64).min], ends)))[:-1]
        starts = np.minimum(np.maximum(starts, latest_end), ends)  # the earlier of overlapping spans owns the instant
        exclusive = (ends - starts).astype(np.float64) - (self._sum_taken_before(ends) - self._sum_taken_before(starts))
        nonempty = ends > starts  # spans within an earlier one get nothing; the others are disjoint and ascending
        self._by_owner[owner] = (starts[nonempty], ends[nonempty], float(exclusive.sum()) * 1e-9)
        self._starts, self._ends = _merge_spans(
            np.concatenate((self._starts, starts)), np.concatenate((self._ends, ends))
        )
        return exclusive * 1e-9

    def owners(self, instants: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the owners of these instants."""
        owners = np.full(len(instants), TimeOwner.PYTHON, np.uint8)
        for owner in sorted(self._by_owner, reverse=True):
            starts, ends, _ = self._by_owner[owner]
            if len(starts):
                index = np.maximum(np.searchsorted(starts, instants, side="right") - 1, 0)
                owners[(starts[index] <= instants) & (instants < ends[index])] = owner
        return owners

    def seconds(self, owner: TimeOwner) -> float:
        return self._by_owner[owner][2]

    def _sum_taken_before(self, instants: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the nanoseconds before each instant that have an owner."""
        if not len(self._starts):
            return np.zeros(len(instants))
        origin = self._starts[0]
        edges = np.stack((self._starts, self._ends), axis=1).ravel() - origin
        taken = np.concatenate(([0], np.cumsum(self._ends - self._starts)))
        heights = np.stack((taken[:-1], taken[1:]), axis=1).ravel()
        before: NDArray[np.float64] = np.interp(instants - origin, edges, heights)
        return before


def _sum_known_spans(spans: KnownSpans, total: float) -> tuple[list[_FunctionRow], _CoveredTime]:
    """Return rows for the functions that spans name, and the time left for samples: the loader's and Python's."""
    covered_time, rows = _CoveredTime(), list[_FunctionRow]()
    for owner in (owner for owner in TimeOwner if owner is not TimeOwner.PYTHON):
        selected = np.flatnonzero((spans.owner == owner) & (spans.end_ns > spans.start_ns))
        selected = selected[np.argsort(spans.start_ns[selected], kind="stable")]
        exclusive = covered_time.take(owner, spans.start_ns[selected], spans.end_ns[selected])
        if owner is TimeOwner.DATA:
            continue
        seconds = np.bincount(spans.name[selected], exclusive, minlength=len(spans.names))
        for name in np.flatnonzero(seconds > 0).tolist():
            rows.append((owner, spans.names[name], float(seconds[name]) / total, 0.0, NOT_MEASURED, NOT_MEASURED))
    return rows, covered_time


def _weigh_samples(samples: StackSamples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return for each sample the seconds it stands for, and the share of them that the thread ran.

    NaN means not known.
    """
    if len(samples.taken_ns) <= 1:
        return np.ones(len(samples.taken_ns)), np.full(len(samples.taken_ns), np.nan)
    gaps = np.diff(samples.taken_ns).astype(np.float64)
    gaps = np.append(gaps, np.median(gaps))
    with np.errstate(divide="ignore", invalid="ignore"):
        ran = np.append(np.diff(samples.ran_ns), np.nan) / gaps
    if not samples.ran_ns.any():
        ran[:] = np.nan
    return np.minimum(gaps, MAX_SAMPLE_GAP_MEDIANS * np.median(gaps)) * 1e-9, np.clip(ran, 0.0, 1.0)


def _share_out_samples(
    owner: TimeOwner,
    share: float,
    selected: NDArray[np.bool_],
    weights: NDArray[np.float64],
    ran: NDArray[np.float64],
    samples: StackSamples,
) -> list[_FunctionRow]:
    """Distribute an owner's share over the innermost functions of the samples within its time."""
    if share <= 0:
        return []
    total = float(weights[selected].sum())
    if total <= 0:
        return [
            (
                owner,
                UNSAMPLED_LOADER if owner is TimeOwner.DATA else OTHER_FUNCTIONS,
                share,
                share,
                NOT_MEASURED,
                NOT_MEASURED,
            )
        ]
    count = total**2 / float((weights[selected] ** 2).sum())
    leaves = sorted({stack[-1] for stack in samples.stacks})
    position = {name: i for i, name in enumerate(leaves)}
    leaf = np.array([position[stack[-1]] for stack in samples.stacks], np.int64)[samples.stack_index]
    rows = list[_FunctionRow]()
    for name in np.unique(leaf[selected]).tolist():
        chosen = selected & (leaf == name)
        fraction = float(weights[chosen].sum()) / total
        error = share * float(np.sqrt(max(fraction * (1 - fraction), 1.0 / count) / count))
        rows.append(
            (owner, leaves[name], share * fraction, min(error, 1.0), *_compute_use(weights[chosen], ran[chosen]))
        )
    return rows


def _compute_use(weights: NDArray[np.float64], ran: NDArray[np.float64]) -> tuple[float, float]:
    known = ~np.isnan(ran)
    if not known.any() or not weights[known].sum():
        return NOT_MEASURED, NOT_MEASURED
    mean = float(np.average(ran[known], weights=weights[known]))
    return mean, float(np.sqrt(np.average((ran[known] - mean) ** 2, weights=weights[known])))


def _merge_spans(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge overlapping spans. The result is in order."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
    begins = np.ones(len(starts), bool)
    begins[1:] = starts[1:] > ends[:-1]
    first = np.flatnonzero(begins)
    return starts[first], ends[np.append(first[1:], len(starts)) - 1] if len(first) else ends


def _correlate_lengths(own: NDArray[np.float64], lengths: NDArray[np.float64]) -> float | None:
    """Return the correlation of own work with lengths; None: too few steps, or all alike."""
    if len(lengths) != len(own) or len(own) < MIN_CORRELATION_STEPS or not (np.ptp(own) and np.ptp(lengths)):
        return None
    return round(float(np.clip(np.corrcoef(own, lengths)[0, 1], -1.0, 1.0)), 3)


class _NameTable:
    """The table of names that functions and stacks refer to."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._positions = {name: i for i, name in enumerate(names)}

    def position(self, name: str) -> int:
        return self._positions.setdefault(_truncate_name(name), len(self._positions))

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self._positions)


def _truncate_name(name: str) -> str:
    """Truncate a name at the front, because its end is the most informative."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in name)
    return plain if len(plain) <= MAX_FUNCTION_NAME_LENGTH else "…" + plain[-MAX_FUNCTION_NAME_LENGTH + 1 :]


def _add_stacks(pattern: RankPattern, samples: StackSamples) -> RankPattern:
    """Add as many stacks as fit, the most frequent first."""
    counts = Counter(samples.stacks[stack][-MAX_STACK_DEPTH:] for stack in samples.stack_index.tolist())
    most_frequent = counts.most_common(MAX_PATTERN_STACKS)

    def first(count: int) -> RankPattern:
        names = _NameTable(pattern.names)
        folded = tuple((sample_count, *map(names.position, frames)) for frames, sample_count in most_frequent[:count])
        return replace(pattern, names=names.all, folded=folded)

    low, high = 0, len(most_frequent)
    while low < high:
        middle = (low + high + 1) // 2
        candidate = first(middle)
        fits = len(candidate.names) <= MAX_PATTERN_NAMES and _measure_size(candidate) <= MAX_RANK_PATTERN_BYTES
        low, high = (middle, high) if fits else (low, middle - 1)
    return first(low)


def _measure_size(pattern: RankPattern) -> int:
    return len(encode_compact_json(pattern.to_json()))
