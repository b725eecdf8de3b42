"""Aligns the windows that ranks send as evidence: the steps that all of them have with their present shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..protocol.reports import RankWindow
from . import length_cost, shares
from .length_cost import SequenceCost
from .shares import ShareCosts

MIN_COMMON_STEPS = 8
"""Smallest number of common steps. Fewer are not sufficient."""
MAX_STEP_WINDOW_SECONDS = 5.0
"""Upper limit of a window's duration. A slow rank shows in less, and a slow job must not be diagnosed later."""


@dataclass(frozen=True)
class AlignedWindow:
    """The ranks' windows on their common steps with the present shares, as arrays of shape (steps, ranks).

    Earlier steps serve only to separate a step's fixed cost from that of its samples (`costs`). A rank that was slow in
    them may have recovered since.
    """

    steps: npt.NDArray[np.int64]  # (steps,)
    compute_seconds: npt.NDArray[np.float64]
    samples: npt.NDArray[np.int64]
    step_seconds: npt.NDArray[np.float64]
    gc_seconds: npt.NDArray[np.float64] | None = None  # part of compute_seconds; None: no rank records it
    lengths: npt.NDArray[np.float64] | None = None  # sum over the samples; None: not known of every rank
    squares: npt.NDArray[np.float64] | None = None  # sum of the squared lengths; None: not known of every rank
    sample_cost_units: npt.NDArray[np.float64] | None = None  # cost units of the samples; None: not known of every rank
    sequence_cost: SequenceCost | None = None  # the cost behind `weight`
    baseline_seconds: float | None = None  # step time in the job's first steady steps; None: not known
    baseline_exposed: float | None = None  # of it, communication that no computation hid; None: not known
    costs: ShareCosts | None = (
        None  # of each rank, from all steps that it sent; None: some rank's samples are not known
    )
    share_granularity: int = 1  # new shares are multiples of this number of samples, as the present ones are
    drawn_from: int = 0  # smallest number of steps per rank from which these were drawn; 0: they are measured steps

    def select_steps(self, steps: slice) -> AlignedWindow:
        """Return the window with only these steps."""
        selected: dict[str, Any] = {
            name: values[steps] for name, values in vars(self).items() if isinstance(values, np.ndarray)
        }
        return replace(self, **selected)

    @property
    def shares(self) -> tuple[int, ...]:
        """The newest shares. Zeros if the script does not report them."""
        return tuple(int(count) for count in self.samples[-1])


@dataclass(frozen=True)
class StepTimeSample:
    """The times of some steps of a synchronous job: what a later mean is compared with."""

    mean_seconds: float
    deviation: float  # standard deviation of a step's time, over the mean
    steps: int

    def compute_ratio_error(self, later_mean_seconds: float, later_steps: int) -> float:
        """Return the standard error of the ratio of a later mean to this one, for steps as noisy as these."""
        ratio = later_mean_seconds / self.mean_seconds
        return ratio * self.deviation * math.sqrt(1 / self.steps + 1 / max(1, later_steps))


def sample_step_times(window: AlignedWindow) -> StepTimeSample | None:
    """Return the step times of the window; None: its steps were not measured, or are too few."""
    seconds = np.median(window.step_seconds, axis=1)
    mean_seconds = float(seconds.mean())
    if window.drawn_from or len(seconds) <= 1 or mean_seconds <= 0:
        return None
    return StepTimeSample(mean_seconds, float(seconds.std(ddof=1)) / mean_seconds, len(seconds))


def align_windows(windows: Sequence[RankWindow]) -> AlignedWindow | None:
    """Align the windows on their common steps since the shares last changed.

    None if there are too few steps, or ranks are missing.
    """
    if not windows or sorted(window.rank for window in windows) != list(range(len(windows))):
        return None
    by_rank = sorted(windows, key=lambda window: window.rank)
    common = sorted(set.intersection(*(set(window.steps) for window in by_rank)))

    def column(window: RankWindow, values: Sequence[float]) -> list[float]:
        value_by_step = dict(zip(window.steps, values, strict=True))
        return [value_by_step[step] for step in common]

    if not common:
        return None
    samples = np.array([column(window, window.samples) for window in by_rank], dtype=np.int64).T
    first = _find_share_change(samples)
    common, samples = common[first:], samples[first:]
    if len(common) < MIN_COMMON_STEPS:
        return None

    gc_seconds = [column(w, w.gc_seconds or (0.0,) * len(w.steps)) for w in by_rank]
    lengths = [column(w, w.lengths) for w in by_rank if w.lengths]
    squares = [column(w, w.squares) for w in by_rank if w.squares]
    window = AlignedWindow(
        steps=np.array(common),
        compute_seconds=np.array([column(w, w.compute_seconds) for w in by_rank]).T,
        samples=samples,
        step_seconds=np.array([column(w, w.step_seconds) for w in by_rank]).T,
        gc_seconds=np.array(gc_seconds).T if any(w.gc_seconds for w in by_rank) else None,
        lengths=np.array(lengths).T if len(lengths) == len(by_rank) else None,
        squares=np.array(squares).T if len(squares) == len(by_rank) else None,
        baseline_seconds=find_baseline_seconds(by_rank),
        baseline_exposed=find_baseline_exposed(by_rank),
        costs=_fit_share_costs(by_rank),
    )
    return add_cost_units(replace(window, share_granularity=find_share_granularity(by_rank, *window.shares)))


