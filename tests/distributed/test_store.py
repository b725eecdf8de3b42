"""The job's state comes back from the source that has the newest of what all ranks can have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pacekeeper.checkpointing.state_store import RestoredState, StateStore
from pacekeeper.checkpointing.storage.checkpoint_folder import CheckpointFolder
from pacekeeper.checkpointing.storage.checkpoint_writer import WriteOutcome
from pacekeeper.checkpointing.training_state import TrainingState
from pacekeeper.environment import Environment
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.recorder import NoRing, Recorder
from pacekeeper_rank.records import StateOrigin
from testing.training.ranks import run_ranks

RANKS = 2
IN_MEMORY, ON_VOLUME = 1.0, 2.0
"""What the model's weight is, by where the state was kept."""


@dataclass(frozen=True)
class Kept:
    """Steps after which the state is kept, in this order."""

    snapshots: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    torn: tuple[int, ...] = ()
    """Of the checkpoints, those that are damaged afterwards."""
    flipped: tuple[int, ...] = ()
    """Of the snapshots, those of which a bit flips afterwards."""
    grown: int = 0
    """Step of a snapshot taken when the model has grown; 0: there is none."""
    half_taken: int = 0
    """Step of a snapshot whose rank states never came; 0: there is none."""


@dataclass
class Rank:
    """A rank that has a store, and a model of one weight."""

    environment: Environment
    volume: CheckpointFolder
    model: nn.Linear
    weight: torch.Tensor
    store: StateStore

    def keep(self, kept: Kept) -> None:
        for step in kept.snapshots:
            self.weight.data.fill_(IN_MEMORY)
            self.store.snapshot(step, samples=100 * step + self.environment.rank)
            assert self.store.settle() == (step if self.environment.rank == 0 else None)
        for step in kept.checkpoints:
            self.weight.data.fill_(ON_VOLUME)
            self.store.checkpoint(step, 100 * step + self.environment.rank, lambda _: None)
            self.weight.data.fill_(0.0)  # what is being written is a copy
            assert self.store.wait_for_checkpoint() is WriteOutcome.PUBLISHED
        if kept.grown:
            self.model.register_buffer("late", torch.zeros(3))
            self.store.snapshot(kept.grown, samples=0)
            self.store.settle()
        if kept.half_taken:
            self.store.snapshot(kept.half_taken, samples=0)
        dist.barrier()
        if self.environment.rank == 0:
            for step in kept.torn:
                part = next((self.volume.path / f"step-{step:08d}").glob("*.distcp"))
                part.write_bytes(bytes(part.stat().st_size))
            for step in kept.flipped:
                self._flip_a_bit(step)
        dist.barrier()

    def _flip_a_bit(self, step: int) -> None:
        """In the last byte of the slot that holds the snapshot."""
        runtime = self.environment.runtime
        assert runtime is not None
        for path in runtime.snapshots.iterdir():
            content = bytearray(path.read_bytes())
            if int.from_bytes(content[8:16], "little") == step:
                content[-1] ^= 1
                path.write_bytes(content)


def create_rank(rank: int, folder: Path) -> Rank:
    environment = Environment(rank, RANKS, local_rank=rank, round=1, runtime=RuntimeFolder(folder / "runtime"))
    volume = CheckpointFolder(folder / "volume", environment.round)
    model = nn.Linear(1, 1, bias=False)
    state = TrainingState({"model": model}, Replication(rank, {"sync": RANKS, "shard": 1}, torch.device("cpu")), rank)
    return Rank(
        environment, volume, model, model.weight, StateStore(environment, CpuGroup(Recorder(NoRing())), state, volume)
    )


