"""A worker's shards come back from the node that keeps its copies; on any doubt, from further back."""

from __future__ import annotations

import logging
import math
import shutil
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pacekeeper.checkpointing import state_sources, state_store
from pacekeeper.checkpointing.snapshots import peer_replication, snapshot_slots
from pacekeeper.checkpointing.snapshots.snapshot_slots import SlotMemory, check_slot
from pacekeeper.checkpointing.state_sources import CheckpointSource, send_slot
from pacekeeper.checkpointing.state_store import StateStore
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder
from pacekeeper.checkpointing.storage.checkpoint_writer import WriteOutcome
from pacekeeper.checkpointing.training_state import TrainingState
from pacekeeper.checkpointing.versions import StateVersion
from pacekeeper.environment import Environment
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_rank.recorder import NoRing, Recorder
from testing.training.launchers import wait_until_true
from testing.training.ranks import run_ranks

RANKS = 4
SECRET = "ab" * 32


class Rank:
    """Of a sharded job: two ranks a worker, each worker on a node of its own; rank r's copies are with (r + 2) % 4."""

    def __init__(
        self, rank: int, folder: Path, workers: str = "ab", megabytes: int = 200, volume: bool = False
    ) -> None:
        replication = Replication(rank, {"sync": 1, "shard": RANKS}, torch.device("cpu"))
        torch.manual_seed(rank)
        self.model = nn.Linear(64, 48)
        fully_shard(self.model, mesh=replication.mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        state = TrainingState({"model": self.model, "optimizer": self.optimizer}, replication, rank)
        worker = workers[rank // 2]
        runtime = RuntimeFolder(folder / worker).create()
        self.snapshots = runtime.snapshots
        write_json(runtime.plan, WorkerPlan(membership=1, role=WorkerRole.MEMBER, secret=SECRET).to_json())
        environment = Environment(
            rank,
            RANKS,
            local_rank=rank % 2,
            round=1,
            runtime=runtime,
            worker=worker,
            node=f"node of {worker}",
            address="127.0.0.1",
            peer_replica_megabytes=megabytes,
        )
        (folder / "volume").mkdir(exist_ok=True)
        checkpoints = CheckpointFolder(folder / "volume", round_=1) if volume else None
        if checkpoints is not None and rank == 0:
            checkpoints.claim()
        self.store = StateStore(environment, CpuGroup(Recorder(NoRing())), state, checkpoints)

    def step(self, number: int) -> list[torch.Tensor]:
        """One step, its snapshot, and its peer replica; the shards after it."""
        self.model(torch.randn(3, 64)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.store.snapshot(number, samples=number)
        assert self.store.settle() == number
        wait_until_true(lambda: self.store.replicated_step == number, f"the copy of step {number}")
        return self.shards()

    @property
    def delivered_step(self) -> int:
        """-1: no copy has been."""
        courier = self.store._peer_replication._sender
        return -1 if courier is None else courier.delivered.step

    def shards(self) -> list[torch.Tensor]:
        return [shard.to_local().detach().clone() for shard in self.state_tensors()]

    def state_tensors(self) -> list[DTensor]:
        """Parameters and moments."""
        moments = [its[name] for its in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [its for its in [*self.model.parameters(), *moments] if isinstance(its, DTensor)]


def delete_replicas(folder: Path, worker: str, ranks: Collection[int] = range(RANKS)) -> None:
    """All that lies in this worker's memory of these ranks."""
    for rank in ranks:
        for path in (folder / worker / "snapshots").glob(f"shard-{rank}-of-{RANKS}.*"):
            path.unlink()


def flip_bit(folder: Path, workers: str, rank: int, step: int) -> None:
    """A bit of the last tensor, with each of these workers."""
    for worker in workers:
        slots = (folder / worker / "snapshots").glob(f"shard-{rank}-of-{RANKS}.*")
        path = next(path for path in slots if struct.unpack_from("<q", path.read_bytes(), 8) == (step,))
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@dataclass(frozen=True)
class Loss:
    """What befalls a job of workers a and b after step 4."""

    happens: Callable[[Path], None]
    workers: str
    """Those of the next round; c has nothing."""
    restored: int | None


LOSSES = {
    "a lost worker": Loss(lambda folder: delete_replicas(folder, "b"), "ac", 4),
    "the first worker": Loss(lambda folder: delete_replicas(folder, "a"), "cb", 4),
    "ranks that were moved": Loss(lambda _: None, "ba", 4),
    "a torn copy: the one before": Loss(lambda folder: flip_bit(folder, "a", rank=3, step=4), "ac", 3),
    "a torn shard of the worker that stays": Loss(lambda folder: flip_bit(folder, "a", rank=0, step=4), "ac", 3),
    "a torn shard whose peer replica is whole": Loss(lambda folder: flip_bit(folder, "a", rank=0, step=4), "ab", 4),
    "a torn copy of a rank that was moved there": Loss(lambda folder: flip_bit(folder, "a", rank=3, step=4), "ba", 4),
    "a shard that is torn wherever it is": Loss(lambda folder: flip_bit(folder, "ab", rank=0, step=4), "ab", 3),
    "a copy that is not there: the one before": Loss(
        lambda folder: next(
            path for path in (folder / "a/snapshots").glob("shard-2-of-4.*") if path.read_bytes()[8] == 4
        ).unlink(),
        "ac",
        3,
    ),
    "both workers": Loss(lambda _: None, "cd", None),
}


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int | None, bool]]]:
    """By loss: the step that each rank goes on from, and whether its shards are those of that step to the bit.

    There is no volume: nothing can be read from it.
    """
    folder = tmp_path_factory.mktemp("losses")

    def rank_main(rank: int) -> dict[str, tuple[int | None, bool]]:
        dist.init_process_group("gloo")
        writer = Rank(rank, folder / "written")
        assert writer.store.restore() is None
        kept = {step: writer.step(step) for step in (1, 2, 3, 4)}
        results: dict[str, tuple[int | None, bool]] = {}
        for name, loss in LOSSES.items():
            dist.barrier()
            if rank == 0:
                shutil.copytree(folder / "written", folder / name)
                loss.happens(folder / name)
            dist.barrier()
            later = Rank(rank, folder / name, loss.workers)
            found = later.store.restore()
            assert found is None or found.samples == found.step
            step = None if found is None else found.step
            results[name] = step, step is None or all(map(torch.equal, later.shards(), kept[step]))
        return results

    of_ranks = run_ranks(rank_main, RANKS, runtime=folder)
    return {name: [results[name] for results in of_ranks] for name in LOSSES}


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_shard_is_restored_bit_for_bit_from_its_peer_replica(
    name: str, restored: dict[str, list[tuple[int | None, bool]]]
) -> None:
    assert restored[name] == [(LOSSES[name].restored, True)] * RANKS


def test_a_replica_that_changes_in_transfer_is_refused_and_not_requested_indefinitely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its sender has it whole, no torn copy is known that could be left out."""

    def send(slot: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> list[dist.Work]:
        if slot[8] == 4 and receiver == 3:
            slot = slot.clone()
            slot[-1] ^= 1
        return send_slot(slot, receiver, group)

    monkeypatch.setattr(state_sources, "send_slot", send)

    def rank_main(rank: int) -> tuple[int | None, bool]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path)
        kept = {step: writer.step(step) for step in (1, 2, 3, 4)}
        dist.barrier()
        later = Rank(rank, tmp_path, "ac")
        found = later.store.restore()
        assert found is not None
        return found.step, all(map(torch.equal, later.shards(), kept[found.step]))

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(3, True)] * RANKS


def test_a_restored_replica_is_in_its_place_and_its_slot_is_empty(tmp_path: Path) -> None:
    """The slot's memory would be kept with it; a captured graph has the tensors that were there."""

    def rank_main(rank: int) -> tuple[bool, bool, bool]:
        dist.init_process_group("gloo")
        kept = Rank(rank, tmp_path).step(1)
        dist.barrier()
        new = Rank(rank, tmp_path, "ac")
        assert new.store.restore() is not None
        mapped = "/c/snapshots/" in Path("/proc/self/maps").read_text()
        before = new.state_tensors()
        with torch.no_grad():
            for its in before:
                its.to_local().zero_()
        assert new.store.restore() is not None
        in_place = all(one is other for one, other in zip(before, new.state_tensors(), strict=True))
        return mapped, in_place, all(map(torch.equal, new.shards(), kept))

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(False, True, True)] * RANKS


