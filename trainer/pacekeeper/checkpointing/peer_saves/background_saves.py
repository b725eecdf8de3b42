"""What happens to a save after the training has gone on: copies on other nodes, and the write to the script's storage.

Each rank runs these jobs in the same order, in a thread for each of the two: a storage that blocks delays no copy.
"""

from __future__ import annotations

import atexit
import copy
import inspect
import io
import logging
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from pacekeeper_analysis.errors import InputError

from ..storage.checkpoint_folder import describe_error, summarize_reasons
from ..versions import StateVersion
from .save_group import SaveGroup
from .save_memory import SavedItem, SaveIndex, ShardWriter, find_chunk, read_items

_log = logging.getLogger(__name__)


class UploadOutcome(Enum):
    """Outcome of writing a save to the script's storage, the same on all ranks."""

    STORED = "Stored"
    FAILED = "Failed"
    ABANDONED = "Abandoned"  # the ranks did not complete the save itself


@dataclass(frozen=True)
class Commit:
    """What the coordinator has once all ranks have completed their part of a save."""

    metadata: Metadata
    index: SaveIndex | None
    """None: the save is not in memory."""


@dataclass
class BackgroundSave:
    """A save whose jobs run, or have run."""

    version: StateVersion
    is_in_memory: bool
    """False: the ranks have written it to the storage themselves."""
    committed: Future[Commit | None] = field(default_factory=Future)
    """Set on the coordinator only. None: the ranks did not complete the save."""
    counts: Future[bool] = field(default_factory=Future)
    """Whether the save counts, once copies on other nodes are made, or have failed."""
    uploaded: Future[UploadOutcome] = field(default_factory=Future)

    def wait_until_copied(self) -> bool:
        """Wait for the copies, and return whether the save counts in memory."""
        try:
            return self.counts.result()
        except Exception as error:  # a peer is gone: the round is about to end
            _log.warning("a save was not copied to other workers: %s", error)
            return False

    def wait_for_upload(self) -> UploadOutcome:
        """Wait for the outcome of the upload."""
        try:
            return self.uploaded.result()
        except Exception as error:  # the same
            _log.warning("a save was not written to its storage: %s", error)
            return UploadOutcome.FAILED

    def abandon(self) -> None:
        """Give up a save that was not committed. It changes nothing if it was."""
        if not self.committed.done():
            self.committed.set_result(None)


def start_copying(group: SaveGroup, save: BackgroundSave) -> None:
    """Copy a save to other workers, in the background."""
    _get_thread("pacekeeper-copy-save").submit(save.counts, lambda: _copy_save(group, save))


def start_upload(group: SaveGroup, save: BackgroundSave, storage: StorageWriter, plan: SavePlan) -> None:
    """Write a save from memory to `storage`, in the background. `plan`: what this rank writes."""
    _get_thread("pacekeeper-upload-save").submit(save.uploaded, lambda: _upload_save(group, save, storage, plan))
    _pending.append(save)


def resume_upload(
    group: SaveGroup, version: StateVersion, index_server: int, index: SaveIndex | None, storage: StorageWriter
) -> BackgroundSave:
    """Write a save of an earlier round, which has not reached its storage, to `storage`, in the background.

    `index`: what the rank `index_server` holds. `storage`: a writer for this save alone.
    """
    save = BackgroundSave(version, is_in_memory=True)
    save.committed.set_result(None)  # in the earlier round
    save.counts.set_result(True)
    _get_thread("pacekeeper-upload-save").submit(
        save.uploaded,
        lambda: _plan_and_upload(group, version, group.upload_channel.broadcast(index, index_server), storage),
    )
    _pending.append(save)
    return save


def start_replacing(group: SaveGroup, save: BackgroundSave, writer: ShardWriter) -> None:
    """Remove older saves from memory once the storage has a save that is not in memory, in the background."""
    save.counts.set_result(False)
    _get_thread("pacekeeper-upload-save").submit(save.uploaded, lambda: _replace_saves(group, save, writer))
    _pending.append(save)


def _copy_save(group: SaveGroup, save: BackgroundSave) -> bool:
    """Give each worker the save's index, and send this rank's shard to another node. Collective."""
    commit = save.committed.result() if group.rank == 0 else None
    index: SaveIndex | None = group.copy_channel.broadcast(None if commit is None else commit.index)
    if index is None:
        return False
    if group.rank != 0 and group.is_first_of_worker():
        try:
            group.memory.write_index(save.version, group.size, index)
        except (OSError, InputError) as error:
            _log.warning("the index of a save is not on this worker: %s", error)
    if group.sender is not None:
        group.sender.send(save.version)
        group.sender.wait(threading.TIMEOUT_MAX)  # it gives up by itself if the network is too slow
    return True


