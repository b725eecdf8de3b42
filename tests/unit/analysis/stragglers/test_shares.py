"""Integer shares against brute force, and what windows show of the ranks' costs."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.shares import ASSUMED_FIXED_COST_SHARE as SUPPOSED
from pacekeeper_analysis.stragglers.shares import (
    CHANCE_STANDARD_ERRORS,
    ShareCosts,
    ShareLimits,
    _pool_deviations,
    _shrink_costs,
    divide_equally,
    fit_costs,
    fit_costs_per_rank,
    optimize_shares,
    rebalance_shares,
)


def test_a_rank_at_half_speed_gets_half_as_much() -> None:
    cost = np.tile([1.0, 1.0, 1.0, 2.0], (8, 1))
    found = optimize_shares(cost, (7, 7, 7, 7))
    assert found.shares == (8, 8, 8, 4)
    assert found.seconds_now == pytest.approx(14.0)
    assert found.seconds_after == pytest.approx(8.0)


@pytest.mark.parametrize("seed", range(8))
def test_no_integer_shares_are_better_where_costs_do_not_vary(seed: int) -> None:
    random = np.random.default_rng(seed)
    cost, fixed = random.uniform(0.5, 3.0, 3), random.uniform(0.0, 2.0, 3)
    found = optimize_shares(np.tile(cost, (4, 1)), (4, 4, 4), fixed=fixed)
    best = min(
        float((fixed + np.array(n) * cost).max()) for n in itertools.product(range(1, 11), repeat=3) if sum(n) == 12
    )
    assert found.seconds_after == pytest.approx(best)


def test_under_noise_the_expected_maximum_decides_and_not_the_mean() -> None:
    """Equal means, but one rank is erratic: it must get less than the steady ones."""
    random = np.random.default_rng(1)
    cost = np.ones((400, 4))
    cost[:, 3] = np.where(random.random(400) < 0.5, 0.2, 1.8)
    found = optimize_shares(cost, (16, 16, 16, 16))
    assert found.shares[3] < 14
    assert found.win > 0.1


def test_bounds_are_kept() -> None:
    found = optimize_shares(np.tile([1.0, 1.0, 9.0], (4, 1)), (8, 8, 8), limits=ShareLimits(2, 11))
    assert found.shares == (11, 11, 2)


def test_optimal_shares_stay() -> None:
    assert optimize_shares(np.ones((4, 4)), (8, 8, 8, 8)).shares == (8, 8, 8, 8)


def test_equal_shares_need_a_sample_a_rank() -> None:
    assert divide_equally(10, 4) == (3, 3, 2, 2)
    with pytest.raises(InputError, match=r"global batch 3 .* raise the batch"):
        divide_equally(3, 4)


def test_equal_shares_in_whole_microbatches() -> None:
    assert divide_equally(20, 3, granularity=4) == (8, 8, 4)
    with pytest.raises(InputError, match=r"global batch 12 is too small for 4 ranks with 4 samples or more"):
        divide_equally(12, 4, granularity=4)
    with pytest.raises(InputError, match=r"\[10\] samples must all be multiples of the shares' granularity, 4"):
        divide_equally(10, 2, granularity=4)


@pytest.mark.parametrize("bad", [np.nan, 0.0, -1.0])
def test_bad_costs_are_rejected(bad: float) -> None:
    cost = np.ones((4, 2))
    cost[1, 1] = bad
    with pytest.raises(InputError, match="finite, positive"):
        optimize_shares(cost, (4, 4))


def test_the_granularity_of_integers_decides_how_near_shares_come_to_the_bound() -> None:
    """Speeds 1 : 1 : 1 : ½ could do 3.5 samples a second: 32 reach 91.4 % of that and 28 all of it."""
    cost = np.tile([1.0, 1.0, 1.0, 2.0], (8, 1))
    known_costs = ShareCosts(np.zeros(4), cost[0], np.ones(4, dtype=bool))
    coarse, whole = (
        rebalance_shares(cost * samples, np.full(cost.shape, samples), costs=known_costs) for samples in (8, 7)
    )
    assert coarse.shares[3] in {4, 5}
    assert 32 / 3.5 / coarse.seconds_after == pytest.approx(0.914, abs=0.001)
    assert whole.shares == (8, 8, 8, 4)
    assert 28 / 3.5 / whole.seconds_after == pytest.approx(1.0)


def test_a_part_of_each_step_is_assumed_to_be_fixed() -> None:
    """Three samples of a rank at 3.3 × fit a usual rank's time only while nothing of its steps is fixed."""
    own = np.tile([1.0, 1.0, 1.0, 3.3], (8, 1))
    nothing = ShareCosts(np.zeros(4), own[0] / 8, np.ones(4, dtype=bool))
    assert sorted(rebalance_shares(own, np.full(own.shape, 8), costs=nothing).shares) == [3, 9, 10, 10]
    supposed = rebalance_shares(own, np.full(own.shape, 8))
    assert supposed.shares == (10, 10, 10, 2)
    assert supposed.seconds_after == pytest.approx(SUPPOSED + (1 - SUPPOSED) * 10 / 8)


