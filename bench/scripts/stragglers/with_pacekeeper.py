"""Pacekeeper, as any script uses it; the operator's part is played by a plan file that is there from the beginning."""

from __future__ import annotations

import os

import torch

import pacekeeper as pk
from pacekeeper.ring import create_ring
from pacekeeper.runtime import Runtime, write_json
from pacekeeper_analysis.plan import Role, SyncMode, WorkerPlan

from .run import GLOBAL_BATCH, Outcome, Place, Run
from .workload import GPT, Pace, Snapshots, SourceCode, loss_sum


def shares(run: Run, place: Place) -> Outcome:
    """Synchronous SGD with the run's shares."""
    return train(run, place, SyncMode.SYNC)


def train(run: Run, place: Place, mode: SyncMode) -> Outcome:
    prepare_runtime(run, place, mode)
    pace, snapshots = Pace(run.costs(), place.rank, run.unit_seconds), Snapshots(run.snapshots)
    data = SourceCode(run.samples, run.seed)
    job = pk.init(seed=run.seed)
    model = GPT(pace)
    replica = job.replicate(model)
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=run.learning_rate))
    loader = job.dataloader(data, GLOBAL_BATCH, max_microbatch=GLOBAL_BATCH, shuffle=False)
    weights = []
    for step in job.steps(loader, until=run.steps):
        for positions, x, y in step.microbatches():
            pace.begin(positions.tolist())
            (loss_sum(replica, x, y) / step.total_weight).backward()
            pace.end()
        optimizer.step()
        optimizer.zero_grad()
        weights.append([share / GLOBAL_BATCH for share in loader.shares])
        snapshots.keep(pace.period, model)
        pace.period += 1
    return Outcome(pace.diary, weights, snapshots.losses(data) if place.rank == 0 else [])


def prepare_runtime(run: Run, place: Place, mode: SyncMode) -> None:
    """The runtime folder as a launcher would have made it: this rank's ring, and the plan, for rank 0 to read."""
    runtime = Runtime(place.folder).make()
    create_ring(runtime.ring(place.rank), place.rank, round_=1)
    if place.rank == 0:
        plan = WorkerPlan(
            version=1,
            role=Role.MEMBER,
            sync_mode=mode,
            sync_every=run.sync_every,
            sync_seconds=run.sync_seconds or 1.0,
            shares=run.shares,
        )
        write_json(runtime.plan, plan.to_json())
    os.environ.update(PACEKEEPER_RUNTIME=str(place.folder), PACEKEEPER_ROUND="1")
