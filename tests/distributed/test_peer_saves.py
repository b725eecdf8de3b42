"""Saves of torch.distributed.checkpoint come back from memory, from another node, or from the storage, to the bit."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import pickle
import shutil
import signal
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pacekeeper
from pacekeeper.checkpointing.peer_saves import save_memory, storage_reader
from pacekeeper.checkpointing.peer_saves.background_saves import BackgroundSave, UploadOutcome
from pacekeeper.checkpointing.peer_saves.save_group import _open_group
from pacekeeper.checkpointing.rank_state import RANK_STATE_BYTES
from pacekeeper.checkpointing.snapshots.peer_replication import ReplicaSender
from pacekeeper.checkpointing.snapshots.snapshot_copies import CopyTime, HostCopies
from pacekeeper.checkpointing.snapshots.snapshot_slots import SLOT_HEADER_BYTES, SlotMemory
from pacekeeper.observe.monitoring import get_recorder
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_rank.records import Phase
from testing.training.launchers import wait_until_true
from testing.training.ranks import run_ranks
from tests.distributed.test_launcher_local import exit_code, start_local_run

PEER_SAVES_SCRIPT = Path(__file__).parents[2] / "testing" / "scripts" / "peer_saves.py"
RANKS = 2
SECRET = "ab" * 32
_rounds = itertools.count()


class BlockedWriter(FileSystemWriter):
    """A storage that never answers."""

    def write_data(self, *_: Any) -> Any:
        threading.Event().wait()


class Training:
    """A deterministic FSDP2 loop whose state is saved as one dict."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 6))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            generator = torch.Generator().manual_seed(100 * self.step + dist.get_rank())
            self.model(torch.randn(3, 8, generator=generator)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load(self, reader: Any) -> None:
        state = self.state()
        load(state, storage_reader=reader)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]

    def whole(self) -> list[torch.Tensor]:
        """Parameters, moments, and counts of steps of all ranks."""
        moments = [its[name] for its in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
        tensors = [*self.model.parameters(), *moments]
        return [(its.full_tensor() if isinstance(its, DTensor) else its).detach().clone() for its in tensors]


def start(rank: int, folder: Path, workers: str, ranks: int = RANKS) -> None:
    """Be a rank of a new round, on one of the workers. Each has memory of its own, and a node of its own."""
    _open_group.cache_clear()
    worker = workers[rank * len(workers) // ranks]
    runtime = RuntimeFolder(folder / worker).create()
    write_json(runtime.plan, WorkerPlan(membership=1, role=WorkerRole.MEMBER, secret=SECRET).to_json())
    os.environ.update(
        PACEKEEPER_RUNTIME=str(runtime.root),
        PACEKEEPER_WORKER=worker,
        PACEKEEPER_NODE=f"node of {worker}",
        PACEKEEPER_POD_IP="127.0.0.1",
    )
    store = folder / f"store-{os.environ['PACEKEEPER_ROUND']}-{next(_rounds)}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def save(training: Training, folder: Path, writer: type[FileSystemWriter] = FileSystemWriter) -> BackgroundSave:
    """Save in the folder's storage; the jobs of the save."""
    peer_writer = pacekeeper.PeerStorageWriter(writer(folder / "storage" / f"step-{training.step}"))
    save_state(training.state(), storage_writer=peer_writer)
    assert peer_writer._saver is not None
    return peer_writer._saver._saves[-1]


def resume(folder: Path) -> tuple[int, Training]:
    """The step that is found, 0 without one, and the training that goes on from there."""
    training = Training()
    reader = pacekeeper.PeerStorageReader(folder / "storage")
    newest = reader.find_newest()
    if newest is not None:
        training.load(reader)
        assert newest == str(folder / "storage" / f"step-{training.step}")
    return training.step, training


def delete_memory(folder: Path, *workers: str) -> None:
    for worker in workers:
        shutil.rmtree(folder / worker / "saves")


def find_newest_slot(folder: Path, worker: str, part: str) -> Path:
    slots = [*(folder / worker / "saves" / "save").glob(f"{part}-of-{RANKS}.?")]
    return max(slots, key=lambda path: struct.unpack_from("<q", path.read_bytes(), 8))


def tear_copy_of_lost_worker(folder: Path) -> None:
    flip_bit(folder, "a", "shard-1")
    delete_memory(folder, "b")


def delete_newest_index(folder: Path) -> None:
    for worker in "ab":
        find_newest_slot(folder, worker, "index").unlink()


def flip_bit(folder: Path, workers: str, part: str) -> None:
    """A bit of the newest slot of this part of a save, with each of these workers: of a shard's first tensor."""
    for worker in workers:
        path = find_newest_slot(folder, worker, part)
        content = bytearray(path.read_bytes())
        tensors = struct.unpack_from("<q", content, 48)[0]
        content[tensors if part.startswith("shard") else SLOT_HEADER_BYTES + RANK_STATE_BYTES + 20] ^= 1
        path.write_bytes(content)


@dataclass(frozen=True)
class Loss:
    """What befalls a job of workers a and b after the save of step 3, whose upload is blocked."""

    happens: Callable[[Path], object]
    workers: str
    """Those of the next round; c and d have nothing."""
    restored: int
    """Step. The storage has step 2."""


LOSSES = {
    "killed ranks": Loss(lambda _: None, "ab", 3),
    "a lost worker": Loss(lambda folder: delete_memory(folder, "b"), "ac", 3),
    "the first worker, with the index": Loss(lambda folder: delete_memory(folder, "a"), "cb", 3),
    "ranks that were moved": Loss(lambda _: None, "ba", 3),
    "both workers": Loss(lambda _: None, "cd", 2),
    "a torn shard whose copy is whole": Loss(lambda folder: flip_bit(folder, "a", "shard-0"), "ab", 3),
    "a shard that is torn wherever it is": Loss(lambda folder: flip_bit(folder, "ab", "shard-0"), "ab", 2),
    "a torn copy of a lost worker": Loss(tear_copy_of_lost_worker, "ac", 2),
    "a torn index": Loss(lambda folder: flip_bit(folder, "ab", "index"), "ab", 2),
    "a save that the ranks have not completed": Loss(delete_newest_index, "ab", 2),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[torch.Tensor]]]:
    """The folder of a job that was killed after step 3, and its whole state at each step."""
    folder = tmp_path_factory.mktemp("written")

    def rank_main(rank: int) -> None:
        start(rank, folder, "ab")
        training, kept = Training(), {}
        for step in (1, 2, 3):
            training.train(1)
            begun = save(training, folder, BlockedWriter if step == 3 else FileSystemWriter)
            kept[step] = training.whole()
            if step < 3:
                assert begun.uploaded.result() is UploadOutcome.STORED
        assert begun.counts.result()
        if rank == 0:
            torch.save(kept, folder / "kept")
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match="ended without a result"):
        run_ranks(rank_main, RANKS)
    return folder, torch.load(folder / "kept")