def test_two_hiccups_in_a_short_window_are_not_a_ranks_pace() -> None:
    """Of eight steps, rank 1 took three times as long in two: this is rather chance than a rank to spare."""
    own = 1.0 + 0.01 * np.random.default_rng(0).standard_normal((8, 4))
    own[[2, 5], 1] *= 3.0
    assert not rebalance_shares(own, np.full(own.shape, 16)).is_worthwhile


def test_a_result_of_only_one_half_of_the_steps_is_not_sure() -> None:
    own = np.ones((16, 4))
    own[0::2, 0] = 1.3
    found = rebalance_shares(own, np.full(own.shape, 16))
    assert not found.is_worthwhile


@pytest.mark.parametrize("seed", range(12))
def test_no_integer_shares_are_better_under_noise_either(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 5))
    total = int(random.integers(ranks + 2, 13))
    cost = random.uniform(0.5, 3.0, ranks) * random.choice([1.0, 2.0], size=(16, ranks), p=[0.8, 0.2])
    fixed = random.uniform(0.0, 2.0, ranks)
    found = optimize_shares(cost, divide_equally(total, ranks), fixed=fixed, draws=64, seed=5)
    drawn = cost[np.random.default_rng(5).integers(0, 16, size=(64, ranks)), np.arange(ranks)]
    best = min(
        float((fixed + drawn * np.array(shares)).max(axis=1).mean())
        for shares in itertools.product(range(1, total), repeat=ranks)
        if sum(shares) == total
    )
    assert found.seconds_after == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_no_shares_of_whole_microbatches_are_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, grain = int(random.integers(2, 5)), int(random.integers(2, 6))
    units = int(random.integers(ranks + 2, 12))
    noise = random.choice([1.0, 2.0], size=(16, ranks), p=[0.8, 0.2]) if seed % 2 else np.ones((16, ranks))
    cost, fixed = random.uniform(0.5, 3.0, ranks) * noise, random.uniform(0.0, 2.0, ranks)
    least, most = 1 + grain * (seed % 3 == 0 and units >= 2 * ranks), grain * units - 1
    current = divide_equally(units * grain, ranks, grain)
    found = optimize_shares(cost, current, fixed=fixed, limits=ShareLimits(least, most, grain), draws=64, seed=5)
    drawn = cost[np.random.default_rng(5).integers(0, 16, size=(64, ranks)), np.arange(ranks)]
    best = min(
        float((fixed + drawn * np.array(shares)).max(axis=1).mean())
        for shares in itertools.product(range(grain, grain * units, grain), repeat=ranks)
        if sum(shares) == grain * units and least <= min(shares) and max(shares) <= most
    )
    assert all(share % grain == 0 for share in found.shares)
    assert sum(found.shares) == grain * units
    assert found.seconds_after == pytest.approx(best, rel=1e-4)


def test_present_shares_that_are_no_whole_microbatches_are_rejected() -> None:
    with pytest.raises(InputError, match=r"\[10, 6\] samples must all be multiples of the shares' granularity, 4"):
        rebalance_shares(np.ones((8, 2)), np.tile([10, 6], (8, 1)), limits=ShareLimits(granularity=4))


