"""What a slow rank cost, reckoned from what a world has shown."""

from __future__ import annotations

import pytest

from bench.scripts.decisions.simulated import STRIKES, TAIL_SECONDS, Case, Played, results

SECONDS = 100.0
ENDS = STRIKES + SECONDS + TAIL_SECONDS


def played(case: Case, *course: tuple[float, float], **changes: float | tuple[float, ...]) -> Played:
    """course: (time, samples), with 10 samples a second until the fault begins."""
    at, samples = zip((0.0, 0.0), (STRIKES, 10 * STRIKES), *course, strict=True)
    return Played(case, at, samples, (2.0, 1.25), **changes)  # type: ignore[arg-type]  # as named


HEALTHY = played(Case(0, 1, seconds=SECONDS), (ENDS, 10 * ENDS))


def test_a_cost_is_of_all_that_is_not_trained_until_the_tail_is_over() -> None:
    """20 s at half the pace until it is noticed, 3 s to exchange the worker, and as usual from then on."""
    trained = 10 * (ENDS - STRIKES) - 100 - 30
    slow = played(Case(0, 1, 2.0, SECONDS), (ENDS, 10 * STRIKES + trained), decided=STRIKES + 20, exchanges=(2.0, 4.0))
    (result,) = results([HEALTHY, slow])
    assert result.cost == pytest.approx(13.0)
    assert result.clairvoyant == pytest.approx(3.0), "what an exchange takes on average"
    assert result.noticing == pytest.approx(10.0)
    assert result.removed == pytest.approx(1 - 13 / 50)
    assert result.removed_by_clairvoyant == pytest.approx(1 - 3 / 50)


def test_a_clairvoyant_without_a_spare_shares() -> None:
    without = played(Case(0, 0, seconds=SECONDS), (ENDS, 10 * ENDS))
    slow = played(Case(0, 0, 2.0, SECONDS), (ENDS, 10 * ENDS - 300), decided=STRIKES + 20, uneven=10.0)
    exchanged = played(Case(0, 1, 2.0, SECONDS), (ENDS, 10 * ENDS), exchanges=(3.0,))
    result = results([without, HEALTHY, slow, exchanged])[0]
    assert result.clairvoyant == pytest.approx(20.0), "100 s at 1.25 ×"
    assert result.cost == pytest.approx(30.0)
    assert result.noticing == pytest.approx(20 * 0.5 + 10 * 0.2), "and that it is over"


def test_what_is_never_noticed_costs_what_it_costs_unmended() -> None:
    slow = played(Case(0, 1, 2.0, SECONDS), (ENDS, 10 * ENDS - 500), exchanges=(3.0,))
    (result,) = results([HEALTHY, slow])
    assert result.decided_after == SECONDS
    assert result.noticing == pytest.approx(50.0)
