"""PyTorch's DistributedDataParallel, equal shares."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from .run import GLOBAL_BATCH, LOCAL_BATCH, RANKS, Outcome, Place, Run
from .workload import GPT, LossSnapshots, SourceCode, StepPacer, compute_loss_sum, make_optimizer

BUCKET_MB = 0.05
"""A fraction of this small model, so that its all-reduces overlap the backward pass as those of a large one do."""


def train_ddp(run: Run, place: Place) -> Outcome:
    dist.init_process_group("gloo")
    pacer, snapshots = StepPacer(run.draw_costs(), place.rank, run.unit_seconds), LossSnapshots()
    data = SourceCode(run.samples, run.seed)
    model = GPT(pacer)
    replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer = make_optimizer(model, run.learning_rate)
    schedule = LambdaLR(optimizer, lambda step: run.compute_rate_factor(step * GLOBAL_BATCH))
    for step in range(run.steps):
        positions = get_local_batch(step, place.rank)
        x, y = data.batch(positions)
        pacer.begin(positions)
        (compute_loss_sum(replica, x, y) / LOCAL_BATCH).backward()
        pacer.end()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if run.snapshot_every and (step + 1) % run.snapshot_every == 0:
            snapshots.add_snapshot(pacer.period, model)
        pacer.period += 1
    dist.barrier()
    dist.destroy_process_group()
    return Outcome(
        pacer.diary,
        weights=[1 / RANKS] * run.steps,
        losses=snapshots.losses(data) if place.rank == 0 else [],
    )


def get_local_batch(step: int, rank: int) -> range:
    """The positions in the stream of a rank with an equal share; `step` from 0."""
    first = step * GLOBAL_BATCH + rank * LOCAL_BATCH
    return range(first, first + LOCAL_BATCH)