def select_slower_steps(window: AlignedWindow, min_ratio: float, ignore_hiccups: bool = True) -> AlignedWindow | None:
    """Return the last steps, since they became at least `min_ratio` times as long. None if there is none.

    Of all split points the one is chosen that explains most of the variance, and at least half of it. With
    `ignore_hiccups`, a single long step between two usual ones counts as usual.
    """
    seconds = window.step_seconds.max(axis=1)
    if ignore_hiccups:
        padded = np.pad(seconds, 1, mode="edge")
        seconds = np.median([padded[:-2], seconds, padded[2:]], axis=0)
    total_variation = float(np.square(seconds - seconds.mean()).sum())

    def explained(split: int) -> float:
        before, after = seconds[:split].mean(), seconds[split:].mean()
        return float((after - before) ** 2 * split * (len(seconds) - split) / len(seconds))

    split = max(range(1, len(seconds)), key=explained)
    if explained(split) < 0.5 * total_variation or seconds[split:].mean() < min_ratio * seconds[:split].mean():
        return None
    return window.select_steps(slice(split, None))


def count_window_steps(max_steps: int, step_seconds: float | None) -> int:
    """Return the number of steps to judge together: at most `max_steps`, and at most MAX_STEP_WINDOW_SECONDS.

    It is never below MIN_COMMON_STEPS, except for `max_steps`. A `step_seconds` of None means not known.
    """
    if step_seconds is None or step_seconds * max_steps <= MAX_STEP_WINDOW_SECONDS:
        return max_steps
    return min(max_steps, max(MIN_COMMON_STEPS, int(MAX_STEP_WINDOW_SECONDS / step_seconds)))


def _find_share_change(samples: npt.NDArray[np.int64]) -> int:
    """Return the position of the first step from which on all have the newest shares. `samples`: (steps, ranks)."""
    different_steps = np.flatnonzero((samples != samples[-1]).any(axis=1))
    return 1 + int(different_steps.max(initial=-1))


def add_cost_units(window: AlignedWindow) -> AlignedWindow:
    """Add the cost units of the samples, by the cost that fits these steps best; by lengths alone without squares."""
    if window.lengths is None:
        return window
    squares = np.zeros_like(window.lengths) if window.squares is None else window.squares
    try:
        cost = length_cost.fit_cost_across_ranks(window.samples, window.lengths, squares, subtract_gc(window))
    except InputError:  # all steps are equal, or the seconds are invalid
        return window
    return replace(
        window,
        sample_cost_units=cost.compute_seconds_from_sums(window.samples, window.lengths, squares),
        sequence_cost=cost,
    )


def subtract_gc(window: AlignedWindow) -> npt.NDArray[np.float64]:
    """Return the own work without garbage collections, (steps, ranks)."""
    gc_seconds = 0.0 if window.gc_seconds is None else window.gc_seconds
    return _subtract_seconds(gc_seconds, window.compute_seconds)


def _subtract_seconds(
    subtracted: npt.NDArray[np.float64] | float, seconds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    return np.maximum(seconds - subtracted, 0.1 * seconds)


def find_baseline_seconds(windows: Sequence[RankWindow]) -> float | None:
    """Return the step time of the job's first steady steps: the smallest, since late ranks missed them.

    None: it is not known.
    """
    return min((window.baseline_seconds for window in windows if window.baseline_seconds), default=None)


def find_baseline_exposed(windows: Sequence[RankWindow]) -> float | None:
    """Return the communication in those steps that no computation hid: the waits of the rank that waited least."""
    waits = ((w.baseline_seconds or 0.0) - w.baseline_own_seconds for w in windows if w.baseline_own_seconds)
    shortest = min(waits, default=None)
    return None if shortest is None else max(0.0, shortest)


def find_baseline_own(windows: Sequence[RankWindow]) -> tuple[float, ...]:
    """Return the own work of each rank in those steps; (): that of some is not known."""
    own = tuple(window.baseline_own_seconds or 0.0 for window in windows)
    return own if all(own) else ()


def _fit_share_costs(windows: Sequence[RankWindow]) -> ShareCosts | None:
    """Fit the costs of each rank. Ranks may have steps from before a change of shares that others lack."""
    own = [np.asarray(window.compute_seconds) for window in windows]
    gc_seconds = [np.asarray(window.gc_seconds or (0.0,) * len(window.steps)) for window in windows]
    working = [_subtract_seconds(pauses, seconds) for pauses, seconds in zip(gc_seconds, own, strict=True)]
    try:
        return shares.fit_costs_per_rank(working, [window.samples for window in windows])
    except InputError:  # no samples, or no seconds: nothing to fit
        return None


def find_share_granularity(windows: Sequence[RankWindow], *samples: int) -> int:
    """Return the number of samples that new shares must be multiples of.

    It follows the ranks' reports, and divides the given numbers of samples.
    """
    return math.gcd(max(window.share_granularity for window in windows), *samples)


def compute_peers_median(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return for each rank the median of all others in the same step, shape (steps, ranks).

    A single rank is its own peer.
    """
    ranks = values.shape[1]
    if ranks == 1:
        return values
    ordered = np.sort(values, axis=1)

    def rank_others(index: int) -> npt.NDArray[np.float64]:
        return np.where(values <= ordered[:, [index]], ordered[:, [index + 1]], ordered[:, [index]])

    return (rank_others((ranks - 2) // 2) + rank_others((ranks - 1) // 2)) / 2
