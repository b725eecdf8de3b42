"""The windows that ranks give as evidence, put side by side on the steps that all of them have with their present
shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import lengths, shares
from ..errors import InputError
from ..lengths import SequenceCost
from ..reports import RankWindow
from ..shares import ShareCosts

MIN_COMMON_STEPS = 8
"""Fewer in common tell nothing."""
MAX_STEP_WINDOW_SECONDS = 5.0
"""Steps of more seconds are not needed to tell a slow rank, and a slow job must not be judged the later for it."""


@dataclass(frozen=True)
class AlignedWindow:
    """The ranks' windows on the steps that all of them have with the present shares, as arrays of shape (steps, ranks).

    Earlier steps tell a step's fixed cost from that of its samples (`costs`), and nothing else: what was slow in them
    may have recovered since."""

    steps: npt.NDArray[np.int64]  # (steps,)
    compute_seconds: npt.NDArray[np.float64]
    samples: npt.NDArray[np.int64]
    step_seconds: npt.NDArray[np.float64]
    garbage_seconds: npt.NDArray[np.float64] | None = None  # part of compute_seconds; None: no rank records it
    lengths: npt.NDArray[np.float64] | None = None  # of the samples, in sum; None: not known of every rank
    squares: npt.NDArray[np.float64] | None = None  # of these lengths, in sum; None: not known of every rank
    weight: npt.NDArray[np.float64] | None = None  # cost units of the samples; None: not known of every rank
    sequence_cost: SequenceCost | None = None  # by which they are weighed
    baseline_seconds: float = 0.0  # step time in the job's first steady steps; 0: not known
    baseline_exposed: float | None = None  # of it, communication that no computation hid; None: not known
    costs: ShareCosts | None = None  # of each rank, from all steps that it gave; None: some rank's samples are not known
    share_grain: int = 1  # samples that new shares are multiples of, as the present ones are
    drawn_from: int = 0  # steps of each rank, at least, that these were put together of; 0: they are steps themselves

    def select_steps(self, steps: slice) -> AlignedWindow:
        """These of its steps."""
        kept: dict[str, Any] = {name: of[steps] for name, of in vars(self).items() if isinstance(of, np.ndarray)}
        return replace(self, **kept)

    @property
    def shares(self) -> tuple[int, ...]:
        """The newest shares; zeros where the script does not tell them."""
        return tuple(int(n) for n in self.samples[-1])


def align_windows(windows: Sequence[RankWindow]) -> AlignedWindow | None:
    """The windows on their common steps since the shares last changed; None where there are too few, or ranks are
    missing."""
    if not windows or sorted(window.rank for window in windows) != list(range(len(windows))):
        return None
    by_rank = sorted(windows, key=lambda window: window.rank)
    common = sorted(set.intersection(*(set(window.steps) for window in by_rank)))

    def column(window: RankWindow, values: Sequence[float]) -> list[float]:
        of_step = dict(zip(window.steps, values, strict=True))
        return [of_step[step] for step in common]

    if not common:
        return None
    samples = np.array([column(window, window.samples) for window in by_rank], dtype=np.int64).T
    first = _find_share_change(samples)
    common, samples = common[first:], samples[first:]
    if len(common) < MIN_COMMON_STEPS:
        return None

    garbage = [column(w, w.garbage_seconds or (0.0,) * len(w.steps)) for w in by_rank]
    tokens = [column(w, w.lengths) for w in by_rank if w.lengths]
    squares = [column(w, w.squares) for w in by_rank if w.squares]
    window = AlignedWindow(
        steps=np.array(common),
        compute_seconds=np.array([column(w, w.compute_seconds) for w in by_rank]).T,
        samples=samples,
        step_seconds=np.array([column(w, w.step_seconds) for w in by_rank]).T,
        garbage_seconds=np.array(garbage).T if any(w.garbage_seconds for w in by_rank) else None,
        lengths=np.array(tokens).T if len(tokens) == len(by_rank) else None,
        squares=np.array(squares).T if len(squares) == len(by_rank) else None,
        baseline_seconds=find_baseline_seconds(by_rank),
        baseline_exposed=find_baseline_exposed(by_rank),
        costs=_fit_share_costs(by_rank),
    )
    return add_cost_units(replace(window, share_grain=find_share_granularity(by_rank, *window.shares)))


def select_slower_steps(window: AlignedWindow, times: float, hiccups: bool = True) -> AlignedWindow | None:
    """The last steps, from the one on at which they became `times` as long or more; None: there is no such one.

    Of all places to split the window at, it is the one that explains most of the variance, and at least half of it.
    hiccups: a single long step between two usual ones counts as they do.
    """
    seconds = window.step_seconds.max(axis=1)
    if hiccups:
        around = np.pad(seconds, 1, mode="edge")
        seconds = np.median([around[:-2], seconds, around[2:]], axis=0)
    whole = float(np.square(seconds - seconds.mean()).sum())

    def explained(split: int) -> float:
        before, after = seconds[:split].mean(), seconds[split:].mean()
        return float((after - before) ** 2 * split * (len(seconds) - split) / len(seconds))

    split = max(range(1, len(seconds)), key=explained)
    if explained(split) < 0.5 * whole or seconds[split:].mean() < times * seconds[:split].mean():
        return None
    return window.select_steps(slice(split, None))


def count_window_steps(most: int, step_seconds: float) -> int:
    """Steps that are judged together: at most `most`, of WINDOW_SECONDS at most, but never fewer than MINIMAL_STEPS.

    step_seconds: 0: not known.
    """
    if step_seconds * most <= MAX_STEP_WINDOW_SECONDS:
        return most
    return min(most, max(MIN_COMMON_STEPS, int(MAX_STEP_WINDOW_SECONDS / step_seconds)))


def _find_share_change(samples: npt.NDArray[np.int64]) -> int:
    """Position of the first step from which on all have the newest shares. samples: (steps, ranks)."""
    other = np.flatnonzero((samples != samples[-1]).any(axis=1))
    return 1 + int(other.max(initial=-1))


def add_cost_units(window: AlignedWindow) -> AlignedWindow:
    """With the cost units of its samples, by the cost that fits these steps best; by lengths alone, where no squares
    are known."""
    if window.lengths is None:
        return window
    squares = np.zeros_like(window.lengths) if window.squares is None else window.squares
    try:
        cost = lengths.fit_cost_across_ranks(window.samples, window.lengths, squares, subtract_gc(window))
    except InputError:  # all steps are alike, or seconds are not to be judged
        return window
    return replace(window, weight=cost.compute_seconds_from_sums(window.samples, window.lengths, squares), sequence_cost=cost)


def subtract_gc(window: AlignedWindow) -> npt.NDArray[np.float64]:
    """Own work without garbage collections, (steps, ranks)."""
    garbage = 0.0 if window.garbage_seconds is None else window.garbage_seconds
    return _subtract_seconds(garbage, window.compute_seconds)


def _subtract_seconds(garbage: npt.NDArray[np.float64] | float, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.maximum(seconds - garbage, 0.1 * seconds)


def find_baseline_seconds(windows: Sequence[RankWindow]) -> float:
    """The step time of the job's first steady steps: the least that a rank knows, as late ranks did not see them."""
    return min((window.baseline_seconds for window in windows if window.baseline_seconds > 0), default=0.0)