def _upload_save(group: SaveGroup, save: BackgroundSave, storage: StorageWriter, plan: SavePlan) -> UploadOutcome:
    """Write this rank's part to the storage; the coordinator completes it. Collective."""

    def read_shard() -> tuple[SavePlan, list[SavedItem]]:
        slot = group.memory.create_shard(group.rank, group.size).read_unchecked(save.version)
        if slot is None:
            raise OSError("the save is no longer in memory")
        return plan, read_items(slot)

    return _write_and_complete(group, save.version, storage, read_shard, save.committed.result)


def _write_and_complete(
    group: SaveGroup,
    version: StateVersion,
    storage: StorageWriter,
    read_shard: Callable[[], tuple[SavePlan, list[SavedItem]]],
    get_commit: Callable[[], Commit | None],
) -> UploadOutcome:
    """Write what `read_shard` returns; the coordinator completes the checkpoint. Collective.

    `get_commit`: returns what the coordinator has; None if the ranks did not complete the save.
    """
    failure, results = "", []
    try:
        plan, items = read_shard()
        results = storage.write_data(plan, _SlotPlanner(items)).wait()
    except (Exception, CheckpointException) as error:  # of the script's storage; the latter is a BaseException
        failure = f"rank {group.rank}: {describe_error(error)}"
    outcome = _agree_on_outcome(
        group, (failure, results), lambda contents: _complete_upload(get_commit(), storage, contents)
    )
    if outcome is UploadOutcome.STORED and group.is_first_of_worker():
        group.memory.mark_stored(version, group.size)
    return outcome


def _plan_and_upload(
    group: SaveGroup, version: StateVersion, index: SaveIndex | None, storage: StorageWriter
) -> UploadOutcome:
    """Plan an upload again, and write it. Collective. ABANDONED: a rank no longer has its shard."""
    failure, local_plan, items = "", None, []
    try:
        slot = group.memory.open_shard(group.rank, group.size).read(version)
        if slot is None or index is None:
            raise OSError("the save of an earlier round is no longer in the memory of this worker")
        items = read_items(slot)
        storage.reset(index.checkpoint_id)
        set_up_writer(storage, group.rank == 0, rank=group.rank, use_collectives=True)
        write_items = [_make_write_item(item.index, index.metadata) for item in items]
        local_plan = storage.prepare_local_plan(SavePlan(write_items))
    except (Exception, CheckpointException) as error:  # of the script's storage, too
        failure = f"rank {group.rank}: {describe_error(error)}"
    contents = group.upload_channel.gather(pickle.dumps((failure, local_plan)))
    plans = None if contents is None else _plan_globally(storage, contents)
    plans = pickle.loads(group.upload_channel.broadcast(pickle.dumps(plans)))
    if plans is None or index is None:
        return UploadOutcome.ABANDONED
    commit = Commit(index.metadata, index)
    return _write_and_complete(group, version, storage, lambda: (plans[group.rank], items), lambda: commit)


def _plan_globally(storage: StorageWriter, contents: Sequence[bytes]) -> list[SavePlan] | None:
    """Return the plans of all ranks; None: one of them cannot take part."""
    local_plans = [pickle.loads(content) for content in contents]
    reasons = summarize_reasons(failure for failure, _ in local_plans if failure)
    if not reasons:
        try:
            return storage.prepare_global_plan([plan for _, plan in local_plans])
        except (Exception, CheckpointException) as error:  # of the script's storage
            reasons = describe_error(error)
    _log.warning("the newest save of the previous round is in memory only, not in its storage: %s", reasons)
    return None


def _replace_saves(group: SaveGroup, save: BackgroundSave, writer: ShardWriter) -> UploadOutcome:
    """Remove what is in memory if the ranks have completed a save elsewhere. Collective."""
    outcome = _agree_on_outcome(
        group, None, lambda _: UploadOutcome.ABANDONED if save.committed.result() is None else UploadOutcome.STORED
    )
    if outcome is UploadOutcome.STORED:
        writer.forget()
        if group.is_first_of_worker():
            group.memory.remove_all()
    return outcome


