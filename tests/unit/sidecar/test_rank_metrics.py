"""When a rank's figures are news."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from pacekeeper.observe.rank_history import RankHistory, StepTimes
from pacekeeper.sidecar.rank_metrics import METRICS_SETTLE_SECONDS, CurrentRankMetrics, MetricsReporter, measure_rank

BAND = 0.05
STEP, OWN, SAMPLES = 0.25, 0.2, 8


class Rank:
    """One rank, and its sidecar that looks every second. `own`: seconds of own work, step by step."""

    def __init__(self) -> None:
        self.history, self.telling, self.now = RankHistory(32), MetricsReporter(), 0.0
        self._numbers = count()
        self._look()

    def train(self, own: Sequence[float] = (OWN,) * 4, wait: float = STEP - OWN) -> bool:
        """For a second or so; whether it is news then."""
        for seconds in own:
            step = StepTimes(next(self._numbers), seconds + wait, seconds, SAMPLES, 0.0)
            self.history.append(step, mode=0)
        before = self.telling.urgent_changes
        self.now += 1.0
        self._look()
        return self.telling.urgent_changes > before

    def _look(self) -> None:
        self.telling.update([self.rank()], BAND, self.now)

    def rank(self) -> CurrentRankMetrics:
        return measure_rank(3, self.history, SAMPLES)


@pytest.fixture
def rank() -> Rank:
    """It has trained evenly for 10 s, and all is told."""
    rank = Rank()
    for _ in range(10):
        rank.train()
    rank.telling.take_report()
    return rank


def test_the_figures_are_means_over_the_window() -> None:
    rank = Rank()
    rank.train((0.1, 0.2, 0.3), wait=0.1)
    (told,) = rank.telling.take_report()
    assert (told.rank, told.steps, told.share) == (3, 3, SAMPLES)
    assert (told.step_seconds, told.compute_seconds, told.wait_seconds) == pytest.approx((0.3, 0.2, 0.1))
    assert told.compute_seconds_per_sample == pytest.approx(0.025)
    assert (told.first_steps_seconds, told.synchronization_seconds) == (None, 0.0), "not known"


def test_they_are_of_steps_with_the_present_share_only() -> None:
    rank = Rank()
    rank.train((0.4,) * 5)
    rank.history.append(StepTimes(5, 0.3, 0.2, 4, 0.0), mode=0)
    told = measure_rank(3, rank.history, 4).metrics
    assert (told.steps, told.compute_seconds, told.share) == (1, 0.2, 4)
    assert measure_rank(3, rank.history, None).metrics.steps == 6, "of an unknown share"
    none = measure_rank(3, rank.history, 6).metrics
    assert (none.steps, none.share) == (0, 6), "none so far"
    assert none.compute_seconds == pytest.approx(2.2 / 6, abs=1e-5), "what is known is of other shares"


def test_figures_are_short_on_the_wire() -> None:
    rank = Rank()
    rank.train((1 / 3, 1 / 7, 1 / 9), wait=1 / 11)
    (told,) = rank.telling.take_report()
    assert all(len(str(value)) <= 9 for value in vars(told).values())


def test_a_rank_without_steps_is_told_all_the_same() -> None:
    (told,) = Rank().telling.take_report()
    assert (told.rank, told.steps, told.step_seconds) == (3, 0, None)


def test_an_even_rank_is_no_news(rank: Rank) -> None:
    assert not any(rank.train() for _ in range(20))


def test_nor_is_a_single_slow_step(rank: Rank) -> None:
    assert not rank.train((OWN, 5 * OWN, OWN, OWN))
    assert not rank.train()


@pytest.mark.parametrize("factor", [1.12, 0.85])
def test_a_rank_that_becomes_slow_or_fast_is_within_two_seconds(rank: Rank, factor: float) -> None:
    assert rank.train((OWN * factor,) * 4) or rank.train((OWN * factor,) * 4)


def test_longer_waits_are(rank: Rank) -> None:
    assert rank.train(wait=2 * (STEP - OWN)) or rank.train(wait=2 * (STEP - OWN))


def test_within_the_band_it_is_not(rank: Rank) -> None:
    assert not any(rank.train((OWN * 1.04,) * 4) for _ in range(5))


def test_what_was_told_is_no_news_until_the_window_has_followed(rank: Rank) -> None:
    """The mean of a window that is slow in its last steps only goes on rising."""
    news = []
    for _ in range(12):
        news.append(rank.train((2 * OWN,) * 2))
        if news[-1]:
            rank.telling.take_report()
    assert any(news)
    (told,) = rank.telling.take_report()
    assert told.compute_seconds == pytest.approx(2 * OWN)
    assert not any(news[int(METRICS_SETTLE_SECONDS) + 3 :]), "it has settled"


def test_what_was_not_heard_stays_news(rank: Rank) -> None:
    assert sum(rank.train((2 * OWN,) * 4) for _ in range(6)) >= 5, "every second until it is told"


def test_a_band_that_is_wide_keeps_it_quiet(rank: Rank) -> None:
    for number in range(6):
        rank.history.append(StepTimes(100 + number, 2 * STEP, 2 * OWN, SAMPLES, 0.0), mode=0)
    rank.telling.update([rank.rank()], 4.5, rank.now + 1)
    assert rank.telling.urgent_changes == 0


def test_steps_too_few_to_tell_are_no_news() -> None:
    rank = Rank()
    rank.telling.take_report()
    assert not rank.train((OWN,) * 3)


def test_a_rank_that_has_come_anew_or_gone_waits_for_the_poll(rank: Rank) -> None:
    another = replace(rank.rank(), metrics=replace(rank.rank().metrics, rank=4))
    rank.telling.update([another], BAND, rank.now + 1)
    assert rank.telling.urgent_changes == 0
    assert [told.rank for told in rank.telling.take_report()] == [4]
    rank.telling.update([], BAND, rank.now + 2)
    assert rank.telling.take_report() == ()
