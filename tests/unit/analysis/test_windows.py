"""Windows of the ranks, side by side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.diagnose import windows
from pacekeeper_analysis.reports import RankWindow


def test_windows_without_common_steps_are_refused() -> None:
    one = RankWindow(0, (1, 2, 3), (1.0,) * 3, (1.0,) * 3, (1,) * 3)
    other = RankWindow(1, (7, 8, 9), (1.0,) * 3, (1.0,) * 3, (1,) * 3)
    assert windows.align([one, other]) is None
    assert windows.align([one]) is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_the_median_of_the_peers_leaves_the_rank_itself_out(ranks: int) -> None:
    values = np.random.default_rng(ranks).integers(0, 4, size=(50, ranks)).astype(float)  # with ties
    expected = [np.median(np.delete(values, rank, axis=1), axis=1) for rank in range(ranks)]
    assert windows.peers_median(values) == pytest.approx(np.stack(expected, axis=1))


def test_pauses_and_weights_are_aligned_with_their_steps() -> None:
    one = RankWindow(0, tuple(range(10)), (1.0,) * 10, (1.0,) * 10, (1,) * 10, garbage_seconds=tuple(np.arange(10.0)))
    other = RankWindow(1, tuple(range(2, 12)), (1.0,) * 10, (1.0,) * 10, (1,) * 10, baseline_seconds=0.7)
    aligned = windows.align([one, other])
    assert aligned is not None
    assert aligned.garbage_seconds is not None
    assert aligned.garbage_seconds.tolist() == [[float(step), 0.0] for step in range(2, 10)]
    assert aligned.weight is None
    assert aligned.baseline_seconds == 0.7
    first = replace(one, lengths=(2.0,) * 10, baseline_seconds=0.8)
    late = replace(one, rank=1, lengths=(3.0,) * 10, baseline_seconds=0.9)
    aligned = windows.align([first, late])
    assert aligned is not None
    assert aligned.weight is not None
    assert aligned.weight[0].tolist() == [2.0, 3.0]
    assert aligned.baseline_seconds == 0.8, "who came later did not see the first steps"
