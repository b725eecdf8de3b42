"""The weights of pseudo-gradients: good ones by their data, bad ones nothing, fast ranks no less than their share."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.pseudo_gradient import NormStatistics, Penalty, ReplicaWeights, weigh_replicas

PENALTY = Penalty(warmup=5)


def learn_statistics(
    norms: list[list[float]], steps: list[float], penalty: Penalty = PENALTY, times: int = 50, noise: float = 0.03
) -> NormStatistics:
    """Return statistics after a number of healthy synchronizations around `norms`."""
    generator = np.random.default_rng(1)
    statistics = NormStatistics.build_empty(len(norms), len(steps))
    for _ in range(times):
        factors = 1 + noise * generator.standard_normal((len(norms), len(steps)))
        weights, statistics = weigh_replicas(np.array(norms) * factors, steps, statistics, penalty)
        assert not weights.anomalous.any()
    return statistics


def weigh_once(
    norms: list[list[float]], steps: list[float], penalty: Penalty = PENALTY, **options: Any
) -> ReplicaWeights:
    return weigh_replicas(norms, steps, NormStatistics.build_empty(len(norms), len(steps)), penalty, **options)[0]


def test_equal_replicas_weigh_the_same() -> None:
    weights, anomalous, rolled_back = weigh_once([[2.0] * 4, [0.01] * 4], [16] * 4)
    np.testing.assert_allclose(weights, 0.25)
    assert not anomalous.any()
    assert not rolled_back.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_replica_that_is_not_finite_counts_in_no_unit(bad: float) -> None:
    statistics = learn_statistics([[1.0] * 3, [2.0] * 3], [4] * 3)
    (weights, anomalous, rolled_back), after = weigh_replicas(
        [[1.0, bad, 1.0], [2.0, 2.0, 2.0]], [4] * 3, statistics, PENALTY
    )
    np.testing.assert_allclose(weights, [[0.5, 0, 0.5]] * 2)
    assert anomalous.tolist() == [[False, True, False]] * 2
    assert not rolled_back.any()
    assert np.isfinite(after.mean).all()
    assert np.isfinite(after.variance).all()
    np.testing.assert_array_equal(after.mean[:, :, 1], statistics.mean[:, :, 1])
    assert (after.count - statistics.count).tolist() == [[1, 0, 1]] * 2


def test_a_norm_far_above_its_own_mean_counts_nothing_and_is_not_learned() -> None:
    statistics = learn_statistics([[1.0] * 3, [2.0] * 3], [4] * 3)
    (weights, anomalous, rolled_back), after = weigh_replicas(
        [[1.0, 1.0, 1.5], [2.0] * 3], [4] * 3, statistics, PENALTY
    )
    np.testing.assert_allclose(weights[0], [0.5, 0.5, 0])
    np.testing.assert_allclose(weights[1], [1 / 3] * 3)
    assert anomalous.tolist() == [[False, False, True], [False] * 3]
    assert not rolled_back.any()
    np.testing.assert_array_equal(after.mean[:, 0, 2], statistics.mean[:, 0, 2])
    np.testing.assert_array_equal(after.variance[:, 0, 2], statistics.variance[:, 0, 2])


def test_a_norm_below_its_mean_is_no_anomaly() -> None:
    statistics = learn_statistics([[1.0] * 3], [4] * 3)
    assert not weigh_replicas([[1.0, 0.01, 1.0]], [4] * 3, statistics, PENALTY)[0].anomalous.any()


def test_only_the_units_without_a_good_replica_roll_back() -> None:
    statistics = learn_statistics([[1.0] * 3, [2.0] * 3], [4] * 3)
    weights, anomalous, rolled_back = weigh_replicas([[9.0] * 3, [2.0] * 3], [4] * 3, statistics, PENALTY)[0]
    assert rolled_back.tolist() == [True, False]
    assert anomalous.tolist() == [[True] * 3, [False] * 3]
    np.testing.assert_array_equal(weights[0], 0)
    assert weigh_once([[np.nan] * 2, [1.0] * 2], [4] * 2).rolled_back.all()


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_garbage_weighs_nothing_before_there_are_statistics(replicas: int) -> None:
    weights = weigh_once([[1.0] * (replicas - 1) + [1000.0]], [4] * replicas).weights
    assert weights[0, -1] < 1e-12
    np.testing.assert_allclose(weights[0, :-1], 1 / (replicas - 1))


SPEEDS = [[2, 2, 2, 1], [2, 1, 1, 1], [2, 1], [4, 3, 2, 1], [8, 1, 1, 1]]


@pytest.mark.parametrize("speeds", SPEEDS, ids=str)
@pytest.mark.parametrize("growth", [0.5, 0.7, 1.0])
def test_the_weight_of_a_fast_replica_is_its_share_of_the_data(speeds: list[float], growth: float) -> None:
    steps = np.array(speeds) * 10.0
    share = steps / steps.sum()
    exact = weigh_once([list(3 * steps**growth)], list(steps)).weights[0]
    np.testing.assert_allclose(exact, share, rtol=1e-12)

    generator = np.random.default_rng(4)
    noises = 1 + 0.03 * generator.standard_normal((200, len(steps)))
    noisy = np.array([weigh_once([list(steps**growth * noise)], list(steps)).weights[0] / share for noise in noises])
    assert noisy.min() > 0.9
    assert (noisy.mean(axis=0) > 0.97).all()


@pytest.mark.parametrize("growth", [0.5, 1.0])
def test_a_change_of_speed_is_no_anomaly(growth: float) -> None:
    """A straggler that has recovered does twice the steps at once, and the other way round."""
    slow, fast = 10.0, 20.0
    statistics = learn_statistics([[fast**growth, slow**growth]], [fast, slow])
    (weights, anomalous, _), _ = weigh_replicas([[slow**growth, fast**growth]], [slow, fast], statistics, PENALTY)
    assert not anomalous.any()
    np.testing.assert_allclose(weights[0], [1 / 3, 2 / 3])


def test_a_lasting_difference_is_learned_again() -> None:
    """Otherwise a change of the learning rate would drop a replica, or roll all of them back, permanently."""
    statistics = learn_statistics([[1.0, 1.0]], [4, 4])
    outcomes = []
    for _ in range(PENALTY.patience + 1):
        (_, _, rolled_back), statistics = weigh_replicas([[3.0, 3.0]], [4, 4], statistics, PENALTY)
        outcomes.append(bool(rolled_back[0]))
    assert outcomes == [True] * PENALTY.patience + [False]


def test_a_replica_that_is_never_finite_is_never_learned() -> None:
    statistics = learn_statistics([[1.0, 1.0]], [4, 4])
    for _ in range(3 * PENALTY.patience):
        (_, anomalous, _), statistics = weigh_replicas([[1.0, np.nan]], [4, 4], statistics, PENALTY)
        assert anomalous.tolist() == [[False, True]]
    assert statistics.count[0, 1] == 50


def test_a_good_norm_ends_the_row_of_anomalies() -> None:
    statistics = learn_statistics([[1.0, 1.0]], [4, 4])
    for _ in range(2 * PENALTY.patience):
        (_, anomalous, _), statistics = weigh_replicas([[1.0, 9.0]], [4, 4], statistics, PENALTY)
        assert anomalous[0, 1]
        (_, anomalous, _), statistics = weigh_replicas([[1.0, 1.0]], [4, 4], statistics, PENALTY)
        assert not anomalous.any()


def test_mean_and_variance_are_exponentially_weighted_after_a_plain_average() -> None:
    penalty, norms = Penalty(alpha=0.25, warmup=100), [1.0, 3.0, 2.0, 4.0, 8.0]
    statistics = NormStatistics.build_empty(1, 1)
    for norm in norms[:4]:
        _, statistics = weigh_replicas([[norm]], [1], statistics, penalty)
    np.testing.assert_allclose(statistics.mean, 2.5)
    np.testing.assert_allclose(statistics.variance, np.var(norms[:4]))
    _, statistics = weigh_replicas([[norms[4]]], [1], statistics, penalty)
    np.testing.assert_allclose(statistics.mean, 0.75 * 2.5 + 0.25 * 8)
    np.testing.assert_allclose(statistics.variance, 0.75 * (np.var(norms[:4]) + 0.25 * 5.5**2))


def test_only_the_data_weighs_when_the_penalty_is_off() -> None:
    off = Penalty(enabled=False)
    weights, anomalous, rolled_back = weigh_once([[1.0, np.nan, 1e9, 0.0]], [4] * 4, off)
    np.testing.assert_array_equal(weights, [[0.25] * 4])
    assert not anomalous.any()
    assert not rolled_back.any()
    np.testing.assert_allclose(weigh_once([[1.0] * 2], [3, 1], off).weights, [[0.75, 0.25]])


def compute_published_weights(norms: NDArray[np.float64], warmup: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return weights and anomalies [synchronizations, replicas] of one unit, number by number as in the paper."""
    alpha, replicas = 0.02, norms.shape[1]
    mean, variance, count = [0.0] * replicas, [0.0] * replicas, [0] * replicas
    weights, anomalies = np.zeros_like(norms), np.zeros(norms.shape, np.bool_)
    for number, row in enumerate(norms):
        for replica, norm in enumerate(row):
            if count[replica] >= warmup and norm > mean[replica] + 3 * variance[replica] ** 0.5:
                anomalies[number, replica] = True
                continue
            mean[replica] = alpha * norm + (1 - alpha) * mean[replica]
            variance[replica] = alpha * (norm - mean[replica]) ** 2 + (1 - alpha) * variance[replica]
            count[replica] += 1
        exponentials = np.where(anomalies[number], 0.0, np.exp(-row))
        if exponentials.any():
            weights[number] = exponentials / exponentials.sum()
    return weights, anomalies