def test_many_ranks_with_large_batches_keep_sum_and_bounds() -> None:
    random = np.random.default_rng(0)
    cost = random.uniform(0.5, 2.0, 200) * (1 + 0.05 * random.standard_normal((16, 200)))
    found = optimize_shares(cost, (100,) * 200, limits=ShareLimits(60, 160), draws=64)
    assert sum(found.shares) == 100 * 200
    assert 60 <= min(found.shares) < max(found.shares) <= 160
    slowest, fastest = int(cost.mean(axis=0).argmax()), int(cost.mean(axis=0).argmin())
    assert found.shares[slowest] == 60 < found.shares[fastest]


def draw_steps(samples: np.ndarray, fixed: np.ndarray, per_sample: np.ndarray, noise: float = 0.02) -> np.ndarray:
    """Own seconds, [steps, ranks]."""
    random = np.random.default_rng(3)
    return np.asarray((fixed + per_sample * samples) * (1 + noise * random.standard_normal(samples.shape)))


FIXED, PER_SAMPLE = np.array([0.0, 1.0, 4.0, 8.0]), np.array([1.0, 1.0, 0.5, 0.25])


def test_fixed_and_per_sample_cost_are_separated_where_samples_varied() -> None:
    samples = np.random.default_rng(0).integers(5, 12, size=(64, 4))
    costs = fit_costs(draw_steps(samples, FIXED, PER_SAMPLE), samples)
    assert costs.identified.all()
    assert costs.fixed == pytest.approx(FIXED, abs=0.4)
    assert costs.per_sample == pytest.approx(PER_SAMPLE, abs=0.05)
    assert costs.compute_seconds([8, 8, 8, 8]) == pytest.approx(FIXED + 8 * PER_SAMPLE, rel=0.02)


def test_pauses_in_a_fifth_of_the_steps_do_not_distort_the_fit() -> None:
    samples = np.random.default_rng(0).integers(5, 12, size=(64, 4))
    seconds = draw_steps(samples, FIXED, PER_SAMPLE)
    seconds[np.random.default_rng(1).random(seconds.shape) < 0.2] += 50.0
    costs = fit_costs(seconds, samples)
    assert costs.identified.all()
    assert costs.fixed == pytest.approx(FIXED, abs=1.0)
    assert costs.per_sample == pytest.approx(PER_SAMPLE, abs=0.15)


def test_where_samples_did_not_vary_enough_all_cost_is_taken_as_per_sample() -> None:
    samples = np.full((32, 4), 8)
    costs = fit_costs(draw_steps(samples, FIXED, PER_SAMPLE), samples)
    assert not costs.identified.any()
    assert (costs.fixed == 0).all()
    assert costs.per_sample == pytest.approx(FIXED / 8 + PER_SAMPLE, rel=0.02)
    samples[7, 2] = 9  # once, in the noise
    assert not fit_costs(draw_steps(samples, FIXED, PER_SAMPLE, noise=0.1), samples).identified.any()


def test_a_pace_that_changed_along_with_the_samples_is_not_taken_for_a_fixed_part() -> None:
    samples = np.repeat([[8, 8], [5, 9]], 16, axis=0)
    recovered = np.where(samples == 5, 5.0, 20.0 * samples / 8)  # rank 0 took 2.5 a sample, then 1
    slower = np.where(samples == 5, 20.0, samples)  # … or 1 a sample, then 4
    for seconds in (recovered, slower):
        costs = fit_costs(seconds * (1 + 0.01 * np.random.default_rng(0).standard_normal((32, 2))), samples)
        assert not costs.identified[0]
        assert costs.fixed[0] == 0


def test_ranks_are_fitted_each_over_its_own_steps() -> None:
    samples = [np.array([8] * 8 + [5] * 8), np.full(32, 8)]
    costs = fit_costs_per_rank([3.0 + samples[0], 2.0 * samples[1]], samples)
    assert costs.identified.tolist() == [True, False]
    assert costs.fixed == pytest.approx([3.0, 0.0])
    assert costs.per_sample == pytest.approx([1.0, 2.0])