def _agree_on_outcome(
    group: SaveGroup, own_result: Any, decide: Callable[[Sequence[bytes]], UploadOutcome]
) -> UploadOutcome:
    """Have the coordinator decide from the pickled results of all ranks. Collective.

    The results are what torch.distributed.checkpoint exchanges between the same ranks, in the same form.
    """
    contents = group.upload_channel.gather(pickle.dumps(own_result))
    outcome = None if contents is None else decide(contents).value
    return UploadOutcome(group.upload_channel.broadcast(outcome))


def _complete_upload(commit: Commit | None, storage: StorageWriter, contents: Sequence[bytes]) -> UploadOutcome:
    """Write the metadata, which makes the checkpoint count, if all ranks have written their parts."""
    if commit is None:
        return UploadOutcome.ABANDONED
    results: list[list[WriteResult]] = []
    failures = []
    for content in contents:
        failure, rank_results = pickle.loads(content)
        failures.append(failure)
        results.append(rank_results)
    reasons = summarize_reasons(failure for failure in failures if failure)
    if not reasons:
        try:
            storage.finish(copy.copy(commit.metadata), results)
        except (Exception, CheckpointException) as error:  # of the script's storage
            reasons = describe_error(error)
    if reasons:
        name = "" if commit.index is None else commit.index.checkpoint_id
        _log.warning(
            "the save %s is in memory only, it could not be written to its storage: %s; the save after the next one "
            "is written before the training goes on",
            name,
            reasons,
        )
        return UploadOutcome.FAILED
    return UploadOutcome.STORED


def set_up_writer(storage: StorageWriter, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
    """Set up a storage writer as torch.distributed.checkpoint does: older ones take no further arguments."""
    if "kwargs" in inspect.signature(storage.set_up_storage_writer).parameters:
        storage.set_up_storage_writer(is_coordinator, *args, **kwargs)
    else:
        storage.set_up_storage_writer(is_coordinator)


def _make_write_item(index: MetadataIndex, metadata: Metadata) -> WriteItem:
    """Return the item of a plan that wrote what `index` names."""
    description = metadata.state_dict_metadata[index.fqn]
    if not isinstance(description, TensorStorageMetadata):
        return WriteItem(index, WriteItemType.BYTE_IO)
    chunk = find_chunk(description, index)
    return WriteItem(
        index,
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, description.properties, description.size),
    )


class _SlotPlanner(DefaultSavePlanner):
    """Resolves the items of a plan to a slot's content."""

    def __init__(self, items: Sequence[SavedItem]) -> None:
        super().__init__()
        self._items = {item.index: item for item in items}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        item = self._items[write_item.index]
        content = item.content
        if item.is_bytes:
            return io.BytesIO(content.numpy().tobytes())
        if not content.numel():
            return torch.empty_like(content)
        # A storage of its own, without a copy: a writer may save the whole storage of a tensor.
        buffer = content.reshape(-1).view(torch.uint8).numpy().data
        return torch.frombuffer(buffer, dtype=content.dtype).view(content.shape)


class _JobThread:
    """A daemon thread that runs jobs one after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run_jobs, name=name, daemon=True).start()

    def submit(self, future: Future[Any], job: Callable[[], Any]) -> None:
        """Run `job` after those before, and set `future` to its result."""
        self._jobs.put((future, job))

    def _run_jobs(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, job  # they hold a slot's memory


_pending: list[BackgroundSave] = []
"""Saves that were begun, and whose uploads may not have ended."""


@cache
def _get_thread(name: str) -> _JobThread:
    """Return the thread; the first call also makes the process wait for its uploads at its end."""
    _watch_exceptions()
    return _JobThread(name)


def forget_ended_saves() -> None:
    """Drop the references to saves whose uploads have ended."""
    _pending[:] = [save for save in _pending if not save.uploaded.done()]


@cache
def _watch_exceptions() -> None:
    """Wait for uploads before the process ends, unless an exception ends it: then the ranks are to restart soon."""
    has_failed = threading.Event()
    process = os.getpid()
    hook = sys.excepthook

    def report(*arguments: Any) -> None:
        has_failed.set()
        hook(*arguments)

    def wait_for_uploads() -> None:
        for save in _pending if os.getpid() == process else ():  # the threads are not in a fork
            save.abandon()
            if not has_failed.is_set():
                save.wait_for_upload()

    sys.excepthook = report
    atexit.register(wait_for_uploads)
