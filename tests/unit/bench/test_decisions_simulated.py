"""The cost of a slow rank, computed from a simulated run."""

from __future__ import annotations

import pytest

from bench.scripts.decisions import agreement
from bench.scripts.decisions.agreement import LEAD_SECONDS
from bench.scripts.decisions.simulated import (
    COMPARED_KINDS,
    SLOWDOWN_AT_SECONDS,
    TAIL_SECONDS,
    UNBOUNDED_SECONDS,
    Played,
    Result,
    SimulatedCase,
    build_results,
    list_cases,
    print_report,
)

SECONDS = 100.0
ENDS = SLOWDOWN_AT_SECONDS + SECONDS + TAIL_SECONDS


def build_played(case: SimulatedCase, *course: tuple[float, float], **changes: float | tuple[float, ...]) -> Played:
    """course: (time, samples), with 10 samples a second until the fault begins."""
    at, samples = zip((0.0, 0.0), (SLOWDOWN_AT_SECONDS, 10 * SLOWDOWN_AT_SECONDS), *course, strict=True)
    return Played(case, at, samples, (2.0, 1.25), **changes)  # type: ignore[arg-type]  # as named


HEALTHY = build_played(SimulatedCase(0, 1, seconds=SECONDS), (ENDS, 10 * ENDS))


def test_a_cost_covers_all_lost_training_until_the_end_of_the_tail() -> None:
    """20 s at half the pace until it is noticed, 3 s to exchange the worker, and as usual from then on."""
    trained = 10 * (ENDS - SLOWDOWN_AT_SECONDS) - 100 - 30
    slow = build_played(
        SimulatedCase(0, 1, 2.0, SECONDS),
        (ENDS, 10 * SLOWDOWN_AT_SECONDS + trained),
        decided=SLOWDOWN_AT_SECONDS + 20,
        exchanges=(2.0, 4.0),
    )
    (result,) = build_results([HEALTHY, slow])
    assert result.cost == pytest.approx(13.0)
    assert result.clairvoyant == pytest.approx(3.0), "what an exchange takes on average"
    assert result.noticing == pytest.approx(10.0)
    assert result.removed == pytest.approx(1 - 13 / 50)
    assert result.removed_by_clairvoyant == pytest.approx(1 - 3 / 50)


def test_a_clairvoyant_without_a_spare_uses_shares() -> None:
    without = build_played(SimulatedCase(0, 0, seconds=SECONDS), (ENDS, 10 * ENDS))
    slow = build_played(
        SimulatedCase(0, 0, 2.0, SECONDS), (ENDS, 10 * ENDS - 300), decided=SLOWDOWN_AT_SECONDS + 20, uneven=10.0
    )
    exchanged = build_played(SimulatedCase(0, 1, 2.0, SECONDS), (ENDS, 10 * ENDS), exchanges=(3.0,))
    result = build_results([without, HEALTHY, slow, exchanged])[0]
    assert result.clairvoyant == pytest.approx(20.0), "100 s at 1.25 ×"
    assert result.cost == pytest.approx(30.0)
    assert result.noticing == pytest.approx(20 * 0.5 + 10 * 0.2), "the end of the fault is noticed late, too"


def test_a_fault_that_is_never_noticed_has_its_full_cost() -> None:
    slow = build_played(SimulatedCase(0, 1, 2.0, SECONDS), (ENDS, 10 * ENDS - 500), exchanges=(3.0,))
    (result,) = build_results([HEALTHY, slow])
    assert result.decided_after == SECONDS
    assert result.noticing == pytest.approx(50.0)


def test_cases_cover_all_kinds_and_references_in_each_world() -> None:
    assert len(list_cases(3)) == 3 * (2 + 48)
    few = list_cases(0)
    assert {case.kind for case in few if case.factor > 1} == set(COMPARED_KINDS)
    assert {case.spares for case in few if case.factor == 1} == {0, 1}
    assert few == sorted(few, key=lambda case: -case.ends)


def build_result(spares: int, factor: float, seconds: float, cost: float) -> Result:
    return Result(SimulatedCase(0, spares, factor, seconds), cost, 10.0, 2.0, 5.0, 1 - cost / 100, 0.9)


def test_goals_are_means_over_the_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    report, holds = print_report(
        [build_result(1, 2.0, 600.0, 18.0), build_result(1, 2.0, 600.0, 26.0), build_result(0, 2.0, 30.0, 12.0)]
    )
    assert report["times_the_clairvoyant"] == {"2 times as slow for 600 s, spares: 1": 2.0}
    assert report["points_behind"] == {"2 times as slow for 600 s, spares: 1": pytest.approx(12.0)}
    assert list(holds.values()) == [True, False]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_both_parts_of_a_case_have_the_same_slow_rank() -> None:
    scenario = agreement.build_scenario(0, 0, 1.6, 600.0)
    assert (scenario.timeline.onset, scenario.timeline.end_second, scenario.timeline.end) == (
        LEAD_SECONDS,
        LEAD_SECONDS + 600,
        810,
    )
    (strain,) = {strain for strain in scenario.timeline.strains_by_second if strain.slow}
    assert strain.slow == ((1, 1.6),)
    endless = agreement.build_scenario(0, 1, 1.6, UNBOUNDED_SECONDS).timeline
    assert endless.end == endless.end_second == LEAD_SECONDS + UNBOUNDED_SECONDS
    assert agreement.Compared(0, 1.6, 600.0, 0.7, 0.84).agrees
    assert not agreement.Compared(0, 1.6, 600.0, 0.7, 0.86).agrees
