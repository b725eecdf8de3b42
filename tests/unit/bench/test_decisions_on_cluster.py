from __future__ import annotations

import pytest

from bench.scripts.decisions import on_cluster
from bench.scripts.decisions.on_cluster import (
    CALM_SECONDS,
    SAMPLES,
    SECONDS_A_SAMPLE,
    SLOW_SECONDS,
    TAIL_SECONDS,
    ClusterCase,
    RankStep,
    Trained,
)
from bench.scripts.decisions.simulated import REPLICAS, SLOW_RANK
from bench.scripts.decisions.world import JobCosts, Spare

STRUCK = 1000.0
USUAL, SLOW = SAMPLES * SECONDS_A_SAMPLE + 0.02, 1.6 * SAMPLES * SECONDS_A_SAMPLE + 0.02


def build_steps(noticed: float, mended: float) -> dict[int, list[RankStep]]:
    """Build steps of four ranks, as long as the slow one takes: until noticed, until the fault ends, and after it."""
    at, number, found = STRUCK - CALM_SECONDS - 30.0, 0, list[RankStep]()
    while at < STRUCK + SLOW_SECONDS + TAIL_SECONDS:
        since = at - STRUCK
        at += USUAL if not 0 <= since < SLOW_SECONDS else SLOW if since < noticed else mended
        number += 1
        found.append(RankStep(at, 1, number, SAMPLES))
    return dict.fromkeys(range(REPLICAS), found)


def test_the_removed_share_is_the_loss_that_was_avoided() -> None:
    nothing = on_cluster.compare_with_coarse_clock(ClusterCase(0, 1.6), build_steps(SLOW_SECONDS, SLOW), STRUCK)
    assert nothing.there == pytest.approx(0.0, abs=0.02)
    half = on_cluster.compare_with_coarse_clock(ClusterCase(0, 1.6), build_steps(SLOW_SECONDS / 2, USUAL), STRUCK)
    assert half.there == pytest.approx(0.5, abs=0.02)


def test_a_cluster_that_follows_the_decisions_agrees_and_another_does_not() -> None:
    """Shares of 11 and 17 or 18 leave about an eighth of the slowdown, and are made within ten seconds."""
    soon, late = (
        on_cluster.compare_with_coarse_clock(ClusterCase(0, 1.6), build_steps(noticed, USUAL * 1.12), STRUCK)
        for noticed in (8.0, 90.0)
    )
    assert soon.agrees, soon.description
    assert not late.agrees, late.description


def test_a_step_that_is_repeated_after_a_restart_counts_once() -> None:
    steps_of_ranks = [(1.0, 1, 1), (2.0, 1, 2), (7.0, 2, 1), (8.0, 2, 2), (9.0, 2, 3), (9.5, 2, 3)]
    trained = Trained({0: [RankStep(at, round_, number, 8) for at, round_, number in steps_of_ranks]})
    assert trained.count_samples(0.0, 9.2) == 24
    assert trained.count_samples(2.0, 8.5) == 0
    assert trained.count_samples(9.2, 10.0) == 8, "in a Local-SGD mode numbers come again"


def test_an_incomplete_line_is_skipped() -> None:
    steps_of_ranks = on_cluster.parse_diary(["1.5 1 1 16\n", "2.5 1 2 16\n", "3.5 1 3 1"])
    assert steps_of_ranks == [RankStep(1.5, 1, 1, 16), RankStep(2.5, 1, 2, 16)]


def test_coarse_clock_and_cluster_have_the_same_slow_worker() -> None:
    job = JobCosts(REPLICAS, 1, SAMPLES, SECONDS_A_SAMPLE, 0.0, 0.02, 0.01, 0.0, Spare.NONE, 4)
    found = on_cluster.build_scenario(0, 3.1, job)
    (slow,) = {rank for strain in found.timeline.strains_by_second for rank in strain.slow}
    assert slow == (SLOW_RANK, 3.1)
    assert found.timeline.end_second - found.timeline.onset == SLOW_SECONDS
