"""A sharded job's shards come back bit for bit; one bad shard sends all ranks to the other slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pacekeeper.checkpointing.snapshots.snapshot_copies import CopyTime, HostCopies, TornCopyError
from pacekeeper.checkpointing.snapshots.snapshot_slots import Snapshots
from pacekeeper.checkpointing.state_store import StateStore
from pacekeeper.checkpointing.training_state import TrainingState
from pacekeeper.environment import Environment
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper.replication.replication import Replication
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_rank.recorder import NoRing, Recorder
from testing.training.ranks import run_ranks

RANKS = 2
PATIENCE = 300.0


class Beside(HostCopies):
    """As of a state on a device: the host's part overlaps with the training."""

    asynchronous = True

    def finish(self) -> CopyTime | None:
        return CopyTime(blocked_seconds=0.0, concurrent_seconds=0.0)


class _Rank:
    def __init__(self, rank: int, runtime: Path) -> None:
        replication = Replication(rank, {"sync": 1, "shard": RANKS}, torch.device("cpu"))
        self.model = nn.Linear(6, 4)
        fully_shard(self.model, mesh=replication.mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        state = TrainingState({"model": self.model, "optimizer": self.optimizer}, replication, rank)
        environment = Environment(rank, RANKS, local_rank=rank, round=1, runtime=RuntimeFolder(runtime))
        self.store = StateStore(environment, CpuGroup(Recorder(NoRing())), state, None)

    def step(self) -> None:
        self.model(torch.randn(3, 6)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def places(self) -> list[int]:
        """In memory, of what a graph or a holder of `data` would have."""
        moments = [its for state in self.optimizer.state.values() for its in state.values()]
        tensors = [*self.model.parameters(), *moments]
        return [(its.to_local() if isinstance(its, DTensor) else its).data_ptr() for its in tensors]

    def shards(self) -> list[torch.Tensor]:
        moments = [its["exp_avg"] for its in self.optimizer.state.values()]
        return [shard.to_local().detach().clone() for shard in [*self.model.parameters(), *moments]]


@pytest.mark.parametrize(("flipped", "restored"), [(False, 3), (True, 2)])
def test_shards_come_back_bit_equal(flipped: bool, restored: int, tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[int, bool]:
        dist.init_process_group("gloo")
        writer = _Rank(rank, tmp_path)
        kept: dict[int, list[torch.Tensor]] = {}
        for step in (1, 2, 3):
            writer.step()
            writer.store.snapshot(step, samples=step)
            assert writer.store.settle() == step
            kept[step] = writer.shards()
        if flipped and rank == 1:
            path = next(path for path in tmp_path.rglob("shard-1-of-2.*") if path.read_bytes()[8] == 3)
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        dist.barrier()
        later = _Rank(rank, tmp_path)
        later.step()
        places = later.places()
        found = later.store.restore()
        assert found is not None
        assert later.places() == places
        return found.step, all(map(torch.equal, later.shards(), kept[restored]))

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [(restored, True)] * RANKS


def test_a_copy_that_is_torn_on_one_rank_is_void_on_all(tmp_path: Path) -> None:
    """Otherwise the others write the next one over the last that all have."""

    def rank_main(rank: int) -> int:
        dist.init_process_group("gloo")
        writer = _Rank(rank, tmp_path)
        for step in (1, 2):
            writer.step()
            writer.store.snapshot(step, samples=step)
            assert writer.store.settle() == step
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Snapshots, "finish_copy", torn)
            writer.store.snapshot(3, samples=3)
            assert writer.store.settle() is None
        writer.store.snapshot(4, samples=4)  # killed before it is whole
        dist.barrier()
        found = _Rank(rank, tmp_path).store.restore()
        assert found is not None
        return found.step

    def torn(_: Snapshots) -> None:
        raise TornCopyError("changed during the copy")

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [2] * RANKS


def test_with_a_device_memory_is_taken_and_a_copy_is_made_valid_while_the_training_goes_on(tmp_path: Path) -> None:
    def rank_main(rank: int) -> int:
        dist.init_process_group("gloo")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pacekeeper.checkpointing.state_store.create_slot_copies", lambda _: Beside())
            hold = _Hold(patch, "_create_slot")
            writer = _Rank(rank, tmp_path)
            writer.step()
            for step in (1, 2):
                writer.store.snapshot(step, samples=step)  # left out: there is no memory for it yet
                assert writer.store.settle(wait=True) is None
            hold.end()
            newest = max(_wait_for_snapshot(writer, 3), _wait_for_snapshot(writer, 20))  # both slots
            hold = _Hold(patch, "publish")
            writer.store.snapshot(newest + 1, samples=0)
            assert writer.store.settle() is None, "the training goes on"
            hold.end()
            assert writer.store.settle(wait=True) == newest + 1
        restored = _Rank(rank, tmp_path)
        restored.step()
        back = restored.store.restore()
        assert back is not None
        return back.step - newest

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [1] * RANKS


def test_no_copy_is_written_over_before_all_ranks_have_the_next_one(tmp_path: Path) -> None:
    def rank_main(rank: int) -> list[int]:
        dist.init_process_group("gloo")
        seen: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pacekeeper.checkpointing.state_store.create_slot_copies", lambda _: Beside())
            writer = _Rank(rank, tmp_path)
            writer.step()
            for step in (1, 2):
                writer.store.snapshot(step, samples=step, leaving=True)
                assert writer.store.settle(wait=True) == step
            hold = _Hold(patch, "publish") if rank == 1 else None
            writer.store.snapshot(3, samples=3)
            assert writer.store.settle(wait=rank == 0) == (3 if rank == 0 else None)
            if hold is not None:

                def look_then_go_on() -> None:
                    time.sleep(0.2)  # that something does not happen
                    steps = [path.read_bytes()[8] for path in tmp_path.rglob("shard-0-of-2.*")]
                    seen.extend(sorted(steps))

                hold.before_end(look_then_go_on)
            writer.store.snapshot(4, samples=4)
            assert writer.store.settle(wait=True) == 4
        return seen

    assert run_ranks(rank_main, RANKS, runtime=tmp_path) == [[], [2, 3]]


def _wait_for_snapshot(writer: _Rank, step: int) -> int:
    """The step of the first that is kept, from this one on: the ranks try alike."""
    deadline = time.monotonic() + PATIENCE
    while True:
        writer.store.snapshot(step, samples=step)
        if writer.store.settle(wait=True) == step:
            return step
        assert time.monotonic() < deadline, "no snapshot is kept"
        step += 1


class _Hold:
    """A method of `Snapshots` does not begin before this ends."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str) -> None:
        self._go = threading.Event()
        before: Callable[..., Any] = getattr(Snapshots, method)

        def held(*arguments: Any) -> Any:
            assert self._go.wait(PATIENCE)
            return before(*arguments)

        patch.setattr(Snapshots, method, held)

    def end(self) -> None:
        self._go.set()

    def before_end(self, call: Callable[[], None]) -> None:
        """In a thread: the call, then the end."""

        def work() -> None:
            call()
            self.end()

        threading.Thread(target=work, daemon=True).start()
