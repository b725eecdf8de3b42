"""What the operator receives about the ranks' training speed, and when it cannot wait for the next poll.

Metrics are means over a rank's window of steps with its present share, and go with every heartbeat. They are urgent
once the *medians* of a rank's last steps differ from the reported ones by more than the plan's band. A single slow step
is not urgent. A mean takes its whole window to follow. So for this time it is reported again whenever it has moved by
as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from pacekeeper.observe.rank_history import RankHistory, StepTimes
from pacekeeper_analysis.protocol.reports import RankMetrics

LAST_STEPS_SECONDS = 2.0
MIN_LAST_STEPS, MAX_LAST_STEPS = 4, 8
"""The last steps are those of this many seconds, but within these limits of their number."""
METRICS_SETTLE_SECONDS = 6.0
"""Seconds for which a window's means may still move after its last steps have changed."""
_METRIC_DIGITS = 5
"""Significant digits of a metric as it is sent. More are noise, and cost bytes."""


@dataclass(frozen=True)
class MetricLevel:
    """A rank's training speed, as far as a change of it may be urgent. Seconds."""

    step: float
    own_per_sample: float
    waiting: float  # share of a step

    def has_moved(self, reported: MetricLevel, deadband: float) -> bool:
        """Return whether it differs from `reported` by more than `deadband`, a fraction (for waiting: of a step)."""
        pairs = ((self.step, reported.step), (self.own_per_sample, reported.own_per_sample))
        moved = any(abs(current - previous) > deadband * previous for current, previous in pairs)
        return moved or abs(self.waiting - reported.waiting) > deadband


@dataclass(frozen=True)
class CurrentRankMetrics:
    """A rank's metrics at one time."""

    metrics: RankMetrics
    mean: MetricLevel | None  # over its window; None: no step
    last_steps: MetricLevel | None  # medians over its last steps; None: too few


class MetricsReporter:
    """The metrics at the last poll, and those that were reported."""

    def __init__(self) -> None:
        self.urgent_changes = 0
        """Changes whenever the metrics are to be reported at once."""
        self._current: Sequence[CurrentRankMetrics] = ()
        self._reported: dict[int, CurrentRankMetrics] = {}
        self._unsettled_until: float | None = None

    def update(self, ranks: Sequence[CurrentRankMetrics], deadband: float, now: float) -> None:
        """Update the metrics.

        `ranks`: those here, now. `deadband`: the fraction by which they may differ from the reported ones. `now`:
        seconds.
        """
        self._current = ranks
        pairs = [(rank, self._reported[rank.metrics.rank]) for rank in ranks if rank.metrics.rank in self._reported]
        last_steps_moved = any(_has_moved(rank.last_steps, reported.last_steps, deadband) for rank, reported in pairs)
        if last_steps_moved:
            self._unsettled_until = now + METRICS_SETTLE_SECONDS
        is_unsettled = self._unsettled_until is not None and now < self._unsettled_until
        mean_moved = is_unsettled and any(_has_moved(rank.mean, reported.mean, deadband) for rank, reported in pairs)
        self.urgent_changes += last_steps_moved or mean_moved

    def take_report(self) -> tuple[RankMetrics, ...]:
        """Return the newest metrics. They count as reported."""
        self._reported = {rank.metrics.rank: rank for rank in self._current}
        return tuple(rank.metrics for rank in self._current)


def measure_rank(rank: int, history: RankHistory, share: int | None) -> CurrentRankMetrics:
    """Measure one rank, which takes `share` samples per step (None: unknown).

    The metrics cover the steps with this share, or all steps while there are none with it.
    """
    share_steps = [step for step in history.steps if share in (None, step.samples)]
    steps = share_steps or history.steps
    step_seconds, compute_seconds = (
        _compute_mean(step.step_seconds for step in steps),
        _compute_mean(step.compute_seconds for step in steps),
    )
    metrics = RankMetrics(
        rank=rank,
        steps=len(share_steps),
        step_seconds=_round_metric(step_seconds),
        compute_seconds=_round_metric(compute_seconds),
        compute_seconds_per_sample=_round_metric(
            _compute_mean(step.compute_seconds / max(step.samples, 1) for step in steps)
        ),
        wait_seconds=None
        if step_seconds is None or compute_seconds is None
        else _round_metric(max(0.0, step_seconds - compute_seconds)),
        share=share or None,
        first_steps_seconds=_round_metric(history.first_steps_seconds),
        synchronization_seconds=_round_metric(history.synchronization_seconds) or 0.0,
        last_step=steps[-1].step if steps else None,
    )
    return CurrentRankMetrics(metrics, _build_mean_level(metrics), _measure_last_steps(steps))


def _build_mean_level(metrics: RankMetrics) -> MetricLevel | None:
    """Return the level of the means; None: there is no step."""
    if not metrics.step_seconds or metrics.compute_seconds_per_sample is None or metrics.wait_seconds is None:
        return None
    waiting = metrics.wait_seconds / metrics.step_seconds
    return MetricLevel(metrics.step_seconds, metrics.compute_seconds_per_sample, waiting)


def _measure_last_steps(steps: Sequence[StepTimes]) -> MetricLevel | None:
    """Return the medians of a window's last steps; None: there are too few."""
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


def _compute_mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None


def _round_metric(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.{_METRIC_DIGITS}g}")


def _has_moved(current: MetricLevel | None, reported: MetricLevel | None, deadband: float) -> bool:
    return current is not None and reported is not None and current.has_moved(reported, deadband)
