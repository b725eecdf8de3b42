"""A small steered job for tests of the modes: what each rank used, and what it was like at each ordinal."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import pacekeeper as pk
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import SyncMode, WorkerPlan, WorkerRole
from testing.training.ranks import forbid_unpickling, run_ranks

SIZE = 96
BATCH = 16
PLAN = WorkerPlan(version=1, membership=1, role=WorkerRole.MEMBER, sync_every=4, sync_seconds=0.1)

LossSabotage = Callable[[int, pk.Step, Tensor], Tensor]
"""From rank, step and loss to the loss that the rank trains with."""


class Numbers(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Sample i and its features."""

    def __init__(self) -> None:
        self.x = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.x[index]


@dataclass(frozen=True)
class SyncPointState:
    """What a rank found at an ordinal: the same on all ranks, apart from sharded parameters."""

    step: int
    samples: int
    rate: float
    parameters: str


@dataclass
class JobRankTrace:
    """What one rank did."""

    restored: int = 0
    used: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sync_points: list[SyncPointState] = field(default_factory=list)
    own_steps: int = 0
    step: int = 0
    samples: int = 0
    moments: str = ""
    left_with: Any = None


def run_job(  # noqa: PLR0913  # options of a harness: each caller names what it varies
    runtime: Path,
    *,
    until: int | None,
    plans: Mapping[int, Mapping[str, Any]],
    ranks: int = 4,
    shard: int = 1,
    sharded: bool | None = None,
    workers: int = 0,
    weighs: bool = False,
    pauses: Sequence[float] = (0.005,),
    volume: Path | None = None,
    checkpoint_every: int = 1000,
    sabotage: LossSabotage | None = None,
    at_step: Callable[[int, pk.Job], bool] = lambda *_: False,
) -> list[JobRankTrace]:
    """What the ranks did.

    plans: from the job's step to what rank 0 changes in the plan when the job has come so far; 0: from the beginning.
    weighs: whether the loader is given a weight of batches: as many as they have samples.
    pauses: seconds a step of each rank; the last one's goes for all after it.
    at_step: called in each step; True: the rank leaves the loop.
    """
    (runtime / "plan.json").unlink(missing_ok=True)
    first_changes = plans.get(0, {})

    def rank_main(rank: int) -> JobRankTrace:
        forbid_unpickling()
        if rank == 0:
            write_json(RuntimeFolder(runtime).plan, replace(PLAN, **first_changes).to_json())
        job = pk.init(
            mesh={"sync": -1, "shard": shard},
            checkpoints=pk.Checkpoints(volume, checkpoint_every) if volume else None,
            snapshot_every=0,
        )
        torch.manual_seed(0)
        net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        net = job.fully_shard(net) if (shard > 1 if sharded is None else sharded) else job.replicate(net)
        optimizer = job.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01), warmup_steps=0)
        schedule = job.lr_lambda(optimizer, lambda samples: 1 / (1 + samples / 500))
        loader = job.dataloader(
            Numbers(), BATCH, max_microbatch=3, weight=count_samples if weighs else None, num_workers=workers
        )
        job.register(net=net, optimizer=optimizer, schedule=schedule, loader=loader)
        trace = JobRankTrace(restored=job.restore())
        pending = {step: changes for step, changes in sorted(plans.items()) if step > trace.restored}
        trace.moments = compute_moments_digest(job)
        try:
            for step in job.steps(loader, until):
                loss = torch.zeros(())
                for indices, x in step.microbatches():
                    loss = (net(x) - x.sum(1, keepdim=True)).square().sum()
                    if sabotage:
                        loss = sabotage(rank, step, loss)
                    step.add_loss(loss)
                    (loss / step.total_weight).backward()
                    trace.used += indices.tolist()
                time.sleep(pauses[min(rank, len(pauses) - 1)])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                trace.own_steps += 1
                trace.losses.append(loss.item())
                if step.due("poll", every=1):
                    rate = optimizer.param_groups[0]["lr"]
                    trace.sync_points.append(
                        SyncPointState(job.step, job.samples, rate, compute_digest(net.parameters()))
                    )
                if rank == 0 and pending and job.step >= min(pending):
                    due = min(pending)
                    write_json(
                        RuntimeFolder(runtime).plan, replace(PLAN, version=1 + due, **pending.pop(due)).to_json()
                    )
                if at_step(rank, job):
                    break
        except SystemExit as exit_:
            trace.left_with = exit_.code
        trace.step, trace.samples = job.step, job.samples
        trace.moments = trace.moments if until == trace.restored else compute_moments_digest(job)
        return trace

    return run_ranks(rank_main, ranks, runtime=runtime)


def count_samples(batch: Any) -> int:
    return len(batch[0])


def compute_digest(tensors: Any) -> str:
    """Of every bit, of this rank's parts."""
    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().numpy().tobytes())
    return digest.hexdigest()


def compute_moments_digest(job: pk.Job) -> str:
    """Of the whole outer momentum, however it is sharded; "": there is none."""
    replication = job._replication
    if not replication.has_outer_state:
        return ""
    momenta = [state["momentum_buffer"] for state in replication.replicas[0].outer.state.values()]
    return compute_digest(
        momentum.full_tensor() if hasattr(momentum, "full_tensor") else momentum for momentum in momenta
    )


def count_used_samples(*runs: list[JobRankTrace]) -> Counter[int]:
    """How often each sample was used."""
    return Counter(index for run in runs for trace in run for index in trace.used)


def is_each_used_once_per_epoch(counts: Counter[int], samples: int) -> bool:
    """Whether `samples` samples were this many epochs, and the beginning of one more."""
    epochs, remainder = divmod(samples, SIZE)
    expected = Counter({epochs: SIZE - remainder, epochs + 1: remainder})
    return Counter(counts[index] for index in range(SIZE)) == +expected


def read_records(runtime: Path, rank: int) -> NDArray[np.void]:
    return RingReader(RuntimeFolder(runtime).ring(rank)).records()


def list_mode_starts(runtime: Path, rank: int) -> list[tuple[SyncMode, int]]:
    """The modes that a rank was in, each with the number of its first step."""
    from pacekeeper_rank.records import RecordKind

    starts: list[tuple[SyncMode, int]] = []
    for record in read_records(runtime, rank):
        if record["kind"] == RecordKind.STEP:
            mode = tuple(SyncMode)[int(record["flags"])]
            if not starts or starts[-1][0] is not mode:
                starts.append((mode, int(record["step"])))
    return starts