def test_ranks_with_as_many_steps_are_fitted_as_if_each_were_alone() -> None:
    samples = np.repeat([[8, 8, 6], [5, 9, 7]], 16, axis=0)
    seconds = draw_steps(samples, np.array([3.0, 0.0, 1.0]), np.array([1.0, 2.0, 1.5])).T
    costs = fit_costs_per_rank(list(seconds), list(samples.T))
    alone = [fit_costs_per_rank([own], [amounts]) for own, amounts in zip(seconds, samples.T, strict=True)]
    assert costs.identified.any()
    for name in ("fixed", "per_sample", "identified"):
        assert getattr(costs, name).tolist() == [getattr(one, name).item() for one in alone]


def test_shares_that_cannot_help_are_detected_once_the_fixed_part_is_known() -> None:
    """Rank 3's cost hardly depends on its samples: less of them would only burden the others."""
    fixed, per_sample = np.array([0.0, 0.0, 0.0, 12.0]), np.array([1.0, 1.0, 1.0, 0.02])
    unknown = np.full((32, 4), 8)
    assert rebalance_shares(draw_steps(unknown, fixed, per_sample), unknown).win > 0.2, "as far as the window shows"
    tried = np.repeat([[8, 8, 8, 8], [9, 9, 9, 5]], 16, axis=0)
    found = rebalance_shares(draw_steps(tried, fixed, per_sample), tried)
    assert not found.is_worthwhile


@pytest.mark.parametrize("ranks", [4, 16, 48])
def test_shares_do_not_follow_noise(ranks: int) -> None:
    """Ranks that are alike, with noise as large as their work: the next window is different from any before."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        seconds = 8 * (1 + random.exponential(0.7, (32, ranks)))
        assert not rebalance_shares(seconds, np.full(seconds.shape, 8)).is_worthwhile


def test_the_slow_one_of_many_gets_less_and_the_others_do_not_follow_chance() -> None:
    """Of 64 ranks with noise of 8 %, by eight steps. Only the test knows what a step takes then."""
    random, pace = np.random.default_rng(7), np.where(np.arange(64) == 59, 1.24, 1.0)
    noise = 1 + 0.08 * random.standard_normal((20, 8, 64))
    later = pace * (1 + 0.08 * random.standard_normal((4000, 64)))

    def compute_step_seconds(shares: tuple[int, ...]) -> float:
        return float((later * shares).max(axis=1).mean())

    equally, best = compute_step_seconds((8,) * 64), compute_step_seconds((9, *(8,) * 58, 7, *(8,) * 4))
    found = [rebalance_shares(8 * pace * each, np.full((8, 64), 8)).shares for each in noise]
    lost = (np.mean([compute_step_seconds(shares) for shares in found]) - best) / (equally - best)
    assert lost < 0.2, "of what the best shares win"


def draw_node(pace: float, ranks: int = 1024, steps: int = 8, seed: int = 0) -> np.ndarray:
    """Own seconds of ranks that vary by 3 %, (steps, ranks); the first eight take `pace` times as long."""
    noise = 1.0 + 0.03 * np.random.default_rng(seed).standard_normal((steps, ranks))
    return np.asarray(noise * np.where(np.arange(ranks) < 8, pace, 1.0))


def compute_step_time(shares: Sequence[int], own: np.ndarray) -> float:
    return float((own * np.array(shares) / 32).max(axis=1).mean())


def test_equally_slow_ranks_are_as_slow_as_all_of_them_together() -> None:
    """By its own eight steps one of a node's ranks seems 1.09 × slow, another 1.15 ×."""
    own = draw_node(1.12)
    costs = (own / 32).mean(axis=0)[:8] / np.median(own / 32)
    assert np.ptp(costs) > 0.02
    assert np.ptp(_shrink_costs(own / 32)[0].mean(axis=0)[:8] / np.median(own / 32)) < 0.015
    two = own * np.where(np.arange(1024) < 4, 1.1, 1.0)  # two nodes that are not as slow as each other
    of_two = _shrink_costs(two / 32)[0].mean(axis=0)[:8]
    assert of_two[:4].mean() > 1.05 * of_two[4:].mean()


@pytest.mark.parametrize("ranks", [64, 1024])
def test_ranks_that_are_alike_do_not_follow_single_draws(ranks: int) -> None:
    own = draw_node(1.12, ranks)
    found = rebalance_shares(own, np.full(own.shape, 32))
    assert found.is_worthwhile
    freed = 8 * 32 - sum(found.shares[:8])
    others = Counter(found.shares[8:])
    assert others == {32: ranks - 8 - freed, 33: freed}, "no others than it takes"


