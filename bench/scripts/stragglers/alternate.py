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
from bench.overhead import restore_functions, save_functions
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_rank.collectives.collective_monitor import exclude_group

from .ddp import get_local_batch
from .run import GLOBAL_BATCH, LOCAL_BATCH, Outcome, Place, Run
from .with_pacekeeper import prepare_runtime
from .workload import GPT, SourceCode, StepPacer, compute_loss_sum, make_optimizer

BLOCK_STEPS = 8
"""Steps."""


def compare_sync(run: Run, place: Place) -> Outcome:
    return alternate_blocks(run, place, SyncMode.SYNC)


def compare_edit(run: Run, place: Place) -> Outcome:
    return alternate_blocks(run, place, SyncMode.EDIT)


def alternate_blocks(run: Run, place: Place, mode: SyncMode) -> Outcome:
    """Seconds a step in pairs of blocks; of the run's steps, half are made by each side."""
    prepare_runtime(run, place, mode)
    plain_functions = save_functions()
    job = pk.init(seed=run.seed)
    recording_functions = save_functions()
    data = SourceCode(run.samples, run.seed)
    our_steps = iterate_our_steps(run, place, job, data)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    exclude_group(group)
    their_steps = iterate_plain_steps(run, place, group, data)

    def time_block(steps: Iterator[None], functions: dict[str, object]) -> float:
        restore_functions(functions)
        dist.barrier(group)
        return statistics.median(time_step(lambda: next(steps)) for _ in range(BLOCK_STEPS))

    blocks = []
    for pair in range(run.steps // (2 * BLOCK_STEPS)):
        if pair % 2:
            our_seconds, their_seconds = (
                time_block(our_steps, recording_functions),
                time_block(their_steps, plain_functions),
            )
        else:
            their_seconds, our_seconds = (
                time_block(their_steps, plain_functions),
                time_block(our_steps, recording_functions),
            )
        blocks.append((their_seconds, our_seconds))
    return Outcome([], [], blocks=blocks[1:])


def iterate_our_steps(run: Run, place: Place, job: pk.Job, data: SourceCode) -> Iterator[None]:
    """Makes a step for each next item."""
    pacer = StepPacer(run.draw_costs(), place.rank, run.unit_seconds)
    model = GPT(pacer)
    replica = job.replicate(model, units=lambda gpt: gpt.blocks)
    optimizer = job.optimizer(make_optimizer(model, run.learning_rate), warmup_steps=0)
    loader = job.dataloader(data, GLOBAL_BATCH, max_microbatch=GLOBAL_BATCH, shuffle=False)
    for step in job.steps(loader):
        for positions, x, y in step.microbatches():
            pacer.begin(positions.tolist())
            (compute_loss_sum(replica, x, y) / step.total_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def iterate_plain_steps(run: Run, place: Place, group: dist.ProcessGroup, data: SourceCode) -> Iterator[None]:
    pacer = StepPacer(run.draw_costs(), place.rank, run.unit_seconds)
    model = GPT(pacer)
    replica = DistributedDataParallel(model, process_group=group)
    optimizer = make_optimizer(model, run.learning_rate)
    batches = [list(get_local_batch(step, place.rank)) for step in range(run.steps)]
    for positions, x, y in DataLoader(data, batch_sampler=batches):
        pacer.begin(positions.tolist())
        (compute_loss_sum(replica, x, y) / LOCAL_BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def time_step(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