def find_baseline_exposed(windows: Sequence[RankWindow]) -> float | None:
    """Communication in those steps that no computation hid: the waits of the rank that waited least."""
    waits = (w.baseline_seconds - w.baseline_own_seconds for w in windows if w.baseline_own_seconds > 0)
    least = min(waits, default=None)
    return None if least is None else max(0.0, least)


def _fit_share_costs(windows: Sequence[RankWindow]) -> ShareCosts | None:
    """Ranks whose share has changed may have steps from before that, which the others have not."""
    own = [np.asarray(window.compute_seconds) for window in windows]
    garbage = [np.asarray(window.garbage_seconds or (0.0,) * len(window.steps)) for window in windows]
    working = [_subtract_seconds(pauses, seconds) for pauses, seconds in zip(garbage, own, strict=True)]
    try:
        return shares.fit_costs_per_rank(working, [window.samples for window in windows])
    except InputError:  # no samples, or no seconds: nothing to fit
        return None


def find_share_granularity(windows: Sequence[RankWindow], *samples: int) -> int:
    """What new shares must be multiples of, by what the ranks say, and as far as these numbers of samples are."""
    return math.gcd(max(window.share_grain for window in windows), *samples)


def compute_peers_median(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each rank the median of all others in the same step, shape (steps, ranks); a single rank is its own peer."""
    ranks = values.shape[1]
    if ranks == 1:
        return values
    order = np.argsort(values, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    position = np.argsort(order, axis=1)  # of each rank among all

    def of_the_others(place: int) -> npt.NDArray[np.float64]:
        return np.where(position <= place, ordered[:, [place + 1]], ordered[:, [place]])

    return (of_the_others((ranks - 2) // 2) + of_the_others((ranks - 1) // 2)) / 2
