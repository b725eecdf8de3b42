"""The own work of a job's ranks between two moments, from the sums that they report.

Ranks report at different steps. What is compared covers the same steps of all of them: a rank that has reported further
has spread what it has not been compared in evenly over these steps. So the sums over all steps stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..protocol.watched_report import StepSums
from ..stragglers.windows import compute_peers_median

MAX_EXCESS_RANKS = 8
"""Ranks of one interval whose excess is remembered: a slow rank is among the slowest."""

Seconds = npt.NDArray[np.float64]  # (ranks,)
Steps = npt.NDArray[np.int64]  # (ranks,)


@dataclass(frozen=True)
class RankSums:
    """The measured steps of each rank in this round, summed, in the order of ranks."""

    last_steps: Steps
    steps: Steps
    step_seconds: Seconds
    own_seconds: Seconds

    @property
    def origins(self) -> Steps:
        """The step after which each rank's sums begin. It stays the same unless steps were missed."""
        return self.last_steps - self.steps


@dataclass(frozen=True)
class StepWork:
    """What the ranks did in some steps."""

    steps: int
    seconds: float  # that the steps took
    exposed: float  # of these, in which even the rank that waits least waits
    excess: Mapping[int, float]  # own work beyond the peers' median, seconds, of the ranks with the most


@dataclass(frozen=True)
class WorkPosition:
    """The step up to which all ranks are compared, and their sums up to it."""

    origins: Steps
    step: int
    step_seconds: Seconds
    own_seconds: Seconds

    @classmethod
    def begin_round(cls, sums: RankSums) -> WorkPosition:
        """Return the position before the first measured step."""
        zeros = np.zeros(len(sums.steps))
        return cls(sums.origins, int(sums.origins.max()), zeros, zeros)

    @classmethod
    def skip_reported(cls, sums: RankSums) -> WorkPosition:
        """Return the position behind all that was reported so far."""
        start = cls.begin_round(sums)
        return start.advance(sums)[1]

    def advance(self, sums: RankSums) -> tuple[StepWork | None, WorkPosition]:
        """Return the work in the steps that all ranks have reported since, and the position behind them.

        The work is None if there is none, or some steps were missed, as by a sidecar that has begun again.
        """
        if len(sums.origins) != len(self.origins):
            return None, WorkPosition.skip_reported(sums)
        step = int(sums.last_steps.min())
        if (sums.origins < self.origins).any() or step <= self.step:  # reports that arrive late
            return None, self
        if (sums.origins > self.origins).any():
            return None, WorkPosition.skip_reported(sums)
        share = (step - self.step) / np.maximum(1, sums.last_steps - self.step)
        step_seconds = np.maximum(0.0, sums.step_seconds - self.step_seconds) * share
        own_seconds = np.maximum(0.0, sums.own_seconds - self.own_seconds) * share
        position = WorkPosition(self.origins, step, self.step_seconds + step_seconds, self.own_seconds + own_seconds)
        excess = own_seconds - compute_peers_median(own_seconds[None])[0]
        slowest = np.argsort(-excess, kind="stable")[:MAX_EXCESS_RANKS]
        work = StepWork(
            steps=step - self.step,
            seconds=float(np.median(step_seconds)),
            exposed=max(0.0, float((step_seconds - own_seconds).min())),
            excess={int(rank): float(excess[rank]) for rank in slowest if excess[rank] > 0},
        )
        return work, position


def collect_sums(reports: Sequence[StepSums], world_size: int) -> RankSums | None:
    """Return the sums of all ranks; None: some are missing."""
    by_rank = {report.rank: report for report in reports}
    if not world_size or len(by_rank) != world_size or max(by_rank) >= world_size:
        return None
    in_order = [by_rank[rank] for rank in range(world_size)]
    return RankSums(
        np.array([report.last_step for report in in_order], np.int64),
        np.array([report.steps for report in in_order], np.int64),
        np.array([report.step_seconds for report in in_order]),
        np.array([report.own_seconds for report in in_order]),
    )
