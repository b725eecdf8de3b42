"""When a rank's metrics are reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from pacekeeper.health.rank_metrics import METRICS_SETTLE_SECONDS, CurrentRankMetrics, MetricsReporter, measure_rank
from pacekeeper.observe.rank_history import RankHistory, StepTimes

BAND = 0.05
STEP, OWN, SAMPLES = 0.25, 0.2, 8


class SimulatedRank:
    """One rank, and its sidecar that checks every second. `own`: seconds of own work, step by step."""

    def __init__(self) -> None:
        self.history, self.reporter, self.now = RankHistory(32), MetricsReporter(), 0.0
        self._numbers = count()
        self._update()

    def train(self, own: Sequence[float] = (OWN,) * 4, wait: float = STEP - OWN) -> bool:
        """Train for a second or so, and return whether the metrics are to be reported then."""
        for seconds in own:
            step = StepTimes(next(self._numbers), seconds + wait, seconds, SAMPLES, 0.0)
            self.history.append(step, mode=0)
        before = self.reporter.urgent_changes
        self.now += 1.0
        self._update()
        return self.reporter.urgent_changes > before

    def _update(self) -> None:
        self.reporter.update([self.measure()], BAND, self.now)

    def measure(self) -> CurrentRankMetrics:
        return measure_rank(3, self.history, SAMPLES)


@pytest.fixture
def rank() -> SimulatedRank:
    """A rank that has trained evenly for 10 s, with all metrics reported."""
    rank = SimulatedRank()
    for _ in range(10):
        rank.train()
    rank.reporter.take_report()
    return rank


def test_the_metrics_are_means_over_the_window() -> None:
    rank = SimulatedRank()
    rank.train((0.1, 0.2, 0.3), wait=0.1)
    (metrics,) = rank.reporter.take_report()
    assert (metrics.rank, metrics.steps, metrics.share, metrics.last_step) == (3, 3, SAMPLES, 2)
    assert (metrics.step_seconds, metrics.compute_seconds, metrics.wait_seconds) == pytest.approx((0.3, 0.2, 0.1))
    assert metrics.compute_seconds_per_sample == pytest.approx(0.025)
    assert (metrics.first_steps_seconds, metrics.synchronization_seconds) == (None, 0.0), "not known"


def test_the_metrics_are_of_steps_with_the_present_share_only() -> None:
    rank = SimulatedRank()
    rank.train((0.4,) * 5)
    rank.history.append(StepTimes(5, 0.3, 0.2, 4, 0.0), mode=0)
    metrics = measure_rank(3, rank.history, 4).metrics
    assert (metrics.steps, metrics.compute_seconds, metrics.share) == (1, 0.2, 4)
    assert measure_rank(3, rank.history, None).metrics.steps == 6, "of an unknown share"
    none = measure_rank(3, rank.history, 6).metrics
    assert (none.steps, none.share) == (0, 6), "none so far"
    assert none.compute_seconds == pytest.approx(2.2 / 6, abs=1e-5), "what is known is of other shares"


def test_metrics_are_short_on_the_wire() -> None:
    rank = SimulatedRank()
    rank.train((1 / 3, 1 / 7, 1 / 9), wait=1 / 11)
    (metrics,) = rank.reporter.take_report()
    assert all(len(str(value)) <= 9 for value in vars(metrics).values())


def test_a_rank_without_steps_is_reported_too() -> None:
    (metrics,) = SimulatedRank().reporter.take_report()
    assert (metrics.rank, metrics.steps, metrics.step_seconds) == (3, 0, None)


def test_an_even_rank_is_not_reported(rank: SimulatedRank) -> None:
    assert not any(rank.train() for _ in range(20))


def test_a_single_slow_step_is_not_reported(rank: SimulatedRank) -> None:
    assert not rank.train((OWN, 5 * OWN, OWN, OWN))
    assert not rank.train()


@pytest.mark.parametrize("factor", [1.12, 0.85])
def test_a_rank_that_becomes_slow_or_fast_is_reported_within_two_seconds(rank: SimulatedRank, factor: float) -> None:
    assert rank.train((OWN * factor,) * 4) or rank.train((OWN * factor,) * 4)


def test_longer_waits_are_reported(rank: SimulatedRank) -> None:
    assert rank.train(wait=2 * (STEP - OWN)) or rank.train(wait=2 * (STEP - OWN))


def test_a_change_within_the_band_is_not_reported(rank: SimulatedRank) -> None:
    assert not any(rank.train((OWN * 1.04,) * 4) for _ in range(5))


def test_reported_metrics_are_not_repeated_until_the_window_has_followed(rank: SimulatedRank) -> None:
    """The mean of a window that is slow in its last steps only continues to rise."""
    reported = []
    for _ in range(12):
        reported.append(rank.train((2 * OWN,) * 2))
        if reported[-1]:
            rank.reporter.take_report()
    assert any(reported)
    (metrics,) = rank.reporter.take_report()
    assert metrics.compute_seconds == pytest.approx(2 * OWN)
    assert not any(reported[int(METRICS_SETTLE_SECONDS) + 3 :]), "it has settled"


def test_metrics_that_were_not_received_are_reported_again(rank: SimulatedRank) -> None:
    assert sum(rank.train((2 * OWN,) * 4) for _ in range(6)) >= 5, "every second until it is reported"


def test_a_wide_band_suppresses_the_report(rank: SimulatedRank) -> None:
    for number in range(6):
        rank.history.append(StepTimes(100 + number, 2 * STEP, 2 * OWN, SAMPLES, 0.0), mode=0)
    rank.reporter.update([rank.measure()], 4.5, rank.now + 1)
    assert rank.reporter.urgent_changes == 0


def test_too_few_steps_are_not_reported() -> None:
    rank = SimulatedRank()
    rank.reporter.take_report()
    assert not rank.train((OWN,) * 3)


def test_a_new_or_removed_rank_waits_for_the_poll(rank: SimulatedRank) -> None:
    another = replace(rank.measure(), metrics=replace(rank.measure().metrics, rank=4))
    rank.reporter.update([another], BAND, rank.now + 1)
    assert rank.reporter.urgent_changes == 0
    assert [metrics.rank for metrics in rank.reporter.take_report()] == [4]
    rank.reporter.update([], BAND, rank.now + 2)
    assert rank.reporter.take_report() == ()
