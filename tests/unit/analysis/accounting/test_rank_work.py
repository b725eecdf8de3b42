"""Own work of ranks by the sums that they report, also if reports are late or missing."""

from __future__ import annotations

import pytest

from pacekeeper_analysis.accounting.rank_work import RankSums, WorkPosition, collect_sums
from pacekeeper_analysis.protocol.watched_report import StepSums

OWN, SLOW, STEP = 0.02, 0.08, 0.09


def report(rank: int, last_step: int, *, slow_from: int = 10**9, first: int = 1) -> StepSums:
    """Return the sums of a rank after a step. From `slow_from` on its own work takes SLOW."""
    slow = max(0, last_step - max(slow_from, first) + 1)
    steps = last_step - first + 1
    return StepSums(rank, last_step, steps, steps * STEP, (steps - slow) * OWN + slow * SLOW)


def collect(*reports: StepSums) -> RankSums:
    sums = collect_sums(reports, len(reports))
    assert sums is not None
    return sums


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_excess_of_a_slow_rank_and_the_least_wait_are_exact(ranks: int) -> None:
    others = [report(rank, 40) for rank in range(1, ranks)]
    sums = collect(report(0, 40, slow_from=31), *others)
    work, _ = WorkPosition.begin_round(sums).advance(sums)
    assert work is not None
    assert work.excess == {0: pytest.approx(10 * (SLOW - OWN))}
    assert work.steps == 40
    assert work.seconds == pytest.approx(40 * STEP)
    assert work.exposed == pytest.approx(30 * (STEP - OWN) + 10 * (STEP - SLOW))


def test_ranks_that_report_at_different_steps_are_compared_over_the_same_ones() -> None:
    """In the end all is counted once."""
    position = WorkPosition.begin_round(collect(report(0, 10), report(1, 10)))
    excess = 0.0
    for mine, other in ((20, 35), (50, 40), (50, 60), (80, 80)):
        work, position = position.advance(collect(report(0, mine, slow_from=11), report(1, other)))
        excess += 0.0 if work is None else work.excess.get(0, 0.0)
    assert excess == pytest.approx(70 * (SLOW - OWN))


def test_a_late_report_changes_nothing() -> None:
    start = WorkPosition.begin_round(collect(report(0, 10), report(1, 10)))
    _, position = start.advance(collect(report(0, 40), report(1, 40)))
    work, late = position.advance(collect(report(0, 20), report(1, 40)))
    assert work is None
    assert late is position


def test_steps_that_a_sidecar_has_missed_are_left_out() -> None:
    _, position = WorkPosition.begin_round(collect(report(0, 10), report(1, 10))).advance(
        collect(report(0, 40), report(1, 40))
    )
    again = collect(report(0, 70, first=61, slow_from=61), report(1, 70))
    work, position = position.advance(again)
    assert work is None
    work, _ = position.advance(collect(report(0, 80, first=61, slow_from=61), report(1, 80)))
    assert work is not None
    assert work.excess == {0: pytest.approx(10 * (SLOW - OWN))}


@pytest.mark.parametrize("reports", [(), (report(0, 5),), (report(0, 5), report(2, 5))], ids=["none", "one", "other"])
def test_without_all_ranks_nothing_is_compared(reports: tuple[StepSums, ...]) -> None:
    assert collect_sums(reports, 2) is None
