"""The cost of sequences is estimated from the duration of steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.length_cost import (
    SequenceCost,
    fit_cost_across_ranks,
    fit_cost_to_sums,
    fit_sequence_cost,
)

TRUTHS = [
    SequenceCost(2e-3, 3e-6, 5e-10),
    SequenceCost(0.0, 3e-6, 5e-10),
    SequenceCost(2e-3, 3e-6, 0.0),
    SequenceCost(0.0, 0.0, 5e-10),
]


def draw_steps(seed: int, count: int = 200) -> list[npt.NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    return [np.rint(rng.lognormal(7.0, 1.0, size=rng.integers(4, 9))) for _ in range(count)]


@pytest.mark.parametrize("truth", TRUTHS, ids=str)
def test_exact_times_give_the_terms_exactly(truth: SequenceCost) -> None:
    steps = draw_steps(1)
    found = fit_sequence_cost(steps, [truth.compute_seconds(lengths).sum() for lengths in steps])
    for term in ("fixed", "per_token", "per_token_squared"):
        assert getattr(found, term) == pytest.approx(getattr(truth, term), rel=1e-6, abs=1e-15)


def test_a_few_sequences_timed_one_by_one_are_enough() -> None:
    tried = [256, 512, 1024, 2048, 4096, 8192]
    found = fit_sequence_cost([[n] for n in tried], TRUTHS[0].compute_seconds(tried))
    assert found.compute_seconds([300, 6000]) == pytest.approx(TRUTHS[0].compute_seconds([300, 6000]), rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_pauses_do_not_mislead(seed: int) -> None:
    """5 % noise, and one step in ten stalls for ten times as long."""
    truth, steps, rng = TRUTHS[0], draw_steps(seed, 400), np.random.default_rng(seed)
    seconds = np.array([truth.compute_seconds(lengths).sum() for lengths in steps]) * rng.normal(1.0, 0.05, len(steps))
    seconds[rng.random(len(steps)) < 0.1] *= 10
    found = fit_sequence_cost(steps, seconds)
    lengths = np.array([200.0, 1000.0, 5000.0, 20_000.0])
    assert found.compute_seconds(lengths) == pytest.approx(truth.compute_seconds(lengths), rel=0.15)


@pytest.mark.parametrize("truth", TRUTHS, ids=str)
def test_sums_are_as_good_as_the_lengths(truth: SequenceCost) -> None:
    steps = draw_steps(2)
    sums = [(len(lengths), lengths.sum(), (lengths * lengths).sum()) for lengths in steps]
    seconds = [truth.compute_seconds(lengths).sum() for lengths in steps]
    assert fit_cost_to_sums(sums, seconds) == fit_sequence_cost(steps, seconds)
    assert truth.compute_seconds_from_sums(*np.transpose(sums)) == pytest.approx(seconds)


@pytest.mark.parametrize("truth", TRUTHS, ids=str)
@pytest.mark.parametrize("paces", [(1.0, 1.0, 1.0, 1.0), (1.0, 3.0, 1.0, 1.0), (0.5, 1.0, 1.0, 1.0)])
def test_a_slower_or_faster_rank_does_not_distort_the_estimate(truth: SequenceCost, paces: tuple[float, ...]) -> None:
    """32 steps, 8 sequences each, 1 % noise: the cost of sequences of any length is found within 2 %."""
    rng = np.random.default_rng(3)
    lengths = np.rint(rng.lognormal(7.0, 1.0, size=(32, 4, 8)))
    seconds = truth.compute_seconds(lengths).sum(axis=2) * paces * rng.normal(1.0, 0.01, (32, 4))
    found = fit_cost_across_ranks(np.full((32, 4), 8), lengths.sum(axis=2), (lengths * lengths).sum(axis=2), seconds)
    assert found.compute_seconds(lengths).sum(axis=2) == pytest.approx(
        truth.compute_seconds(lengths).sum(axis=2), rel=0.02
    )


def test_a_term_that_would_be_negative_is_left_out() -> None:
    steps = [np.array([100.0]), np.array([200.0]), np.array([400.0]), np.array([800.0])]
    found = fit_sequence_cost(steps, [0.1, 0.4, 1.6, 6.3])  # grows a little slower than the square
    assert min(found.fixed, found.per_token, found.per_token_squared) >= 0
    assert found.compute_seconds([400.0])[0] == pytest.approx(1.6, rel=0.05)


@pytest.mark.parametrize(
    ("steps", "seconds", "message"),
    [
        ([[1.0], [2.0], [3.0]], [1.0, 2.0], "seconds: .* for 3 steps; give one a step"),
        ([[1.0], [2.0]], [1.0, 2.0], "of 3 steps or more"),
        ([[5.0], [5.0], [5.0]], [1.0, 2.0, 3.0], "steps: all have the same lengths"),
        ([[1.0], [-2.0, 2.0], [3.0]], [1.0, 2.0, 3.0], "lengths must be finite and 0 or more"),
        ([[1.0], [np.nan], [3.0]], [1.0, 2.0, 3.0], "lengths must be finite"),
        ([[1.0], [2.0], [3.0]], [1.0, 0.0, 3.0], "seconds finite and above 0"),
    ],
)
def test_bad_input_is_named(steps: list[list[float]], seconds: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_sequence_cost(steps, seconds)


@pytest.mark.parametrize("terms", [(-1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, float("nan"), 0.0)])
def test_a_cost_without_sense_is_rejected(terms: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match=r"cost: .* must have finite terms"):
        SequenceCost(*terms)