@pytest.fixture(scope="module")
def saved_memory(written: tuple[Path, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the memory of that job's workers."""
    backup = tmp_path_factory.mktemp("memory")
    for worker in "ab":
        shutil.copytree(written[0] / worker, backup / worker)
    return backup


def restore_memory(folder: Path, saved_memory: Path) -> None:
    for worker in "abcd":
        shutil.rmtree(folder / worker, ignore_errors=True)
    shutil.copytree(saved_memory, folder, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def restored(
    written: tuple[Path, dict[int, list[torch.Tensor]]], saved_memory: Path
) -> dict[str, list[tuple[int, bool]]]:
    """By loss: the step that each rank goes on from, and whether two more steps end as without any loss, to the bit."""
    folder, _ = written

    def rank_main(rank: int) -> dict[str, tuple[int, bool]]:
        results = {}
        for number, (name, loss) in enumerate(LOSSES.items()):
            if rank == 0:
                restore_memory(folder, saved_memory)
                loss.happens(folder)
                (folder / f"prepared-{number}").touch()
            wait_until_true((folder / f"prepared-{number}").exists, name)
            start(rank, folder, loss.workers)
            step, training = resume(folder)
            training.train(5 - step)
            uninterrupted = Training()
            uninterrupted.train(5)
            results[name] = step, all(map(torch.equal, training.whole(), uninterrupted.whole()))
            dist.barrier()
            dist.destroy_process_group()
        return results

    of_ranks = run_ranks(rank_main, RANKS)
    return {name: [results[name] for results in of_ranks] for name in LOSSES}


@pytest.mark.oldest_torch
@pytest.mark.parametrize("name", LOSSES)
def test_the_newest_save_that_all_ranks_can_read_is_loaded_bit_for_bit(
    name: str, restored: dict[str, list[tuple[int, bool]]]
) -> None:
    assert restored[name] == [(LOSSES[name].restored, True)] * RANKS


@pytest.mark.parametrize(("ranks", "workers"), [(1, "a"), (3, "abc")])
def test_another_number_of_ranks_loads_from_memory(
    ranks: int, workers: str, written: tuple[Path, dict[int, list[torch.Tensor]]], saved_memory: Path
) -> None:
    folder, kept = written

    def rank_main(rank: int) -> tuple[int, bool]:
        start(rank, folder, workers, ranks)
        step, training = resume(folder)
        return step, all(map(torch.equal, training.whole(), kept[3]))

    restore_memory(folder, saved_memory)
    assert run_ranks(rank_main, ranks) == [(3, True)] * ranks


def test_an_upload_that_did_not_end_begins_again_with_the_next_save(
    written: tuple[Path, dict[int, list[torch.Tensor]]], saved_memory: Path
) -> None:
    folder, kept = written

    def rank_main(rank: int) -> bool:
        start(rank, folder, "ab")
        _, training = resume(folder)
        training.train(1)
        assert save(training, folder).uploaded.result() is UploadOutcome.STORED
        loaded = Training()
        loaded.load(FileSystemReader(folder / "storage" / "step-3"))
        if rank == 0:
            shutil.rmtree(folder / "storage" / "step-4")
        return all(map(torch.equal, loaded.whole(), kept[3]))

    restore_memory(folder, saved_memory)
    assert run_ranks(rank_main, RANKS) == [True] * RANKS


def test_a_save_without_room_in_memory_is_written_before_the_training_goes_on(tmp_path: Path) -> None:
    """What is in memory is outdated then; the next save that has room is in memory again."""

    def rank_main(rank: int) -> list[tuple[bool, int]]:
        start(rank, tmp_path, "ab")
        training, found = Training(), []
        for step, has_room in enumerate((True, rank == 0, True), start=1):
            training.train(1)
            writer = pacekeeper.PeerStorageWriter(tmp_path / "storage" / "newest")
            assert writer._saver is not None
            left = math.inf if has_room else 0
            writer._saver.group.memory._memory = SlotMemory(partial(float, left))
            writer._saver._writer.forget()
            save_state(training.state(), storage_writer=writer)
            save = writer._saver._saves[-1]
            assert save.uploaded.result() is UploadOutcome.STORED
            dist.barrier()
            loaded = Training()
            loaded.load(pacekeeper.PeerStorageReader(tmp_path / "storage" / "newest"))
            assert loaded.step == step
            found.append((save.is_in_memory, len([*writer._saver.group.memory.folder.glob("index*")])))
            dist.barrier()
        return found

    assert run_ranks(rank_main, RANKS) == [[(True, 1), (False, 0), (True, 1)]] * RANKS


def test_a_slot_is_not_overwritten_before_other_nodes_and_the_storage_have_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and uploads begin here only when a save waits for them: without a wait, they would not be there."""
    awaited = {"wait_until_copied": threading.Event(), "wait_for_upload": threading.Event()}

    def begin_with_wait(name: str) -> None:
        wait = getattr(BackgroundSave, name)

        def begin(self: BackgroundSave) -> Any:
            awaited[name].set()
            return wait(self)

        monkeypatch.setattr(BackgroundSave, name, begin)

    def delay(owner: Any, name: str, event: threading.Event) -> None:
        act = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: (event.wait(), act(*arguments))[1])

    for name in awaited:
        begin_with_wait(name)
    delay(ReplicaSender, "_send_snapshot", awaited["wait_until_copied"])
    delay(FileSystemWriter, "write_data", awaited["wait_for_upload"])

    def rank_main(rank: int) -> tuple[bool, bool]:
        start(rank, tmp_path, "ab")
        training = Training()
        found = []
        for step in (1, 2, 3):
            training.train(1)
            save(training, tmp_path)
            if step == 2:
                copies = (tmp_path / "ba"[rank] / "saves" / "save").glob(f"shard-{rank}-of-{RANKS}.?")
                found.append(any(struct.unpack_from("<q", path.read_bytes(), 8) == (1,) for path in copies))
        found.append((tmp_path / "storage" / "step-1" / ".metadata").exists())
        return found[0], found[1]

    assert run_ranks(rank_main, RANKS) == [(True, True)] * RANKS


class CopiesNextToWork(HostCopies):
    """As of a state on a device: memory is allocated in the background."""

    asynchronous = True

    def finish(self) -> CopyTime | None:
        return CopyTime(blocked_seconds=0.0, concurrent_seconds=0.0)


def test_a_save_from_a_device_is_in_memory_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_memory, "_choose_copies", lambda _: CopiesNextToWork())

    def rank_main(rank: int) -> list[int]:
        start(rank, tmp_path, "a", 1)
        training, found = Training(), []
        for _ in range(3):
            training.train(1)
            assert save(training, tmp_path).is_in_memory
            found.append(resume(tmp_path)[0])
        return found

    assert run_ranks(rank_main, 1) == [[1, 2, 3]]


class LateWriter(FileSystemWriter):
    """A storage that answers once it may."""

    may_write = threading.Event()

    def write_data(self, *arguments: Any) -> Any:
        self.may_write.wait()
        return super().write_data(*arguments)


def test_an_upload_that_ends_while_the_storage_is_listed_is_no_deleted_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_checkpoints = storage_reader.list_checkpoints

    def rank_main(rank: int) -> int:
        start(rank, tmp_path, "a", 1)
        training = Training()
        training.train(1)
        saved = save(training, tmp_path, LateWriter)

        def list_before_the_upload(storage: Any, folder: str) -> list[str]:
            found = list_checkpoints(storage, folder)
            LateWriter.may_write.set()
            assert saved.uploaded.result() is UploadOutcome.STORED
            marks = RuntimeFolder(tmp_path / "a").root
            wait_until_true(lambda: any(marks.glob("saves/*/stored-*")), "the save is marked as stored")
            return found

        monkeypatch.setattr(storage_reader, "list_checkpoints", list_before_the_upload)
        return resume(tmp_path)[0]

    assert run_ranks(rank_main, 1) == [1]


class FailingWriter(FileSystemWriter):
    """A storage that fails on rank 1."""

    def write_data(self, *arguments: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the bucket is gone")
        return super().write_data(*arguments)


def test_a_storage_that_fails_is_reported_and_raises_at_the_save_after_the_next_one(tmp_path: Path) -> None:
    """As the script's own writer does, so that a broken storage does not go unnoticed; memory keeps the newest save."""

    def rank_main(rank: int) -> tuple[list[UploadOutcome], bool, int]:
        start(rank, tmp_path, "ab")
        training, outcomes = Training(), []
        for _ in range(2):
            training.train(1)
            outcomes.append(save(training, tmp_path, FailingWriter).uploaded.result())
        training.train(1)
        with pytest.raises(CheckpointException, match="the bucket is gone"):
            save(training, tmp_path, FailingWriter)
        step, loaded = resume(tmp_path)
        save(loaded, tmp_path / "other")
        return outcomes, (tmp_path / "storage" / "step-1" / ".metadata").exists(), step

    assert run_ranks(rank_main, RANKS) == [([UploadOutcome.FAILED] * 2, False, 2)] * RANKS


def test_a_checkpoint_that_the_script_deletes_is_not_loaded_from_memory(tmp_path: Path) -> None:
    def rank_main(rank: int) -> tuple[int, type]:
        start(rank, tmp_path, "ab")
        training = Training()
        for _ in range(2):
            training.train(1)
            assert save(training, tmp_path).uploaded.result() is UploadOutcome.STORED
        dist.barrier()
        if rank == 0:
            shutil.rmtree(tmp_path / "storage" / "step-2")
        dist.barrier()
        step, _ = resume(tmp_path)
        with pytest.raises(CheckpointException) as raised:
            training.load(pacekeeper.PeerStorageReader(tmp_path / "storage" / "step-2"))
        return step, type(raised.value)

    assert run_ranks(rank_main, RANKS) == [(1, CheckpointException)] * RANKS


@pytest.mark.oldest_torch
def test_the_last_upload_ends_before_the_process_does(tmp_path: Path) -> None:
    """Also after the script has destroyed its process groups, and for `async_save`."""
    released = tmp_path / "released"

    class SlowWriter(FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            wait_until_true(released.exists, "the release")
            return super().write_data(*arguments)

    def rank_main(rank: int) -> None:
        start(rank, tmp_path, "ab")
        training = Training()
        training.train(1)
        writer = pacekeeper.PeerStorageWriter(SlowWriter(tmp_path / "storage" / "step-1"))
        future = async_save(training.state(), storage_writer=writer)
        assert isinstance(future, Future)
        future.result()
        training.train(1)  # what is written is the state before
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            assert not (tmp_path / "storage" / "step-1" / ".metadata").exists()
            released.touch()
        atexit._run_exitfuncs()

    def load(rank: int) -> tuple[int, bool]:
        start(rank, tmp_path, "cd")
        step, training = resume(tmp_path)
        training.train(1)
        uninterrupted = Training()
        uninterrupted.train(2)
        return step, all(map(torch.equal, training.whole(), uninterrupted.whole()))

    run_ranks(rank_main, RANKS)
    assert run_ranks(load, RANKS) == [(1, True)] * RANKS


def test_neither_a_failed_rank_nor_its_fork_waits_for_uploads_at_its_end(tmp_path: Path) -> None:
    def rank_main(rank: int) -> bool:
        start(rank, tmp_path, "ab")
        training = Training()
        training.train(1)
        save(training, tmp_path, BlockedWriter)
        fork = os.fork()
        if fork == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(fork, 0)
        sys.excepthook(ValueError, ValueError("the script's"), None)
        atexit._run_exitfuncs()
        return True

    assert run_ranks(rank_main, RANKS, patience=60.0) == [True] * RANKS


def test_a_save_is_a_phase_of_its_own_for_the_launcher(tmp_path: Path) -> None:
    """It may wait for minutes, which no step does."""

    def rank_main(_: int) -> tuple[set[Phase], Phase]:
        dist.init_process_group("gloo")
        recorder, phases = get_recorder(), set()
        recorder.enter_phase(Phase.TRAIN)

        class Planner(DefaultSavePlanner):
            def resolve_data(self, write_item: WriteItem) -> Any:
                if threading.get_ident() == recorder.training_thread:
                    phases.add(recorder.phase)
                return super().resolve_data(write_item)

        writer = pacekeeper.PeerStorageWriter(tmp_path / "storage" / "step-1")
        save_state({"weight": torch.ones(2)}, storage_writer=writer, planner=Planner())
        return phases, recorder.phase

    assert run_ranks(rank_main, 1, runtime=tmp_path) == [({Phase.CHECKPOINT}, Phase.TRAIN)]


def test_without_a_launcher_the_storage_is_all_that_is_used(tmp_path: Path) -> None:
    def rank_main(_: int) -> list[int]:
        dist.init_process_group("gloo")
        training = Training()
        training.train(1)
        writer = pacekeeper.PeerStorageWriter(tmp_path / "storage")
        save_state(training.state(), checkpoint_id=tmp_path / "storage" / "step-1", storage_writer=writer)
        assert isinstance(pickle.loads(pickle.dumps(writer)), FileSystemWriter)
        training.load(FileSystemReader(tmp_path / "storage" / "step-1"))
        return [training.step, resume(tmp_path)[0]]

    assert run_ranks(rank_main, RANKS) == [[1, 1]] * RANKS


def test_a_killed_rank_of_a_launcher_resumes_from_the_save_before_while_its_storage_is_blocked(tmp_path: Path) -> None:
    ends = []
    for name in ("killed", "whole"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "whole":
            (folder / "released").touch()
        with start_local_run(folder, script=PEER_SAVES_SCRIPT) as pid:
            assert exit_code(pid, folder) == 0
        ends.append(torch.load(folder / "end-0"))
    assert [(tmp_path / "killed" / f"resumed-{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert all(map(torch.equal, *ends))
    stored = [(tmp_path / "killed" / "storage" / f"step-{step}" / ".metadata").exists() for step in (2, 3, 4)]
    assert stored == [True] * 3, "uploads end before the ranks do, that of the killed ranks first"
