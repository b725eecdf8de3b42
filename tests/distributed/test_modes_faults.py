"""What a job in a Local-SGD mode does about bad plans and bad ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pacekeeper as pk
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import SyncMode
from testing.training.ranks import run_ranks
from testing.training.sync_mode_jobs import BATCH, PLAN, Numbers, list_mode_starts, run_job

SYNC, EDIT, ASYNC_EDIT = SyncMode.SYNC, SyncMode.EDIT, SyncMode.ASYNC_EDIT


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sync_mode": "DiLoCo"}, "sync_mode: 'DiLoCo' is unknown; take one of Sync, EDiT, AsyncEDiT"),
        ({"sync_mode": "Sync", "shares": [9, 8]}, "shares: [9, 8] sum to 17; they must sum to the global batch, 16"),
        ({"sync_mode": "Sync", "shares": [16, 0]}, "shares: [16, 0] must all be at least 1"),
        ({"sync_mode": "Sync", "sequence_cost": [0.0, -1.0, 0.0]}, "plan.sequence_cost: cost: "),
        (
            {"sync_mode": "Sync", "sequence_cost": [0.0, 0.0, 1.0]},
            "the lengths of samples are unknown; pass lengths to dataloader",
        ),
        ("no plan", "plan.json: not JSON"),
    ],
    ids=["unknown mode", "too many samples", "nothing for a rank", "a cost below 0", "unknown lengths", "unreadable"],
)
def test_a_plan_that_cannot_be_followed_is_refused_and_the_last_good_one_goes_on(
    bad: Any, message: str, tmp_path: Path
) -> None:
    refusals: list[str] = []

    def rank_main(rank: int) -> list[str]:
        runtime = RuntimeFolder(tmp_path)

        def give(version: int, changes: Any) -> None:
            if isinstance(changes, str):
                runtime.plan.write_text(changes)
            else:
                write_json(runtime.plan, {**PLAN.to_json(), "sync_every": 2, "version": version, **changes})

        if rank == 0:
            give(1, {"sync_mode": "EDiT"})
        job = pk.init()
        net = job.replicate(nn.Linear(4, 1))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=0)
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=16):
            for _, x in step.microbatches():
                (net(x).sum() / step.total_weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                refusals.append(runtime.refusal.read_text())
                if step.number == 4:
                    give(2, bad)
                if step.number == 9:  # the ranks meet in the next one
                    give(3, {"sync_mode": "Sync"})
        return refusals

    refusals, _ = run_ranks(rank_main, 2, runtime=tmp_path)
    assert refusals[:4] == [""] * 4
    assert message in refusals[8]
    assert refusals[-1] == ""
    assert list_mode_starts(tmp_path, 1) == [(EDIT, 1), (SYNC, 11)]


def test_a_local_mode_needs_the_optimizer(tmp_path: Path) -> None:
    def rank_main(rank: int) -> str:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, {**PLAN.to_json(), "sync_mode": "AsyncEDiT"})
        job = pk.init()
        net = job.replicate(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=3):
            for _, x in step.microbatches():
                (net(x).sum() / step.total_weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        return RuntimeFolder(tmp_path).refusal.read_text()

    (refused, _) = run_ranks(rank_main, 2, runtime=tmp_path)
    assert "sync_mode: Local-SGD needs the optimizer; pass it to job.optimizer(…)" in refused
    assert list_mode_starts(tmp_path, 1) == [(SYNC, 1)]


@pytest.mark.parametrize("mode", [EDIT, ASYNC_EDIT])
def test_a_rank_whose_loss_is_not_finite_is_reported_and_does_not_count(mode: SyncMode, tmp_path: Path) -> None:
    spoilt: list[int] = []

    def bad(rank: int, step: pk.Step, loss: Tensor) -> Tensor:
        """In the first step from the seventh on: AsyncEDiT leaves numbers out."""
        if rank == 2 and step.number >= 7 and not set(spoilt) - {step.number}:
            spoilt.append(step.number)
            (tmp_path / "spoilt").write_text(str(step.number))
            return loss * float("nan")
        return loss

    run = run_job(tmp_path, until=24, plans={0: {"sync_mode": mode}}, ranks=3, sabotage=bad)
    assert len({seen.sync_points[-1].parameters for seen in run}) == 1
    assert all(torch.tensor(seen.losses[-1]).isfinite() for seen in run)
    bad_steps = [int(RingReader(RuntimeFolder(tmp_path).ring(rank)).state()["bad_loss_step"]) for rank in range(3)]
    assert bad_steps == [-1, -1, int((tmp_path / "spoilt").read_text())]


def test_a_query_on_one_rank_only_holds_no_rank_up(tmp_path: Path) -> None:
    """`if job.rank == 0 and step.due("print", …)`, as examples do."""

    def rank_main(rank: int) -> list[int]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, {**PLAN.to_json(), "sync_mode": "EDiT"})
        job = pk.init()
        net = job.replicate(nn.Linear(4, 1))
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

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [[8, 12, 20, 24], []]


@pytest.mark.parametrize("mode", [EDIT, ASYNC_EDIT])
def test_ranks_answer_alike_where_one_leaves_the_optimizers_step_out(mode: SyncMode, tmp_path: Path) -> None:
    """A `GradScaler` does, where a gradient of this rank's is infinite; an evaluation without it would hang."""

    def rank_main(rank: int) -> tuple[list[int], list[int]]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, {**PLAN.to_json(), "sync_mode": mode})
        job = pk.init()
        net = job.replicate(nn.Linear(4, 1))
        optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.01), warmup_steps=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        due: list[int] = []
        skipped: list[int] = []
        optimizer.register_step_post_hook(lambda *_: skipped.clear())
        for step in job.steps(job.dataloader(Numbers(), BATCH, max_microbatch=8), until=24):
            for _, x in step.microbatches():
                loss = net(x).sum() * (float("inf") if rank == 1 else 1.0)
                step.backward(loss, scaler)
            skipped.append(step.number)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step.due("eval", every=1):
                due.append(job.step)
        return due, skipped

    (due, skipped), (due_of_other, skipped_by_other) = run_ranks(rank_main, 2, runtime=tmp_path)
    assert due == due_of_other != []
    assert skipped == []
    assert skipped_by_other
