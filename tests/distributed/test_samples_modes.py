"""Each sample is used exactly once an epoch while real ranks switch modes, are of unequal speed, leave and restart."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pacekeeper as pk
from pacekeeper.data.sample_stream import IndexedStream
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import SYNC_MODES, SyncMode, WorkerPlan, WorkerRole
from testing.training.ranks import run_ranks

SYNC, EDIT, ASYNC = SyncMode.SYNC, SyncMode.EDIT, SyncMode.ASYNC_EDIT
SIZE, BATCH = 50, 12
PLAN = WorkerPlan(version=1, role=WorkerRole.MEMBER, sync_every=3, sync_seconds=0.02)

Sample = tuple[int, torch.Tensor]


def build_sample(index: int) -> Sample:
    return index, torch.full((4,), index / SIZE)


class Indexed(torch.utils.data.Dataset[Sample]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Sample:
        return build_sample(index)


class Streamed(torch.utils.data.IterableDataset[Sample]):
    """The same samples in the same order, without an index and without saying how many."""

    def __init__(self) -> None:
        self.order = IndexedStream(SIZE, seed=0)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        return map(build_sample, self.order.get_indices([(self.epoch * SIZE, (self.epoch + 1) * SIZE)]))


def count_expected(steps: int) -> Counter[int]:
    return Counter(IndexedStream(SIZE, seed=0).get_indices([(0, steps * BATCH)]))


def count_used(results: list[tuple[list[int], list[SyncMode]]]) -> Counter[int]:
    return Counter(index for used, _ in results for index in used)


def train_until(
    rank: int,
    runtime: Path,
    dataset: Any,
    until: int,
    modes: list[SyncMode],
    mesh: dict[str, int],
    leaves: bool = False,
    **options: Any,
) -> tuple[list[int], list[SyncMode]]:
    """The samples of the steps that this rank has completed, and the modes that it has been through.

    leaves: rank 1 receives SIGTERM in AsyncEDiT; then all leave.
    modes: of the plan one after the other, each when the one before has been in force for some steps of rank 0.
    """
    job = pk.init(mesh=mesh, checkpoints=pk.Checkpoints(runtime / "checkpoints", 1000))
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = job.fully_shard(model) if mesh.get("shard", 1) > 1 else job.replicate(model)
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), warmup_steps=0)
    loader = job.dataloader(dataset, BATCH, max_microbatch=2, **options)
    job.register(model=model, opt=opt, loader=loader)
    job.restore()
    used: list[int] = []
    seen: list[SyncMode] = []
    mode_index, steps = 0, 0
    try:
        for step in job.steps(loader, until=until):
            for indices, x in step.microbatches():
                (model(x).sum() / step.total_weight).backward()
                used += indices.tolist() if step.total_weight < math.inf else []
                assert len(indices) == 2 or not options.get("static_shapes")
            opt.step()
            opt.zero_grad()
            time.sleep(
                0.002 * (1 + rank)
            )  # the last rank is the slowest, and none so fast that the samples do not last
            mode = SYNC_MODES[job.recorder.ring.state.sync_mode]
            steps = steps + 1 if seen[-1:] == [mode] else 1
            if steps == 1:
                seen.append(mode)
            if rank == 0 and steps >= 4 and mode_index < len(modes) and mode is (SYNC, *modes)[mode_index]:
                write_json(
                    RuntimeFolder(runtime).plan,
                    replace(PLAN, version=2 + mode_index, sync_mode=modes[mode_index]).to_json(),
                )
                mode_index += 1
            if leaves and rank == 1 and mode is ASYNC and steps == 10:
                os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit:
        assert leaves
    return used, seen


EVERY_SWITCH = [ASYNC, SYNC, EDIT, ASYNC, EDIT, SYNC]
"""From each mode to each other one, beginning in Sync."""
EVERY_MODE = [ASYNC, EDIT, SYNC]


@pytest.mark.parametrize(
    ("dataset", "mesh", "options", "modes", "until"),
    [
        (Indexed(), {"sync": 3}, {}, EVERY_SWITCH, 100),
        (Indexed(), {"sync": 3}, {"num_workers": 1}, EVERY_SWITCH, 100),
        (Streamed(), {"sync": 3}, {}, EVERY_MODE, 60),
        (Indexed(), {"sync": 2, "shard": 2}, {}, EVERY_MODE, 60),
        (Indexed(), {"sync": 2, "shard": 2}, {"static_shapes": True}, EVERY_MODE, 60),
        (Indexed(), {"sync": 3}, {"lengths": lambda index: index + 1.0}, EVERY_MODE, 60),
    ],
    ids=["indexed", "workers", "iterable", "sharded", "static shapes", "lengths"],
)
def test_samples_are_exact_across_switches_of_the_mode(
    dataset: Any, mesh: dict[str, int], options: Any, modes: list[SyncMode], until: int, tmp_path: Path
) -> None:
    ranks = mesh["sync"] * mesh.get("shard", 1)
    results = run_ranks(
        lambda rank: train_until(rank, tmp_path, dataset, until, modes, mesh, **options), ranks, runtime=tmp_path
    )
    assert all(seen == [SYNC, *modes] for _, seen in results)
    assert count_used(results) == count_expected(until)


@pytest.mark.parametrize("dataset", [Indexed(), Streamed()], ids=["indexed", "iterable"])
def test_samples_are_exact_across_a_restart_with_leases_and_another_number_of_ranks(
    dataset: Any, tmp_path: Path
) -> None:
    first = run_ranks(
        lambda rank: train_until(rank, tmp_path, dataset, 1000, [ASYNC], {"sync": 3}, leaves=True, num_workers=1),
        3,
        runtime=tmp_path,
    )
    done = sum(count_used(first).values())
    assert [seen for _, seen in first] == [[SYNC, ASYNC]] * 3
    until = done // BATCH + 12
    second = run_ranks(
        lambda rank: train_until(rank, tmp_path, dataset, until, [], {"sync": 2}),
        2,
        runtime=tmp_path,
    )
    assert count_used(first + second) == count_expected(until)
