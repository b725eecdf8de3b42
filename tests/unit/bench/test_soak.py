"""`bench soak`: what counts as growth, and what is seen where something that must be true is not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.scripts.soak import invariants
from bench.scripts.soak.growth import MIN_SAMPLES, estimate_growth
from pacekeeper_operator.api.names import TAINT_QUARANTINE

MINUTE = 60.0


def series(an_hour: float, noise: float, minutes: int = 120, level: float = 100.0) -> list[tuple[float, float]]:
    dice = random.Random(7)
    return [(n * MINUTE, level + an_hour * n / 60 + dice.gauss(0, noise)) for n in range(minutes)]


class TestGrowth:
    def test_its_slope_is_found(self) -> None:
        found = estimate_growth(series(an_hour=6.0, noise=0.5))
        assert found is not None
        assert found.slope == pytest.approx(6.0, abs=0.5)
        assert found.hours == pytest.approx(1.5, abs=0.02)
        assert found.grows

    @pytest.mark.parametrize(("an_hour", "noise"), [(0.0, 0.0), (0.0, 10.0), (-5.0, 1.0), (1.0, 0.1)])
    def test_noise_and_what_is_little_is_none(self, an_hour: float, noise: float) -> None:
        found = estimate_growth(series(an_hour, noise))
        assert found is not None
        assert not found.grows

    def test_what_fills_at_the_beginning_is_none(self) -> None:
        filling = [(at, 100.0 + min(at, 20 * MINUTE) / 60) for at in (n * MINUTE for n in range(120))]
        found = estimate_growth(filling)
        assert found is not None
        assert not found.grows

    def test_too_few_tell_nothing(self) -> None:
        assert estimate_growth([]) is None
        assert estimate_growth(series(50.0, 0.0, minutes=30)) is None, "all of it may be what settles"
        assert estimate_growth(series(50.0, 0.0)[::20]) is None
        assert estimate_growth([(3.0, 1.0)] * 2 * MIN_SAMPLES) is None


def pod(name: str, going: bool = False) -> dict[str, Any]:
    return {"metadata": {"name": name, **({"deletionTimestamp": "now"} if going else {})}}


def member(worker: str, *ranks: int) -> dict[str, Any]:
    return {"worker": worker, "ranks": list(ranks)}


@pytest.mark.parametrize(
    ("members", "wrong"),
    [
        ([member("a", 0), member("b", 1)], ""),
        ([member("a", 0), member("b", 0)], "rank 0 is held 2 times"),
        ([member("a", 0), member("c", 1)], "c holds ranks, and there is no such pod"),
        ([member("a", 0), member("going", 1)], "going holds ranks"),
        ([member("a", 0)], "1 workers hold ranks, not 2"),
        ([member("a", 0), member("b", 2)], r"leave one out"),
    ],
)
def test_a_plan_fits_its_pods(members: list[dict[str, Any]], wrong: str) -> None:
    found = invariants.check_plan({"members": members}, 2, [pod("a"), pod("b"), pod("going", going=True)])
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
def test_nodes_fit_their_quarantines(tainted: bool, phase: str, wrong: str) -> None:
    node = {"metadata": {"name": "n"}, "spec": {"taints": [{"key": TAINT_QUARANTINE}] if tainted else []}}
    quarantines = [{"metadata": {"name": "n"}, "status": {"phase": phase}}] if phase else []
    found = invariants.check_nodes([node], quarantines)
    assert wrong in "".join(found)
    assert bool(found) == bool(wrong)


def test_samples_that_are_left_out_or_there_again_are_seen() -> None:
    assert invariants.check_samples([[2, 0, 1], [1, 2, 0]], 3) == []
    assert invariants.check_samples([[2, 0, 1], [1, 1, 0]], 3) == ["epoch 2: 1 samples are left out, 1 are there again"]
