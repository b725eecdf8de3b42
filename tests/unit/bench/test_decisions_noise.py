"""Noise models of the decisions bench: how ranks' own work varies, as it is observed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.scripts.decisions import draw
from bench.scripts.decisions.noise import AUTOCORRELATION, NoiseModel, NoiseSource
from bench.scripts.decisions.salts import create_rng
from bench.scripts.decisions.sampled_metrics import SampledMetrics
from bench.scripts.decisions.world import CALM, EQUAL_SHARES, HICCUP_INTERVAL_STEPS, CostModel

SCENARIO = draw.draw_scenario(4000, ranks=4)
WORLD = CostModel(replace(SCENARIO.job, noise=0.02, hiccups=0.0))
STEPS = range(500, 4500)


def draw_steps(model: NoiseModel) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the noise of all STEPS: shape (steps, ranks)."""
    source = NoiseSource(WORLD, model, seed=1)
    return np.array([source.draw_step(number, create_rng(1, number)) for number in STEPS])


def correlate(noise: np.ndarray[tuple[int, int], np.dtype[np.float64]], lag: int) -> float:
    """Return the correlation between steps of a rank that lie this far apart."""
    centered = noise - 1.0
    return float((centered[lag:] * centered[:-lag]).mean() / (centered**2).mean())


@pytest.mark.parametrize("model", [NoiseModel.INDEPENDENT, NoiseModel.CORRELATED, NoiseModel.HEAVY])
def test_models_have_the_same_standard_deviation(model: NoiseModel) -> None:
    noise = draw_steps(model)
    assert noise.mean() == pytest.approx(1.0, abs=0.002)
    assert noise.std() == pytest.approx(0.02, rel=0.1)


def test_only_correlated_noise_depends_on_the_steps_before() -> None:
    correlated = draw_steps(NoiseModel.CORRELATED)
    for lag in (1, 5, 10):
        assert correlate(correlated, lag) == pytest.approx(AUTOCORRELATION**lag, abs=0.06)
    for model in (NoiseModel.INDEPENDENT, NoiseModel.HEAVY, NoiseModel.HICCUPS):
        assert abs(correlate(draw_steps(model), 1)) < 0.05


def test_heavy_tails_are_more_frequent_than_normal_ones() -> None:
    far = [(np.abs(draw_steps(model) - 1.0) > 4 * 0.02).mean() for model in (NoiseModel.HEAVY, NoiseModel.INDEPENDENT)]
    assert far[0] == pytest.approx(0.006, abs=0.002), "P(|t| > 4 × 3 ** 0.5) with three degrees of freedom"
    assert far[1] < 0.0005


def test_hiccups_are_frequent_and_of_any_length() -> None:
    outliers = draw_steps(NoiseModel.HICCUPS)
    outliers = outliers[outliers > 1.15]
    assert len(outliers) / len(STEPS) == pytest.approx(4 / HICCUP_INTERVAL_STEPS, rel=0.2)
    assert outliers.mean() == pytest.approx(3.0, rel=0.2)
    assert np.quantile(outliers, 0.2) < 1.7
    assert np.quantile(outliers, 0.9) > 4.5


@pytest.mark.parametrize("model", NoiseModel)
def test_a_step_is_the_same_whenever_and_in_whatever_order_it_is_read(model: NoiseModel) -> None:
    scenario = replace(SCENARIO, noise_model=model)
    windows = []
    for times in ((100.0, 101.0, 200.0), (200.0, 101.0, 100.0)):
        metrics = SampledMetrics.from_scenario(scenario, WORLD)
        metrics.extend(0.0, EQUAL_SHARES, CALM)
        windows.append({time: metrics.build_windows(time) for time in times})
    assert windows[0] == windows[1]


def test_independent_noise_is_the_one_that_the_bench_has_always_drawn() -> None:
    job = replace(WORLD.job, hiccups=0.3)
    metrics = SampledMetrics(CostModel(job), 7)
    metrics.extend(0.0, EQUAL_SHARES, CALM)
    windows = metrics.build_windows(30 * job.step_seconds)
    rng = np.random.default_rng((7, windows[0].steps[0]))
    noise = np.maximum(0.2, 1.0 + job.noise * rng.standard_normal(job.ranks))
    noise = np.where(rng.random(job.ranks) < job.hiccups, 3.0, noise)
    first = [window.compute_seconds[0] for window in windows]
    assert first == pytest.approx(list(job.own_seconds * noise), rel=1e-12)


@pytest.mark.parametrize("model", NoiseModel)
def test_the_first_steps_that_ranks_remember_have_the_same_noise(model: NoiseModel) -> None:
    """Otherwise all later steps would look longer, or shorter, than these."""
    world = CostModel(replace(SCENARIO.job, noise=0.08, hiccups=0.0))
    source = NoiseSource(world, model, seed=1)
    noise = np.array([source.draw_step(number, create_rng(1, number)) for number in STEPS])
    step, own = source.measure_first_steps()
    expected = float(np.median(noise.max(axis=1))) * world.job.own_seconds + world.job.transfer_seconds
    assert step == pytest.approx(expected, rel=0.015)
    assert own == pytest.approx(world.job.own_seconds, rel=0.015)
