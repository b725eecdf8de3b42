"""Which rank persistently holds the others of a synchronous job back, and what each remedy would leave of it.

Judged from windows of the ranks' own work, not from step times: in a synchronous job every rank's step takes as long
as the slowest one's. Costs are compared per sample, so that shares which have already been changed hide nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..reports import RankWindow

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
    culprits: tuple[int, ...]
    slowdown_replaced: float  # what is left of S when the culprits work at their peers' pace


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

    return Window(
        steps=np.array(common),
        compute_seconds=np.array([column(w, w.compute_seconds) for w in by_rank]).T,
        samples=np.array([column(w, w.samples) for w in by_rank], dtype=np.int64).T,
        step_seconds=np.array([column(w, w.step_seconds) for w in by_rank]).T,
    )


def find(window: Window, threshold: float) -> StragglerVerdict:
    """S and the culprits: ranks whose cost a sample is `threshold` × their peers' in most steps of the window.

    No culprit is named where S itself stays below the threshold (the slow rank keeps nobody waiting).
    """
    cost = window.cost_per_sample
    relative = cost / np.stack(
        [np.median(np.delete(cost, rank, axis=1), axis=1) for rank in range(cost.shape[1])], axis=1
    )
    actual = slowdown(window.compute_seconds)
    persistent = (relative >= threshold).mean(axis=0) >= PERSISTENT
    culprits = tuple(int(rank) for rank in np.flatnonzero(persistent)) if actual >= threshold else ()
    return StragglerVerdict(
        slowdown=actual,
        rank_slowdown=tuple(float(value) for value in np.median(relative, axis=0)),
        culprits=culprits,
        slowdown_replaced=_replaced(window, culprits),
    )


def slowdown(compute_seconds: npt.NDArray[np.float64]) -> float:
    """S of a data-parallel job: mean over steps of the slowest rank's work, over the mean work of all."""
    return float(compute_seconds.max(axis=1).mean() / compute_seconds.mean())


def _replaced(window: Window, culprits: tuple[int, ...]) -> float:
    """S, by the same ideal, when each culprit does its samples at its peers' median pace."""
    if not culprits:
        return slowdown(window.compute_seconds)
    peers = np.delete(window.cost_per_sample, culprits, axis=1)
    if peers.shape[1] == 0:
        return slowdown(window.compute_seconds)
    compute = window.compute_seconds.copy()
    pace = np.median(peers, axis=1)
    for rank in culprits:
        compute[:, rank] = pace * np.maximum(window.samples[:, rank], 1)
    return max(1.0, float(compute.max(axis=1).mean() / window.compute_seconds.mean()))
