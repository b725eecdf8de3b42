"""The pure parts of `bench stragglers`: draws, the bound of all sides, and the evaluation of diaries."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench import stragglers
from bench.scripts.stragglers import bounds, diaries, hosts
from bench.scripts.stragglers.diaries import DiaryEntry
from bench.scripts.stragglers.draws import Costs, Scenario, draw_costs
from bench.scripts.stragglers.run import Run

RANKS, BATCH, LEASE = 4, 28, 7


def draw_scenario_costs(scenario: Scenario, batches: int = 200, seed: int = 1) -> Costs:
    return draw_costs(scenario, RANKS, batches * BATCH, BATCH, seed)


@pytest.mark.parametrize("scenario", Scenario)
def test_a_cost_depends_on_rank_and_sample_alone(scenario: Scenario) -> None:
    longer, shorter = draw_scenario_costs(scenario, 200), draw_scenario_costs(scenario, 50)
    np.testing.assert_array_equal(longer[:, : 50 * BATCH], shorter)
    assert longer.min() > 0


def test_random_slows_one_rank_in_each_batch_and_all_ranks_equally_often() -> None:
    slow: npt.NDArray[np.bool_] = draw_scenario_costs(Scenario.RANDOM, 2000).reshape(RANKS, -1, BATCH) > 1
    assert (slow.all(axis=2) == slow.any(axis=2)).all()  # for the whole batch
    assert (slow[:, :, 0].sum(axis=0) == 1).all()
    np.testing.assert_allclose(slow[:, :, 0].mean(axis=1), 1 / RANKS, atol=0.04)


def test_noise_is_a_shifted_exponential_of_mean_one_that_differs_between_ranks() -> None:
    costs = draw_scenario_costs(Scenario.NOISE, 2000)
    assert costs.min() >= 0.5
    assert costs.mean() == pytest.approx(1.0, abs=0.01)
    assert (costs - 0.5).std() == pytest.approx(0.5, abs=0.02)
    assert abs(float(np.mean((costs[0] - 1) * (costs[1] - 1)))) < 0.01


def test_seeds_give_different_draws() -> None:
    assert not np.array_equal(draw_scenario_costs(Scenario.NOISE, seed=1), draw_scenario_costs(Scenario.NOISE, seed=2))


def test_bound_without_straggler_is_one_sample_per_unit_and_rank() -> None:
    assert bounds.compute_bound(draw_scenario_costs(Scenario.NONE), BATCH) == pytest.approx(4.0)


def test_bound_with_a_rank_half_as_fast_is_three_and_a_half_for_shares_and_leases() -> None:
    costs = draw_scenario_costs(Scenario.CONSTANT)
    shares, rate = bounds.find_fixed_shares(costs, BATCH)
    assert shares == (8, 8, 8, 4)
    assert rate == pytest.approx(3.5)
    assert bounds.compute_lease_rate(costs, LEASE) == pytest.approx(3.5)
    assert bounds.compute_bound(costs, BATCH) == pytest.approx(3.5)
    assert bounds.compute_shares_rate(costs, (7, 7, 7, 7)) == pytest.approx(2.0)


def test_the_grain_caps_integer_shares() -> None:
    costs = draw_costs(Scenario.CONSTANT, RANKS, 32 * 50, 32, 1)
    assert bounds.find_fixed_shares(costs, 32)[1] == pytest.approx(3.2)  # of 3.5: 91.4 %


@pytest.mark.parametrize("scenario", [Scenario.RANDOM, Scenario.NOISE])
def test_no_method_beats_the_bound(scenario: Scenario) -> None:
    costs = draw_scenario_costs(scenario, 400)
    best = bounds.compute_bound(costs, BATCH)
    within_reach = bounds.compute_lease_rate(costs, LEASE)
    assert (
        bounds.compute_shares_rate(costs, (7, 7, 7, 7))
        <= bounds.find_fixed_shares(costs, BATCH)[1]
        < within_reach
        <= best
    )
    assert bounds.compute_foreseen_rate(costs, BATCH) <= best


def test_the_bound_with_a_random_straggler_equals_that_with_a_known_one() -> None:
    costs = draw_scenario_costs(Scenario.RANDOM)
    assert bounds.compute_bound(costs, BATCH) == pytest.approx(3.5, rel=0.01)
    assert bounds.compute_shares_rate(costs, (7, 7, 7, 7)) == pytest.approx(2.0)


def test_fixed_shares_are_the_best_of_all_by_brute_force() -> None:
    costs = draw_costs(Scenario.NOISE, 3, 9 * 40, 9, 3)

    def compute_seconds(shares: tuple[int, ...]) -> float:
        total = 0.0
        for batch in range(40):
            first, finish = batch * 9, []
            for rank, share in enumerate(shares):
                finish.append(costs[rank, first : first + share].sum())
                first += share
            total += max(finish)
        return total

    combinations = [combination for combination in itertools.product(range(1, 8), repeat=3) if sum(combination) == 9]
    assert sorted(map(tuple, bounds.list_shares(9, 3).tolist())) == sorted(combinations)
    best = min(combinations, key=compute_seconds)
    shares, rate = bounds.find_fixed_shares(costs, 9)
    assert shares == best
    assert rate == pytest.approx(9 * 40 / compute_seconds(best))


def test_no_rank_waits_under_leases() -> None:
    costs = np.ones((2, 60))
    assert bounds.compute_lease_rate(costs, 1) == pytest.approx(2.0)
    costs[1] = 3.0
    assert bounds.compute_lease_rate(costs, 1) == pytest.approx(1 + 1 / 3)


@pytest.mark.parametrize("scenario", [Scenario.NONE, Scenario.CONSTANT])
def test_local_sgd_wastes_nothing_where_steps_fit_the_clock(scenario: Scenario) -> None:
    costs = draw_scenario_costs(scenario)
    for lease in (1, LEASE):
        assert bounds.compute_local_sgd_rate(costs, lease, LEASE, 16) == pytest.approx(
            bounds.compute_bound(costs, BATCH)
        )


def test_ranks_wait_for_the_last_one_at_a_synchronization() -> None:
    """Steps of 2 and 3 units; the clock is up after 4: the second rank makes one step, or two, and the first waits."""
    costs = np.array([[2.0] * 100, [3.0] * 100])
    assert bounds.compute_local_sgd_rate(costs, 1, 1, 4) == pytest.approx(
        3 / 4
    )  # ends at 4 (two samples) and at 3 (one)
    assert bounds.compute_local_sgd_rate(costs, 1, 1, 5) == pytest.approx(
        4 / 6
    )  # at 4, next is nearer to 5: at 6 (two) and 4 …


@pytest.mark.parametrize(("scenario", "whole", "fine"), [(Scenario.RANDOM, 0.945, 0.98), (Scenario.NOISE, 0.998, 0.99)])
def test_the_best_case_of_aedit(scenario: Scenario, whole: float, fine: float) -> None:
    """With leases of a whole step it cannot reach 0.95 of the bound where draws are random; with small ones it can."""
    of_bound = {}
    for lease in (2, LEASE):
        costs = [draw_scenario_costs(scenario, 400, seed) for seed in range(1, 5)]
        of_bound[lease] = np.mean(
            [bounds.compute_local_sgd_rate(its, lease, LEASE, 128) / bounds.compute_bound(its, BATCH) for its in costs]
        )
    assert of_bound[LEASE] < whole
    assert of_bound[2] > fine


def test_a_failed_side_is_omitted_and_its_goals_are_missed() -> None:
    run = stragglers.Measured(0.97, 10.0, 1.0, [0.25] * 4, 0.05, 0)
    found = stragglers.summarize_scenario(
        Scenario.CONSTANT, {"ddp": {0: run, 1: run}, "aedit": {1: run}, "torchft_diloco": {}}
    )
    assert found["aedit"] == found["ddp"] == 0.97
    assert found["against_ddp"] == {"aedit": {"ratio": 1.0, "interval": None}}  # of the repeat that both have
    assert found["torchft_best"] is None
    assert "torchft_diloco" not in found
    holds = stragglers.check_goals({"constant": found, "random": {"aedit": 0.96}, "loss": {"against_ddp": {}}})
    assert not holds["constant_1.4_torchft"]
    assert not holds["constant_95_percent"]  # `shares` is missing
    assert holds["random_95_percent"]
    assert not holds["aedit_loss_1_percent"]


def test_the_whole_interval_of_the_loss_must_be_within_a_percent() -> None:
    def evaluate_loss_goal(ratio: float, interval: float | None) -> bool:
        of_pairs = {"ratio": ratio, "interval": interval}
        return stragglers.check_goals({"loss": {"against_ddp": {"aedit": of_pairs}}})["aedit_loss_1_percent"]

    assert evaluate_loss_goal(1.0, 0.009)
    assert not evaluate_loss_goal(1.0, 0.02)
    assert not evaluate_loss_goal(1.0, None)


def test_an_exited_launcher_is_a_failure_with_its_last_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run of the side has a launcher again."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no_such_module >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    started = hosts.Hosts(tmp_path)
    run = Run("ddp", Scenario.NONE, seed=1, steps=1, unit_seconds=0.0, sync_every=1)
    with pytest.raises(hosts.RunFailedError, match="no_such_module"):
        started.perform(run, timeout=600)
    assert [(failure.side, failure.attempt) for failure in started.failures] == [("ddp", 1), ("ddp", 2)]
    started.close()


def build_diary(*steps: tuple[float, int, float, int]) -> list[DiaryEntry]:
    """Build a diary from steps as (end, number of samples, cost, period)."""
    return [DiaryEntry(at, tuple(range(samples)), cost, 0.01, period) for at, samples, cost, period in steps]


def test_a_period_lasts_until_its_last_rank_and_counts_all_samples() -> None:
    fast = build_diary((1.0, 7, 7, 1), (2.0, 7, 7, 2), (3.0, 7, 7, 2), (5.0, 7, 7, 3))
    slow = build_diary((1.5, 7, 9, 1), (4.0, 4, 14, 2), (5.5, 7, 14, 3))
    second, third = diaries.list_complete_periods([fast, slow])
    assert (second.seconds, second.samples, second.virtual) == (2.5, (14, 4), 14)
    assert (third.seconds, third.samples, third.virtual) == (1.5, (7, 7), 14)
    assert diaries.compute_virtual_time([fast, slow], 2) == 9 + 14
    assert diaries.count_samples([fast, slow], 2) == 7 + 14 + 7 + 4


def test_a_period_of_local_steps_lasts_from_its_first_step_to_the_next_periods() -> None:
    fast = build_diary((1.5, 7, 1, 1), (2.5, 7, 1, 1), (6.0, 7, 1, 2))
    slow = build_diary((2.6, 7, 2, 1), (6.8, 7, 2, 2))
    (first,) = diaries.list_begun_periods([fast, slow], unit_seconds=1.0)
    assert first.seconds == pytest.approx(5.0 - 0.6)  # fast begins at 0.5 and 5.0, slow at 0.6 and 4.8
    assert (first.samples, first.virtual) == ((14, 7), 2)
    left_behind = build_diary((2.6, 7, 2, 1), (5.6, 7, 2, 1))
    (first,) = diaries.list_begun_periods([fast, left_behind], unit_seconds=1.0)
    assert first.samples == (14, 7)


def test_work_counts_by_the_weight_of_the_rank() -> None:
    done = [(8, 8, 8, 4), (8, 8, 8, 4)]
    assert diaries.compute_counted_share(done, [(8 / 28, 8 / 28, 8 / 28, 4 / 28)] * 2) == pytest.approx(1.0)
    assert diaries.compute_counted_share(done, [(0.25, 0.25, 0.25, 0.25)] * 2) == pytest.approx(25 / 28)
    assert diaries.compute_counted_share(done, [(1 / 3, 1 / 3, 1 / 3, 0)] * 2) == pytest.approx(24 / 28)
    uneven = [(0.3, 0.2, 0.25, 0.25), (0.2, 0.3, 0.25, 0.25)]
    assert diaries.compute_counted_share([(7, 7, 7, 7)] * 2, uneven) == pytest.approx(1.0)  # chance evens out
    assert diaries.compute_rank_weights([(7, 7, 7, 7)] * 2, uneven) == pytest.approx([0.25] * 4)


def test_the_interval_uses_students_distribution() -> None:
    mean, half = diaries.compute_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert diaries.compute_interval([1.0]) == (1.0, math.inf)