def test_each_rank_verifies_the_checksum_of_the_shard_that_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is received, as it comes; who sends it does not read it twice."""
    checked: list[int] = []

    def count(slot: torch.Tensor) -> None:
        checked.append(len(slot))
        check_slot(slot)

    monkeypatch.setattr(snapshot_slots, "check_slot", count)

    def rank_main(rank: int) -> int:
        dist.init_process_group("gloo")
        Rank(rank, tmp_path).step(1)
        dist.barrier()
        assert Rank(rank, tmp_path, "ac").store.restore() is not None
        return len(checked)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [1, 1, 0, 0]


def test_the_ranks_of_a_worker_share_the_replicas_of_a_lost_worker(tmp_path: Path) -> None:
    """One of them would send all shards of it one after the other."""

    def rank_main(rank: int) -> list[int]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path)
        for step in (1, 2):
            writer.step(step)
        dist.barrier()
        kept = Rank(rank, tmp_path, "ac").store._peer_replication.peer_shards.list_versions()
        return [its for its, version, _ in kept if version.step == 2]

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [[2], [3], [], []]


def test_the_first_snapshot_of_a_round_is_on_another_node_too(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[int | None, bool]:
        dist.init_process_group("gloo")
        kept = Rank(rank, tmp_path).step(1)
        dist.barrier()
        later = Rank(rank, tmp_path, "ac")
        found = later.store.restore()
        return None if found is None else found.step, all(map(torch.equal, later.shards(), kept))

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(1, True)] * RANKS


def test_the_cost_of_replication_is_part_of_the_cost_of_a_snapshot(tmp_path: Path) -> None:
    """On the rank where it is highest: rank 0 decides how often snapshots are taken."""

    def rank_main(rank: int) -> tuple[bool, bool]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path)
        cost = writer.store._peer_replication._cost
        cost._read_wait_seconds = lambda: None  # all that the threads compute counts
        for step in (1, 2):
            writer.step(step)
        counted = cost.seconds > 0
        if rank == 3:
            cost._costs.append(100.0)
        writer.step(3)  # measures what the copies before have cost
        dist.barrier()  # or this rank would be gone before it has taken another one's
        return counted, writer.store.snapshot_seconds > 100.0 / 3

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(True, True)] * RANKS


def test_with_both_lost_the_state_comes_from_the_volume(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[int, bool]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path, volume=True)
        kept = {step: writer.step(step) for step in (1, 2)}
        writer.store.checkpoint(2, samples=2, on_published=lambda _: None)
        writer.store.wait_for_checkpoint()
        writer.step(3)
        dist.barrier()
        later = Rank(rank, tmp_path, "cd", volume=True)
        found = later.store.restore()
        assert found is not None
        return found.step, all(map(torch.equal, later.shards(), kept[2]))

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(2, True)] * RANKS


def test_with_a_peer_replica_the_volume_is_not_read(tmp_path: Path) -> None:
    def rank_main(rank: int) -> int:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path, volume=True)
        writer.step(1)
        writer.step(2)
        writer.store.checkpoint(2, samples=2, on_published=lambda _: None)
        writer.store.wait_for_checkpoint()
        dist.barrier()
        if rank == 0:
            delete_replicas(tmp_path, "b")
        dist.barrier()
        CheckpointSource.load = None  # type: ignore[method-assign,assignment]  # of a process that ends with the test
        found = Rank(rank, tmp_path, "ac", volume=True).store.restore()
        assert found is not None
        return found.step

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [2] * RANKS


def test_no_snapshot_is_taken_during_a_replication(tmp_path: Path) -> None:
    """Otherwise the others would soon have no snapshot as old as the peer replicas."""

    def rank_main(rank: int) -> tuple[list[int | None], bool, list[str]]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path)
        collector = WarningCollector()
        logging.getLogger(peer_replication.__name__).addHandler(collector)
        courier = writer.store._peer_replication._sender
        assert courier is not None
        for step in (1, 2):
            writer.step(step)
        if rank == 3:
            courier._idle_event.clear()  # it is slow
        taken = []
        for step in range(3, 3 + 2 * peer_replication.SKIPPED_SNAPSHOTS_WARNING):
            writer.store.snapshot(step, samples=step)
            taken.append(writer.store.settle())
        dist.barrier()
        courier._idle_event.set()
        dist.barrier()
        writer.store.snapshot(60, samples=60)
        return taken, writer.store.settle() == 60, collector.warnings

    found = run_ranks(rank_main, RANKS, runtime=tmp_path)
    assert [its[:2] for its in found] == [([None] * (2 * peer_replication.SKIPPED_SNAPSHOTS_WARNING), True)] * RANKS
    first, *others = [its[2] for its in found]
    assert others == [[]] * (RANKS - 1)
    (warning,) = first
    assert "8 were skipped until the previous one is on other nodes" in warning
    assert "200 MB per second" in warning
    assert "PACEKEEPER_PEER_REPLICA_MEGABYTES" in warning


class WarningCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


@pytest.mark.parametrize(("arrives", "restored"), [(False, 3), (True, 4)], ids=["late", "in time"])
def test_a_worker_that_is_drained_costs_no_more_than_one_that_is_lost(
    arrives: bool, restored: int, tmp_path: Path
) -> None:
    """A last snapshot would be written over the replicated one, while the next is in transfer."""

    def rank_main(rank: int) -> tuple[int | None, int | None]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path)
        for step in (1, 2, 3):
            writer.step(step)
        courier = writer.store._peer_replication._sender
        assert courier is not None
        arrive = threading.Event()
        if rank == 3:
            deliver = courier._send_snapshot

            def deliver_late(version: StateVersion) -> None:
                assert version.step == 4 and arrive.wait(60), "the last one comes too late"  # noqa: PT018  # one reason
                deliver(version)

            courier._send_snapshot = deliver_late  # type: ignore[method-assign]
        writer.store.snapshot(4, samples=4)
        if arrives:
            threading.Timer(0.3, arrive.set).start()
        state_store.FINAL_DELIVERY_SECONDS = 30.0 if arrives else 0.1
        writer.store.snapshot(5, samples=5, leaving=True)
        last = writer.store.settle()
        dist.barrier()
        if rank == 0:
            delete_replicas(tmp_path, "b")
        dist.barrier()
        found = Rank(rank, tmp_path, "ac").store.restore()
        return last, None if found is None else found.step

    last = 5 if arrives else None
    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(last, restored)] * RANKS


@pytest.mark.parametrize(("workers", "megabytes"), [("aa", 200), ("ab", 0)], ids=["one node", "no budget"])
def test_without_another_node_or_a_budget_there_are_no_peer_replicas(
    workers: str, megabytes: int, tmp_path: Path
) -> None:
    def rank_main(rank: int) -> tuple[int, list[str]]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path, workers, megabytes)
        for step in (1, 2, 3):
            writer.store.snapshot(step, samples=step)
            assert writer.store.settle() == step
        dist.barrier()
        return writer.delivered_step, sorted({path.name.split(".")[0] for path in writer.snapshots.glob("shard*")})

    shards = [f"shard-{rank}-of-{RANKS}" for rank in range(RANKS)]
    own = {"aa": [shards] * RANKS, "ab": [shards[:2]] * 2 + [shards[2:]] * 2}[workers]
    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(-1, its) for its in own]


def test_replicas_of_an_earlier_ring_are_deleted(tmp_path: Path) -> None:
    """Ranks were moved: neither they nor their peer replicas are this worker's any longer."""

    def rank_main(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path, "ab")
        for step in (1, 2):
            writer.step(step)
        dist.barrier()
        later = Rank(rank, tmp_path, "ac")
        assert later.store.restore() is not None
        for step in (3, 4):
            later.step(step)
        dist.barrier()
        return sorted({path.name.split(".")[0] for path in later.snapshots.glob("shard*")})

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [[f"shard-{rank}-of-{RANKS}" for rank in range(RANKS)]] * 4


