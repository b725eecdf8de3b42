"""Integer shares against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.shares import balance, equal


def test_a_rank_at_half_speed_gets_half_as_much() -> None:
    cost = np.tile([1.0, 1.0, 1.0, 2.0], (8, 1))
    found = balance(cost, (7, 7, 7, 7))
    assert found.shares == (8, 8, 8, 4)
    assert found.seconds_now == pytest.approx(14.0)
    assert found.seconds_after == pytest.approx(8.0)


@pytest.mark.parametrize("seed", range(8))
def test_no_integer_shares_are_better_where_costs_do_not_vary(seed: int) -> None:
    random = np.random.default_rng(seed)
    cost, fixed = random.uniform(0.5, 3.0, 3), random.uniform(0.0, 2.0, 3)
    found = balance(np.tile(cost, (4, 1)), (4, 4, 4), fixed=fixed)
    best = min(
        float((fixed + np.array(n) * cost).max()) for n in itertools.product(range(1, 11), repeat=3) if sum(n) == 12
    )
    assert found.seconds_after == pytest.approx(best)


def test_under_noise_the_expected_maximum_decides_not_the_mean() -> None:
    """Equal means, but one rank is erratic: it must get less than the steady ones."""
    random = np.random.default_rng(1)
    cost = np.ones((400, 4))
    cost[:, 3] = np.where(random.random(400) < 0.5, 0.2, 1.8)
    found = balance(cost, (16, 16, 16, 16))
    assert found.shares[3] < 14
    assert found.win > 0.1


def test_bounds_are_kept() -> None:
    found = balance(np.tile([1.0, 1.0, 9.0], (4, 1)), (8, 8, 8), minimum=2, maximum=11)
    assert found.shares == (11, 11, 2)


def test_what_cannot_be_bettered_stays() -> None:
    assert balance(np.ones((4, 4)), (8, 8, 8, 8)).shares == (8, 8, 8, 8)


def test_equal_shares_need_a_sample_a_rank() -> None:
    assert equal(10, 4) == (3, 3, 2, 2)
    with pytest.raises(InputError, match=r"global batch 3 .* raise the batch"):
        equal(3, 4)


@pytest.mark.parametrize("bad", [np.nan, 0.0, -1.0])
def test_bad_costs_are_refused(bad: float) -> None:
    cost = np.ones((4, 2))
    cost[1, 1] = bad
    with pytest.raises(InputError, match="finite, positive"):
        balance(cost, (4, 4))