@pytest.mark.parametrize("deviations", [(-0.15, 0.15), (0.2, 0.4, 0.0, 0.0, 0.0)])
def test_ranks_that_are_not_as_slow_as_each_other_are_not_combined(deviations: tuple[float, ...]) -> None:
    """They lie nine and six standard errors apart."""
    found = _pool_deviations(np.array(deviations), np.full(len(deviations), 0.033), CHANCE_STANDARD_ERRORS)
    assert found[1] - found[0] > 0.6 * (deviations[1] - deviations[0])


def test_a_common_slowdown_of_two_ranks_may_be_chance_as_well() -> None:
    single, both = (
        _pool_deviations(np.array([0.075, two, 0.0, 0.0]), np.full(4, 0.033), CHANCE_STANDARD_ERRORS)
        for two in (0.0, 0.075)
    )
    assert 0 < single[0] < both[0] < 0.075
    assert both[0] == both[1]


def test_a_step_that_takes_next_to_nothing_of_the_mean_is_not_negative() -> None:
    """The two halves of four steps are two each."""
    own = np.full((4, 4), 32.0)
    own[2:, 1] = 6 * 32.0
    assert sum(rebalance_shares(own, np.full((4, 4), 32)).shares) == 128


def test_between_kinds_many_samples_move_and_within_them_all_stay_even() -> None:
    random = np.random.default_rng(3)
    kinds = np.array([0, 0, 0, 1, 1])
    for _ in range(20):
        cost = np.where(kinds == 0, 1.9, 1.0) * (1.0 + 0.17 * random.standard_normal((16, 5)))
        shares = np.array(optimize_shares(cost, (128,) * 5, rank_classes=kinds, draws=128).shares)
        assert np.ptp(shares[kinds == 0]) <= 1
        assert np.ptp(shares[kinds == 1]) <= 1


def test_ranks_of_a_kind_whose_fixed_parts_differ_have_other_shares() -> None:
    cost = 1.0 + 0.03 * np.random.default_rng(0).standard_normal((64, 5))
    found = optimize_shares(
        cost, (32,) * 5, fixed=np.array([0.0, 12.0, 4.0, 0.2, 0.0]), rank_classes=np.zeros(5, dtype=int)
    )
    assert found.shares == (35, 24, 31, 35, 35)


def test_ranks_that_differ_only_by_chance_have_equal_shares() -> None:
    """By these draws the second rank is faster than the third."""
    cost = np.array([[2.0, 1.0, 1.2], [2.0, 0.9, 1.3], [2.0, 1.1, 1.0], [2.0, 0.9, 1.3]])
    alike = np.array([7, 2, 2])
    by_draws, by_kind = optimize_shares(cost, (32,) * 3), optimize_shares(cost, (32,) * 3, rank_classes=alike)
    assert by_draws.shares[1] > by_draws.shares[2] + 2
    assert abs(by_kind.shares[1] - by_kind.shares[2]) <= 1
    coarse = optimize_shares(cost, (32,) * 3, rank_classes=alike, limits=ShareLimits(granularity=4))
    assert abs(coarse.shares[1] - coarse.shares[2]) <= 4


def test_a_pace_known_from_more_steps_is_worth_its_gain() -> None:
    """A node at 1.06 × among 1,024: no eight steps show what other shares win."""
    own, later = draw_node(1.06), draw_node(1.06, steps=512, seed=1)
    samples = np.full(own.shape, 32)
    assert not rebalance_shares(own, samples).is_worthwhile
    rebalanced = rebalance_shares(own, samples, known_relative_times=dict.fromkeys(range(8), 1.06))
    assert rebalanced.is_worthwhile
    assert 1.0 - compute_step_time(rebalanced.shares, later) / compute_step_time((32,) * 1024, later) == pytest.approx(
        rebalanced.win, abs=0.01
    )
    assert compute_step_time(rebalanced.shares, later) < compute_step_time((32,) * 1024, later)
    assert not rebalance_shares(draw_node(1.0), samples, known_relative_times={0: 1.001}).is_worthwhile


