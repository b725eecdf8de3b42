"""A storage writer of torch.distributed.checkpoint that keeps the newest save in memory, and on another node.

    dcp.save(state, checkpoint_id=path, storage_writer=pacekeeper.PeerStorageWriter(path))

The training goes on once all ranks have copied their parts into memory. The storage gets them in the background.
"""

from __future__ import annotations

import copy
import logging
import os
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from pacekeeper.observe.monitoring import show_phase
from pacekeeper.torch_internals import open_checkpoint_storage
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.records import Phase

from ..versions import NO_STATE_VERSION
from .background_saves import (
    BackgroundSave,
    Commit,
    UploadOutcome,
    forget_ended_saves,
    resume_upload,
    set_up_writer,
    start_copying,
    start_replacing,
    start_upload,
)
from .save_choice import choose_save, find_index_server
from .save_group import DEFAULT_SAVE_NAME, SaveGroup, open_save_group
from .save_memory import ItemPlace, ShardWriter, make_index

_log = logging.getLogger(__name__)


class PeerStorageWriter(StorageWriter):
    """Keeps the newest save in memory and on another node, and writes through to the script's storage.

    Without a launcher of Pacekeeper, and on any failure of its own, it writes to the storage as the script would have.
    """

    def __init__(
        self,
        storage: StorageWriter | str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        name: str = DEFAULT_SAVE_NAME,
    ) -> None:
        """Create the writer. Collective over the process group.

        `storage`: the script's own writer, or a path or URL, for which torch chooses one.
        `process_group`: what `dcp.save` is given.
        `name`: name of these saves in memory, of lower-case letters, digits, and underscores. Give each part of a
        checkpoint that is saved by a `dcp.save` of its own another one.

        Raises InputError if the name is invalid.
        """
        super().__init__()
        self._template = storage if isinstance(storage, StorageWriter) else open_checkpoint_storage(storage, False)
        self._storage = self._template
        """Writer of the present save: a copy, since an earlier one may still write in the background."""
        group = open_save_group(name, process_group)
        self._saver = None if group is None else _get_saver(group)
        self._checkpoint_id: str | os.PathLike[str] | None = getattr(self._template, "checkpoint_id", None)
        self._is_managed = False
        """Whether the present save goes through memory, or may."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the script's own writer in another process, which has no memory of its own."""
        return copy.copy, (self._template,)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The ID of the present save, as the script's writer has it."""
        return self._checkpoint_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._template.reset(checkpoint_id)
        self._checkpoint_id = checkpoint_id or getattr(self._template, "checkpoint_id", None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._storage = copy.copy(self._template)
        set_up_writer(self._storage, is_coordinator, *args, **kwargs)
        saver = self._saver
        self._is_managed = (
            saver is not None
            and kwargs.get("use_collectives", True)
            and kwargs.get("rank", saver.group.rank) == saver.group.rank
            and is_coordinator == (saver.group.rank == 0)
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self._storage.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._saver is not None and len(plans) != self._saver.group.size:
            self._is_managed = False  # a save of this rank alone
        return self._storage.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._saver is None or not self._is_managed:
            return self._storage.write_data(plan, planner)
        with show_phase(Phase.CHECKPOINT):  # it may wait for other ranks and for the storage
            results = self._saver.save(plan, planner, self._storage)
        if results is None:
            return self._storage.write_data(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self._saver is None or not self._is_managed:
            self._storage.finish(metadata, results)
        else:
            self._saver.commit(str(self._checkpoint_id or ""), metadata, results, self._storage)

    def storage_meta(self) -> StorageMeta | None:
        return self._template.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(FileSystemWriter.validate_checkpoint_id(checkpoint_id))


class _Saver:
    """One rank's saves of one name, one after the other. All writers of the name share it."""

    def __init__(self, group: SaveGroup) -> None:
        self.group = group
        self._writer = ShardWriter(group.memory, group.rank, group.size)
        self._saves: list[BackgroundSave] = []
        """The newest two."""
        self._kept = NO_STATE_VERSION
        """The newest save that counts: its slot is not written."""
        self._sequence = 0
        """Number of the newest save; 0: the memory has not been examined yet."""
        self._count = 0
        """Saves in memory of this process."""

    def save(self, plan: SavePlan, planner: SavePlanner, storage: StorageWriter) -> list[WriteResult] | None:
        """Copy what this rank writes into memory, and begin to write it to `storage`. Collective.

        None, on all ranks: it is not in memory, and the caller writes it to the storage. The save counts once the
        coordinator has called `commit`.
        """
        sizes = self._write_to_memory(plan, planner, storage)
        save = BackgroundSave(self.group.get_version(self._sequence), is_in_memory=sizes is not None)
        self._saves = [*self._saves[-1:], save]
        forget_ended_saves()
        if sizes is None:
            start_replacing(self.group, save, self._writer)
            return None
        start_copying(self.group, save)
        start_upload(self.group, save, storage, plan)
        return [
            WriteResult(item.index, nbytes, ItemPlace(self.group.rank, position, nbytes))
            for position, (item, nbytes) in enumerate(zip(plan.items, sizes, strict=True))
        ]

    def commit(
        self, checkpoint_id: str, metadata: Metadata, results: list[list[WriteResult]], storage: StorageWriter
    ) -> None:
        """Complete a save, of which all ranks have written their parts. Only the coordinator calls it."""
        save = self._saves[-1]
        if not save.is_in_memory:
            storage.finish(metadata, results)
            save.committed.set_result(Commit(metadata, None))
            return
        try:
            places = [(result.index, result.storage_data) for rank_results in results for result in rank_results]
            index = make_index(checkpoint_id, metadata, places)
            self.group.memory.write_index(save.version, self.group.size, index)
        except (OSError, InputError) as error:
            _log.warning("the save %s is not in memory, and waits for its storage: %s", checkpoint_id, error)
            save.committed.set_result(Commit(metadata, None))
            if save.wait_for_upload() is not UploadOutcome.STORED:
                raise RuntimeError(f"the save {checkpoint_id} could not be written; the log has the reason") from error
            return
        save.committed.set_result(Commit(metadata, index))

    def _write_to_memory(self, plan: SavePlan, planner: SavePlanner, storage: StorageWriter) -> list[int] | None:
        """Return the bytes of each item in memory; None, on all ranks: a rank cannot have it there."""
        group = self.group
        try:
            self._examine_memory(storage)
            is_ready = self._wait_for_slot()
            self._sequence += 1
            if not group.channel.all_agree(is_ready):
                return None
            if self._count == 1:  # before that, they may be needed with what the training began from
                group.remove_moved_shards()
            sizes = self._try_to_write(plan, planner)
            if not group.channel.all_agree(sizes is not None):
                self._writer.release()
                return None
            self._writer.publish()
            self._count += 1
        except Exception as error:  # a peer is gone: the storage's own save fails, too
            _log.warning("a save goes to the storage, not into memory: %s", error)
            return None
        return sizes

    def _examine_memory(self, storage: StorageWriter) -> None:
        """Find, at this process's first save, what the memory has from earlier rounds. Collective.

        The newest save of an earlier round may not have reached its storage: its upload begins again.
        """
        if self._sequence:
            return
        group = self.group
        gathered = group.channel.all_gather(group.memory.list_saves(group.worker))
        versions = [version for saves in gathered for version, _, _ in saves.shards]
        versions += [entry.version for saves in gathered for entry in saves.entries]
        self._sequence = max((version.step for version in versions), default=0)
        chosen = choose_save(gathered, lambda _: True)
        if chosen is None:
            return
        self._kept = chosen.version
        if not chosen.is_stored and chosen.world_size == group.size:
            index = group.memory.read_index(chosen.version, chosen.world_size)
            server = find_index_server(chosen, gathered)
            self._saves = [resume_upload(group, chosen.version, server, index, copy.copy(storage))]

    def _wait_for_slot(self) -> bool:
        """Wait until the older slot is no longer needed; return whether saves still reach the storage.

        The other slot's save is then on another node, so that losing a node while this one is written costs no more.
        What the older slot holds is in the storage.
        """
        for save in self._saves:
            save.abandon()
        if self._saves:
            newest = self._saves[-1]
            if newest.wait_until_copied():
                self._kept = newest.version
            if not newest.is_in_memory and newest.wait_for_upload() is UploadOutcome.STORED:
                self._kept = NO_STATE_VERSION
        return not self._saves[:-1] or self._saves[0].wait_for_upload() is not UploadOutcome.FAILED

    def _try_to_write(self, plan: SavePlan, planner: SavePlanner) -> list[int] | None:
        try:
            return self._writer.write(self._sequence, plan.items, planner, self._kept)
        except Exception as error:  # also of the script's objects: its own storage then raises it
            _log.warning(
                "a save is written to its storage before the training goes on, since there is no copy in memory: %s; "
                "give the container and its runtime volume more memory",
                error,
            )
            return None


@cache
def _get_saver(group: SaveGroup) -> _Saver:
    """Return the one saver of a group."""
    return _Saver(group)
