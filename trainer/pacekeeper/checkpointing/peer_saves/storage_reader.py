"""A storage reader of torch.distributed.checkpoint that loads a save from memory, from another node, or from storage.

reader = pacekeeper.PeerStorageReader(folder)
newest = reader.find_newest()
if newest is not None:
    dcp.load(state, storage_reader=reader)
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from pacekeeper.observe.monitoring import show_phase
from pacekeeper.torch_internals import open_checkpoint_storage
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.records import Phase

from ..background import run_in_background
from ..versions import StateVersion
from .item_transfer import ItemTransfer, MappedShards
from .save_choice import SaveEntry, WorkerSaves, assign_servers, choose_save, find_index_server
from .save_group import DEFAULT_SAVE_NAME, SaveGroup, open_save_group
from .save_memory import ItemPlace, SaveIndex

STORAGE_CHECK_SECONDS = 10.0
"""Seconds within which the storage reports whether it still has a checkpoint. After that, the copy in memory counts."""
_METADATA_FILE = ".metadata"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ChosenSave:
    """A save in memory that all ranks load."""

    entry: SaveEntry
    index: SaveIndex
    servers: list[int]
    """Rank that serves each shard."""
    shards: MappedShards


class PeerStorageReader(StorageReader):
    """Loads the newest save that all ranks can read: from memory, from another node's memory, or from the storage.

    The number of ranks may differ from that of the ranks that wrote it.
    """

    def __init__(
        self,
        storage: StorageReader | str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        name: str = DEFAULT_SAVE_NAME,
    ) -> None:
        """Create the reader. Collective over the process group.

        `storage`: the script's own reader, or a path or URL, for which torch chooses one: of a checkpoint, or of the
        folder of all checkpoints, for `find_newest`.
        `process_group`: what `dcp.load` is given.
        `name`: as for `PeerStorageWriter`.

        Raises InputError if the name is invalid.
        """
        super().__init__()
        self._storage = storage if isinstance(storage, StorageReader) else open_checkpoint_storage(storage, True)
        self._checkpoint_id: str | os.PathLike[str] | None = getattr(self._storage, "checkpoint_id", None)
        self._group = open_save_group(name, process_group)
        self._process_group = process_group
        self._chosen: _ChosenSave | None = None
        """The save in memory that is loaded; None: the storage's."""
        self._is_found = False
        """Whether `find_newest` has chosen."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The ID of the save that is loaded."""
        return self._checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(FileSystemReader.validate_checkpoint_id(checkpoint_id))

    def find_newest(self) -> str | None:
        """Return the ID of the newest checkpoint in the reader's folder, which `dcp.load` then loads. Collective.

        Newest is the one with the highest last number in its name, in memory or in the storage. None: there is none.
        Raises OSError if the storage cannot be listed, and the memory has none.
        """
        folder = str(self._checkpoint_id or "")
        group = self._group
        # Before the storage is listed: an upload may end in between, and is then no deleted checkpoint.
        stored_before: frozenset[StateVersion] = frozenset() if group is None else _list_stored_versions(group)
        stored, failure = self._list_stored(folder)
        newest_stored = max(stored, key=read_number, default=None)

        def is_wanted(entry: SaveEntry) -> bool:
            checkpoint_id = entry.checkpoint_id
            if normalize_id(os.path.dirname(checkpoint_id.rstrip("/"))) != normalize_id(folder):
                return False
            is_listed = normalize_id(checkpoint_id) in map(normalize_id, stored)
            if entry.version in stored_before and not failure and not is_listed:
                return False  # the script has deleted it
            return newest_stored is None or read_number(checkpoint_id) >= read_number(newest_stored)

        self._chosen = None if group is None else _choose_from_memory(group, is_wanted)
        newest = newest_stored if self._chosen is None else self._chosen.entry.checkpoint_id
        if failure and newest is None:
            raise OSError(f"the checkpoints in {folder} cannot be listed, and none is in memory: {failure}")
        if newest is not None:
            self._storage.reset(newest)
            self._checkpoint_id = newest
            self._is_found = True
        return newest

    def is_in_memory(self) -> bool:
        """Return whether all ranks can load the reader's checkpoint from memory. Collective; the same on all ranks."""
        return self._group is not None and self._find_in_memory(self._group) is not None

    def discard_saves(self, is_discarded: Callable[[str], bool]) -> None:
        """Discard the saves of earlier rounds in memory whose IDs `is_discarded` accepts. Collective.

        Training goes on from an older one: they are no longer the newest, and their uploads do not begin again.
        """
        group = self._group
        if group is None:
            return
        gathered: list[WorkerSaves] = group.load_channel.all_gather(group.memory.list_saves(group.worker))
        entries = [entry for saves in gathered for entry in saves.entries if entry.version.round != group.round]
        discarded = {(entry.version, entry.world_size) for entry in entries if is_discarded(entry.checkpoint_id)}
        if discarded and group.is_first_of_worker():
            try:
                group.memory.void_saves(discarded)
            except OSError as error:  # the other ranks wait
                _log.warning("outdated saves stay in this worker's memory: %s", error)
        group.load_channel.all_agree(True)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._storage.reset(checkpoint_id)
        if checkpoint_id is not None and (
            self._checkpoint_id is None or normalize_id(str(checkpoint_id)) != normalize_id(str(self._checkpoint_id))
        ):
            self._checkpoint_id, self._is_found = checkpoint_id, False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        group = self._group
        if group is None or kwargs.get("rank") is not None:
            self._chosen = None
        elif not self._is_found:
            self._chosen = self._find_in_memory(group)
        if self._chosen is None:
            return self._storage.read_metadata(*args, **kwargs)
        index = self._chosen.index
        places: dict[MetadataIndex, ItemPlace] = dict(index.places)
        return replace(index.metadata, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._chosen is not None:
            return
        if "kwargs" in inspect.signature(self._storage.set_up_storage_reader).parameters:
            self._storage.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        else:
            self._storage.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan if self._chosen is not None else self._storage.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans if self._chosen is not None else self._storage.prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chosen, group = self._chosen, self._group
        if chosen is None or group is None:
            return self._storage.read_data(plan, planner)
        transfer = ItemTransfer(group.load_channel, chosen.index, chosen.servers, chosen.shards.items)
        with show_phase(Phase.RESTORE):
            transfer.load_items(plan, planner)
        self._chosen, self._is_found = None, False  # a later save will overwrite these slots
        _log.info("loaded the save %s from memory", chosen.entry.checkpoint_id)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _list_stored(self, folder: str) -> tuple[list[str], str]:
        """Return the first rank's list of checkpoints in the storage, and why it has none; "": it has. Collective."""
        is_distributed = dist.is_available() and dist.is_initialized()
        outcome: list[Any] = [[], ""]
        if not is_distributed or dist.get_rank(self._process_group) == 0:
            try:
                outcome = [list_checkpoints(self._storage, folder), ""]
            except Exception as error:  # of any storage
                outcome = [[], f"{type(error).__name__}: {error}"]
        if self._group is not None:
            outcome = self._group.load_channel.broadcast(outcome)
        elif is_distributed:
            dist.broadcast_object_list(outcome, group=self._process_group, group_src=0)
        return outcome[0], outcome[1]

    def _find_in_memory(self, group: SaveGroup) -> _ChosenSave | None:
        """Return the newest save of the reader's checkpoint in memory. Collective."""
        wanted_id = normalize_id(str(self._checkpoint_id or ""))
        return _choose_from_memory(
            group, lambda entry: normalize_id(entry.checkpoint_id) == wanted_id, self._is_deleted
        )

    def _is_deleted(self) -> bool:
        """Return whether the script has deleted the checkpoint from its storage. Without an answer, it has not."""
        finished = threading.Event()
        reader = copy.copy(self._storage)
        future = run_in_background(reader.read_metadata, "pacekeeper-check-storage")
        future.add_done_callback(lambda _: finished.set())
        return finished.wait(STORAGE_CHECK_SECONDS) and isinstance(future.exception(), FileNotFoundError)


def normalize_id(checkpoint_id: str) -> str:
    """Return the same text for all forms of a path; a URL stays as it is."""
    return checkpoint_id.rstrip("/") if "://" in checkpoint_id else os.path.abspath(checkpoint_id)


def read_number(checkpoint_id: str) -> int:
    """Return the last number in the name of a checkpoint; -1: it has none, and is older than those that have one."""
    numbers = re.findall(r"\d+", PurePosixPath(checkpoint_id).name)
    return int(numbers[-1]) if numbers else -1


def list_checkpoints(storage: Any, folder: str) -> list[str]:
    """Return the IDs of the complete checkpoints in a folder of a storage that has file-system access."""
    fs = getattr(storage, "fs", None)
    if fs is None or not hasattr(fs, "ls") or not fs.exists(folder):
        return []
    children = [f"{folder.rstrip('/')}/{PurePosixPath(str(child)).name}" for child in fs.ls(folder)]
    return [child for child in children if fs.exists(fs.concat_path(child, _METADATA_FILE))]


def _list_stored_versions(group: SaveGroup) -> frozenset[StateVersion]:
    """Return the saves in memory that the storage has, too. Collective."""
    try:
        gathered: list[WorkerSaves] = group.load_channel.all_gather(group.memory.list_saves(group.worker))
    except (OSError, RuntimeError, InputError) as error:
        _log.warning("the memory's saves cannot be compared with the storage: %s", error)
        return frozenset()
    return frozenset(entry.version for saves in gathered for entry in saves.entries if entry.is_stored)


def _choose_from_memory(
    group: SaveGroup, is_wanted: Callable[[SaveEntry], bool], is_deleted: Callable[[], bool] = lambda: False
) -> _ChosenSave | None:
    """Return the newest wanted save in memory whose bytes are those that were written; None: use the storage.

    Collective; the result is the same on all ranks. `is_deleted`: whether the storage had the save, and has lost it.
    """
    with show_phase(Phase.RESTORE):
        return _try_to_choose(group, is_wanted, is_deleted)


def _try_to_choose(
    group: SaveGroup, is_wanted: Callable[[SaveEntry], bool], is_deleted: Callable[[], bool]
) -> _ChosenSave | None:
    try:
        while True:
            gathered: list[WorkerSaves] = group.load_channel.all_gather(group.memory.list_saves(group.worker))
            entry = choose_save(gathered, is_wanted)
            if entry is None:
                return None
            if entry.is_stored and group.load_channel.broadcast(is_deleted() if group.rank == 0 else None):
                return None
            servers = assign_servers(entry, gathered)
            index_server = find_index_server(entry, gathered)
            own_index = group.memory.read_index(entry.version, entry.world_size)
            index = group.load_channel.broadcast(own_index, index_server)
            shards = MappedShards.open(group, entry, servers)
            if not group.load_channel.all_agree(shards.is_intact and index is not None):
                continue  # a torn shard is void: another copy of it, or an older save, is next
            is_mapped = shards.map_local(group, entry, servers)
            return _ChosenSave(entry, index, servers, shards) if group.load_channel.all_agree(is_mapped) else None
    except (OSError, RuntimeError, InputError) as error:
        _log.warning("the newest save is loaded from its storage, not from memory: %s", error)
        return None
