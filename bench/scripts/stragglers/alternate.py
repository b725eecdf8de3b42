"""What ours costs where nothing is wrong: blocks of steps with DDP and with ours in turn, in the same processes.

DDP is as plain as can be: while it has its turn, what our watching replaces in torch is as it was before, and its
process group is not watched. Both fetch their samples with a DataLoader, as scripts do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import pacekeeper as pk
from bench.overhead import restore_functions, saved_functions
from pacekeeper.observe.collectives import exclude_group
from pacekeeper_analysis.plan import SyncMode

from .ddp import local_batch
from .run import GLOBAL_BATCH, LOCAL_BATCH, Outcome, Place, Run
from .with_pacekeeper import prepare_runtime
from .workload import GPT, StepPacer, SourceCode, loss_sum, make_optimizer

BLOCK = 8
"""Steps."""


def sync(run: Run, place: Place) -> Outcome:
    return alternate(run, place, SyncMode.SYNC)


def edit(run: Run, place: Place) -> Outcome:
    return alternate(run, place, SyncMode.EDIT)


def alternate(run: Run, place: Place, mode: SyncMode) -> Outcome:
    """Seconds a step in pairs of blocks; of the run's steps, half are made by each side."""
    prepare_runtime(run, place, mode)
    plain = saved_functions()
    job = pk.init(seed=run.seed)
    watched = saved_functions()
    data = SourceCode(run.samples, run.seed)
    ours = our_steps(run, place, job, data)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    exclude_group(group)
    theirs = plain_steps(run, place, group, data)

    def block(steps: Iterator[None], functions: dict[str, object]) -> float:
        restore_functions(functions)
        dist.barrier(group)
        return statistics.median(timed(lambda: next(steps)) for _ in range(BLOCK))

    blocks = []
    for pair in range(run.steps // (2 * BLOCK)):
        if pair % 2:
            our_seconds, their_seconds = block(ours, watched), block(theirs, plain)
        else:
            their_seconds, our_seconds = block(theirs, plain), block(ours, watched)
        blocks.append((their_seconds, our_seconds))
    return Outcome([], [], blocks=blocks[1:])


def our_steps(run: Run, place: Place, job: pk.Job, data: SourceCode) -> Iterator[None]:
    """Makes a step each time it is asked for the next item."""
    pace = StepPacer(run.costs(), place.rank, run.unit_seconds)
    model = GPT(pace)
    replica = job.replicate(model, units=lambda gpt: gpt.blocks)
    optimizer = job.optimizer(make_optimizer(model, run.learning_rate), warmup_steps=0)
    loader = job.dataloader(data, GLOBAL_BATCH, max_microbatch=GLOBAL_BATCH, shuffle=False)
    for step in job.steps(loader):
        for positions, x, y in step.microbatches():
            pace.begin(positions.tolist())
            (loss_sum(replica, x, y) / step.total_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def plain_steps(run: Run, place: Place, group: dist.ProcessGroup, data: SourceCode) -> Iterator[None]:
    pace = StepPacer(run.costs(), place.rank, run.unit_seconds)
    model = GPT(pace)
    replica = DistributedDataParallel(model, process_group=group)
    optimizer = make_optimizer(model, run.learning_rate)
    batches = [list(local_batch(step, place.rank)) for step in range(run.steps)]
    for positions, x, y in DataLoader(data, batch_sampler=batches):
        pace.begin(positions.tolist())
        (loss_sum(replica, x, y) / LOCAL_BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
