"""A managed job: shares change on one step, requests are answered, it leaves on SIGTERM, and reports errors."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import pacekeeper as pk
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper.safe_serialization import pack_value, unpack_value
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from testing.training.ranks import forbid_unpickling, run_ranks

RANKS = 4
BATCH = 16
PLAN = WorkerPlan(version=1, membership=1, role=WorkerRole.MEMBER)


def make_job(**arguments: Any) -> tuple[pk.Job, nn.Module, torch.optim.Optimizer]:
    job = pk.init(**arguments)
    model = job.replicate(nn.Linear(4, 1))
    return job, model, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))


def make_loader(job: pk.Job, size: int = 64, **options: Any) -> Any:
    return job.dataloader(Features(size), BATCH, max_microbatch=3, **options)


class Features(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((4,), float(index))


def train_step(step: pk.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """One step; returns the samples that it used."""
    used = []
    for indices, x in step.microbatches():
        loss = model(x).sum()
        step.add_loss(loss)
        (loss / step.total_weight).backward()
        used += indices.tolist()
    optimizer.step()
    optimizer.zero_grad()
    return used


def read_state(runtime: Path, rank: int) -> NDArray[np.void]:
    return RingReader(RuntimeFolder(runtime).ring(rank)).state()  # type: ignore[return-value]


@pytest.mark.parametrize("workers", [0, 1])
def test_shares_change_live_on_one_step_and_no_sample_is_lost(workers: int, tmp_path: Path) -> None:
    shares = {3: (7, 4, 3, 2), 6: (1, 1, 1, 13), 9: None}

    def rank_main(rank: int) -> tuple[list[int], list[int]]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, PLAN.to_json())
        job, model, optimizer = make_job()
        sizes, used = [], []
        for step in job.steps(make_loader(job, num_workers=workers), until=16):
            mine = train_step(step, model, optimizer)
            sizes.append(len(mine))
            used += mine
            if rank == 0 and step.number in shares:
                plan = replace(PLAN, version=1 + step.number, shares=shares[step.number])
                write_json(RuntimeFolder(tmp_path).plan, plan.to_json())
        return sizes, used

    results = run_ranks(rank_main, RANKS, runtime=tmp_path)
    by_step = list(zip(*(sizes for sizes, _ in results), strict=True))
    assert all(sum(sizes) == BATCH for sizes in by_step)
    even = (BATCH // RANKS,) * RANKS
    # Read when step 4 begins, agreed during it: in force from step 5 on, or behind what is prefetched.
    lookahead = 2 * workers
    changes = [even, shares[3], shares[6], even]
    expected = [changes[sum(step > at + 1 + lookahead for at in shares)] for step in range(1, 17)]
    assert by_step == expected
    everything = Counter(index for _, used in results for index in used)
    assert everything == Counter(dict.fromkeys(range(64), 4))  # 16 steps of 16: four epochs
    assert [int(read_state(tmp_path, rank)["samples"]) for rank in range(RANKS)] == [sum(sizes) for sizes, _ in results]
    assert {int(read_state(tmp_path, rank)["plan_version"]) for rank in range(RANKS)} == {10}
    assert {int(read_state(tmp_path, rank)["global_batch"]) for rank in range(RANKS)} == {BATCH}
    assert {int(read_state(tmp_path, rank)["share_granularity"]) for rank in range(RANKS)} == {1}
    assert {int(read_state(tmp_path, rank)["total_steps"]) for rank in range(RANKS)} == {16}
    assert {int(read_state(tmp_path, rank)["replica_ranks"]) for rank in range(RANKS)} == {1}


@pytest.mark.parametrize("bad", [(5, 5, 5, 5), (4, 4, 8), (16, 0, 0, 0), "not a plan"])
def test_a_bad_plan_is_refused_and_the_last_good_one_goes_on(
    bad: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = replace(PLAN, version=2, shares=(7, 4, 3, 2))

    def rank_main(rank: int) -> list[int]:
        logging.getLogger("pacekeeper").addHandler(logging.StreamHandler())
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, good.to_json())
        job, model, optimizer = make_job()
        sizes = []
        for step in job.steps(make_loader(job), until=8):
            sizes.append(len(train_step(step, model, optimizer)))
            if rank == 0 and step.number == 2:
                path = RuntimeFolder(tmp_path).plan
                if isinstance(bad, str):
                    path.write_text(bad)
                else:
                    write_json(path, replace(PLAN, version=3, shares=bad).to_json())
        return sizes

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [[7] * 8, [4] * 8, [3] * 8, [2] * 8]
    assert "the last valid" in capfd.readouterr().err


def test_plans_of_the_next_membership_do_not_change_this_rounds_shares(tmp_path: Path) -> None:
    def rank_main(rank: int) -> list[int]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, replace(PLAN, shares=(7, 4, 3, 2)).to_json())
        job, model, optimizer = make_job()
        sizes = []
        for step in job.steps(make_loader(job), until=6):
            sizes.append(len(train_step(step, model, optimizer)))
            if rank == 0 and step.number == 2:
                write_json(
                    RuntimeFolder(tmp_path).plan, replace(PLAN, version=2, membership=2, shares=(8, 8)).to_json()
                )
        return sizes

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [[7] * 6, [4] * 6, [3] * 6, [2] * 6]


def test_a_requested_checkpoint_is_published_and_answered(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[int, int]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, PLAN.to_json())
        job, model, optimizer = make_job(checkpoints=pk.Checkpoints(tmp_path / "volume", every=1000))
        loader = make_loader(job)
        job.register(model=model, optimizer=optimizer, loader=loader)
        job.restore()
        for step in job.steps(loader):
            train_step(step, model, optimizer)
            if rank == 0 and step.number == 3:
                write_json(RuntimeFolder(tmp_path).plan, replace(PLAN, version=2, checkpoint_request=1).to_json())
            # All ranks see it alike only where they agree; the launcher reads the ring of rank 0.
            answered = torch.tensor(int(read_state(tmp_path, 0)["checkpoint_request"]))
            torch.distributed.all_reduce(answered, torch.distributed.ReduceOp.MIN)
            if answered.item() == 1:
                break
            assert step.number < 2000
            time.sleep(0.01)
        mine = read_state(tmp_path, rank)
        return int(mine["checkpoint_request"]), int(mine["checkpoint_step"])

    results = run_ranks(rank_main, 2, runtime=tmp_path)
    assert results[0] == (1, 4)  # written in step 3, read when step 4 begins, agreed when it is over
    assert (tmp_path / "volume/step-00000004/manifest.json").exists()


def test_sigterm_to_one_rank_checkpoints_and_all_leave_with_143(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[Any, int]:
        job, model, optimizer = make_job(checkpoints=pk.Checkpoints(tmp_path / "volume", every=1000))
        loader = make_loader(job)
        job.register(model=model, optimizer=optimizer, loader=loader)
        try:
            for step in job.steps(loader):
                train_step(step, model, optimizer)
                if rank == 1 and step.number == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                assert step.number < 10
        except SystemExit as exit_:
            return exit_.code, job.step
        return None, job.step

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(143, 4)] * RANKS
    assert (tmp_path / "volume/step-00000004/manifest.json").exists()


def save_then(change: Callable[[Path], None], tmp_path: Path, make: Callable[[], nn.Module]) -> list[Any]:
    """Trains to step 6 with a checkpoint every two; changes the volume; what another round's restore gives with
    `make()`'s model: the step, or the error."""
    volume = tmp_path / "volume"

    def run(until: int, make: Callable[[], nn.Module]) -> Callable[[int], Any]:
        def rank_main(_: int) -> Any:
            job = pk.init(checkpoints=pk.Checkpoints(volume, every=2))
            model = job.replicate(make())
            before = [parameter.clone() for parameter in model.parameters()]
            optimizer = job.optimizer(torch.optim.AdamW(model.parameters()))
            loader = make_loader(job)
            job.register(model=model, optimizer=optimizer, loader=loader)
            try:
                restored = job.restore()
            except InputError as error:
                unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                return str(error) if unchanged else "changed in spite of the error"
            for step in job.steps(loader, until=until):
                train_step(step, model, optimizer)
            return restored, job.samples, loader.cursor

        return rank_main

    run_ranks(run(6, lambda: nn.Linear(4, 1)), 2)
    change(volume)
    return run_ranks(run(0, make), 2)


