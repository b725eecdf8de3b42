"""In Local-SGD modes a snapshot is worth a synchronization that all wait for, where it can be taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import pacekeeper as pk
from pacekeeper.checkpointing.snapshots.peer_replication import PeerReplication
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper.sync.step_timer import SynchronizationTimes
from pacekeeper_analysis.protocol.plan import SyncMode
from testing.training.ranks import run_ranks
from testing.training.sync_mode_jobs import BATCH, PLAN, Numbers

STEPS, EVERY = 16, 4
"""Of the job; between two synchronizations, at each of which a snapshot is due."""


@pytest.mark.parametrize(
    ("delivered", "waited_for"), [(True, STEPS // EVERY), (False, 1)], ids=["delivered", "in progress"]
)
def test_no_synchronization_waits_while_the_last_snapshot_is_being_replicated(
    delivered: bool, waited_for: int, tmp_path: Path
) -> None:
    """But for the last one: the job is done."""

    def rank_main(rank: int) -> int:
        waits: list[None] = []
        # of a process that ends with the test
        PeerReplication.wait_for_delivery = lambda *_: delivered  # type: ignore[method-assign]
        SynchronizationTimes.finish = lambda *_: waits.append(None)  # type: ignore[method-assign]
        if rank == 0:
            plan = replace(PLAN, sync_mode=SyncMode.EDIT, sync_every=EVERY)
            write_json(RuntimeFolder(tmp_path).plan, plan.to_json())
        job = pk.init(mesh={"sync": -1}, snapshot_every=EVERY)
        net = job.replicate(nn.Linear(4, 1))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=0)
        loader = job.dataloader(Numbers(), BATCH, max_microbatch=BATCH)
        job.register(net=net, optimizer=optimizer, loader=loader)
        job.restore()
        for step in job.steps(loader, STEPS):
            for _, x in step.microbatches():
                (net(x).square().sum() / step.total_weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(waits)

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [waited_for] * 2