def test_the_replica_of_a_moved_rank_is_deleted_without_a_ring(tmp_path: Path) -> None:
    """Until the round's second snapshot it may be needed: it is of the version from which the round began."""

    def rank_main(rank: int) -> list[bool]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path, "ab", megabytes=0)
        moved = writer.snapshots / f"shard-{(rank + 2) % RANKS}-of-{RANKS}.1"
        moved.write_bytes(b"of the rank that was here before")
        there = []
        for step in (1, 2, 3):
            writer.store.snapshot(step, samples=step)
            assert writer.store.settle() == step
            dist.barrier()
            there.append(moved.exists())
            dist.barrier()
        return there

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [[True, False, False]] * RANKS


def test_replicas_for_peers_are_deleted_if_the_workers_own_state_needs_the_memory(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[list[bool], WriteOutcome]:
        dist.init_process_group("gloo")
        writer = Rank(rank, tmp_path, volume=True)
        own = {f"shard-{its}-of-{RANKS}" for its in (rank, rank ^ 1)}

        def left() -> float:
            there = {path.name.split(".")[0] for path in writer.snapshots.glob("shard*")}
            return 0 if there - own else math.inf

        for step in (1, 2, 3):
            writer.step(step)
        dist.barrier()
        takes = [left() == 0, writer.store._count_unallocated_slots() == 1]
        snapshots, checkpoints = writer.store._snapshot_writer._snapshots, writer.store._checkpoint_writer
        assert snapshots is not None
        assert checkpoints is not None
        snapshots._memory = SlotMemory(left, snapshots._memory.free)
        snapshots._slots = [None, None]  # as when the state has grown
        writer.step(4)
        dist.barrier()
        takes.append(left() == 0)
        checkpoints._saver._read_memory_left = left
        writer.store.checkpoint(4, samples=4, on_published=lambda _: None)
        outcome = writer.store.wait_for_checkpoint()
        takes += [left() == 0, writer.store._count_unallocated_slots() == 1]
        return takes, outcome

    found = run_ranks(rank_main, RANKS, runtime=tmp_path)
    assert found == [([True, True, True, False, False], WriteOutcome.PUBLISHED)] * RANKS
