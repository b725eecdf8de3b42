"""Each rank reads by itself what is due: what the ranks must do together, they do at the same ordinal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import pacekeeper as pk
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import SyncMode
from testing.training.ranks import run_ranks
from testing.training.sync_mode_jobs import BATCH, PLAN, Numbers, compute_digest

EDIT, ASYNC_EDIT = SyncMode.EDIT, SyncMode.ASYNC_EDIT


@pytest.mark.parametrize("mode", [EDIT, ASYNC_EDIT])
def test_a_query_by_one_rank_of_a_mesh_holds_no_rank_up(mode: SyncMode, tmp_path: Path) -> None:
    """More units than the two whose synchronization is in progress at a time. Were the rest completed only on the
    querying rank, it would wait for its sync group, which waits for shards that this rank has to gather. One of the
    units has no parameters, as those of `nn.Module.children` may."""

    def rank_main(rank: int) -> tuple[list[int], dict[int, str]]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, {**PLAN.to_json(), "sync_mode": mode, "sync_seconds": 0.02})
        job = pk.init(mesh={"sync": 2, "shard": 2})
        net = job.fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Tanh(), nn.Linear(4, 1)))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=0)
        due, parameters = [], {}
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=24):
            for _, x in step.microbatches():
                step.backward(net(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0 and step.due("print", every=6):
                due.append(job.step)
            if mode is EDIT:  # a collective of the script's own, after a query of only one rank
                torch.distributed.barrier()
            parameters[job.step] = compute_digest(net.parameters())
        return due, parameters

    (due, parameters), *others = run_ranks(rank_main, 4, runtime=tmp_path)
    assert [due_steps for due_steps, _ in others] == [[]] * 3
    assert due[-1] == 24
    if mode is EDIT:
        assert due == [8, 12, 20, 24]
    sync_groups_other = others[1][1]
    assert [parameters[step] for step in due] == [sync_groups_other[step] for step in due]


def test_ranks_without_a_step_and_ranks_that_call_one_model_hold_no_rank_up() -> None:
    """Two models of more units than are in progress at a time. Rank 0 has used up all samples while rank 1 has two
    steps to go, so it comes to a synchronization without a forward pass. Then rank 1 must wait for it only in this
    synchronization. And rank 1 evaluates the second model first."""

    def rank_main(rank: int) -> tuple[list[int], int, str]:
        job = pk.init(sync_mode=ASYNC_EDIT, sync_seconds=0.05)
        nets = [job.replicate(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 1))) for _ in range(2)]
        parameters = [parameter for net in nets for parameter in net.parameters()]
        optimizer = job.optimizer(torch.optim.SGD(parameters, lr=0.001), warmup_steps=0)
        loader = job.dataloader(Numbers(), BATCH, max_microbatch=8, num_workers=1)  # promises two steps in advance
        own = []
        for step in job.steps(loader, until=6):
            if rank == 1:
                with torch.no_grad():
                    nets[1](torch.zeros(1, 4))
                time.sleep(0.1)
            for _, x in step.microbatches():
                step.backward(sum(net(x).sum() for net in nets))
            optimizer.step()
            optimizer.zero_grad()
            own.append(step.samples)
        return own, job.samples, compute_digest(parameters)

    (zero, used, parameters), (one, used_too, parameters_too) = run_ranks(rank_main, 2)
    assert sum(zero) + sum(one) == used == used_too == 6 * BATCH
    assert len(one) >= 3
    assert parameters == parameters_too


def test_ranks_make_different_queries_and_each_event_comes_once(tmp_path: Path) -> None:
    """Rank 1 queries for the first time when the ranks have synchronized: what was due then comes one ordinal later."""

    def rank_main(rank: int) -> dict[str, list[int]]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, {**PLAN.to_json(), "sync_mode": EDIT})
        job = pk.init()
        net = job.replicate(nn.Linear(4, 1))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=0)
        due: dict[str, list[int]] = {"sparse": [], "late": [], "print": []}
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=28):
            for _, x in step.microbatches():
                step.backward(net(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1 and step.due("sparse", every=10):
                due["sparse"].append(job.step)
            if rank == 1 and job.step >= 12 and step.due("late", every=6):
                due["late"].append(job.step)
            if rank == 0 and step.due("print", every=4):
                due["print"].append(job.step)
        return due

    zero, one = run_ranks(rank_main, 2, runtime=tmp_path)
    assert one == {"sparse": [12, 20], "late": [16, 20, 24], "print": []}  # 12: returned at 16; 18 and 24
    assert zero == {"sparse": [], "late": [], "print": [4, 8, 12, 16, 20, 24, 28]}


def test_the_ranks_synchronize_when_all_optimizers_have_stepped(tmp_path: Path) -> None:
    """What the second one does is part of what they synchronize."""

    def rank_main(rank: int) -> list[str]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, {**PLAN.to_json(), "sync_mode": EDIT})
        job = pk.init()
        parts = nn.Linear(4, 4), nn.Linear(4, 1)
        net = job.replicate(nn.Sequential(*parts))
        optimizers = [job.optimizer(torch.optim.SGD(part.parameters(), lr=0.01), warmup_steps=0) for part in parts]
        found = []
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=12):
            for _, x in step.microbatches():
                step.backward(net(x).sum())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step.due("poll", every=4):
                found.append(compute_digest(net.parameters()))
        return found

    zero, one = run_ranks(rank_main, 2, runtime=tmp_path)
    assert zero == one
    assert len(set(zero)) == 3


@pytest.mark.parametrize("mode", SyncMode)
@pytest.mark.parametrize("before_the_microbatches", [False, True])
def test_a_query_before_the_optimizers_step_is_an_error(mode: SyncMode, before_the_microbatches: bool) -> None:
    """In the first step, in Sync too: in a Local-SGD mode this rank would synchronize without it, its peers with it."""

    def rank_main(_: int) -> str:
        job = pk.init(sync_mode=mode, sync_every=3)
        net = job.replicate(nn.Linear(4, 1))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=0)
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=6):
            if before_the_microbatches:
                step.due("early", every=1)
            for _, x in step.microbatches():
                step.backward(net(x).sum())
            if not before_the_microbatches:
                step.due("early", every=1)
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
        return "no error"

    (message,) = run_ranks(rank_main, 1)
    assert message == "step 1: step.due was called before optimizer.step(); call it afterwards"
