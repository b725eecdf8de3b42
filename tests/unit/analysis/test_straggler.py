"""Stragglers from windows of the ranks' own work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.diagnose import straggler
from pacekeeper_analysis.reports import RankWindow


def window(per_sample: list[float], samples: list[int], steps: int = 32, noise: float = 0.02) -> straggler.Window:
    random = np.random.default_rng(0)
    windows = [
        RankWindow(
            rank=rank,
            steps=tuple(range(rank, steps + rank)),  # each rank's window begins elsewhere
            step_seconds=(0.1,) * steps,
            compute_seconds=tuple(cost * share * (1 + noise * random.standard_normal(steps))),
            samples=(share,) * steps,
        )
        for rank, (cost, share) in enumerate(zip(per_sample, samples, strict=True))
    ]
    aligned = straggler.align(windows)
    assert aligned is not None
    return aligned


def test_one_of_four_at_half_speed() -> None:
    found = straggler.find(window([1, 1, 1, 2], [8, 8, 8, 8], noise=0.0), threshold=1.1)
    assert found.slowdown == pytest.approx(1.6)
    assert found.culprits == (3,)
    assert found.rank_slowdown == pytest.approx((1, 1, 1, 2))
    assert found.rank_effect == pytest.approx((1, 1, 1, 1.6))
    assert found.gain_replaced == pytest.approx(2.0)


def test_noise_alone_blames_nobody() -> None:
    assert straggler.find(window([1, 1, 1, 1], [8, 8, 8, 8], noise=0.1), threshold=1.1).culprits == ()


def test_after_a_rebalance_the_slow_rank_keeps_nobody_waiting() -> None:
    found = straggler.find(window([1, 1, 1, 2], [8, 8, 8, 4]), threshold=1.1)
    assert found.culprits == ()
    assert found.rank_slowdown[3] == pytest.approx(2.0, rel=0.05)


def test_unequal_shares_make_no_straggler() -> None:
    found = straggler.find(window([1, 1, 1, 1], [4, 8, 8, 8], noise=0.0), threshold=1.1)
    assert found.culprits == ()


def test_what_comes_and_goes_is_not_persistent() -> None:
    aligned = window([1, 1, 1, 1], [8, 8, 8, 8], noise=0.0)
    aligned.compute_seconds[::2, 1] *= 3
    assert straggler.find(aligned, threshold=1.1).culprits == ()


def test_windows_without_common_steps_are_refused() -> None:
    one = RankWindow(0, (1, 2, 3), (1.0,) * 3, (1.0,) * 3, (1,) * 3)
    other = RankWindow(1, (7, 8, 9), (1.0,) * 3, (1.0,) * 3, (1,) * 3)
    assert straggler.align([one, other]) is None
    assert straggler.align([one]) is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_the_median_of_the_peers_leaves_the_rank_itself_out(ranks: int) -> None:
    values = np.random.default_rng(ranks).integers(0, 4, size=(50, ranks)).astype(float)  # with ties
    expected = [np.median(np.delete(values, rank, axis=1), axis=1) for rank in range(ranks)]
    assert straggler.peers_median(values) == pytest.approx(np.stack(expected, axis=1))


def test_a_single_rank_is_its_own_peer() -> None:
    assert straggler.find(window([1], [8]), threshold=1.1).culprits == ()


def test_pauses_and_weights_are_aligned_with_their_steps() -> None:
    one = RankWindow(0, tuple(range(10)), (1.0,) * 10, (1.0,) * 10, (1,) * 10, garbage_seconds=tuple(np.arange(10.0)))
    other = RankWindow(1, tuple(range(2, 12)), (1.0,) * 10, (1.0,) * 10, (1,) * 10, baseline_seconds=0.7)
    aligned = straggler.align([one, other])
    assert aligned is not None
    assert aligned.garbage_seconds is not None
    assert aligned.garbage_seconds.tolist() == [[float(step), 0.0] for step in range(2, 10)]
    assert aligned.weight is None
    assert aligned.baseline_seconds == 0.7
    first = replace(one, weight=(2.0,) * 10, baseline_seconds=0.8)
    late = replace(one, rank=1, weight=(3.0,) * 10, baseline_seconds=0.9)
    aligned = straggler.align([first, late])
    assert aligned is not None
    assert aligned.weight is not None
    assert aligned.weight[0].tolist() == [2.0, 3.0]
    assert aligned.baseline_seconds == 0.8, "who came later did not see the first steps"
