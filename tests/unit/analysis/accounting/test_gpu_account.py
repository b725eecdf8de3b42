"""The account of a job's GPU seconds: each second once, for what it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.accounting.gpu_account import (
    MAX_DAYS,
    MAX_NODES,
    GpuAccount,
    Loss,
    RecentSteps,
    SlowRank,
    TrainingMoment,
    advance_account,
)
from pacekeeper_analysis.accounting.rank_work import RankSums, collect_sums
from pacekeeper_analysis.protocol.watched_report import StepSums

GPUS, BEGAN, STEP = 8, 1_000_000.0, 0.5
DAY, DATE = 86_400.0, "1970-01-12"
"""Seconds of a day; the date of BEGAN."""


def advance(account: GpuAccount, *moments: TrainingMoment) -> GpuAccount:
    for moment in moments:
        account = advance_account(account, moment)
    return account


def train(round_: int, began: float, steps: int, *, resumed_from: int | None = 0, **changes: Any) -> TrainingMoment:
    """Return the moment at which this many steps of a round are complete. Its start takes ten seconds."""
    first = began + 10.0
    moment = TrainingMoment(
        now=first + (steps - 1) * STEP,
        gpus=GPUS,
        round=round_,
        held_since=BEGAN,
        round_began=began,
        first_step_ended=first if steps else None,
        steps_in_round=steps,
        step=None if resumed_from is None else resumed_from + steps,
        step_ended=first + (steps - 1) * STEP if steps else None,
    )
    return replace(moment, **changes)


def list_seconds(account: GpuAccount) -> dict[str, float]:
    """Return the seconds of the job by loss, and the useful ones."""
    found = {loss.value: seconds / GPUS for loss, seconds in account.total.lost.items()}
    return {"useful": account.total.useful / GPUS, **found}


def test_a_healthy_run_is_startup_and_useful_steps() -> None:
    account = advance(GpuAccount(), train(1, BEGAN, 0, now=BEGAN + 4), train(1, BEGAN, 1), train(1, BEGAN, 101))
    assert list_seconds(account) == {"Startup": 10.0, "useful": 50.0}
    assert account.total.goodput == pytest.approx(50 / 60)


def test_pods_without_ranks_start() -> None:
    waiting = TrainingMoment(now=BEGAN + 30, gpus=GPUS, round=0, held_since=BEGAN)
    account = advance(GpuAccount(), waiting, train(1, BEGAN + 40, 1))
    assert list_seconds(account) == {"Startup": 50.0, "useful": 0.0}


def test_slow_ranks_and_communication_take_their_share_of_steps() -> None:
    steps = train(1, BEGAN, 101, slowdown=2.0, exposed_share=0.2, culprit_nodes=("node-1", "node-2"))
    account = advance(GpuAccount(), train(1, BEGAN, 1), steps)
    assert list_seconds(account) == {
        "Startup": 10.0,
        "Straggler": 25.0,
        "Communication": pytest.approx(10.0),
        "useful": pytest.approx(15.0),
    }
    assert account.nodes == {(DATE, "node-1"): 12.5 * GPUS, (DATE, "node-2"): 12.5 * GPUS}


def test_a_hang_lasts_from_the_last_complete_step() -> None:
    hung = train(1, BEGAN, 101, now=BEGAN + 100, is_hung=True, culprit_nodes=("node-3",))
    account = advance(GpuAccount(), train(1, BEGAN, 1), train(1, BEGAN, 101), hung)
    assert list_seconds(account) == {"Startup": 10.0, "useful": 50.0, "Hang": 40.0}
    assert account.nodes == {(DATE, "node-3"): 40.0 * GPUS}
    goes_on = advance(account, train(1, BEGAN, 103, now=BEGAN + 110, step_ended=BEGAN + 110))
    assert list_seconds(goes_on) == {"Startup": 10.0, "useful": 51.0, "Hang": 49.0}, "two steps of usual length"


@pytest.mark.parametrize("is_known_late", [False, True])
def test_a_restart_costs_the_unfinished_step_the_gap_the_start_and_repeated_steps(*, is_known_late: bool) -> None:
    account = advance(
        GpuAccount(),
        train(1, BEGAN, 101),
        train(1, BEGAN, 101, now=BEGAN + 62),
        train(2, BEGAN + 65, 1, resumed_from=80, previous_round_ended=BEGAN + (64.9 if is_known_late else 60.3)),
        train(2, BEGAN + 65, 41, resumed_from=80, previous_round_ended=BEGAN + 60.3),
        train(2, BEGAN + 65, 41, resumed_from=80, previous_round_ended=BEGAN + 60.3),
    )
    assert list_seconds(account) == {
        "Startup": 20.0,
        "useful": pytest.approx(50.0 + 10.0),  # the first of 21 repeated steps is part of the start
        "RepeatedSteps": pytest.approx(0.3 + 10.0),
        "Idle": pytest.approx(4.7),
    }


def test_without_the_step_that_a_round_resumed_from_nothing_counts_as_repeated() -> None:
    account = advance(GpuAccount(), train(1, BEGAN, 101), train(2, BEGAN + 60, 41, resumed_from=None))
    assert "RepeatedSteps" not in account.total.lost


def test_the_end_of_a_round_that_hung_is_part_of_the_hang() -> None:
    account = advance(
        GpuAccount(),
        train(1, BEGAN, 101),
        train(1, BEGAN, 101, now=BEGAN + 70, is_hung=True),
        train(2, BEGAN + 80, 0, now=BEGAN + 85),
    )
    assert list_seconds(account) == {"Startup": 15.0, "useful": 50.0, "Hang": 20.0}


def test_pods_that_are_gone_hold_no_gpus_and_the_end_of_a_job_is_idle() -> None:
    account = advance(
        GpuAccount(),
        train(1, BEGAN, 101),
        train(1, BEGAN, 101, now=BEGAN + 70, is_hung=True),
        train(1, BEGAN, 101, now=BEGAN + 80, gpus=0, is_hung=True),
        train(1, BEGAN, 101, now=BEGAN + 85, is_over=True),
    )
    assert list_seconds(account) == {"Startup": 10.0, "useful": 50.0, "Hang": 10.0, "Idle": 5.0}


def sum_own_work(steps: int, slow_from: int) -> RankSums:
    """Return the sums of two ranks. Rank 1 works 0.4 s in a step from `slow_from` on, else each works 0.1 s."""
    own = 0.1 * (steps - 1) + 0.3 * max(0, steps - slow_from + 1)
    reports = [StepSums(rank, steps, steps - 1, (steps - 1) * STEP, (0.1 * (steps - 1), own)[rank]) for rank in (0, 1)]
    sums = collect_sums(reports, 2)
    assert sums is not None
    return sums


def train_with_sums(steps: int, slow_from: int, **changes: Any) -> TrainingMoment:
    return train(1, BEGAN, steps, sums=sum_own_work(steps, slow_from), **changes)


SLOW_FROM = 51
NAMED = SlowRank(1, BEGAN + 10.0 + (SLOW_FROM - 1) * STEP, "node-1")


def test_the_excess_of_a_slow_rank_is_moved_once_it_is_named_and_only_once() -> None:
    steps = [train_with_sums(count, SLOW_FROM) for count in (2, 31, 50, 61, 71)]
    unnamed = advance(GpuAccount(), train(1, BEGAN, 1), *steps)
    assert Loss.STRAGGLER not in unnamed.total.lost
    named = advance(unnamed, *(train_with_sums(count, SLOW_FROM, slow_ranks=(NAMED,)) for count in (81, 81, 91)))
    assert named.total.lost[Loss.STRAGGLER] == pytest.approx(41 * 0.3 * GPUS)
    assert named.nodes == {(DATE, "node-1"): pytest.approx(41 * 0.3 * GPUS)}
    assert sum(day.lost.get(Loss.STRAGGLER, 0.0) for day in named.days.values()) == pytest.approx(41 * 0.3 * GPUS)


def test_the_last_slow_steps_count_if_the_rank_is_not_named_any_more() -> None:
    steps = [train_with_sums(count, SLOW_FROM) for count in (2, 50)]
    account = advance(GpuAccount(), train(1, BEGAN, 1), *steps, train_with_sums(60, SLOW_FROM, slow_ranks=(NAMED,)))
    account = advance(account, train_with_sums(70, SLOW_FROM), train_with_sums(80, SLOW_FROM))
    assert account.total.lost[Loss.STRAGGLER] == pytest.approx(20 * 0.3 * GPUS)


def test_a_new_leader_moves_nothing_twice() -> None:
    """It continues from what is stored, which has no recent steps."""
    steps = [train_with_sums(count, SLOW_FROM) for count in (2, 50)]
    before = advance(GpuAccount(), train(1, BEGAN, 1), *steps, train_with_sums(70, SLOW_FROM, slow_ranks=(NAMED,)))
    moments = [train_with_sums(count, SLOW_FROM, slow_ranks=(NAMED,)) for count in (80, 90)]
    after = advance(replace(before, recent=RecentSteps()), *moments)
    assert after.total.lost[Loss.STRAGGLER] == pytest.approx((20 + 10) * 0.3 * GPUS), "the first ten are unknown"
    assert after.total.held == pytest.approx(advance(before, *moments).total.held)


def test_a_hang_is_no_excess_of_the_rank_that_caused_it() -> None:
    """Its step is the first of the new ones after the hang."""
    healthy = 10**6
    hung = train_with_sums(101, healthy, now=BEGAN + 90, is_hung=True)
    account = advance(GpuAccount(), train(1, BEGAN, 1), train_with_sums(101, healthy), hung)
    sums = sum_own_work(111, healthy)
    sums = replace(sums, own_seconds=sums.own_seconds + np.array([0.0, 40.0]), step_seconds=sums.step_seconds + 40.0)
    goes_on = train(1, BEGAN, 111, now=BEGAN + 105, step_ended=BEGAN + 105, sums=sums, slow_ranks=(NAMED,))
    account = advance(account, goes_on)
    assert account.total.lost[Loss.HANG] == pytest.approx(40.0 * GPUS)
    assert Loss.STRAGGLER not in account.total.lost


def test_a_hang_waits_for_the_report_of_the_steps_before_it() -> None:
    stale = train(1, BEGAN, 51, now=BEGAN + 70, is_hung=True, knows_last_step=False)
    account = advance(GpuAccount(), train(1, BEGAN, 1), train(1, BEGAN, 51), stale)
    assert Loss.HANG not in account.total.lost
    account = advance(account, train(1, BEGAN, 101, now=BEGAN + 70, is_hung=True))
    assert list_seconds(account) == {"Startup": 10.0, "useful": 50.0, "Hang": 10.0}


def test_a_late_report_changes_nothing() -> None:
    account = advance(GpuAccount(), train(1, BEGAN, 1), train_with_sums(50, SLOW_FROM), train_with_sums(80, SLOW_FROM))
    late = advance(account, train_with_sums(60, SLOW_FROM))
    assert (late.total, late.until, late.steps_in_round) == (account.total, account.until, 80)


def build_random_run(rng: Random) -> Iterator[TrainingMoment]:
    """Yield moments of rounds with hangs, slow ranks, and unobserved ends, in the order of time."""
    now, step = BEGAN, 0
    for round_ in range(1, rng.randint(2, 6)):
        began, steps, first, ended = now, 0, None, None
        for _ in range(rng.randint(1, 8)):
            now += rng.uniform(0.1, 30)
            if rng.random() < 0.7:
                steps, step, ended = steps + rng.randint(1, 20), step + 1, now - rng.uniform(0, 0.1)
                first = first or rng.uniform(began, ended)
            yield TrainingMoment(
                now=now,
                gpus=GPUS,
                round=round_,
                held_since=BEGAN,
                round_began=began,
                first_step_ended=first,
                steps_in_round=steps,
                step=step if rng.random() < 0.9 else None,
                step_ended=ended,
                is_hung=rng.random() < 0.2,
                knows_last_step=rng.random() < 0.8,
                sums=build_random_sums(rng, steps) if steps > 1 and rng.random() < 0.8 else None,
                slow_ranks=(SlowRank(rng.randrange(2), now - 60, "node-2"),) if rng.random() < 0.3 else (),
                slowdown=rng.uniform(0.9, 3),
                exposed_share=rng.uniform(-0.1, 1.1),
                culprit_nodes=("node-1",),
                previous_round_ended=began - rng.uniform(0, 10) if rng.random() < 0.5 else None,
                is_over=rng.random() < 0.05,
            )
        now += rng.uniform(0, 10)


def build_random_sums(rng: Random, steps: int) -> RankSums | None:
    """Return sums that do not fit together, as of ranks whose clocks or records are wrong."""
    return collect_sums(
        [StepSums(rank, steps, steps - 1, steps * rng.uniform(0, 60), steps * rng.uniform(0, 60)) for rank in (0, 1)], 2
    )


@pytest.mark.parametrize("seed", range(20))
def test_useful_seconds_and_losses_add_up_to_what_was_held(seed: int) -> None:
    account = GpuAccount()
    for moment in build_random_run(Random(seed)):
        account = advance_account(account, moment)
        assert account.until is not None
        assert account.total.held == pytest.approx((account.until - BEGAN) * GPUS)
        assert min(account.total.useful, *account.total.lost.values()) >= -1e-6
        assert account.until <= moment.now
    assert sum(day.held for day in account.days.values()) == pytest.approx(account.total.held)


def test_days_and_nodes_are_bounded() -> None:
    account = advance(GpuAccount(), train(1, BEGAN, 1))
    for day in range(1, 2 * MAX_DAYS):
        nodes = tuple(f"node-{day}-{index}" for index in range(10))
        steps = train(1, BEGAN, 1 + day, now=BEGAN + day * DAY, step_ended=BEGAN + day * DAY)
        account = advance(account, replace(steps, slowdown=2.0, culprit_nodes=nodes))
    assert len(account.days) == MAX_DAYS
    assert max(account.days) == "1970-05-15"
    assert len(account.nodes) == MAX_NODES
    assert max(account.nodes) == ("1970-05-15", f"node-{2 * MAX_DAYS - 1}-9"), "the newest stay"
