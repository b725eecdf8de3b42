"""Modes change live: at one ordinal on all ranks, in both directions, and every sample is used once an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pacekeeper as pk
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_rank.records import RecordKind
from testing.training.ranks import run_ranks
from testing.training.sync_mode_jobs import (
    BATCH,
    PLAN,
    JobRankTrace,
    Numbers,
    count_used_samples,
    is_each_used_once_per_epoch,
    list_mode_starts,
    read_records,
    run_job,
)

SYNC, EDIT, ASYNC_EDIT = SyncMode.SYNC, SyncMode.EDIT, SyncMode.ASYNC_EDIT
THROUGH_ALL = {3: {"sync_mode": EDIT}, 13: {"sync_mode": ASYNC_EDIT}, 40: {"sync_mode": SYNC}}


def check_ordinals(run: list[JobRankTrace], shard: int = 1) -> None:
    """Ranks agree on step, samples and learning rate; those of a sync group have the same parameters to the bit."""
    for rank, seen in enumerate(run):
        assert [(one.step, one.samples, one.rate) for one in seen.sync_points] == [
            (one.step, one.samples, one.rate) for one in run[0].sync_points
        ]
        assert [one.parameters for one in seen.sync_points] == [one.parameters for one in run[rank % shard].sync_points]
        assert all(one.step == one.samples // BATCH for one in seen.sync_points)


@pytest.mark.oldest_torch
@pytest.mark.parametrize("shard", [1, 2], ids=["replicas", "sharded replicas"])
def test_a_job_passes_through_all_modes_and_back(shard: int, tmp_path: Path) -> None:
    run = run_job(tmp_path, until=60, plans=THROUGH_ALL, shard=shard, weighs=shard > 1, pauses=(0.004, 0.012))
    check_ordinals(run, shard)
    assert {(seen.step, seen.samples) for seen in run} == {(60, 60 * BATCH)}
    assert is_each_used_once_per_epoch(count_used_samples(run), 60 * BATCH)
    switches = [list_mode_starts(tmp_path, rank) for rank in range(4)]
    assert switches == [switches[0]] * 4
    (_, first), (_, edit), (_, leased), (_, back) = switches[0]
    assert [mode for mode, _ in switches[0]] == [SYNC, EDIT, ASYNC_EDIT, SYNC]
    assert (first, edit) == (1, 5)  # written in step 3, read when step 4 begins, agreed when it is over
    assert (leased - edit) % PLAN.sync_every == 0
    between = [one.step for one in run[0].sync_points if edit <= one.step < leased]
    assert between == list(range(edit + 3, leased, PLAN.sync_every))
    assert [one.step for one in run[0].sync_points if one.step >= back] == list(range(back, 61))
    synchronized = [
        int((read_records(tmp_path, rank)["kind"] == RecordKind.SYNCHRONIZATION).sum()) for rank in range(4)
    ]
    assert synchronized == [synchronized[0]] * 4
    assert synchronized[0] >= len([one for one in run[0].sync_points if edit <= one.step < back])


@pytest.mark.oldest_torch
@pytest.mark.parametrize(
    ("shard", "workers"), [(1, 1), (2, 0)], ids=["replicas with loader workers", "sharded replicas"]
)
def test_requests_are_followed_before_the_synchronization_is_due(shard: int, workers: int, tmp_path: Path) -> None:
    """A checkpoint, behind which the mode goes on; and Sync."""
    by_the_clock: dict[str, Any] = {"sync_mode": ASYNC_EDIT, "sync_seconds": 1000.0}
    plans: dict[int, dict[str, Any]] = {
        0: by_the_clock,
        8: by_the_clock | {"checkpoint_request": 1},
        24: {"sync_mode": SYNC},
    }
    volume = tmp_path / "volume"
    run = run_job(tmp_path, until=60, plans=plans, shard=shard, workers=workers, pauses=(0.004, 0.012), volume=volume)
    assert {(seen.step, seen.samples) for seen in run} == {(60, 60 * BATCH)}
    assert is_each_used_once_per_epoch(count_used_samples(run), 60 * BATCH)
    (_, first), (_, back) = list_mode_starts(tmp_path, 0)
    assert [mode for mode, _ in list_mode_starts(tmp_path, 0)] == [ASYNC_EDIT, SYNC]
    assert first == 1
    assert 10 < back < 40
    kept = sorted(int(folder.name.rpartition("-")[2]) for folder in volume.glob("step-*"))
    assert len(kept) == 2
    assert 2 < kept[0] < 16


def test_a_slow_rank_makes_fewer_steps_and_no_rank_waits_for_it_in_a_step(tmp_path: Path) -> None:
    run = run_job(
        tmp_path, until=60, plans={0: {"sync_mode": ASYNC_EDIT, "sync_seconds": 0.6}}, pauses=(0.01, 0.3, 0.01)
    )
    check_ordinals(run)
    assert is_each_used_once_per_epoch(count_used_samples(run), 60 * BATCH)
    fast = [seen.own_steps for rank, seen in enumerate(run) if rank != 1]
    assert run[1].own_steps < min(fast) / 2
    assert [len(seen.used) for seen in run] == [4 * seen.own_steps for seen in run]


def test_the_job_ends_in_a_step_of_all_ranks_in_every_mode(tmp_path: Path) -> None:
    """So that an evaluation which is due then happens, on all of them."""
    run = run_job(tmp_path, until=20, plans={0: {"sync_mode": ASYNC_EDIT}}, pauses=(0.002, 0.03))
    check_ordinals(run)
    assert [seen.sync_points[-1].step for seen in run] == [20] * 4


@pytest.mark.parametrize("mode", [EDIT, ASYNC_EDIT])
def test_a_single_rank_trains(mode: SyncMode, tmp_path: Path) -> None:
    (seen,) = run_job(tmp_path, until=12, plans={0: {"sync_mode": mode}, 8: {"sync_mode": SYNC}}, ranks=1)
    assert (seen.step, seen.samples) == (12, 12 * BATCH)
    assert is_each_used_once_per_epoch(count_used_samples([seen]), 12 * BATCH)


def test_without_an_operator_the_script_chooses_the_mode() -> None:
    """As under torchrun."""

    def rank_main(_: int) -> tuple[int, int, int]:
        job = pk.init(sync_mode="EDiT", sync_every=3)
        net = job.replicate(nn.Linear(4, 1))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=2)
        due_count = 0
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=10):
            for _, x in step.microbatches():
                (net(x).sum() / step.total_weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            due_count += step.due("poll", every=1)
        return job.step, job.samples, due_count

    assert run_ranks(rank_main, 2) == [(10, 10 * BATCH, 2 + 3)] * 2  # 1, 2 in Sync; then 5, 8, 10