@pytest.mark.parametrize("steps", [[8, 8, 8], [20, 10, 1]], ids=["equal", "unequal"])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_the_published_rules_are_those_of_the_paper(steps: list[int], scale: float) -> None:
    """With any number of steps and samples: also an anomaly of all, and more of them in a row than our patience."""
    norms = scale * (1 + 0.1 * np.random.default_rng(7).standard_normal((160, 3)))
    norms[100, 1] *= 9
    norms[120] *= 9
    norms[130:140, 2] *= 9
    norms[150, 0] = 0.0
    expected, anomalies = compute_published_weights(norms, warmup=100)
    assert anomalies[100:].sum() == 14
    statistics = NormStatistics.build_empty(1, 3)
    for row, weights, anomalous in zip(norms, expected, anomalies, strict=True):
        result, statistics = weigh_replicas([row], steps, statistics, Penalty.from_paper(), samples=[5, 6, 7])
        np.testing.assert_allclose(result.weights[0], weights, rtol=1e-12)
        np.testing.assert_array_equal(result.anomalous[0], anomalous)
        assert result.rolled_back[0] == anomalous.all()


def test_the_published_weights_hold_for_norms_of_any_size() -> None:
    weights = weigh_once([[5000.0, 5001.0], [0.001, 0.002]], [4, 4], Penalty.from_paper()).weights
    np.testing.assert_allclose(weights[0, 1] / weights[0, 0], np.exp(-1))
    np.testing.assert_allclose(weights[1, 1] / weights[1, 0], np.exp(-0.001))


