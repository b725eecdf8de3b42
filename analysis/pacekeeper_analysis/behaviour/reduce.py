"""On the rank: from looks at the Python stack and spans of known work to the pattern of its window.

What is recorded from beginning to end (kernels, waits for peers, the loader, collections) is summed exactly; the rest
of the time is Python's, and is shared out by the looks that fall into it. An instant has one owner: the first in the
order of `Owner` that is at work in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..plan import SourceNaming
from .pattern import (
    MAX_STACK_DEPTH,
    MAX_FUNCTION_NAME_LENGTH,
    MAX_RANK_PATTERN_BYTES,
    MAX_PATTERN_FUNCTIONS,
    MAX_PATTERN_NAMES,
    MAX_PATTERN_STACKS,
    NOT_MEASURED,
    TimeOwner,
    RankPattern,
    ProcessSetup,
    encode_compact_json,
)

MAX_FUNCTION_BYTES = MAX_RANK_PATTERN_BYTES * 5 // 8
"""Of a pattern before its stacks, which have the rest."""

MIN_FUNCTION_SHARE = 0.001
"""Functions with less of the window go together as `OTHERS`."""
OTHER_FUNCTIONS = "(others)"
UNSAMPLED_LOADER = "(loader)"
"""Time of the loader into which no look falls."""
MAX_SAMPLE_GAP_MEDIANS = 5.0
"""In medians: a look stands for no longer a time than this."""
MIN_CORRELATION_STEPS = 8
"""For a correlation."""


@dataclass(frozen=True)
class StackSamples:
    """Looks at the training thread, in order of time."""

    at_ns: NDArray[np.int64]
    ran_ns: NDArray[np.int64]
    """Processor time of the thread until then; all 0: not known."""
    stack: NDArray[np.int64]
    """Position in `stacks`."""
    stacks: Sequence[tuple[str, ...]]
    """Named frames, outermost first; none is empty."""


@dataclass(frozen=True)
class KnownSpans:
    """Stretches of known work, in any order, overlapping as they may."""

    owner: NDArray[np.uint8]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    name: NDArray[np.int64]
    """Position in `names`; of data spans it is not looked at: their looks name them."""
    names: Sequence[str]


@dataclass(frozen=True)
class WindowRecording:
    """What a rank has of a window."""

    rank: int
    round: int
    first_step: int
    step_seconds: NDArray[np.float64]  # of each step, other phases left out
    own_seconds: NDArray[np.float64]  # of each step
    lengths: NDArray[np.float64]  # of each step's samples in sum; (): not known
    samples: int  # of this rank in a step
    looks: StackSamples
    spans: KnownSpans
    mode: str = ""
    sources: SourceNaming = SourceNaming.HASH
    setup: ProcessSetup = field(default_factory=ProcessSetup)


def reduce_window(window: WindowRecording) -> RankPattern:
    """The pattern, of MOST_BYTES at most when it is written. Raises ValueError for a window without steps."""
    if not len(window.step_seconds):
        raise ValueError("a window without a step has no pattern")
    rows = _compute_function_rows(window)
    head = RankPattern(
        rank=window.rank,
        round=window.round,
        first_step=window.first_step,
        steps=len(window.step_seconds),
        seconds=round(float(window.step_seconds.sum()), 6),
        looks=len(window.looks.at_ns),
        mode=window.mode,
        samples=window.samples,
        length=round(float(window.lengths.mean()), 3) if len(window.lengths) else 0.0,
        follows_lengths=_correlate_lengths(window.own_seconds, window.lengths),
        sources=window.sources,
        setup=window.setup,
    )
    most = MAX_PATTERN_FUNCTIONS - len(TimeOwner)
    while _measure_size(pattern := _add_functions(head, rows, most)) > MAX_FUNCTION_BYTES and most > 8:
        most = most * 3 // 4
    return _add_stacks(pattern, window.looks)


_FunctionRow = tuple[TimeOwner, str, float, float, float, float]
"""Owner, name, share, error, use, spread."""


def _compute_function_rows(window: WindowRecording) -> list[_FunctionRow]:
    """Those with most of the time first; what is small goes together, by owner."""
    total = float(window.step_seconds.sum())
    rows, sampled = _sum_known_spans(window.spans, total)
    weights, ran = _weigh_samples(window.looks)
    owner_of_look = sampled.owners(window.looks.at_ns)
    data = sampled.seconds(TimeOwner.DATA) / total
    covered = sum(share for _, _, share, *_ in rows) + data
    if covered > 1.0:  # steps end by the device's clock, loading and waits by the host's
        rows = [(owner, name, share / covered, error, use, spread) for owner, name, share, error, use, spread in rows]
        data /= covered
    for owner, share in ((TimeOwner.DATA, data), (TimeOwner.PYTHON, max(0.0, 1.0 - covered))):
        rows += _share_out_samples(owner, share, owner_of_look == owner, weights, ran, window.looks)
    return sorted(rows, key=lambda row: -row[2])


def _add_functions(head: RankPattern, rows: Sequence[_FunctionRow], most: int) -> RankPattern:
    """So many functions at most; the others go together, by owner."""
    kept = [row for row in rows[:most] if row[2] >= MIN_FUNCTION_SHARE]
    left = rows[len(kept) :]
    for owner in TimeOwner:
        share = sum(row[2] for row in left if row[0] is owner)
        if share > 0:
            kept.append((owner, OTHER_FUNCTIONS, share, 0.0, NOT_MEASURED, NOT_MEASURED))
    names = _NameTable()
    return replace(
        head,
        functions=np.array([names.position(name) for _, name, *_ in kept], np.uint16),
        names=names.all,
        owners=np.array([owner for owner, *_ in kept], np.uint8),
        figures=np.array([figures for _, _, *figures in kept], np.float32).reshape(-1, 4),
    )


class _CoveredTime:
    """The time that each owner has, when those before it have had theirs."""

    def __init__(self) -> None:
        self._starts = self._ends = np.zeros(0, np.int64)
        self._by_owner: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], float]] = {}

    def take(self, owner: TimeOwner, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """The seconds that each span has for itself. `starts` rise."""
        reached = np.maximum.accumulate(np.concatenate(([np.iinfo(np.int64).min], ends)))[:-1]
        starts = np.minimum(np.maximum(starts, reached), ends)  # of spans of one owner the earlier one has the instant
        alone = (ends - starts).astype(np.float64) - (self._sum_taken_before(ends) - self._sum_taken_before(starts))
        mine = ends > starts  # what lies within an earlier one has nothing; the others are disjoint, and rise
        self._by_owner[owner] = (starts[mine], ends[mine], float(alone.sum()) * 1e-9)
        self._starts, self._ends = _merge_spans(np.concatenate((self._starts, starts)), np.concatenate((self._ends, ends)))
        return alone * 1e-9

    def owners(self, at: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Of these instants."""
        found = np.full(len(at), TimeOwner.PYTHON, np.uint8)
        for owner in sorted(self._by_owner, reverse=True):
            starts, ends, _ = self._by_owner[owner]
            if len(starts):
                place = np.maximum(np.searchsorted(starts, at, side="right") - 1, 0)
                found[(starts[place] <= at) & (at < ends[place])] = owner
        return found

    def seconds(self, owner: TimeOwner) -> float:
        return self._by_owner[owner][2]

    def _sum_taken_before(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nanoseconds that are taken before these instants."""
        if not len(self._starts):
            return np.zeros(len(at))
        origin = self._starts[0]
        edges = np.stack((self._starts, self._ends), axis=1).ravel() - origin
        taken = np.concatenate(([0], np.cumsum(self._ends - self._starts)))
        heights = np.stack((taken[:-1], taken[1:]), axis=1).ravel()
        before: NDArray[np.float64] = np.interp(at - origin, edges, heights)
        return before


def _sum_known_spans(spans: KnownSpans, total: float) -> tuple[list[_FunctionRow], _CoveredTime]:
    """The functions that spans name, and what they leave to looks: the data's time and Python's."""
    covered, rows = _CoveredTime(), list[_FunctionRow]()
    for owner in (owner for owner in TimeOwner if owner is not TimeOwner.PYTHON):
        mine = np.flatnonzero((spans.owner == owner) & (spans.end_ns > spans.start_ns))
        mine = mine[np.argsort(spans.start_ns[mine], kind="stable")]
        alone = covered.take(owner, spans.start_ns[mine], spans.end_ns[mine])
        if owner is TimeOwner.DATA:
            continue
        seconds = np.bincount(spans.name[mine], alone, minlength=len(spans.names))
        for name in np.flatnonzero(seconds > 0).tolist():
            rows.append((owner, spans.names[name], float(seconds[name]) / total, 0.0, NOT_MEASURED, NOT_MEASURED))
    return rows, covered


def _weigh_samples(looks: StackSamples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each look: the seconds that it stands for, and the part of them that the thread ran; NaN: not known."""
    if len(looks.at_ns) < 2:
        return np.ones(len(looks.at_ns)), np.full(len(looks.at_ns), np.nan)
    gaps = np.diff(looks.at_ns).astype(np.float64)
    gaps = np.append(gaps, np.median(gaps))
    with np.errstate(divide="ignore", invalid="ignore"):
        ran = np.append(np.diff(looks.ran_ns), np.nan) / gaps
    if not looks.ran_ns.any():
        ran[:] = np.nan
    return np.minimum(gaps, MAX_SAMPLE_GAP_MEDIANS * np.median(gaps)) * 1e-9, np.clip(ran, 0.0, 1.0)


def _share_out_samples(
    owner: TimeOwner,
    share: float,
    mine: NDArray[np.bool_],
    weights: NDArray[np.float64],
    ran: NDArray[np.float64],
    looks: StackSamples,
) -> list[_FunctionRow]:
    """An owner's share among the innermost functions of the looks into its time."""
    if share <= 0:
        return []
    whole = float(weights[mine].sum())
    if whole <= 0:
        return [(owner, UNSAMPLED_LOADER if owner is TimeOwner.DATA else OTHER_FUNCTIONS, share, share, NOT_MEASURED, NOT_MEASURED)]
    count = whole**2 / float((weights[mine] ** 2).sum())
    leaves = sorted({stack[-1] for stack in looks.stacks})
    position = {name: i for i, name in enumerate(leaves)}
    leaf = np.array([position[stack[-1]] for stack in looks.stacks], np.int64)[looks.stack]
    rows = list[_FunctionRow]()
    for name in np.unique(leaf[mine]).tolist():
        chosen = mine & (leaf == name)
        part = float(weights[chosen].sum()) / whole
        error = share * float(np.sqrt(max(part * (1 - part), 1.0 / count) / count))
        rows.append((owner, leaves[name], share * part, min(error, 1.0), *_compute_use(weights[chosen], ran[chosen])))
    return rows


def _compute_use(weights: NDArray[np.float64], ran: NDArray[np.float64]) -> tuple[float, float]:
    known = ~np.isnan(ran)
    if not known.any() or not weights[known].sum():
        return NOT_MEASURED, NOT_MEASURED
    mean = float(np.average(ran[known], weights=weights[known]))
    return mean, float(np.sqrt(np.average((ran[known] - mean) ** 2, weights=weights[known])))


def _merge_spans(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Apart from each other, in order."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
    begins = np.ones(len(starts), bool)
    begins[1:] = starts[1:] > ends[:-1]
    first = np.flatnonzero(begins)
    return starts[first], ends[np.append(first[1:], len(starts)) - 1] if len(first) else ends


def _correlate_lengths(own: NDArray[np.float64], lengths: NDArray[np.float64]) -> float:
    if len(lengths) != len(own) or len(own) < MIN_CORRELATION_STEPS or not (np.ptp(own) and np.ptp(lengths)):
        return 0.0
    return round(float(np.clip(np.corrcoef(own, lengths)[0, 1], -1.0, 1.0)), 3)


class _NameTable:
    """The table that functions and stacks refer to."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._positions = {name: i for i, name in enumerate(names)}

    def position(self, name: str) -> int:
        return self._positions.setdefault(_truncate_name(name), len(self._positions))

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self._positions)


def _truncate_name(name: str) -> str:
    """The end says most."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in name)
    return plain if len(plain) <= MAX_FUNCTION_NAME_LENGTH else "…" + plain[-MAX_FUNCTION_NAME_LENGTH + 1 :]


def _add_stacks(pattern: RankPattern, looks: StackSamples) -> RankPattern:
    """As many as there is room for, those that were seen most often first."""
    counts = Counter(looks.stacks[stack][-MAX_STACK_DEPTH:] for stack in looks.stack.tolist())
    often = counts.most_common(MAX_PATTERN_STACKS)

    def first(count: int) -> RankPattern:
        names = _NameTable(pattern.names)
        folded = tuple((seen, *map(names.position, frames)) for frames, seen in often[:count])
        return replace(pattern, names=names.all, folded=folded)

    low, high = 0, len(often)
    while low < high:
        middle = (low + high + 1) // 2
        candidate = first(middle)
        fits = len(candidate.names) <= MAX_PATTERN_NAMES and _measure_size(candidate) <= MAX_RANK_PATTERN_BYTES
        low, high = (middle, high) if fits else (low, middle - 1)
    return first(low)


def _measure_size(pattern: RankPattern) -> int:
    return len(encode_compact_json(pattern.to_json()))