@pytest.mark.parametrize(
    ("kept", "step", "checkpoint_step", "weight"),
    [
        (Kept(snapshots=(3, 4), checkpoints=(6,)), 6, 6, ON_VOLUME),
        (Kept(snapshots=(6,), checkpoints=(2, 4)), 6, 4, IN_MEMORY),
        (Kept(snapshots=(5,), checkpoints=(5,)), 5, 5, IN_MEMORY),
        (Kept(snapshots=(4,), checkpoints=(5, 6), torn=(6,)), 5, 5, ON_VOLUME),
        (Kept(snapshots=(4,), checkpoints=(6,), torn=(6,)), 4, None, IN_MEMORY),
        (Kept(snapshots=(4,), half_taken=6), 4, None, IN_MEMORY),
        (Kept(snapshots=(3, 6), checkpoints=(2,), flipped=(6,)), 3, 2, IN_MEMORY),
        (Kept(snapshots=(3, 6), checkpoints=(2,), flipped=(3, 6)), 2, 2, ON_VOLUME),
        (Kept(snapshots=(4,), grown=6), 4, None, IN_MEMORY),
    ],
    ids=[
        "the volume",
        "memory",
        "both: memory",
        "a torn newest",
        "all torn",
        "a snapshot that was not settled",
        "a bit flipped: the other slot",
        "in both: the volume",
        "a model that has grown",
    ],
)
def test_the_newest_state_of_all_ranks_is_restored(
    kept: Kept, step: int, checkpoint_step: int | None, weight: float, tmp_path: Path
) -> None:
    def rank_main(rank: int) -> tuple[RestoredState | None, float]:
        dist.init_process_group("gloo")
        create_rank(rank, tmp_path).keep(kept)
        fresh = create_rank(rank, tmp_path)
        return fresh.store.restore(), float(fresh.weight)

    origin = StateOrigin.MEMORY if weight == IN_MEMORY else StateOrigin.CHECKPOINT
    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [
        (RestoredState(step, 100 * step + rank, checkpoint_step, origin), weight) for rank in range(RANKS)
    ]


def test_without_a_kept_state_nothing_changes(tmp_path: Path) -> None:
    def rank_main(rank: int) -> bool:
        dist.init_process_group("gloo")
        fresh = create_rank(rank, tmp_path)
        before = fresh.weight.detach().clone()
        return fresh.store.restore() is None and torch.equal(fresh.weight, before)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [True] * RANKS


class Particular:
    """Takes over no state of a later step than `most`."""

    step = 0
    most = 3

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["step"] > self.most:
            raise KeyError("of another kind")
        self.step = state["step"]


def create_optimizing_rank(rank: int, folder: Path) -> tuple[nn.Linear, torch.optim.Optimizer, Particular, StateStore]:
    """It trains the weight and not the bias, at first."""
    environment = Environment(rank, RANKS, local_rank=rank, round=1, runtime=RuntimeFolder(folder / "runtime"))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    particular = Particular()
    replication = Replication(rank, {"sync": RANKS, "shard": 1}, torch.device("cpu"))
    state = TrainingState({"model": model, "optimizer": optimizer, "particular": particular}, replication, rank)
    volume = CheckpointFolder(folder / "volume", environment.round)
    return model, optimizer, particular, StateStore(environment, CpuGroup(Recorder(NoRing())), state, volume)


@pytest.mark.parametrize(
    ("checkpoints", "snapshots", "step"), [((), (3, 4), 3), ((3,), (4, 5), 3)], ids=["the other slot", "the volume"]
)
@pytest.mark.parametrize("why", ["groups", "refused"])
def test_all_ranks_load_an_older_state_if_a_snapshot_cannot_be_loaded(
    why: str, checkpoints: tuple[int, ...], snapshots: tuple[int, ...], step: int, tmp_path: Path
) -> None:
    def rank_main(rank: int) -> tuple[int, float]:
        dist.init_process_group("gloo")
        model, optimizer, particular, store = create_optimizing_rank(rank, tmp_path)

        def train(number: int) -> None:
            if number == 4 and why == "groups":
                optimizer.add_param_group({"params": [model.bias]})
            if why == "refused":
                particular.step = number
            model.weight.data.fill_(number)
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            model.weight.data.fill_(number)

        for number in checkpoints:
            train(number)
            store.checkpoint(number, number, lambda _: None)
            assert store.wait_for_checkpoint() is WriteOutcome.PUBLISHED
        for number in snapshots:
            train(number)
            store.snapshot(number, number)
            store.settle()
        dist.barrier()
        fresh, _, its, later = create_optimizing_rank(rank, tmp_path)
        if why == "refused" and rank == 0:
            its.most = 5  # only one rank refuses
        found = later.restore()
        assert found is not None
        return found.step, float(fresh.weight.detach())

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(step, step)] * RANKS


