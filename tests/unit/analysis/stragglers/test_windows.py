"""Windows of the ranks, next to each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.stragglers import windows
from pacekeeper_analysis.stragglers.length_cost import SequenceCost

BY_STEP = ("steps", "step_seconds", "compute_seconds", "samples")


@pytest.mark.parametrize(
    ("most", "step_seconds", "steps"),
    [(32, 0.0, 32), (32, 0.15, 32), (32, 0.25, 20), (32, 1.0, 8), (32, 10.0, 8), (64, 0.1, 50), (4, 10.0, 4)],
)
def test_a_window_is_bounded_in_steps_and_in_seconds(most: int, step_seconds: float, steps: int) -> None:
    assert windows.count_window_steps(most, step_seconds) == steps


def test_windows_without_common_steps_are_rejected() -> None:
    one = RankWindow(0, (1, 2, 3), (1.0,) * 3, (1.0,) * 3, (1,) * 3)
    other = RankWindow(1, (7, 8, 9), (1.0,) * 3, (1.0,) * 3, (1,) * 3)
    assert windows.align_windows([one, other]) is None
    assert windows.align_windows([one]) is None


def test_steps_with_other_shares_show_the_costs_only() -> None:
    """Rank 0 takes 3 s and 1 s a sample: only its earlier steps can show it. Rank 1 was slow in its own."""
    samples = np.repeat([[8, 8], [5, 11]], [8, 12], axis=0)
    own = np.stack([3.0 + samples[:, 0], np.where(samples[:, 1] == 8, 4.0, 1.0) * samples[:, 1]], axis=1)
    steps = (*range(8), *range(20, 32))
    given = [RankWindow(i, steps, tuple(own.max(axis=1)), tuple(own[:, i]), tuple(samples[:, i])) for i in range(2)]
    aligned = windows.align_windows(given)
    assert aligned is not None
    assert aligned.steps.tolist() == list(range(20, 32))
    assert aligned.samples.tolist() == [[5, 11]] * 12
    assert aligned.compute_seconds.tolist() == [[8.0, 11.0]] * 12
    assert aligned.costs is not None
    assert aligned.costs.identified.tolist() == [True, False]
    assert aligned.costs.fixed == pytest.approx([3.0, 0.0])
    few = [replace(window, **{name: getattr(window, name)[:15] for name in BY_STEP}) for window in given]
    assert windows.align_windows(few) is None, "seven steps with the present shares"


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_the_median_of_the_peers_leaves_the_rank_itself_out(ranks: int) -> None:
    values = np.random.default_rng(ranks).integers(0, 4, size=(50, ranks)).astype(float)  # with ties
    expected = [np.median(np.delete(values, rank, axis=1), axis=1) for rank in range(ranks)]
    assert windows.compute_peers_median(values) == pytest.approx(np.stack(expected, axis=1))


def test_pauses_and_weights_are_aligned_with_their_steps() -> None:
    one = RankWindow(0, tuple(range(10)), (1.0,) * 10, (1.0,) * 10, (1,) * 10, gc_seconds=tuple(np.arange(10.0)))
    other = RankWindow(1, tuple(range(2, 12)), (1.0,) * 10, (1.0,) * 10, (1,) * 10, baseline_seconds=0.7)
    aligned = windows.align_windows([one, other])
    assert aligned is not None
    assert aligned.gc_seconds is not None
    assert aligned.gc_seconds.tolist() == [[float(step), 0.0] for step in range(2, 10)]
    assert aligned.sample_cost_units is None
    assert aligned.baseline_seconds == 0.7
    first, late = (replace(one, rank=rank, baseline_seconds=0.8 + 0.1 * rank) for rank in range(2))
    aligned = windows.align_windows([first, late])
    assert aligned is not None
    assert aligned.baseline_seconds == 0.8, "who came later did not see the first steps"
    assert aligned.baseline_exposed is None
    waiting = [replace(first, baseline_own_seconds=0.5), replace(late, baseline_own_seconds=0.8)]
    aligned = windows.align_windows(waiting)
    assert aligned is not None
    assert aligned.baseline_exposed == pytest.approx(0.1), "who waits longest waits for the other rank"


def test_samples_are_weighed_by_the_cost_that_fits() -> None:
    """Garbage collections are left out, and a rank that does not know its lengths spoils it for all."""
    truth, rng = SequenceCost(1e-3, 0.0, 1e-8), np.random.default_rng(0)
    lengths = np.rint(rng.lognormal(6.0, 0.7, size=(16, 2, 4)))
    own, pauses = truth.compute_seconds(lengths).sum(axis=2), np.where(rng.random((16, 2)) < 0.3, 0.5, 0.0)
    given = [
        RankWindow(
            rank,
            tuple(range(16)),
            (1.0,) * 16,
            tuple((own + pauses)[:, rank]),
            (4,) * 16,
            gc_seconds=tuple(pauses[:, rank]),
            lengths=tuple(lengths[:, rank].sum(axis=1)),
            squares=tuple(np.square(lengths[:, rank]).sum(axis=1)),
        )
        for rank in range(2)
    ]
    aligned = windows.align_windows(given)
    assert aligned is not None
    assert aligned.sequence_cost is not None
    assert aligned.sample_cost_units == pytest.approx(own, rel=0.05)
    linear = windows.align_windows([given[0], replace(given[1], squares=())])
    assert linear is not None
    assert linear.squares is None
    assert linear.sequence_cost is not None
    assert linear.sequence_cost.per_token_squared == 0
    unknown = windows.align_windows([given[0], replace(given[1], lengths=(), squares=())])
    assert unknown is not None
    assert unknown.sample_cost_units is None
    alike = windows.align_windows([replace(window, lengths=(9.0,) * 16, squares=(27.0,) * 16) for window in given])
    assert alike is not None
    assert alike.sample_cost_units is None
