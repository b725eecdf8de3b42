"""Snapshots of several ranks: who has no memory for one, who lacks one, and what earlier rounds have left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pacekeeper.checkpointing import state_sources
from pacekeeper.checkpointing.snapshots.snapshot_copies import CopyTime, HostCopies
from pacekeeper.checkpointing.state_sources import send_slot
from pacekeeper.checkpointing.state_store import StateStore
from pacekeeper.checkpointing.training_state import TrainingState
from pacekeeper.environment import Environment
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_rank.recorder import NoRing, Recorder
from testing.training.ranks import run_ranks


class Worker:
    """A rank of a job with `ranks` ranks, `local` of them on each worker, each worker with a folder of its own."""

    def __init__(self, rank: int, folder: Path, ranks: int, local: int, sharded: bool = False) -> None:
        shape = {"sync": 1, "shard": ranks} if sharded else {"sync": ranks, "shard": 1}
        replication = Replication(rank, shape, torch.device("cpu"))
        self.model = nn.Linear(6, 4)
        if sharded:
            fully_shard(self.model, mesh=replication.mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        state = TrainingState({"model": self.model, "optimizer": self.optimizer}, replication, rank)
        runtime = RuntimeFolder(folder / f"worker-{rank // local}").create()
        self.folder = runtime.snapshots
        environment = Environment(rank, ranks, local_rank=rank % local, round=1, runtime=runtime)
        self.store = StateStore(environment, CpuGroup(Recorder(NoRing())), state, None)

    def snapshot(self, step: int, wait: bool = False) -> int | None:
        """Of a state that encodes `step`; what `settle` returns. wait: for what is done in the background."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        self.store.snapshot(step, samples=step, leaving=wait)
        return self.store.settle(wait)

    @property
    def slots(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))


class Memory:
    """Stands before `os.posix_fallocate`: there is none until it is `enough`."""

    def __init__(self, enough: bool) -> None:
        self.enough = enough
        self.queries = 0
        self._allocate: Callable[[int, int, int], None] = os.posix_fallocate
        os.posix_fallocate = self  # of a process that ends with the test

    def __call__(self, file: int, offset: int, nbytes: int) -> None:
        self.queries += 1
        if not self.enough:
            raise OSError(28, "No space left on device")
        self._allocate(file, offset, nbytes)


def test_all_ranks_back_off_if_one_shard_has_no_memory(tmp_path: Path) -> None:
    """The others' shards are useless without it: their memory goes back to the training."""

    def rank_main(rank: int) -> tuple[list[int | None], int, list[str], int]:
        dist.init_process_group("gloo")
        memory = Memory(enough=rank != 1)
        worker = Worker(rank, tmp_path, ranks=2, local=2, sharded=True)
        settled = [worker.snapshot(step) for step in range(1, 11)]
        dist.barrier()
        queries, slots = memory.queries, worker.slots
        memory.enough = True
        dist.barrier()
        return settled, queries, slots, max(worker.snapshot(step) or 0 for step in range(11, 20))

    # Tried at 1, 3, 6 and then at 11.
    assert run_ranks(rank_main, 2, runtime=tmp_path) == [([None] * 10, 3, [], 19)] * 2


