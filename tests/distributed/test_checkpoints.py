"""Checkpoints: who writes what, what is read again, and that nothing counts as kept which others cannot read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pacekeeper.checkpointing.state_store import RestoredState, StateStore
from pacekeeper.checkpointing.storage import checkpoint_folder, distributed_checkpoint
from pacekeeper.checkpointing.storage.checkpoint_folder import SHARED_VOLUME_REMEDY, CheckpointFolder
from pacekeeper.checkpointing.storage.checkpoint_status import read_checkpoint_status
from pacekeeper.checkpointing.storage.checkpoint_writer import WriteOutcome
from pacekeeper.checkpointing.training_state import TrainingState
from pacekeeper.environment import Environment
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.recorder import NoRing, Recorder
from pacekeeper_rank.records import StateOrigin
from testing.training.mounts import can_mount, mount_memory, unshare_mounts
from testing.training.ranks import run_ranks

Values = npt.NDArray[np.float32]
WIDTH = 128
MODEL_BYTES = 12 * (WIDTH * WIDTH + WIDTH) * 4
"""With its moments three times as much."""


@dataclass
class Rank:
    """A rank that trains a model of twelve layers, without the steps of a job around it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    folder: CheckpointFolder
    store: StateStore
    runtime: RuntimeFolder

    def train(self, steps: int = 1) -> None:
        for number in range(steps):
            self.model(torch.full((2, WIDTH), float(number + 1))).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def checkpoint(self, step: int) -> WriteOutcome:
        self.store.checkpoint(step, samples=10 * step, on_published=lambda _: None)
        return self.store.wait_for_checkpoint()

    def values(self) -> list[torch.Tensor]:
        """Weights and moments, whole."""
        moments = [its[name] for its in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
        return [
            (its.full_tensor() if isinstance(its, DTensor) else its).detach().clone()
            for its in [*self.model.parameters(), *moments]
        ]


def create_rank(rank: int, root: Path, shard: int = 1, seed: int = 0) -> Rank:
    """shard: ranks that share a replica. seed: of the weights at the beginning."""
    ranks = dist.get_world_size()
    replication = Replication(rank, {"sync": ranks // shard, "shard": shard}, torch.device("cpu"))
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    if shard > 1:
        fully_shard(model, mesh=replication.mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    state = TrainingState({"model": model, "optimizer": optimizer}, replication, rank)
    runtime = RuntimeFolder(root / "runtime").create()
    environment = Environment(rank, ranks, local_rank=rank, round=1, runtime=runtime)
    folder = CheckpointFolder(root / "volume", environment.round)
    return Rank(model, optimizer, folder, StateStore(environment, CpuGroup(Recorder(NoRing())), state, folder), runtime)


def run_in_ranks(ranks: int, main: Callable[[int], Any]) -> list[Any]:
    def rank_main(rank: int) -> Any:
        dist.init_process_group("gloo")
        return main(rank)

    return run_ranks(rank_main, ranks)


def list_steps(root: Path) -> list[str]:
    """Folders of checkpoints, half-written ones among them."""
    return sorted(path.name for path in (root / "volume").glob("step-*"))


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Sharing


@pytest.mark.parametrize("shard", [1, 2], ids=["replicas", "replicas of two shards"])
def test_replicas_share_the_copying_and_the_writing(shard: int, tmp_path: Path) -> None:
    ranks = 4

    def main(rank: int) -> int:
        its = create_rank(rank, tmp_path, shard)
        its.train()
        assert its.checkpoint(1) is WriteOutcome.PUBLISHED
        its.train()
        assert its.checkpoint(2) is WriteOutcome.PUBLISHED
        writer = its.store._checkpoint_writer
        assert writer is not None
        return len(writer._saver._buffer)

    copied = run_in_ranks(ranks, main)
    written = [(tmp_path / f"volume/step-00000002/__{rank}_0.distcp").stat().st_size for rank in range(ranks)]
    share = 3 * MODEL_BYTES / ranks
    assert all(0.75 * share < nbytes < 1.25 * share for nbytes in copied), "each a part, none twice"
    assert all(0.75 * share < nbytes < 1.4 * share for nbytes in written), "torch wraps each item into a kilobyte"


@pytest.mark.parametrize(
    ("ranks", "shard", "after", "after_shard"),
    [(3, 1, 2, 1), (2, 1, 3, 1), (4, 2, 2, 2), (2, 2, 2, 1), (2, 1, 4, 2)],
    ids=["fewer", "more", "fewer of shards", "shards to replicas", "replicas to shards"],
)
def test_another_number_of_ranks_goes_on_bit_for_bit(
    ranks: int, shard: int, after: int, after_shard: int, tmp_path: Path
) -> None:
    def write(rank: int) -> list[Values]:
        its = create_rank(rank, tmp_path, shard)
        its.train(3)
        assert its.checkpoint(3) is WriteOutcome.PUBLISHED
        return [its.numpy() for its in its.values()]  # plain values cross processes

    def restore(rank: int) -> tuple[RestoredState | None, list[Values]]:
        its = create_rank(rank, tmp_path, after_shard, seed=1)
        restored = its.store.restore()
        return restored, [its.numpy() for its in its.values()]

    kept = run_in_ranks(ranks, write)[0]
    for restored, values in run_in_ranks(after, restore):
        assert restored == RestoredState(3, 30, 3, StateOrigin.CHECKPOINT)
        # By numpy: ranks of later tests are forked from this process, and would miss the threads that torch makes here.
        assert all(np.array_equal(one, other) for one, other in zip(kept, values, strict=True))


def test_a_state_that_grows_is_distributed_again(tmp_path: Path) -> None:
    def main(rank: int) -> bool:
        its = create_rank(rank, tmp_path)
        assert its.checkpoint(1) is WriteOutcome.PUBLISHED  # before the first step there are no moments
        its.train(2)
        assert its.checkpoint(2) is WriteOutcome.PUBLISHED
        fresh = create_rank(rank, tmp_path, seed=1)
        assert fresh.store.restore() == RestoredState(2, 20, 2, StateOrigin.CHECKPOINT)
        return are_equal(its.values(), fresh.values())

    assert run_in_ranks(2, main) == [True] * 2


# Reading


def test_a_restart_from_a_snapshot_reads_no_checkpoint(tmp_path: Path) -> None:
    def main(rank: int) -> tuple[int, int | None, int]:
        its = create_rank(rank, tmp_path)
        its.train()
        for step in (1, 2):
            assert its.checkpoint(step) is WriteOutcome.PUBLISHED
        its.store.snapshot(2, samples=20)
        its.store.settle()
        fresh = create_rank(rank, tmp_path, seed=1)
        opened = record_opened_files(tmp_path / "volume")
        restored = fresh.store.restore()
        assert restored is not None
        assert are_equal(its.values(), fresh.values())
        return restored.step, restored.checkpoint_step, sum(opened)

    for rank, (step, checkpoint_step, nbytes) in enumerate(run_in_ranks(2, main)):
        assert (step, checkpoint_step) == (2, 2)
        assert nbytes < 1 << 16, f"rank {rank}: manifests are all that is read of {6 * MODEL_BYTES} bytes"


def record_opened_files(folder: Path) -> list[int]:
    """The sizes of files in it that this process opens from now on: no more than that is read of them."""
    sizes: list[int] = []

    def on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(str(folder)):
            path = Path(arguments[0])
            sizes.append(path.stat().st_size if path.exists() else 0)

    sys.addaudithook(on_audit_event)
    return sizes


def test_where_every_checkpoint_is_torn_no_rank_loads_half_of_one(tmp_path: Path) -> None:
    def main(rank: int) -> str:
        its = create_rank(rank, tmp_path)
        its.train()
        for step in (1, 2):
            assert its.checkpoint(step) is WriteOutcome.PUBLISHED
        dist.barrier()
        if rank == 0:
            for path in (tmp_path / "volume").glob("step-*/__1_0.distcp"):
                path.write_bytes(bytes(path.stat().st_size))
        dist.barrier()
        with pytest.raises(InputError) as refused:
            create_rank(rank, tmp_path, seed=1).store.restore()
        return str(refused.value)

    for message in run_in_ranks(2, main):
        assert f"spec.checkpoint.path: no checkpoint in {tmp_path / 'volume'} can be loaded: rank 0: " in message
        assert "step-00000001/__1_0.distcp: the checksum at offset" in message


# What others cannot read


def test_a_checkpoint_that_the_volume_changed_is_not_published(tmp_path: Path) -> None:
    def main(rank: int) -> list[WriteOutcome]:
        write = distributed_checkpoint._write_items

        def write_and_lose_a_bit(items: Any, storage: Any, name: str) -> Any:
            written = write(items, storage, name)
            path = storage.path / name
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
            return written

        its = create_rank(rank, tmp_path)
        if rank == 1:
            distributed_checkpoint._write_items = write_and_lose_a_bit
        outcomes = [its.checkpoint(1)]
        distributed_checkpoint._write_items = write
        outcomes.append(its.checkpoint(2))
        return outcomes

    assert run_in_ranks(2, main) == [[WriteOutcome.FAILED, WriteOutcome.PUBLISHED]] * 2
    assert list_steps(tmp_path) == ["step-00000002"]


@pytest.mark.skipif(not can_mount(), reason="mounts need root")
def test_a_path_that_workers_do_not_share_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def main(rank: int) -> str:
        unshare_mounts()
        checkpoint_folder._FILE_VISIBILITY_SECONDS = 0.0
        mount_memory(tmp_path / "volume")
        with pytest.raises(InputError) as refused:
            create_rank(rank, tmp_path).store.restore()
        return str(refused.value)

    for message in run_in_ranks(3, main):
        path = tmp_path / "volume"
        assert (
            message
            == f"spec.checkpoint.path: {path} is another folder for ranks 1, 2 than for rank 0. {SHARED_VOLUME_REMEDY}"
        )


@pytest.mark.skipif(not can_mount(), reason="mounts need root")
def test_a_checkpoint_that_another_worker_cannot_read_does_not_count_as_kept(tmp_path: Path) -> None:
    """The volume goes away under one worker, which writes into its own disk from then on."""

    def main(rank: int) -> tuple[list[WriteOutcome], str]:
        unshare_mounts()
        checkpoint_folder._FILE_VISIBILITY_SECONDS = 0.0
        its = create_rank(rank, tmp_path)
        its.store.restore()
        outcomes = [its.checkpoint(1)]
        if rank == 1:
            mount_memory(tmp_path / "volume")
        outcomes.append(its.checkpoint(2))
        assert list_steps(tmp_path) == (["step-00000001"] if rank == 0 else []), "what no rank can use takes no space"
        return outcomes, read_checkpoint_status(its.runtime.checkpoints).error

    results = run_in_ranks(2, main)
    assert [outcomes for outcomes, _ in results] == [[WriteOutcome.PUBLISHED, WriteOutcome.FAILED]] * 2
    assert list_steps(tmp_path) == ["step-00000001"]
    message = results[0][1]
    assert "/__1_0.distcp, which rank 1 has written, is missing on this rank's worker. Mount one volume" in message
