"""What is learned of a healthy job."""

from __future__ import annotations

import numpy as np
import pytest

from pacekeeper_analysis.estimator.noise import NoiseModel, compute_density, compute_scale
from pacekeeper_analysis.estimator.parameters import EstimatorParameters

PARAMETERS = EstimatorParameters()


def draw_correlated(steps: int, ranks: int, coefficient: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = np.zeros((steps + 100, ranks))
    for step in range(1, len(values)):
        values[step] = coefficient * values[step - 1] + np.sqrt(1 - coefficient**2) * rng.standard_normal(ranks)
    return 0.02 * values[100:]


def learn(values: np.ndarray, window: int = 32) -> NoiseModel:
    noise = NoiseModel.create(PARAMETERS, values.shape[1]).learn_first_steps(values[:window], np.ones(window))
    for begin in range(window, len(values) - window, window):
        noise = noise.learn_steps(values[begin : begin + window], np.ones(window), healthy=True)
    return noise


def test_the_noise_of_independent_steps() -> None:
    noise = learn(draw_correlated(3000, 4, 0.0))
    assert noise.sigma == pytest.approx(0.02, rel=0.1)
    assert noise.correlation < 1.5
    assert noise.outlier_rate < 0.001


@pytest.mark.parametrize("steps", [32, 3000])
def test_correlated_steps_tell_less_than_independent_ones(steps: int) -> None:
    noise = learn(draw_correlated(steps, 8, 0.9))
    assert 5.0 < noise.correlation <= 32.0
    assert noise.step_error == pytest.approx(noise.sigma * np.sqrt(noise.correlation))


def test_outliers_are_no_noise_but_are_counted() -> None:
    values = draw_correlated(3000, 4, 0.0)
    values[np.random.default_rng(1).random(values.shape) < 0.02] += 1.0
    noise = learn(values)
    assert noise.sigma == pytest.approx(0.02, rel=0.15)
    assert noise.outlier_rate == pytest.approx(0.02, rel=0.3)
    unhealthy = NoiseModel.create(PARAMETERS, 4).learn_steps(values[:32] + 1.0, np.ones(32), healthy=False)
    assert unhealthy.outlier_rate == pytest.approx(PARAMETERS.outlier_rate), "a slow rank's steps are no outliers"


def test_offsets_of_healthy_ranks_are_learned_within_their_limit() -> None:
    noise = NoiseModel.create(PARAMETERS, 3)
    for _ in range(400):
        noise = noise.learn_offsets(np.array([0.02, 0.5, 0.02]) - noise.offsets, np.array([True, True, False]), 8)
    assert noise.offsets[0] == pytest.approx(0.02, abs=0.002)
    assert noise.offsets[1] == PARAMETERS.max_rank_offset
    assert noise.offsets[2] == 0.0
    assert not noise.offset_errors.any()


def test_offsets_of_ranks_that_differ_by_nature_are_the_mean_of_all_their_steps() -> None:
    rng, differences = np.random.default_rng(0), np.array([-0.5, 0.0, 0.5])
    levels = differences + 0.02 * rng.standard_normal((8, 3))
    noise = NoiseModel.create(PARAMETERS, 3).learn_first_steps(levels, np.ones(8), np.median(levels, axis=0))
    first_errors, healthy = noise.offset_errors, np.array([True, True, False])
    assert (np.abs(noise.offsets - differences) < 3 * first_errors).all()
    for _ in range(99):
        means = (differences + 0.02 * rng.standard_normal((8, 3))).mean(axis=0)
        noise = noise.learn_offsets(means - noise.offsets, healthy, 8)
    assert noise.offsets[:2] == pytest.approx(differences[:2], abs=0.003), "no limit holds"
    shrinks = (1 + 99 * 8) ** -0.5  # the first steps count as one: their correlation was not known
    assert noise.offset_errors == pytest.approx(first_errors * [shrinks, shrinks, 1.0]), "nothing is learned if slow"
    with_outlier = noise.learn_offsets(np.array([1.0, 0.0, 0.0]), healthy, 8)
    assert with_outlier.offsets[0] - noise.offsets[0] < noise.offset_errors[0]


@pytest.mark.parametrize("steps", [1, 32])
def test_the_density_of_a_mean_is_one(steps: int) -> None:
    values = np.linspace(-1.0, 4.0, 200_001)
    density = compute_density(values, np.zeros(1), 0.02, 0.01, (0.2, 0.7), steps)
    assert float(density.sum() * (values[1] - values[0])) == pytest.approx(1.0, abs=0.001)


def test_one_outlier_is_limited_evidence() -> None:
    healthy, slow = (compute_density(np.array([1.0]), np.array([mean]), 0.02, 0.001) for mean in (0.0, 1.0))
    assert np.log(slow / healthy)[0] < np.log(3.0 / 0.001 * 20.0)


def test_the_scale_of_most_values() -> None:
    values = np.append(np.random.default_rng(0).normal(0.0, 0.1, 1000), np.full(50, 5.0))
    assert compute_scale(values) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("changes", [{"noise": 0.0}, {"action_probability": 1.9}, {"rotation_hit_rate": 1.0}])
def test_impossible_parameters_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        EstimatorParameters(**changes)
