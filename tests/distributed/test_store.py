"""The job's state comes back from the source that has the newest of what all ranks can have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pacekeeper.environment import Environment
from pacekeeper.keep.checkpoint_writer import WriteOutcome
from pacekeeper.keep.checkpoints import CheckpointFolder
from pacekeeper.keep.state import TrainingState
from pacekeeper.keep.store import Restored, Store
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper.observe.recorder import NoRing, Recorder
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime import Runtime
from tests.support.ranks import run_ranks

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
    store: Store

    def keep(self, kept: Kept) -> None:
        for step in kept.snapshots:
            self.weight.data.fill_(IN_MEMORY)
            self.store.snapshot(step, samples=100 * step + self.environment.rank)
            assert self.store.settle() == (step if self.environment.rank == 0 else -1)
        for step in kept.checkpoints:
            self.weight.data.fill_(ON_VOLUME)
            self.store.checkpoint(step, 100 * step + self.environment.rank, lambda _: None)
            self.weight.data.fill_(0.0)  # what is being written is a copy
            assert self.store.wait_for_checkpoint() is WriteOutcome.KEPT
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


def a_rank(rank: int, folder: Path) -> Rank:
    environment = Environment(rank, RANKS, local_rank=rank, round=1, runtime=Runtime(folder / "runtime"))
    volume = CheckpointFolder(folder / "volume", environment.round)
    model = nn.Linear(1, 1, bias=False)
    state = TrainingState({"model": model}, Replication(rank, {"sync": RANKS, "shard": 1}, torch.device("cpu")), rank)
    return Rank(
        environment, volume, model, model.weight, Store(environment, CpuGroup(Recorder(NoRing())), state, volume)
    )


@pytest.mark.parametrize(
    ("kept", "step", "checkpoint_step", "weight"),
    [
        (Kept(snapshots=(3, 4), checkpoints=(6,)), 6, 6, ON_VOLUME),
        (Kept(snapshots=(6,), checkpoints=(2, 4)), 6, 4, IN_MEMORY),
        (Kept(snapshots=(5,), checkpoints=(5,)), 5, 5, IN_MEMORY),
        (Kept(snapshots=(4,), checkpoints=(5, 6), torn=(6,)), 5, 5, ON_VOLUME),
        (Kept(snapshots=(4,), checkpoints=(6,), torn=(6,)), 4, -1, IN_MEMORY),
        (Kept(snapshots=(4,), half_taken=6), 4, -1, IN_MEMORY),
        (Kept(snapshots=(3, 6), checkpoints=(2,), flipped=(6,)), 3, 2, IN_MEMORY),
        (Kept(snapshots=(3, 6), checkpoints=(2,), flipped=(3, 6)), 2, 2, ON_VOLUME),
        (Kept(snapshots=(4,), grown=6), 4, -1, IN_MEMORY),
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
def test_the_newest_that_all_ranks_can_have_comes_back(
    kept: Kept, step: int, checkpoint_step: int, weight: float, tmp_path: Path
) -> None:
    def rank_main(rank: int) -> tuple[Restored | None, float]:
        dist.init_process_group("gloo")
        a_rank(rank, tmp_path).keep(kept)
        fresh = a_rank(rank, tmp_path)
        return fresh.store.restore(), float(fresh.weight)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [
        (Restored(step, 100 * step + rank, checkpoint_step), weight) for rank in range(RANKS)
    ]


def test_where_nothing_is_kept_nothing_changes(tmp_path: Path) -> None:
    def rank_main(rank: int) -> bool:
        dist.init_process_group("gloo")
        fresh = a_rank(rank, tmp_path)
        before = fresh.weight.detach().clone()
        return fresh.store.restore() is None and torch.equal(fresh.weight, before)

    assert run_ranks(rank_main, RANKS, runtime=tmp_path / "runtime") == [True] * RANKS