def test_a_worker_without_memory_does_not_block_the_others(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[list[int | None], bool]:
        dist.init_process_group("gloo")
        memory = Memory(enough=rank != 1)
        worker = Worker(rank, tmp_path, ranks=2, local=1)
        settled = [worker.snapshot(step) for step in range(1, 6)]
        memory.enough = True
        settled += [worker.snapshot(step) for step in range(6, 8)]
        return settled, worker.store.stores_snapshots

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [
        ([1, 2, 3, 4, 5, 6, 7], True),
        ([None, None, None, None, None, 6, 7], True),
    ]


def test_a_snapshot_that_rank_0_has_no_memory_for_is_no_cheaper_for_the_others(tmp_path: Path) -> None:
    """Rank 0 decides how often snapshots are taken: by the cost on the rank where it is highest."""

    def rank_main(rank: int) -> bool:
        dist.init_process_group("gloo")
        Memory(enough=rank != 0)
        worker = Worker(rank, tmp_path, ranks=2, local=1)
        for step in range(1, 7):
            worker.snapshot(step)
        costs = torch.zeros(2, dtype=torch.float64)
        costs[rank] = worker.store.snapshot_seconds
        dist.all_reduce(costs)
        return bool(costs[0] > 0)

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [True] * 2


@pytest.mark.parametrize(
    ("device", "cost"),
    [(None, 50.0), (CopyTime(blocked_seconds=0.25, concurrent_seconds=3.0), 0.55)],
    ids=["host", "device"],
)
def test_a_snapshot_costs_its_stall_and_a_tenth_of_its_background_work(
    device: CopyTime | None, cost: float, tmp_path: Path
) -> None:
    """Launching it may wait for all that the device has to do before: that is the training's own time."""
    now = 0.0

    class Launched(HostCopies):
        asynchronous = device is not None

        def begin(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
            nonlocal now
            super().begin(targets, sources)
            now += 50.0

        def finish(self) -> CopyTime | None:
            return device

    def rank_main(rank: int) -> float:
        dist.init_process_group("gloo")
        here = pytest.MonkeyPatch()
        here.setattr("pacekeeper.checkpointing.state_store.create_slot_copies", lambda _: Launched())
        here.setattr(
            "pacekeeper.checkpointing.snapshots.snapshot_writer.time", SimpleNamespace(perf_counter=lambda: now)
        )
        worker = Worker(rank, tmp_path, ranks=1, local=1)
        for step in (1, 2):
            assert worker.snapshot(step, wait=True) == step
        assert worker.store.snapshot_seconds == 0.0, "taking memory is not counted"
        assert worker.snapshot(3, wait=True) == 3
        return worker.store.snapshot_seconds

    assert run_ranks(rank_main, 1, runtime=tmp_path) == [pytest.approx(cost)]


def test_one_rank_of_a_worker_fetches_a_missing_replica_for_all(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[int, float, int, list[str]]:
        dist.init_process_group("gloo")
        worker = Worker(rank, tmp_path, ranks=4, local=2)
        for step in (1, 2):
            worker.snapshot(step)
        dist.barrier()
        if rank == 2:
            for path in worker.folder.iterdir():
                path.unlink()
        dist.barrier()
        later = Worker(rank, tmp_path, ranks=4, local=2)
        found = later.store.restore()
        assert found is not None
        values = {float(value) for parameter in later.model.parameters() for value in parameter.flatten()}
        return found.step, values.pop(), len(values), later.slots

    ranks = run_ranks(rank_main, 4, runtime=tmp_path)
    assert [rank[:3] for rank in ranks] == [(2, 2.0, 0)] * 4
    assert [rank[3] for rank in ranks] == [["replica.0", "replica.1"]] * 2 + [["replica.0"]] * 2
    fetched = (tmp_path / "worker-1" / "snapshots" / "replica.0").read_bytes()
    assert fetched == (tmp_path / "worker-0" / "snapshots" / "replica.1").read_bytes()


def test_a_replica_of_one_worker_is_forwarded_from_worker_to_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def send(slot: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> list[dist.Work]:
        sent.append(receiver)
        return send_slot(slot, receiver, group)

    monkeypatch.setattr(state_sources, "send_slot", send)

    def rank_main(rank: int) -> tuple[int, float, list[int]]:
        dist.init_process_group("gloo")
        worker = Worker(rank, tmp_path, ranks=4, local=1)
        worker.snapshot(1)
        if rank > 0:
            (worker.folder / "replica.0").unlink()
        dist.barrier()
        later = Worker(rank, tmp_path, ranks=4, local=1)
        found = later.store.restore()
        assert found is not None
        return found.step, float(later.model.bias[0].detach()), sent

    assert run_ranks(rank_main, 4, runtime=tmp_path) == [(1, 1.0, [1, 2]), (1, 1.0, [3]), (1, 1.0, []), (1, 1.0, [])]


def test_no_rank_waits_for_a_replica_that_a_worker_has_no_memory_for(tmp_path: Path) -> None:
    def rank_main(rank: int) -> bool:
        dist.init_process_group("gloo")
        worker = Worker(rank, tmp_path, ranks=2, local=1)
        worker.snapshot(1)
        if rank == 1:
            (worker.folder / "replica.0").unlink()
        Memory(enough=False)
        return Worker(rank, tmp_path, ranks=2, local=1).store.restore() is None

    assert run_ranks(rank_main, 2, runtime=tmp_path) == [True] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_snapshots_of_rounds_of_another_size_are_deleted_with_the_first_snapshot(sharded: bool, tmp_path: Path) -> None:
    own = [f"shard-{rank}-of-2.{slot}" for rank in range(2) for slot in range(2)] if sharded else ["replica.0"]
    left = ["shard-0-of-4.0", "shard-1-of-12.1", ".shard-0-of-2.0.4711", ".replica.0.4711"]
    left += ["replica.1"] if sharded else ["shard-0-of-2.0"]

    def rank_main(rank: int) -> tuple[list[str], list[str]]:
        dist.init_process_group("gloo")
        worker = Worker(rank, tmp_path, ranks=2, local=2, sharded=sharded)
        if rank == 0:
            for name in (*own, *left):
                (worker.folder / name).write_bytes(b"of an earlier round")
        dist.barrier()
        worker.store.restore()
        before = sorted(path.name for path in worker.folder.iterdir())
        dist.barrier()
        worker.snapshot(1)
        dist.barrier()
        return before, worker.slots

    for before, after in run_ranks(rank_main, 2, runtime=tmp_path):
        assert before == sorted([*own, *left]), "not before all ranks have a state to go on from"
        assert after == sorted(own)
