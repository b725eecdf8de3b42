"""Which rank persistently holds the others of a synchronous job back, and what each remedy would leave of it.

Judged from windows of the ranks' own work, not from step times: in a synchronous job every rank's step takes as long
as the slowest one's. Costs are compared per sample, so that shares which have already been changed hide nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import shares
from ..errors import InputError
from ..reports import RankWindow
from ..shares import Costs
from ..whatif import data_parallel

PERSISTENT = 0.8
"""Share of the window's steps in which a rank must be slow to be called a straggler: what comes and goes is noise."""

MINIMAL_STEPS = 8


@dataclass(frozen=True)
class Window:
    """The ranks' windows on the steps that all of them have, as arrays of shape (steps, ranks)."""

    steps: npt.NDArray[np.int64]  # (steps,)
    compute_seconds: npt.NDArray[np.float64]
    samples: npt.NDArray[np.int64]
    step_seconds: npt.NDArray[np.float64]
    garbage_seconds: npt.NDArray[np.float64] | None = None  # part of compute_seconds; None: no rank records it
    weight: npt.NDArray[np.float64] | None = None  # cost units of the samples; None: not known of every rank
    baseline_seconds: float = 0.0  # step time in the job's first steady steps; 0: not known
    costs: Costs | None = None  # of each rank, from all of its steps; None: some rank's samples are not known

    @property
    def cost_per_sample(self) -> npt.NDArray[np.float64]:
        """Seconds of own work a sample; a script that is only watched tells no samples and counts as one a step."""
        return self.compute_seconds / np.maximum(self.samples, 1)

    @property
    def shares(self) -> tuple[int, ...]:
        """The newest shares; zeros where the script does not tell them."""
        return tuple(int(n) for n in self.samples[-1])


@dataclass(frozen=True)
class StragglerVerdict:
    """`slowdown` is S: step time over that with every rank at the mean pace (what-if analysis, arXiv 2505.05713)."""

    slowdown: float
    rank_slowdown: tuple[float, ...]  # median over steps of a rank's cost a sample over its peers' median
    rank_effect: tuple[float, ...]  # S_w: what is left of S with every other rank ideal; empty: nothing to decompose
    culprits: tuple[int, ...]
    gain_replaced: float  # how many times faster the job is with the culprits at their peers' pace


def align(windows: Sequence[RankWindow]) -> Window | None:
    """The windows on their common steps; None where there are too few, or ranks are missing."""
    if not windows or sorted(window.rank for window in windows) != list(range(len(windows))):
        return None
    by_rank = sorted(windows, key=lambda window: window.rank)
    common = sorted(set.intersection(*(set(window.steps) for window in by_rank)))
    if len(common) < MINIMAL_STEPS:
        return None

    def column(window: RankWindow, values: Sequence[float]) -> list[float]:
        of_step = dict(zip(window.steps, values, strict=True))
        return [of_step[step] for step in common]

    garbage = [column(w, w.garbage_seconds or (0.0,) * len(w.steps)) for w in by_rank]
    weights = [column(w, w.weight) for w in by_rank if w.weight]
    return Window(
        steps=np.array(common),
        compute_seconds=np.array([column(w, w.compute_seconds) for w in by_rank]).T,
        samples=np.array([column(w, w.samples) for w in by_rank], dtype=np.int64).T,
        step_seconds=np.array([column(w, w.step_seconds) for w in by_rank]).T,
        garbage_seconds=np.array(garbage).T if any(w.garbage_seconds for w in by_rank) else None,
        weight=np.array(weights).T if len(weights) == len(by_rank) else None,
        baseline_seconds=baseline(by_rank),
        costs=_costs(by_rank),
    )


def baseline(windows: Sequence[RankWindow]) -> float:
    """The step time of the job's first steady steps: the least that a rank knows, as late ranks did not see them."""
    return min((window.baseline_seconds for window in windows if window.baseline_seconds > 0), default=0.0)


def _costs(windows: Sequence[RankWindow]) -> Costs | None:
    """Ranks whose share has changed may have steps from before that, which the others have not."""
    own = [np.asarray(window.compute_seconds) for window in windows]
    garbage = [np.asarray(window.garbage_seconds or (0.0,) * len(window.steps)) for window in windows]
    working = [np.maximum(seconds - pauses, 0.1 * seconds) for seconds, pauses in zip(own, garbage, strict=True)]
    try:
        return shares.fit_each(working, [window.samples for window in windows])
    except InputError:  # no samples, or no seconds: nothing to fit
        return None


def find(window: Window, threshold: float) -> StragglerVerdict:
    """S, S_w and the culprits: ranks whose cost a sample is `threshold` × their peers' in most steps of the window.

    No culprit is named where S itself stays below the threshold (the slow rank keeps nobody waiting).
    """
    cost = window.cost_per_sample
    relative = cost / peers_median(cost)
    whatif = data_parallel.analyse(window.compute_seconds, steps=[int(step) for step in window.steps])
    persistent = (relative >= threshold).mean(axis=0) >= PERSISTENT
    culprits = tuple(int(rank) for rank in np.flatnonzero(persistent)) if whatif.slowdown >= threshold else ()
    parts = whatif.decomposition
    return StragglerVerdict(
        slowdown=whatif.slowdown,
        rank_slowdown=tuple(float(value) for value in np.median(relative, axis=0)),
        rank_effect=() if parts is None else tuple(float(value) for value in parts.by_replica),
        culprits=culprits,
        gain_replaced=whatif.gain(data_parallel.replaced(culprits)) if culprits else 1.0,
    )


def peers_median(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
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