def test_a_replica_that_is_not_finite_counts_nothing_by_the_published_rules_too() -> None:
    weights, anomalous, rolled_back = weigh_once([[1.0, np.nan], [1.0, 1.0]], [4, 4], Penalty.from_paper())
    np.testing.assert_array_equal(weights, [[1, 0], [1, 0]])
    assert anomalous.tolist() == [[False, True]] * 2
    assert not rolled_back.any()
    assert weigh_once([[np.inf, np.nan]], [4, 4], Penalty.from_paper()).rolled_back.all()


def test_rho_mixes_samples_in() -> None:
    np.testing.assert_allclose(weigh_once([[1.0, 1.0]], [4, 4], Penalty(rho=0), samples=[30, 10]).weights, [[0.5, 0.5]])
    np.testing.assert_allclose(
        weigh_once([[1.0, 1.0]], [4, 4], Penalty(rho=1), samples=[30, 10]).weights, [[0.75, 0.25]]
    )
    np.testing.assert_allclose(
        weigh_once([[1.0, 1.0]], [4, 4], Penalty(rho=0.4), samples=[30, 10]).weights, [[0.6, 0.4]]
    )


def test_a_milder_temperature_lets_a_large_norm_weigh_more() -> None:
    mild = weigh_once([[1.0, 1.0, 2.0]], [4] * 3, Penalty(temperature=10.0)).weights[0]
    usual = weigh_once([[1.0, 1.0, 2.0]], [4] * 3).weights[0]
    np.testing.assert_allclose(mild[2] / mild[0], np.exp(-0.1))
    np.testing.assert_allclose(usual[2] / usual[0], np.exp(-1))


