"""When each remedy is taken."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pacekeeper_analysis.price import Option, choose, expected_remaining, loss_rate

SHARES = Option("Rebalance", cost_seconds=0.0, slowdown_after=1.05)
REPLACE = Option("ReplaceWorker", cost_seconds=30.0, slowdown_after=1.0)


def test_a_free_live_remedy_comes_first() -> None:
    choice = choose([REPLACE, SHARES], slowdown=1.6, lost_seconds=100.0, mended=1.1)
    assert choice.chosen is not None
    assert choice.chosen.option is SHARES


def test_a_free_remedy_that_does_not_mend_the_job_delays_no_better_one() -> None:
    little = Option("Rebalance", cost_seconds=0.0, slowdown_after=1.5)

    def taken(dear: Option, lost_seconds: float, remaining_seconds: float) -> str:
        choice = choose([little, dear], 2.0, lost_seconds, remaining_seconds, mended=1.1)
        assert choice.chosen is not None
        return choice.chosen.option.remedy

    assert taken(REPLACE, 40.0, 600.0) == "ReplaceWorker"
    assert taken(REPLACE, 40.0, 80.0) == "Rebalance", "80 s at 1.5 × lose less than the 30 s that a spare costs"
    assert taken(REPLACE, 0.0, 50.0) == "Rebalance", "not due"
    assert taken(replace(REPLACE, refused="no spare is left"), 40.0, 600.0) == "Rebalance"


def test_a_dear_remedy_waits_until_the_loss_reaches_its_price() -> None:
    brief = {"slowdown": 1.5, "remaining_seconds": 10.0}
    assert choose([REPLACE], lost_seconds=29.0, **brief).chosen is None
    choice = choose([REPLACE], lost_seconds=30.0, **brief)
    assert choice.chosen is not None
    assert choice.chosen.option is REPLACE


def test_never_more_than_twice_what_a_clairvoyant_pays() -> None:
    """The ski-rental bound, for faults of every length, asked every second and knowing nothing of durations to come."""
    slowdown, cost = 2.0, REPLACE.cost_seconds
    for duration in range(1, 400, 7):
        lost, bought = 0.0, False
        for _ in range(duration):
            if choose([REPLACE], slowdown, lost, remaining_seconds=1e-9).chosen is not None:
                bought = True
                break
            lost += loss_rate(slowdown)
        paid = lost + cost * bought
        clairvoyant = min(cost, duration * loss_rate(slowdown))
        assert paid <= 2 * clairvoyant + 1.0


def test_experience_buys_earlier() -> None:
    assert choose([REPLACE], slowdown=2.0, lost_seconds=1.0, remaining_seconds=600.0).chosen is not None


def test_a_job_that_stands_still_takes_the_cheapest_cure() -> None:
    restart = Option("RestartRanks", cost_seconds=2.0, slowdown_after=1.0)
    choice = choose([REPLACE, restart], slowdown=math.inf, lost_seconds=0.0)
    assert choice.chosen is not None
    assert choice.chosen.option is restart


def test_what_is_refused_is_priced_but_never_taken() -> None:
    refused = Option("ReplaceWorker", 30.0, 1.0, refused="no spare is left")
    choice = choose([refused], slowdown=math.inf, lost_seconds=1e6)
    assert choice.chosen is None
    assert choice.prices[0].reason == "no spare is left"
    assert choice.prices[0].gain_seconds > 0


def test_a_free_remedy_that_wins_next_to_nothing_is_left() -> None:
    assert choose([Option("Rebalance", 0.0, 1.495)], slowdown=1.5, lost_seconds=1e6).chosen is None


@pytest.mark.parametrize(("elapsed", "expected"), [(0.0, 450.0), (500.0, 600.0)])
def test_expected_rest_learns_from_earlier_incidents(elapsed: float, expected: float) -> None:
    assert expected_remaining(elapsed, [300.0, 300.0], prior_seconds=600.0) == pytest.approx(expected)


def local_sgd(after: float) -> Option:
    return Option("LocalSGD", 0.0, after, exact=False)


def test_exact_training_is_preferred_where_it_mends_nearly_as_well() -> None:
    for after in (1.05, 0.9):  # noise and communication that Local-SGD wins beside the fault count for nothing
        choice = choose([local_sgd(after), Option("Rebalance", 0.0, 1.12)], slowdown=1.9, lost_seconds=0.0)
        assert choice.chosen is not None
        assert choice.chosen.option.exact
    choice = choose([local_sgd(1.02), Option("Rebalance", 0.0, 1.5)], slowdown=1.9, lost_seconds=0.0)
    assert choice.chosen is not None
    assert not choice.chosen.option.exact


def test_what_is_mended_needs_no_better() -> None:
    options = [local_sgd(1.0), Option("Rebalance", 0.0, 1.25)]
    exact, better = (choose(options, 1.9, 0.0, mended=mended).chosen for mended in (1.3, 1.1))
    assert exact is not None
    assert exact.option.exact
    assert better is not None
    assert not better.option.exact


def test_synchronous_training_is_not_left_for_little() -> None:
    assert choose([local_sgd(1.0)], slowdown=1.12, lost_seconds=1e6).chosen is None
    assert choose([local_sgd(0.7)], slowdown=1.12, lost_seconds=1e6).chosen is None
    assert choose([local_sgd(1.0)], slowdown=1.2, lost_seconds=0.0).chosen is not None


def test_shares_that_have_done_what_they_can_do_not_lead_to_local_sgd() -> None:
    """What is chosen once stays chosen: from 1.9 to 1.12 by shares, and from there nowhere."""
    assert choose([local_sgd(1.0), Option("Rebalance", 0.0, 1.12)], 1.12, lost_seconds=1e6).chosen is None
