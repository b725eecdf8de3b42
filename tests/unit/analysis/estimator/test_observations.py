"""Windows of steps, aligned from what ranks answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.estimator.observations import StepWindow
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.reports import RankWindow


def build_rank_window(rank: int, steps: range = range(10, 20), **changes: object) -> RankWindow:
    count = len(steps)
    window = RankWindow(
        rank=rank,
        steps=tuple(steps),
        step_seconds=(1.0,) * count,
        compute_seconds=tuple(0.5 + 0.01 * step for step in steps),
        samples=(8,) * count,
        sync_mode=SyncMode.SYNC,
        baseline_seconds=1.0,
        baseline_own_seconds=0.8,
    )
    return replace(window, **changes)  # type: ignore[arg-type]


def test_synchronous_steps_are_aligned_by_their_numbers() -> None:
    window = StepWindow.from_rank_windows([build_rank_window(1, range(12, 22)), build_rank_window(0)])
    assert window is not None
    assert window.numbers.tolist() == list(range(12, 20))
    assert np.allclose(window.compute_seconds[:, 0], window.compute_seconds[:, 1])
    assert np.allclose(window.exposed_seconds, 1.0 - window.compute_seconds[:, 0])
    assert window.baseline_exposed == pytest.approx(0.2)
    assert window.synchronous


def test_steps_of_a_local_sgd_mode_are_aligned_from_the_newest_one() -> None:
    ranks = [
        build_rank_window(0, range(100, 108), sync_mode=SyncMode.ASYNC_EDIT, transfers=(0.2, 0.3)),
        build_rank_window(1, range(40, 45), sync_mode=SyncMode.ASYNC_EDIT, transfers=(0.2, 0.4)),
    ]
    window = StepWindow.from_rank_windows(ranks)
    assert window is not None
    assert window.numbers.tolist() == list(range(103, 108))
    assert (window.synchronous, window.transfer_seconds) == (False, 0.3)


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [build_rank_window(1)],
        [build_rank_window(0), build_rank_window(0)],
        [build_rank_window(0), build_rank_window(1, range(20, 30))],
        [build_rank_window(0), build_rank_window(1, range(0))],
        [build_rank_window(0), build_rank_window(1, compute_seconds=(0.0,) * 10)],
        [build_rank_window(0), build_rank_window(1, compute_seconds=(float("nan"),) * 10)],
    ],
    ids=["none", "a rank is missing", "twice", "no common step", "no steps", "no work", "not a number"],
)
def test_answers_that_tell_nothing_together(ranks: list[RankWindow]) -> None:
    assert StepWindow.from_rank_windows(ranks) is None


def test_work_follows_the_lengths_of_samples() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.uniform(500, 2000, (10, 3))
    ranks = [
        build_rank_window(
            rank,
            compute_seconds=tuple(1e-3 * lengths[:, rank]),
            step_seconds=(3.0,) * 10,
            gc_seconds=(0.1,) + (0.0,) * 9,
            lengths=tuple(lengths[:, rank]),
            squares=tuple(1000 * lengths[:, rank]),
        )
        for rank in range(3)
    ]
    ranks = [replace(r, compute_seconds=(r.compute_seconds[0] + 0.1, *r.compute_seconds[1:])) for r in ranks]
    window = StepWindow.from_rank_windows(ranks)
    assert window is not None
    assert window.sequence_cost is not None
    assert np.allclose(window.balanced_seconds, 1e-3 * lengths.mean(axis=1, keepdims=True), rtol=0.02)
    unknown = StepWindow.from_rank_windows([replace(r, squares=()) for r in ranks])
    assert unknown is not None
    assert unknown.sequence_cost is None, "a loader that does not know the lengths cannot balance them"


def test_a_monitored_script_has_no_shares() -> None:
    window = StepWindow.from_rank_windows([build_rank_window(rank, samples=(0,) * 10) for rank in range(2)])
    assert window is not None
    assert not window.has_shares


def test_older_steps_are_kept_unless_the_mode_was_another() -> None:
    windows = [
        StepWindow.from_rank_windows(
            [build_rank_window(0, steps, sync_mode=mode), build_rank_window(1, steps, sync_mode=mode)]
        )
        for steps, mode in ((range(10), SyncMode.SYNC), (range(6, 16), SyncMode.SYNC), (range(20, 30), SyncMode.EDIT))
    ]
    first, second, local = windows
    assert first is not None
    assert second is not None
    assert local is not None
    assert second.with_older(first, 64).numbers.tolist() == list(range(16))
    assert second.with_older(first, 4).numbers.tolist() == [12, 13, 14, 15]
    assert local.with_older(second, 64) is local