def test_replicas_without_a_step_or_without_a_move_are_supported() -> None:
    """A replica that did nothing has no weight; a unit in which only one has moved (such as an expert) uses it."""
    np.testing.assert_allclose(weigh_once([[1.0, 0.0, 1.0]], [4, 0, 4]).weights, [[0.5, 0, 0.5]])
    np.testing.assert_allclose(weigh_once([[0.0, 0.0]], [0, 0]).weights, [[0.5, 0.5]])
    np.testing.assert_allclose(weigh_once([[0.0, 2.0]], [4, 4]).weights, [[0.5, 0.5]])


def test_statistics_are_the_same_after_json() -> None:
    statistics = learn_statistics([[1.0, 1.0, 1.0], [0.3, 0.3, 0.3]], [4, 4, 4])
    again = NormStatistics.from_dict(json.loads(json.dumps(statistics.to_dict())))
    for name in ("mean", "variance", "count", "strikes"):
        np.testing.assert_array_equal(getattr(again, name), getattr(statistics, name))
    assert again.shape == (2, 3)


@pytest.mark.parametrize(
    "data", [{}, {"mean": [[[1.0]]], "variance": [[[1.0]]], "count": [[1]], "strikes": [[0]]}, {"mean": "x"}]
)
def test_invalid_statistics_are_rejected(data: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="statistics"):
        NormStatistics.from_dict(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threshold", 0.0),
        ("threshold", float("nan")),
        ("alpha", 0.0),
        ("alpha", 1.5),
        ("warmup", 0),
        ("patience", 0),
        ("temperature", -1.0),
        ("rho", 1.1),
        ("clip", 0.0),
        ("min_deviation", -0.1),
    ],
)
def test_settings_that_make_no_sense_are_named(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        Penalty(**{field: value})


@pytest.mark.parametrize(
    ("norms", "steps", "named"),
    [
        ([1.0, 1.0], [4, 4], "norms"),
        ([[1.0, 1.0]], [4], "steps"),
        ([[1.0, 1.0]], [4, -1], "steps"),
        ([[1.0, 1.0]], [4, float("nan")], "steps"),
        ([[1.0, 1.0], [1.0, 1.0]], [4, 4], "statistics"),
    ],
)
def test_numbers_that_do_not_fit_are_named(norms: Any, steps: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        weigh_replicas(norms, steps, NormStatistics.build_empty(1, 2), PENALTY)