def test_the_newest_checkpoint_is_restored(tmp_path: Path) -> None:
    results = save_then(lambda _: None, tmp_path, lambda: nn.Linear(4, 1))
    assert results == [(6, 6 * BATCH, 6 * BATCH)] * 2


def test_the_previous_checkpoint_is_loaded_if_the_newest_is_torn(tmp_path: Path) -> None:
    def tear(volume: Path) -> None:
        victim = max((volume / "step-00000006").glob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)

    assert save_then(tear, tmp_path, lambda: nn.Linear(4, 1)) == [(4, 4 * BATCH, 4 * BATCH)] * 2


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    results = save_then(lambda _: None, tmp_path, lambda: nn.Linear(4, 2))
    for error in results:
        assert "is of another model: bias is (2,) float32, in the checkpoint (1,) float32; weight is (2, 4)" in error
        assert "spec.checkpoint.path" in error


def test_a_folder_that_cannot_be_written_is_reported_at_init(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank_main(_: int) -> str:
        with pytest.raises(InputError) as caught:
            pk.init(checkpoints=pk.Checkpoints(tmp_path / "file/volume"))
        return str(caught.value)

    (error,) = run_ranks(rank_main, 1)
    assert error.startswith("spec.checkpoint.path: ")
    assert "mount a volume" in error


class Exotic:
    def state_dict(self) -> dict[str, Any]:
        return {"where": [Path("/somewhere")]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_a_state_that_cannot_be_kept_is_named_before_the_first_step(tmp_path: Path) -> None:
    def rank_main(_: int) -> str:
        job = pk.init(checkpoints=pk.Checkpoints(tmp_path / "volume"))
        job.register(tracker=Exotic())
        with pytest.raises(InputError) as caught:
            job.restore()
        return str(caught.value)

    (message,) = run_ranks(rank_main, 1)
    assert message.startswith("tracker.where.0: a pathlib.")
    assert "let state_dict() return tensors" in message


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "a function": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "milestones": lambda opt: torch.optim.lr_scheduler.MultiStepLR(opt, [2, 2, 5]),
    "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 1.0, total_steps=20),
    "one after another": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.LinearLR(opt, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 4),
        ],
        milestones=[3],
    ),
    "plateau": lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_schedules_of_torch_continue_after_a_restart(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    def schedule() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, make(optimizer)

    def advance(optimizer: torch.optim.Optimizer, its: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            its.step(1.0) if isinstance(its, torch.optim.lr_scheduler.ReduceLROnPlateau) else its.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer, before = schedule()
    advance(optimizer, before, 4)
    again, after = schedule()
    again.load_state_dict(unpack_value(pack_value(optimizer.state_dict())))
    after.load_state_dict(unpack_value(pack_value(before.state_dict())))
    assert advance(again, after, 6) == advance(optimizer, before, 6)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_spare_takes_over_a_rank(sharded: bool, tmp_path: Path) -> None:
    """Rank 1's worker is lost with its memory. A replica comes from a peer; a shard must come from the volume."""

    def run(until: int, folders: list[str]) -> Callable[[int], Any]:
        def rank_main(rank: int) -> Any:
            forbid_unpickling()
            os.environ.update(
                LOCAL_RANK="0", PACEKEEPER_RUNTIME=str(RuntimeFolder(tmp_path / folders[rank]).create().root)
            )
            job = pk.init(
                mesh={"shard": -1} if sharded else None,
                checkpoints=pk.Checkpoints(tmp_path / "volume", every=4),
                snapshot_every=1,
            )
            torch.manual_seed(rank)
            model = job.fully_shard(nn.Linear(4, 2)) if sharded else job.replicate(nn.Linear(4, 2))
            optimizer = job.optimizer(torch.optim.AdamW(model.parameters()))
            loader = make_loader(job)
            job.register(model=model, optimizer=optimizer, loader=loader)
            restored = job.restore()
            random = torch.rand(1).item()
            for step in job.steps(loader, until=until):
                train_step(step, model, optimizer)
                if until == 100 and step.number == 7:
                    break  # as a crash would have it: without a last checkpoint
            return restored, random

        return rank_main

    first = run_ranks(run(100, ["a", "b"]), 2)
    assert [restored for restored, _ in first] == [0, 0]
    with_spare = run_ranks(run(0, ["a", "spare"]), 2)
    with_both = run_ranks(run(0, ["a", "b"]), 2)
    # The snapshot of step 6 was still in progress.
    assert [restored for restored, _ in with_both] == [5, 5]
    assert [restored for restored, _ in with_spare] == ([4, 4] if sharded else [5, 5])
    if not sharded:
        assert with_spare == with_both  # its random state came with the replica
        assert with_both[0][1] != with_both[1][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": {"sync": 3}}, "does not fit 2 ranks"),
        ({"mesh": {"data": 2}}, "'data'] unknown"),
        ({"mesh": {"sync": -1, "shard": -1}}, "only one dimension can be -1"),
        ({"mesh": {"shard": 0}}, "does not fit 2 ranks"),
        ({"snapshot_every": -1}, "snapshot_every=-1"),
        ({"sync_mode": "DiLoCo"}, "sync_mode='DiLoCo' is unknown; take one of Sync, EDiT, AsyncEDiT"),
        ({"sync_mode": "EDiT", "sync_every": 0}, "sync_every=0 must be 1 step or more"),
        ({"checkpoints": pk.Checkpoints("folder", every=-1)}, "checkpoints.every=-1"),
        ({"device": "cpu", "backend": "nccl"}, "NCCL needs a GPU"),
    ],
)
def test_bad_arguments_of_init_are_named(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("PACEKEEPER_RUNTIME", raising=False)
    with pytest.raises(InputError) as caught:
        pk.init(**arguments)
    assert message in str(caught.value)


def test_garbage_is_collected_at_the_planned_steps_on_all_ranks(tmp_path: Path) -> None:
    def rank_main(rank: int) -> list[int]:
        if rank == 0:
            write_json(RuntimeFolder(tmp_path).plan, replace(PLAN, gc_every=4).to_json())
        job, model, optimizer = make_job()
        collected = []

        def collecting(event: str, facts: dict[str, int]) -> None:
            if event == "start" and facts["generation"] == 2:
                collected.append(job.step)

        for step in job.steps(make_loader(job), until=10):
            if step.number == 1:
                gc.callbacks.append(collecting)
            train_step(step, model, optimizer)
        return collected

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [[4, 8]] * 2


def test_the_mesh_has_both_dimensions() -> None:
    def rank_main(rank: int) -> tuple[Any, ...]:
        mesh = pk.init(mesh={"sync": -1, "shard": 2}).mesh
        found = torch.tensor([rank])
        torch.distributed.all_reduce(found, group=mesh.get_group("shard"))
        torch.distributed.barrier()  # rank 0 has the store, which the other shards' groups may still need
        return mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate(), found.item()

    for rank, (names, ranks, place, summed) in enumerate(run_ranks(rank_main, RANKS)):
        assert (names, ranks) == (("sync", "shard"), [[0, 1], [2, 3]])
        assert tuple(place) == (rank // 2, rank % 2)
        assert summed == (1, 5)[rank // 2]


def test_the_size_of_gradient_buckets_is_the_scripts() -> None:
    def rank_main(_: int) -> tuple[list[Any], list[str]]:
        job = pk.init()
        sizes = [job.replicate(nn.Linear(4, 1), bucket_cap_mb=size).bucket_bytes_cap for size in (None, 3, 0.5)]
        errors = []
        for nonsense in (0, -1.0, float("nan")):
            with pytest.raises(InputError) as caught:
                job.replicate(nn.Linear(4, 1), bucket_cap_mb=nonsense)
            errors.append(str(caught.value))
        return sizes, errors

    ((sizes, errors),) = run_ranks(rank_main, 1)
    assert sizes == [25 << 20, 3 << 20, 1 << 19]
    wanted = [f"replicate: bucket_cap_mb={given} must be above 0, or None for 25 MiB" for given in ("0", "-1.0", "nan")]
    assert errors == wanted


def test_leaving_microbatches_out_is_an_error() -> None:
    def rank_main(_: int) -> list[str]:
        job, model = make_job()[:2]
        errors = []

        def fails(call: Callable[[], Any]) -> None:
            with pytest.raises(RuntimeError) as caught:
                call()
            errors.append(str(caught.value))

        steps = job.steps(make_loader(job))
        step = next(steps)
        fails(lambda: step.backward(torch.zeros((), requires_grad=True)))
        microbatches = step.microbatches()
        _, x = next(microbatches)
        step.backward(model(x).sum())
        step.backward(model(x).sum())  # two losses of one microbatch
        next(microbatches)
        _, x = next(microbatches)
        fails(lambda: step.backward(model(x).sum()))
        fails(lambda: next(steps))
        return errors

    ((before, between, after),) = run_ranks(rank_main, 1)
    assert "step 1: backward pass after 0 microbatches" in before
    assert "after 3 microbatches, of which only 1 had one; call step.backward(loss) in the loop" in between
    assert "step 1: 3 of 6 microbatches were not used" in after


def test_one_call_registers_and_restores_and_steps_do_so_themselves(tmp_path: Path) -> None:
    """An existing checkpoint is never skipped, however a script is written."""

    def train_to(until: int, restore: Callable[..., None]) -> list[int]:
        def rank_main(_: int) -> list[int]:
            job, model, optimizer = make_job(checkpoints=pk.Checkpoints(tmp_path, every=100))
            loader = make_loader(job)
            restore(job, model=model, optimizer=optimizer, loader=loader)
            done = []
            for step in job.steps(loader, until):
                train_step(step, model, optimizer)
                done.append(step.number)
            assert loader.cursor == until * BATCH
            return done

        (done,) = run_ranks(rank_main, 1)
        return done

    def register_in_two_calls(job: pk.Job, **objects: Any) -> None:
        job.register(**objects)
        job.restore()

    assert train_to(2, lambda job, **objects: job.restore(**objects)) == [1, 2]
    assert train_to(4, lambda job, **objects: job.restore(**objects)) == [3, 4]
    assert train_to(6, lambda job, **objects: job.register(**objects)) == [5, 6]
    assert train_to(8, register_in_two_calls) == [7, 8]


def test_state_that_no_checkpoint_holds_is_reported_before_the_first_step(tmp_path: Path) -> None:
    def rank_main(_: int) -> list[str]:
        job, model, optimizer = make_job(checkpoints=pk.Checkpoints(tmp_path))
        loader = make_loader(job)
        errors = []

        def fails(call: Callable[[], Any]) -> None:
            with pytest.raises(InputError) as caught:
                call()
            errors.append(str(caught.value))

        fails(lambda: next(job.steps(loader)))
        fails(lambda: job.register(job=model))
        job.register(net=model.module)
        fails(lambda: next(job.steps(loader)))
        job.restore(opt=optimizer, samples=loader)
        assert next(job.steps(loader)).number == 1
        fails(lambda: job.register(schedule=torch.optim.lr_scheduler.ConstantLR(optimizer)))
        fails(job.restore)
        return errors

    ((nothing, taken, a_part, late, twice),) = run_ranks(rank_main, 1)
    assert nothing.endswith("call job.restore(model=model, optimizer=optimizer, loader=loader)")
    assert taken == "job: under this name the job keeps its own progress; take another one"
    assert a_part.endswith("call job.restore(optimizer=optimizer, loader=loader)")
    assert late == "schedule: the job's state is restored already; register it before restore()"
    assert "call it once" in twice


def test_a_custom_state_may_hold_all_objects(tmp_path: Path) -> None:
    class Everything:
        def __init__(self, *items: Any) -> None:
            self.items = items

        def state_dict(self) -> dict[str, Any]:
            return {str(number): item.state_dict() for number, item in enumerate(self.items)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            for number, item in enumerate(self.items):
                item.load_state_dict(state[str(number)])

    def rank_main(_: int) -> int:
        job, model, optimizer = make_job(checkpoints=pk.Checkpoints(tmp_path))
        loader = make_loader(job)
        restored = job.restore(everything=Everything(model, optimizer, loader))
        for step in job.steps(loader, until=3):
            train_step(step, model, optimizer)
        return restored

    assert [run_ranks(rank_main, 1) for _ in range(2)] == [[0], [3]]


def test_the_jobs_loss_is_the_mean_over_the_global_batch() -> None:
    def rank_main(_: int) -> list[float]:
        torch.manual_seed(0)
        job = pk.init()
        model = job.replicate(nn.Linear(4, 1))
        losses = []
        for step in job.steps(make_loader(job, shuffle=False), until=4):
            for _, x in step.microbatches():
                step.add_loss(x[:, 0].sum())
                (model(x).sum() / step.total_weight).backward()
            losses.append(job.loss)
        return [*losses, job.loss]

    for losses in run_ranks(rank_main, RANKS):
        means = [sum(range(first, first + BATCH)) / BATCH for first in (0, 16, 32, 48)]
        assert losses[2:] == [means[0], means[1], means[2]]


def test_the_diary_of_a_plain_script(tmp_path: Path) -> None:
    """Without a launcher: one rank, nothing recorded, everything else works."""

    def rank_main(_: int) -> tuple[int, list[str]]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        job, model, optimizer = make_job(checkpoints=pk.Checkpoints(tmp_path, every=2))
        loader = make_loader(job)
        job.register(model=model, optimizer=optimizer, loader=loader)
        for step in job.steps(loader, until=3):
            train_step(step, model, optimizer)
        return job.step, sorted(path.name for path in tmp_path.iterdir())

    assert run_ranks(rank_main, 1) == [(3, [".owner-00000001", "owner.json", "step-00000002", "step-00000003"])]


def test_the_package_is_imported_without_torch() -> None:
    import subprocess
    import sys

    modules = "pacekeeper, pacekeeper.observe.rank_history, pacekeeper.sync.training_config, pacekeeper.runtime_folder"
    script = f"import {modules}, sys, json; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) is False
