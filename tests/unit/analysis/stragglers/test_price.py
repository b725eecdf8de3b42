"""When each remedy is taken."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pacekeeper_analysis.stragglers.price import (
    MIN_LASTING_WIN,
    AccumulatedLoss,
    Option,
    choose_remedy,
    compute_loss_rate,
    estimate_remaining_seconds,
)

SHARES = Option("Rebalance", cost_seconds=0.0, slowdown_after=1.05)
REPLACE = Option("ReplaceWorker", cost_seconds=30.0, slowdown_after=1.0)


def test_a_free_live_remedy_comes_first() -> None:
    choice = choose_remedy([REPLACE, SHARES], slowdown=1.6, lost_seconds=100.0, sufficient_slowdown=1.1)
    assert choice.chosen is not None
    assert choice.chosen.option is SHARES
    assert choice.prices[0].due, "it is next, as SHARES leave something"
    assert [price.option for price in choice.prices] == [REPLACE, SHARES], "in the order in which they were given"


def test_a_free_remedy_that_leaves_too_much_comes_after_one_that_is_due() -> None:
    def choose_by_loss(lost_seconds: float, bearable: float) -> str:
        chosen = choose_remedy(
            [REPLACE, SHARES], 1.6, lost_seconds, sufficient_slowdown=1.1, tolerable_slowdown=bearable
        ).chosen
        assert chosen is not None
        return chosen.option.remedy

    assert choose_by_loss(30.0, 1.05) == "ReplaceWorker"
    assert choose_by_loss(30.0, 1.06) == "Rebalance", "it is bearable"
    assert choose_by_loss(29.0, 1.05) == "Rebalance", "nothing expensive is due"


@pytest.mark.parametrize("mended", [1.0, 1.1, 2.0])
def test_the_slowdown_that_a_free_remedy_leaves_is_priced_however_well_it_mends(mended: float) -> None:
    def choose_by_loss(lost_seconds: float, left: float = 1.05, after: float = 1.0, refused: str = "") -> str | None:
        """Under SHARES, which win nothing more."""
        expensive = replace(REPLACE, slowdown_after=after, refused=refused)
        chosen = choose_remedy(
            [replace(SHARES, slowdown_after=left), expensive], left, lost_seconds, 10.0, sufficient_slowdown=mended
        ).chosen
        return None if chosen is None else chosen.option.remedy

    assert choose_by_loss(30.0) == "ReplaceWorker", "however soon it may be over"
    assert choose_by_loss(29.9) is None, "not due"
    assert choose_by_loss(30.0, refused="no spare is left") is None
    assert choose_by_loss(1e6, left=1.01) is None, "nothing is left to be won"
    assert choose_by_loss(1e6, after=1.1) is None, "it wins less"


def test_the_due_remedy_with_the_least_total_cost_is_taken() -> None:
    half = Option("Half", cost_seconds=10.0, slowdown_after=1.5)

    def choose_by_loss(lost_seconds: float, remaining_seconds: float) -> str | None:
        chosen = choose_remedy([half, REPLACE], 2.0, lost_seconds, remaining_seconds).chosen
        return None if chosen is None else chosen.option.remedy

    assert choose_by_loss(9.0, 600.0) is None
    assert choose_by_loss(10.0, 600.0) == "Half"
    assert choose_by_loss(30.0, 600.0) == "ReplaceWorker"
    assert choose_by_loss(30.0, 30.0) == "Half", "20 s more for a third of 30 s"


def test_an_expensive_remedy_waits_until_the_loss_reaches_its_price() -> None:
    brief = {"slowdown": 1.5, "remaining_seconds": 10.0}
    assert choose_remedy([REPLACE], lost_seconds=29.0, **brief).chosen is None
    choice = choose_remedy([REPLACE], lost_seconds=30.0, **brief)
    assert choice.chosen is not None
    assert choice.chosen.option is REPLACE


@dataclass(frozen=True)
class Fault:
    """A rank that is slow. Times are seconds since its first sign."""

    noticed: float
    lasts: float
    cost: float  # of a spare
    slow: tuple[tuple[float, float], ...]  # (from then on, S), by time
    shares_mend: float  # this part of what S costs; 0: there are no shares

    @classmethod
    def draw(cls, seed: int) -> Fault:
        draw = random.Random(seed)
        lasts = 10 ** draw.uniform(0.5, 3.0)
        changes = sorted(draw.uniform(0.0, lasts) for _ in range(draw.choice([0, 0, 1, 4])))
        return cls(
            noticed=min(lasts, 10 ** draw.uniform(0.0, 2.0)),
            lasts=lasts,
            cost=10 ** draw.uniform(0.3, 2.5),
            slow=tuple((at, draw.choice([1.15, 1.3, 1.6, 2.2, 5.0])) for at in (0.0, *changes)),
            shares_mend=draw.choice([0.0, 0.2, 0.5, 0.75]),
        )

    def compute_slowdown(self, now: float) -> float:
        return next(slowdown for at, slowdown in reversed(self.slow) if at <= now)

    def compute_remaining_slowdown(self, now: float) -> float:
        return 1.0 + (1.0 - self.shares_mend) * (self.compute_slowdown(now) - 1.0)


CHECK_SECONDS = 0.5
"""Time between two checks."""


def compute_costs(fault: Fault, spare: Option, earlier: float = 600.0) -> tuple[float, float]:
    """Return the cost of the policy as time goes by, and that of a clairvoyant who notices at the same time. The
    policy knows only the past; `earlier`: what it expects."""
    now, clairvoyant_loses, shared = 0.0, 0.0, False
    loss = AccumulatedLoss(0.0, 0.0, fault.compute_slowdown(0.0))
    cost, noticed_loss = math.inf, 0.0
    while now < fault.lasts:
        slowdown = fault.compute_remaining_slowdown(now) if shared else fault.compute_slowdown(now)
        loss = loss.continue_at(now, slowdown)
        if now >= fault.noticed and math.isinf(cost):
            free = (
                []
                if shared or not fault.shares_mend
                else [Option("Rebalance", 0.0, fault.compute_remaining_slowdown(now))]
            )
            chosen = choose_remedy([spare, *free], slowdown, loss.seconds, earlier, sufficient_slowdown=1.1).chosen
            if chosen is not None and chosen.option is spare:
                cost = loss.seconds + spare.cost_seconds
            elif chosen is not None:
                shared = True
                loss = loss.continue_at(now, fault.compute_remaining_slowdown(now))
        step = min(CHECK_SECONDS, fault.lasts - now)
        if now < fault.noticed:
            noticed_loss += step * compute_loss_rate(fault.compute_slowdown(now))
        else:
            clairvoyant_loses += step * compute_loss_rate(fault.compute_remaining_slowdown(now))
        now += step
    bought = math.inf if spare.refused else spare.cost_seconds
    return min(cost, loss.compute_seconds(fault.lasts)), noticed_loss + min(clairvoyant_loses, bought)


@pytest.mark.parametrize("earlier", [1.0, 600.0, math.inf])
@pytest.mark.parametrize("refused", ["", "no spare is warm"])
def test_the_policy_never_pays_more_than_twice_what_a_clairvoyant_pays(refused: str, earlier: float) -> None:
    """With any rest after shares, any change and end of the fault, and any expectation of it."""
    bought = 0
    for seed in range(100):
        fault = Fault.draw(seed)
        spare = Option("ReplaceWorker", fault.cost, 1.0, refused)
        mine, clairvoyants = compute_costs(fault, spare, earlier)
        assert mine <= 2 * clairvoyants + 2 * CHECK_SECONDS, fault
        if refused:
            assert mine <= clairvoyants + CHECK_SECONDS, fault
        bought += mine >= fault.cost and not refused
    assert bool(bought) is not bool(refused)


def test_the_rest_after_shares_is_paid_until_it_reaches_the_price_of_a_spare() -> None:
    """The expectation that the fault lasts buys no spare: for a short one that would cost more than twice as much."""
    rest = {"slowdown": 1.1, "remaining_seconds": 1e6}
    assert choose_remedy([REPLACE], lost_seconds=29.9, **rest).chosen is None
    assert choose_remedy([REPLACE], lost_seconds=30.0, **rest).chosen is not None


def test_a_loss_continues_at_the_remaining_rate() -> None:
    loss = AccumulatedLoss(0.0, 100.0, 2.0)
    assert loss.compute_seconds(110.0) == pytest.approx(5.0)
    mended = loss.continue_at(110.0, 1.25)
    assert mended.compute_seconds(110.0) == pytest.approx(5.0), "what was lost before stays lost"
    assert mended.compute_seconds(160.0) == pytest.approx(15.0)
    assert mended.compute_seconds(60.0) == pytest.approx(5.0), "a clock that is set back wins nothing"
    assert mended.continue_at(160.0, 0.9).compute_seconds(1e6) == pytest.approx(15.0), (
        "nothing is lost any more, nor won back"
    )


def test_between_two_checks_a_fault_has_the_cost_that_both_show() -> None:
    loss = AccumulatedLoss(1.0, 100.0, 2.0).observe(110.0, 1.25)
    assert (loss.seconds, loss.at, loss.slowdown) == pytest.approx((1.0 + 10 * (0.5 + 0.2) / 2, 110.0, 1.25))
    assert loss.observe(90.0, 1.25).seconds == loss.seconds, "a clock that is set back wins nothing"


def test_a_job_that_stands_still_takes_the_cheapest_remedy() -> None:
    restart = Option("RestartRanks", cost_seconds=2.0, slowdown_after=1.0)
    choice = choose_remedy([REPLACE, restart], slowdown=math.inf, lost_seconds=0.0)
    assert choice.chosen is not None
    assert choice.chosen.option is restart


def test_a_refused_remedy_is_priced_but_never_taken() -> None:
    refused = Option("ReplaceWorker", 30.0, 1.0, refused="no spare is left")
    choice = choose_remedy([refused], slowdown=math.inf, lost_seconds=1e6)
    assert choice.chosen is None
    assert choice.prices[0].reason == "no spare is left"
    assert choice.prices[0].gain_seconds > 0


def test_a_free_remedy_that_wins_next_to_nothing_is_not_taken() -> None:
    assert choose_remedy([Option("Rebalance", 0.0, 1.495)], slowdown=1.5, lost_seconds=1e6).chosen is None


@pytest.mark.parametrize("option", [SHARES, REPLACE], ids=lambda option: option.remedy)
def test_a_remedy_that_does_not_flap_may_win_little(option: Option) -> None:
    lasts = replace(option, slowdown_after=1.0, min_win=MIN_LASTING_WIN)
    assert choose_remedy([lasts], slowdown=1.01, lost_seconds=30.0).chosen is not None
    assert choose_remedy([lasts], slowdown=1.004, lost_seconds=30.0).chosen is None, "nor next to nothing"
    assert choose_remedy([replace(option, slowdown_after=1.0)], slowdown=1.01, lost_seconds=30.0).chosen is None


@pytest.mark.parametrize(("elapsed", "expected"), [(0.0, 450.0), (500.0, 600.0)])
def test_the_expected_rest_is_learned_from_earlier_incidents(elapsed: float, expected: float) -> None:
    assert estimate_remaining_seconds(elapsed, [300.0, 300.0], prior_seconds=600.0) == pytest.approx(expected)


def build_local_sgd(after: float) -> Option:
    return Option("LocalSGD", 0.0, after, exact=False)


def test_exact_training_is_preferred_where_it_mends_nearly_as_well() -> None:
    for after in (1.05, 0.9):  # noise and communication that Local-SGD wins in addition to the fault count for nothing
        choice = choose_remedy([build_local_sgd(after), Option("Rebalance", 0.0, 1.12)], slowdown=1.9, lost_seconds=0.0)
        assert choice.chosen is not None
        assert choice.chosen.option.exact
    choice = choose_remedy([build_local_sgd(1.02), Option("Rebalance", 0.0, 1.5)], slowdown=1.9, lost_seconds=0.0)
    assert choice.chosen is not None
    assert not choice.chosen.option.exact


def test_a_mended_fault_needs_no_better_remedy() -> None:
    options = [build_local_sgd(1.0), Option("Rebalance", 0.0, 1.25)]
    exact, better = (choose_remedy(options, 1.9, 0.0, sufficient_slowdown=mended).chosen for mended in (1.3, 1.1))
    assert exact is not None
    assert exact.option.exact
    assert better is not None
    assert not better.option.exact


def test_synchronous_training_is_not_left_for_little() -> None:
    assert choose_remedy([build_local_sgd(1.0)], slowdown=1.12, lost_seconds=1e6).chosen is None
    assert choose_remedy([build_local_sgd(0.7)], slowdown=1.12, lost_seconds=1e6).chosen is None
    assert choose_remedy([build_local_sgd(1.0)], slowdown=1.2, lost_seconds=0.0).chosen is not None


def test_shares_at_their_limit_do_not_lead_to_local_sgd() -> None:
    """A choice stays chosen: from 1.9 to 1.12 by shares, and from there nowhere."""
    assert choose_remedy([build_local_sgd(1.0), Option("Rebalance", 0.0, 1.12)], 1.12, lost_seconds=1e6).chosen is None


class TestAwaited:
    """A remedy that is expensive, exact, and mends nearly as well: nothing inexact is taken until then."""

    def choose(self, lost_seconds: float, remaining: float = 600.0, after: float = 1.0, **changes: Any) -> str | None:
        around = Option("PlanTraffic", 5.0, after, **{"awaited": True, **changes})
        chosen = choose_remedy([build_local_sgd(0.9), around], 2.0, lost_seconds, remaining).chosen
        return None if chosen is None else chosen.option.remedy

    def test_an_awaited_remedy_comes_first_once_it_is_due(self) -> None:
        assert self.choose(4.9) is None
        assert self.choose(5.0) == "PlanTraffic"

    def test_a_remedy_is_awaited_where_it_mends_nearly_as_well(self) -> None:
        assert self.choose(5.0, after=1.15) == "PlanTraffic"
        assert self.choose(5.0, after=1.16) == "LocalSGD"

    def test_a_remedy_is_not_awaited_where_it_costs_more_than_it_wins(self) -> None:
        assert self.choose(5.0, remaining=11.0) == "PlanTraffic"
        assert self.choose(5.0, remaining=9.0) == "LocalSGD"

    @pytest.mark.parametrize("changes", [{"awaited": False}, {"exact": False}, {"refused": "no"}, {"after": 1.99}])
    def test_all_other_choices_are_as_before(self, changes: dict[str, Any]) -> None:
        assert self.choose(5.0, **changes) == "LocalSGD"

    def test_a_free_and_exact_remedy_is_taken_at_once(self) -> None:
        around = Option("PlanTraffic", 5.0, 1.0, awaited=True)
        chosen = choose_remedy([SHARES, around], 2.0, 0.0).chosen
        assert chosen is not None
        assert chosen.option is SHARES

    def test_a_remedy_that_wins_next_to_nothing_is_not_awaited(self) -> None:
        around = Option("PlanTraffic", 0.1, 1.15, awaited=True)
        chosen = choose_remedy([build_local_sgd(1.0), around], 1.17, 100.0).chosen
        assert chosen is not None
        assert chosen.option.remedy == "LocalSGD"