def test_the_training_does_not_begin_with_half_of_a_state(tmp_path: Path) -> None:
    def rank_main(rank: int) -> str:
        dist.init_process_group("gloo")
        _, _, particular, store = create_optimizing_rank(rank, tmp_path)
        particular.step = 4
        store.snapshot(4, 4)
        store.settle()
        dist.barrier()
        with pytest.raises(InputError) as caught:
            create_optimizing_rank(rank, tmp_path)[-1].restore()
        return str(caught.value)

    for message in run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime"):
        assert "the snapshot of step 4" in message
        assert "of another kind" in message


@pytest.mark.parametrize("source", ["memory", "volume"])
def test_restored_tensors_keep_their_memory(source: str, tmp_path: Path) -> None:
    """A graph that was captured before, and all holders of a tensor's `data`, see it."""

    def a_training_rank(rank: int) -> tuple[nn.Linear, torch.optim.Optimizer, StateStore]:
        environment = Environment(rank, RANKS, local_rank=rank, round=1, runtime=RuntimeFolder(tmp_path / "runtime"))
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        replication = Replication(rank, {"sync": RANKS, "shard": 1}, torch.device("cpu"))
        state = TrainingState({"model": model, "optimizer": optimizer}, replication, rank)
        volume = CheckpointFolder(tmp_path / "volume", environment.round)
        return model, optimizer, StateStore(environment, CpuGroup(Recorder(NoRing())), state, volume)

    def tensors(model: nn.Linear, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        moments = [its for state in optimizer.state.values() for its in state.values()]
        return [*(its.data for its in model.parameters()), *moments, optimizer.param_groups[0]["lr"]]

    def rank_main(rank: int) -> list[list[Any]]:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model, optimizer, store = a_training_rank(rank)
        optimizer.param_groups[0]["lr"].fill_(0.5)
        if source == "memory":
            store.snapshot(3, samples=3)
            store.settle()
        else:
            store.checkpoint(3, 3, lambda _: None)
            assert store.wait_for_checkpoint() is WriteOutcome.PUBLISHED
        dist.barrier()
        fresh, its, later = a_training_rank(rank)
        before = tensors(fresh, its)
        assert later.restore() is not None
        assert [one.data_ptr() for one in tensors(fresh, its)] == [one.data_ptr() for one in before]
        return [[one.flatten().tolist() for one in found] for found in (before, tensors(model, optimizer))]

    for found, expected in run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime"):
        assert found == expected


def test_the_outer_optimizer_of_a_torn_state_is_discarded(tmp_path: Path) -> None:
    """The job was not in a Local-SGD mode yet, when the older one was kept."""

    def a_training_rank(rank: int) -> tuple[Replication, Particular, StateStore]:
        environment = Environment(rank, RANKS, local_rank=rank, round=1, runtime=RuntimeFolder(tmp_path / "runtime"))
        replication = Replication(rank, {"sync": RANKS, "shard": 1}, torch.device("cpu"))
        model = nn.Linear(1, 1)
        replication.replicate(model, lambda _: [], {})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replication.add_optimizer(optimizer, None)
        particular = Particular()
        objects = {"model": model, "optimizer": optimizer, "particular": particular}
        return (
            replication,
            particular,
            StateStore(environment, CpuGroup(Recorder(NoRing())), TrainingState(objects, replication, rank), None),
        )

    def momentum(replication: Replication) -> list[float]:
        return [float(its["momentum_buffer"].flatten()) for its in replication.replicas[0].outer.state.values()]

    def rank_main(rank: int) -> tuple[int, list[float], int]:
        dist.init_process_group("gloo")
        replication, particular, store = a_training_rank(rank)
        for step in (3, 4):
            particular.step = step
            if step == 4:
                for its in replication.replicas[0].outer.state.values():
                    its["momentum_buffer"].fill_(1.0)
                replication.replicas[0].load_state_dict({**replication.replicas[0].state_dict(), "number": 7})
            store.snapshot(step, samples=step)
            store.settle()
        dist.barrier()
        fresh, particular, later = a_training_rank(rank)
        if rank == 1:
            particular.most = 5  # only rank 0 refuses the newest
        found = later.restore()
        assert found is not None
        return found.step, momentum(fresh), fresh.replicas[0].state_dict()["number"]

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [(3, [0.0, 0.0], 0)] * RANKS
