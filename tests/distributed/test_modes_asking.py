"""Asking what is due is a rank's own affair: whoever asks, what the ranks must do together they do at the ordinal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pacekeeper as pk
from pacekeeper.runtime import Runtime, write_json
from pacekeeper_analysis.plan import SyncMode
from tests.support.mode_jobs import BATCH, PLAN, Numbers
from tests.support.ranks import run_ranks

SYNC, EDIT, ASYNC_EDIT = SyncMode.SYNC, SyncMode.EDIT, SyncMode.ASYNC_EDIT


@pytest.mark.parametrize("mode", [EDIT, ASYNC_EDIT])
def test_what_is_asked_on_one_rank_of_a_mesh_holds_nobody_up(mode: SyncMode, tmp_path: Path) -> None:
    """More units than the two whose synchronisation is under way at a time: the asking rank's would wait for its sync
    group, which waits for shards that the asking rank has to gather with its shard group."""

    def rank_main(rank: int) -> list[int]:
        if rank == 0:
            write_json(Runtime(tmp_path).plan, {**PLAN.to_json(), "sync_mode": mode})
        job = pk.init(mesh={"sync": 2, "shard": 2})
        net = job.fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)), nn.Linear(4, 1)))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=0)
        due = []
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=24):
            for _, x in step.microbatches():
                (net(x).sum() / step.total_weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0 and step.due("print", every=6):
                due.append(job.step)
        return due

    asking, *others = run_ranks(rank_main, 4, runtime=tmp_path, patience=30)
    assert others == [[]] * 3
    if mode is EDIT:
        assert asking == [8, 12, 20, 24]
    else:
        assert len(asking) >= 2
        assert asking[-1] == 24
