"""The hidden Markov chains: probabilities, hazards, onsets."""

from __future__ import annotations

import numpy as np
import pytest

from pacekeeper_analysis.estimator.chain import LEVEL_PRIOR, LEVELS, HiddenChain

SCALE = 60.0


def build_chain(members: int = 2, groups: int = 3) -> HiddenChain:
    return HiddenChain.create(groups, members, onset_rate=1e-3, duration_scale=SCALE)


def observe_level(chain: HiddenChain, levels: np.ndarray, sigma: float = 0.02) -> HiddenChain:
    """`levels`: (groups, members)."""
    grid = np.concatenate([[0.0], LEVELS])
    return chain.update_by_members(-0.5 * np.square((levels[:, :, None] - grid) / sigma))


@pytest.mark.parametrize("members", [1, 2, 8])
def test_what_is_slow_is_found_as_a_whole_group_or_as_one_member(members: int) -> None:
    chain = build_chain(members)
    levels = np.zeros((3, members))
    levels[1, :] = 0.5
    levels[2, -1] = 0.5
    for second in range(6):
        chain = observe_level(chain.predict(1.0, float(second), second + 1.0), levels)
        assert np.allclose(chain.probabilities.sum(axis=1), 1.0)
    assert chain.slow[0] < 0.01
    assert (chain.slow[1:] > 0.99).all()
    assert np.allclose(chain.mean_levels, levels, atol=0.03)
    slow, mean, variance = chain.describe_slow_members()
    assert np.allclose(slow, levels > 0, atol=0.02)
    assert mean[2, -1] == pytest.approx(0.5, abs=0.03)
    assert (variance < 0.02**2).all() or members > 1


def test_a_fault_that_has_lasted_long_is_expected_to_last() -> None:
    def find_probability_after(seconds: float) -> float:
        chain = observe_level(build_chain(1, 1).predict(1.0, 0.0, 1.0), np.full((1, 1), 0.5))
        chain = observe_level(chain.predict(seconds, 0.0, seconds), np.full((1, 1), 0.5))
        later = chain.predict(10.0, seconds, seconds + 10.0)
        return float(later.slow[0] / chain.slow[0])

    assert find_probability_after(10.0) < find_probability_after(100.0) < find_probability_after(1000.0)
    assert find_probability_after(100.0) == pytest.approx(1 - 10.0 / (110.0 + SCALE), abs=0.02)


def test_the_onset_is_when_it_began() -> None:
    chain = build_chain(1, 1)
    for second in range(100):
        level = 0.3 if second >= 70 else 0.0
        chain = observe_level(chain.predict(1.0, float(second), second + 1.0), np.full((1, 1), level))
    assert chain.slow_onsets[0] == pytest.approx(70.0, abs=1.5)


def test_levels_that_something_else_explains_count_as_healthy() -> None:
    chain = observe_level(build_chain(1, 2).predict(1e5, 0.0, 1e5), np.array([[0.05], [0.5]]), sigma=0.01)
    discarded = chain.discard_below(np.array([0.1, 0.1]))
    assert discarded.slow[0] < 0.01 < chain.slow[0]
    assert discarded.slow[1] == pytest.approx(chain.slow[1])
    assert chain.discard_below(np.zeros(2)) is chain


def test_draws_follow_the_posterior() -> None:
    chain = observe_level(build_chain(2, 2).predict(200.0, 0.0, 200.0), np.array([[0.0, 0.03], [0.4, 0.4]]), sigma=0.05)
    drawn = chain.draw_levels(np.random.default_rng(0), 20_000)
    assert drawn.shape == (20_000, 4)
    assert np.allclose(drawn.mean(axis=0), chain.mean_levels.ravel(), atol=0.01)
    assert np.allclose(drawn.var(axis=0), chain.level_variances.ravel(), atol=0.005)


def test_a_group_that_is_new_is_healthy() -> None:
    chain = observe_level(build_chain(1, 2).predict(100.0, 0.0, 100.0), np.full((2, 1), 0.5))
    assert (chain.reset([0]).slow == [0.0, chain.slow[1]]).all()
    assert (chain.reset().slow == 0.0).all()


def test_small_slowdowns_are_the_most_frequent() -> None:
    density = LEVEL_PRIOR / np.gradient(LEVELS)
    assert LEVEL_PRIOR.sum() == pytest.approx(1.0)
    assert (np.diff(density) < 0).all()
    least = HiddenChain.create(1, 1, 1e-3, SCALE, min_level=0.1)
    assert (least.prior[1:][LEVELS < 0.1] == 0.0).all()
    assert least.prior.sum() == pytest.approx(1.0)
