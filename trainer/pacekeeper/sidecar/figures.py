"""What the operator is told of how the ranks train, and when that cannot wait for the next poll.

Figures are means over a rank's window of steps with its present share, and go with every heartbeat. They are news once
the *medians* of a rank's last steps have left what was told last by more than the plan's band: a single slow step is
none. A mean needs as long as its window to follow, so that for this long it is told again whenever it has moved by as
much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from pacekeeper.observe.windows import RankHistory, StepTimes
from pacekeeper_analysis.reports import RankMetrics

LAST_STEPS_SECONDS = 2.0
MIN_LAST_STEPS, MAX_LAST_STEPS = 4, 8
"""The last steps are those of so many seconds, but no fewer and no more."""
METRICS_SETTLE_SECONDS = 6.0
"""So long a window's means may still move after its last steps have changed."""
_METRIC_DIGITS = 5
"""Of a figure as it is sent; more are noise, and bytes."""


@dataclass(frozen=True)
class MetricLevel:
    """How a rank trains, as far as it may be news. Seconds."""

    step: float
    own_per_sample: float
    waiting: float  # share of a step

    def has_moved(self, told: MetricLevel, band: float) -> bool:
        """Whether it differs from what was told by more than this part (of waiting: of a step)."""
        pairs = ((self.step, told.step), (self.own_per_sample, told.own_per_sample))
        moved = any(abs(now - before) > band * before for now, before in pairs)
        return moved or abs(self.waiting - told.waiting) > band


@dataclass(frozen=True)
class CurrentRankMetrics:
    """A rank at one look."""

    metrics: RankMetrics
    mean: MetricLevel | None  # over its window; None: no step
    last_steps: MetricLevel | None  # medians over its last steps; None: too few


class MetricsReporter:
    """What was seen last, and what of it was told."""

    def __init__(self) -> None:
        self.urgent_changes = 0
        """Another number whenever the figures are to be told at once."""
        self._current: Sequence[CurrentRankMetrics] = ()
        self._reported: dict[int, CurrentRankMetrics] = {}
        self._unsettled_until = -math.inf

    def update(self, ranks: Sequence[CurrentRankMetrics], band: float, now: float) -> None:
        """`ranks`: those here, as they are now. `band`: by which they may differ from what was told. `now`: seconds."""
        self._current = ranks
        known = [(rank, self._reported[rank.metrics.rank]) for rank in ranks if rank.metrics.rank in self._reported]
        left = any(_has_moved(rank.last_steps, told.last_steps, band) for rank, told in known)
        if left:
            self._unsettled_until = now + METRICS_SETTLE_SECONDS
        moves = now < self._unsettled_until and any(_has_moved(rank.mean, told.mean, band) for rank, told in known)
        self.urgent_changes += left or moves

    def take_report(self) -> tuple[RankMetrics, ...]:
        """The newest figures, which count as told."""
        self._reported = {rank.metrics.rank: rank for rank in self._current}
        return tuple(rank.metrics for rank in self._current)


def measure_rank(rank: int, history: RankHistory, share: int) -> CurrentRankMetrics:
    """One rank now, which takes `share` samples in a step (0: unknown): by the steps that it has taken so many in, or,
    as long as there are none, by all."""
    of_share = [step for step in history.steps if share in (0, step.samples)]
    steps = of_share or history.steps
    step_seconds, own = _compute_mean(step.step_seconds for step in steps), _compute_mean(step.compute_seconds for step in steps)
    figures = RankMetrics(
        rank=rank,
        steps=len(of_share),
        step_seconds=_round_metric(step_seconds),
        compute_seconds=_round_metric(own),
        compute_seconds_per_sample=_round_metric(_compute_mean(step.compute_seconds / max(step.samples, 1) for step in steps)),
        wait_seconds=_round_metric(max(0.0, step_seconds - own)),
        share=share,
        first_steps_seconds=_round_metric(history.first_steps_seconds or 0.0),
        synchronisation_seconds=_round_metric(history.synchronization_seconds or 0.0),
    )
    mean = None
    if figures.step_seconds > 0:
        waiting = figures.wait_seconds / figures.step_seconds
        mean = MetricLevel(figures.step_seconds, figures.compute_seconds_per_sample, waiting)
    return CurrentRankMetrics(figures, mean, _measure_last_steps(steps))


def _measure_last_steps(steps: Sequence[StepTimes]) -> MetricLevel | None:
    """By the last steps of a window."""
    newest = steps[-MAX_LAST_STEPS:]
    ages = accumulate(step.step_seconds for step in reversed(newest))
    count = max(MIN_LAST_STEPS, sum(age <= LAST_STEPS_SECONDS for age in ages))
    if len(newest) < count:
        return None
    last = newest[-count:]
    return MetricLevel(
        median(step.step_seconds for step in last),
        median(step.compute_seconds / max(step.samples, 1) for step in last),
        median(max(0.0, 1 - step.compute_seconds / step.step_seconds) if step.step_seconds > 0 else 0 for step in last),
    )


def _compute_mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def _round_metric(seconds: float) -> float:
    return float(f"{seconds:.{_METRIC_DIGITS}g}")


def _has_moved(now: MetricLevel | None, told: MetricLevel | None, band: float) -> bool:
    return now is not None and told is not None and now.has_moved(told, band)
