"""The state of a job in any mode: what one mode has written resumes in another, on another number of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import pacekeeper as pk
from pacekeeper.environment import RANK_LEFT_EXIT_CODE
from pacekeeper_analysis.protocol.plan import SyncMode
from testing.training.sync_mode_jobs import BATCH, count_used_samples, is_each_used_once_per_epoch, run_job

SYNC, EDIT, ASYNC_EDIT = SyncMode.SYNC, SyncMode.EDIT, SyncMode.ASYNC_EDIT
UNEVEN = (0.003, 0.02, 0.006)


def sigterm_to_rank_1(rank: int, job: pk.Job) -> bool:
    if rank == 1 and job.step >= 12:
        os.kill(os.getpid(), signal.SIGTERM)
    return False


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ranks": 4, "workers": 1}, {"ranks": 3}),
        ({"ranks": 4, "shard": 2}, {"ranks": 4, "shard": 1, "sharded": True}),
    ],
    ids=["4 with loader workers → 3", "2 × 2 → 4 × 1"],
)
def test_ranks_leave_in_a_local_mode_and_go_on_in_others(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    """AsyncEDiT, from which a SIGTERM comes long before the clock is up; Sync with other ranks; and AsyncEDiT again."""
    volume = tmp_path / "volume"
    left = run_job(
        tmp_path,
        until=None,
        plans={0: {"sync_mode": ASYNC_EDIT, "sync_seconds": 1000.0}},
        pauses=UNEVEN,
        volume=volume,
        at_step=sigterm_to_rank_1,
        **before,
    )
    assert {seen.left_with for seen in left} == {RANK_LEFT_EXIT_CODE}
    (samples,) = {seen.samples for seen in left}
    assert sum(len(seen.used) for seen in left) == samples
    stopped = samples // BATCH
    sync = run_job(tmp_path, until=stopped + 6, plans={}, volume=volume, **after)
    assert {seen.restored for seen in sync} == {stopped}
    assert {seen.samples for seen in sync} == {(stopped + 6) * BATCH}
    again = run_job(
        tmp_path, until=stopped + 20, plans={0: {"sync_mode": ASYNC_EDIT}}, pauses=UNEVEN, volume=volume, **before
    )
    assert {seen.restored for seen in again} == {stopped + 6}
    assert is_each_used_once_per_epoch(count_used_samples(left, sync, again), (stopped + 20) * BATCH)


def test_the_outer_momentum_survives_sync_and_a_change_of_ranks(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    written = run_job(tmp_path, until=16, plans={0: {"sync_mode": EDIT}}, shard=2, volume=volume)
    (momentum,) = {seen.moments for seen in written}
    through_sync = run_job(tmp_path, until=18, plans={}, ranks=2, sharded=True, volume=volume)
    assert {seen.moments for seen in through_sync} == {momentum}
    restored = run_job(tmp_path, until=18, plans={0: {"sync_mode": EDIT}}, ranks=3, sharded=False, volume=volume)
    assert [(seen.restored, seen.moments) for seen in restored] == [(18, momentum)] * 3


def test_a_checkpoint_without_outer_state_begins_with_none(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    run_job(tmp_path, until=4, plans={}, ranks=2, volume=volume)
    local = run_job(tmp_path, until=12, plans={0: {"sync_mode": EDIT}}, ranks=2, volume=volume)
    assert [(seen.restored, seen.step) for seen in local] == [(4, 12)] * 2
    assert [one.step for one in local[0].sync_points] == [8, 12]


def test_resumed_edit_equals_edit_that_was_never_interrupted(tmp_path: Path) -> None:
    """To the bit, where both have kept a checkpoint of the step from which one resumes."""
    edit = {0: {"sync_mode": EDIT}}
    arguments: dict[str, Any] = {"plans": edit, "ranks": 2, "checkpoint_every": 8}
    whole = run_job(tmp_path, until=20, volume=tmp_path / "whole", **arguments)
    run_job(
        tmp_path,
        until=20,
        volume=tmp_path / "cut",
        at_step=lambda _, job: job.step == 13,  # as a crash would have it
        **arguments,
    )
    resumed = run_job(tmp_path, until=20, volume=tmp_path / "cut", **arguments)
    for one, other in zip(whole, resumed, strict=True):
        assert other.restored == 8
        assert other.losses == one.losses[8:]
        assert other.sync_points == one.sync_points[2:]
        assert other.moments == one.moments