def test_a_known_pace_hides_nothing_of_the_other_ranks() -> None:
    """Two are faster than their peers, and have more; the last is known to be a little slow."""
    pace = np.array([0.8, 0.8, *[1.0] * 13, 1.06])
    given = np.array([40, 40, *[32] * 14])

    def draw_own_seconds(steps: int, seed: int) -> np.ndarray:
        noise = 1.0 + 0.01 * np.random.default_rng(seed).standard_normal((steps, 16))
        return np.asarray(noise * pace * given)

    found = rebalance_shares(draw_own_seconds(8, 0), np.tile(given, (8, 1)), known_relative_times={15: 1.06})
    later = draw_own_seconds(512, 1) / given
    assert min(found.shares[:2]) >= 40
    assert found.shares[15] < 32
    won = 1.0 - (later * found.shares).max(axis=1).mean() / (later * given).max(axis=1).mean()
    assert won > 0.015


def test_known_paces_of_missing_ranks_are_rejected() -> None:
    with pytest.raises(InputError, match=r"ranks \[5\] do not fit 2 ranks"):
        rebalance_shares(np.ones((4, 2)), np.full((4, 2), 8), known_relative_times={5: 1.06})


def test_an_intermittently_slow_rank_is_evaluated_by_its_own_steps() -> None:
    """Its mean is its peers', and a third of its steps take more than twice as long: it has to be early in the others,
    since all wait for it in those."""
    own = 1 + 0.05 * np.random.default_rng(3).standard_normal((48, 4))
    own[:, 3] *= 0.4
    own[::3, 3] *= 5.5
    found = rebalance_shares(12 * own, np.full(own.shape, 12))
    assert found.shares[3] <= 8


def test_a_promise_under_noise_comes_true() -> None:
    promised, real = [], []
    for seed in range(10):
        random = np.random.default_rng(seed)
        pace = np.where(np.arange(8) == 5, 2.0, 1.0)
        found = rebalance_shares(16 * pace * (1 + random.exponential(0.3, (32, 8))), np.full((32, 8), 16))
        later = pace * (1 + random.exponential(0.3, (2000, 8)))
        after, before = ((later * np.array(shares)).max(axis=1).mean() for shares in (found.shares, (16,) * 8))
        promised.append(found.win)
        real.append(1 - after / before)
    assert np.mean(real) > 0.2
    assert np.mean(promised) == pytest.approx(np.mean(real), abs=0.03)


def test_a_rare_pause_moves_no_shares() -> None:
    seconds = np.full((32, 4), 8.0)
    seconds[11, 2] = 200.0
    assert not rebalance_shares(seconds, np.full((32, 4), 8)).is_worthwhile


@pytest.mark.parametrize(
    ("seconds", "samples", "message"),
    [
        (np.ones((4, 2)), np.ones((4, 3)), r"must both be \[steps, ranks\]"),
        (np.ones(4), np.ones(4), r"must both be \[steps, ranks\]"),
        (np.ones((0, 2)), np.ones((0, 2)), r"must both be \[steps, ranks\]"),
        (np.zeros((4, 2)), np.ones((4, 2)), "compute_seconds must be finite and above 0"),
        (np.ones((4, 2)), np.zeros((4, 2)), "samples must be finite and above 0"),
        (np.full((4, 2), np.inf), np.ones((4, 2)), "compute_seconds must be finite"),
    ],
)
def test_bad_windows_are_rejected(seconds: np.ndarray, samples: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rebalance_shares(seconds, samples)


@pytest.mark.parametrize("fixed", [0.0, 1e9])
def test_numbers_beyond_reason_are_shared_out_in_a_moment(fixed: float) -> None:
    """As a script may have its rank report: a sample costs less than the least time that differs from the fixed one,
    or 10¹⁵ times as much as on another rank."""
    cost = np.full((8, 3), 1e-14)
    cost[:, 2] *= 1e15
    began = time.process_time()
    found = optimize_shares(cost, (2**31, 2**31, 2**31), fixed=np.full(3, fixed))
    assert sum(found.shares) == 3 * 2**31
    assert min(found.shares) >= 1
    assert time.process_time() - began < 5.0, "it takes 0.1 s; sample by sample, hours"
