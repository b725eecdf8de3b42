"""PyTorch's DistributedDataParallel, equal shares."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from .run import GLOBAL_BATCH, LOCAL_BATCH, RANKS, Outcome, Place, Run
from .workload import GPT, StepPacer, LossSnapshots, SourceCode, loss_sum, make_optimizer

BUCKET_MB = 0.05
"""A fraction of this small model, so that its all-reduces overlap the backward pass as those of a large one do."""


def run(run: Run, place: Place) -> Outcome:
    dist.init_process_group("gloo")
    pace, snapshots = StepPacer(run.costs(), place.rank, run.unit_seconds), LossSnapshots()
    data = SourceCode(run.samples, run.seed)
    model = GPT(pace)
    replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer = make_optimizer(model, run.learning_rate)
    schedule = LambdaLR(optimizer, lambda step: run.rate_left(step * GLOBAL_BATCH))
    for step in range(run.steps):
        positions = local_batch(step, place.rank)
        x, y = data.batch(positions)
        pace.begin(positions)
        (loss_sum(replica, x, y) / LOCAL_BATCH).backward()
        pace.end()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if run.snapshot_every and (step + 1) % run.snapshot_every == 0:
            snapshots.add_snapshot(pace.period, model)
        pace.period += 1
    dist.barrier()
    dist.destroy_process_group()
    return Outcome(
        pace.diary,
        weights=[1 / RANKS] * run.steps,
        losses=snapshots.losses(data) if place.rank == 0 else [],
    )


def local_batch(step: int, rank: int) -> range:
    """The positions in the stream of a rank with an equal share; `step` from 0."""
    first = step * GLOBAL_BATCH + rank * LOCAL_BATCH
    return range(first, first + LOCAL_BATCH)
