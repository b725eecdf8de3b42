"""`bench soak`: what counts as growth, and what is reported if an invariant does not hold."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.scripts.soak import invariants, remedies
from bench.scripts.soak.growth import MIN_SAMPLES, estimate_growth
from pacekeeper_operator.api.names import TAINT_QUARANTINE

MINUTE = 60.0


def build_series(an_hour: float, noise: float, minutes: int = 120, level: float = 100.0) -> list[tuple[float, float]]:
    generator = random.Random(7)
    return [(n * MINUTE, level + an_hour * n / 60 + generator.gauss(0, noise)) for n in range(minutes)]


class TestGrowth:
    def test_the_slope_of_growth_is_found(self) -> None:
        found = estimate_growth(build_series(an_hour=6.0, noise=0.5))
        assert found is not None
        assert found.slope == pytest.approx(6.0, abs=0.5)
        assert found.hours == pytest.approx(1.5, abs=0.02)
        assert found.grows

    @pytest.mark.parametrize(("an_hour", "noise"), [(0.0, 0.0), (0.0, 10.0), (-5.0, 1.0), (1.0, 0.1)])
    def test_noise_and_slight_growth_do_not_count(self, an_hour: float, noise: float) -> None:
        found = estimate_growth(build_series(an_hour, noise))
        assert found is not None
        assert not found.grows

    def test_filling_at_the_beginning_does_not_count(self) -> None:
        filling = [(at, 100.0 + min(at, 20 * MINUTE) / 60) for at in (n * MINUTE for n in range(120))]
        found = estimate_growth(filling)
        assert found is not None
        assert not found.grows

    def test_too_few_samples_have_no_slope(self) -> None:
        assert estimate_growth([]) is None
        assert estimate_growth(build_series(50.0, 0.0, minutes=30)) is None, "all of it may be the settling phase"
        assert estimate_growth(build_series(50.0, 0.0)[::20]) is None
        assert estimate_growth([(3.0, 1.0)] * 2 * MIN_SAMPLES) is None


def build_pod(name: str, leaving: bool = False) -> dict[str, Any]:
    return {"metadata": {"name": name, **({"deletionTimestamp": "now"} if leaving else {})}}


def build_member(worker: str, *ranks: int) -> dict[str, Any]:
    return {"worker": worker, "ranks": list(ranks)}


@pytest.mark.parametrize(
    ("members", "wrong"),
    [
        ([build_member("a", 0), build_member("b", 1)], ""),
        ([build_member("a", 0), build_member("b", 0)], "rank 0 is held 2 times"),
        ([build_member("a", 0), build_member("c", 1)], "c holds ranks, and there is no such pod"),
        ([build_member("a", 0), build_member("going", 1)], "going holds ranks"),
        ([build_member("a", 0)], "1 workers hold ranks, not 2"),
        ([build_member("a", 0), build_member("b", 2)], r"leave one out"),
    ],
)
def test_a_plan_that_contradicts_its_pods_is_reported(members: list[dict[str, Any]], wrong: str) -> None:
    found = invariants.check_plan(
        {"members": members}, 2, [build_pod("a"), build_pod("b"), build_pod("going", leaving=True)]
    )
    assert wrong in (found[0] if found else "")
    assert bool(found) == bool(wrong)


@pytest.mark.parametrize(
    ("tainted", "phase", "wrong"),
    [
        (True, "Active", ""),
        (False, "Blocked", ""),
        (False, "Active", "is quarantined, and has not our taint"),
        (True, "", "no NodeQuarantine names it"),
        (False, "", ""),
    ],
)
def test_a_taint_that_contradicts_its_quarantine_is_reported(tainted: bool, phase: str, wrong: str) -> None:
    node = {"metadata": {"name": "n"}, "spec": {"taints": [{"key": TAINT_QUARANTINE}] if tainted else []}}
    quarantines = [{"metadata": {"name": "n"}, "status": {"phase": phase}}] if phase else []
    found = invariants.check_nodes([node], quarantines)
    assert wrong in "".join(found)
    assert bool(found) == bool(wrong)


def test_missing_and_repeated_samples_are_reported() -> None:
    assert invariants.check_samples([[2, 0, 1], [1, 2, 0]], 3) == []
    assert invariants.check_samples([[2, 0, 1], [1, 1, 0]], 3) == ["epoch 2: 1 samples are left out, 1 are there again"]


@pytest.mark.parametrize(
    ("costs", "median_ratio", "is_accurate"),
    [
        ([], None, True),
        ([(5.0, 4.0), (5.0, 5.0), (5.0, 20.0)], 1.0, True),
        ([(2.0, 8.0), (5.0, 8.0), (7.0, 8.0)], 0.625, False),
        ([(16.0, 10.0)], 1.6, False),
    ],
)
def test_prices_are_compared_in_the_median(
    costs: list[tuple[float, float]], median_ratio: float | None, is_accurate: bool
) -> None:
    """Live changes, which cost nothing, and incidents without a remedy have no ratio."""
    statuses = [{"predictedCost": predicted, "measuredCost": measured} for predicted, measured in costs]
    unpriced: list[dict[str, Any]] = [{}, {"status": {}}, {"status": {"predictedCost": 0, "measuredCost": 0}}]
    spec = {"cause": "hang"}
    incidents = [*({"status": {"remedy": "RestartRanks", **status}} for status in statuses), *unpriced]
    found = remedies.compare_prices([{"spec": spec, **incident} for incident in incidents])
    ratios = {"hang RestartRanks": sorted(predicted / measured for predicted, measured in costs)} if costs else {}
    expected = {"remedies": len(costs), "median_ratio": median_ratio, "by_remedy": ratios}
    assert found["cost"].to_json() == expected
    assert found["cost"].is_accurate is is_accurate
    assert found["gain"].to_json() == {"remedies": 0, "median_ratio": None, "by_remedy": {}}
