"""The saves in the memory of one worker: a shard per rank in two slots, and the index of each complete save.

Slots, their checksums, and their memory are those of snapshots (`snapshot_slots`). A shard holds what one rank writes.
The index is written last, by the rank that coordinates the save, and then copied to each worker: a save without one
does not count.
"""

from __future__ import annotations

import io
import logging
import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from pacekeeper.safe_serialization import allow_classes
from pacekeeper_analysis.errors import InputError

from ..rank_state import RANK_STATE_BYTES
from ..snapshots.shard_names import format_shard_name
from ..snapshots.snapshot_copies import CudaCopyStreams, DeviceCopies, HostCopies, SlotCopies
from ..snapshots.snapshot_slots import SlotMemory, Snapshots, unpack_slot
from ..versions import NO_STATE_VERSION, StateVersion
from .save_choice import SaveEntry, WorkerSaves

_log = logging.getLogger(__name__)
_MIN_BLOB_BYTES = 1 << 16
"""Least room for the values of a shard that are no tensors. Its size is a power of two: they vary by some bytes."""
_NO_RANK_STATES = torch.zeros(RANK_STATE_BYTES, dtype=torch.uint8)


@dataclass(frozen=True)
class ItemPlace:
    """Where an item lies."""

    shard: int
    position: int
    """Position among the items of the shard."""
    nbytes: int


@dataclass(frozen=True)
class SaveIndex:
    """Describes a save whose shards are complete."""

    checkpoint_id: str
    metadata: Metadata
    """As the planner has made it, without the data of a storage."""
    places: tuple[tuple[MetadataIndex, ItemPlace], ...]


@dataclass(frozen=True)
class SavedItem:
    """An item in a mapped slot."""

    index: MetadataIndex
    content: torch.Tensor
    """The tensor, or the bytes as uint8; a view of the slot."""
    is_bytes: bool


class SaveMemory:
    """The folder of saves of one worker. Ranks of a worker share it."""

    def __init__(self, folder: Path, name: str, round_: int, memory: SlotMemory | None = None) -> None:
        """Open the folder, which exists, and has the saves of one name. Those of another name are not loaded."""
        self.folder = folder
        self._round = round_
        self._memory = memory or SlotMemory()
        self._fingerprint = zlib.crc32(name.encode())
        self._shards: dict[tuple[int, int], Snapshots] = {}
        self._indices: dict[int, Snapshots] = {}
        self._known_indices: dict[StateVersion, SaveIndex] = {}

    def list_saves(self, worker: str) -> WorkerSaves:
        """Return what is here; nothing if it cannot be read. Indices are verified; shards are not read."""
        try:
            return self._list_saves(worker)
        except OSError as error:  # the other ranks wait for the answer
            _log.warning("the saves in this worker's memory are not used: %s", error)
            return WorkerSaves(worker, (), frozenset())

    def _list_saves(self, worker: str) -> WorkerSaves:
        shards = set()
        pattern = re.compile(r"shard-(\d+)-of-(\d+)\.\d")
        index_pattern = re.compile(r"index-of-(\d+)\.\d")
        entries = []
        names = sorted(path.name for path in self.folder.iterdir())
        for rank, size in {(int(found[1]), int(found[2])) for name in names if (found := pattern.fullmatch(name))}:
            for version, _ in self.open_shard(rank, size).list_versions():
                if version != NO_STATE_VERSION:
                    shards.add((version, size, rank))
        for size in {int(found[1]) for name in names if (found := index_pattern.fullmatch(name))}:
            for version, _ in self._open_index(size).list_versions():
                index = None if version == NO_STATE_VERSION else self.read_index(version, size)
                if index is not None:
                    is_stored = self._get_mark(version, size).exists()
                    entries.append(SaveEntry(version, size, index.checkpoint_id, is_stored))
        return WorkerSaves(worker, tuple(entries), frozenset(shards))

    def open_shard(self, rank: int, world_size: int) -> Snapshots:
        """Return the slots of a rank's shard, for reading: the same object at each call."""
        key = rank, world_size
        if key not in self._shards:
            self._shards[key] = self.create_shard(rank, world_size)
        return self._shards[key]

    def create_shard(self, rank: int, world_size: int, copies: SlotCopies | None = None) -> Snapshots:
        """Return a new object for the slots of a rank's shard. `copies`: as for `Snapshots`."""
        return self._open(format_shard_name(rank, world_size), copies)

    def read_index(self, version: StateVersion, world_size: int) -> SaveIndex | None:
        """Return the index of a save; None: it is not here, or its bytes have changed."""
        if version not in self._known_indices:
            slot = self._open_index(world_size).read(version)
            if slot is None:
                return None
            try:
                index = unpack_slot(slot, None)[0]["index"]
            except InputError:
                return None
            if not isinstance(index, SaveIndex):
                return None
            self._known_indices[version] = index
        return self._known_indices[version]

    def write_index(self, version: StateVersion, world_size: int, index: SaveIndex) -> None:
        """Make a save count, and forget the oldest.

        Raises OSError without memory, InputError if the index cannot be saved.
        """
        slots = self._open_index(world_size)
        slots.write_oldest_next()
        slots.write(version.step, {"index": index}, self._fingerprint)
        slots.publish(_NO_RANK_STATES)

    def mark_stored(self, version: StateVersion, world_size: int) -> None:
        """Record that the script's storage has the save, and forget older records."""
        mark = self._get_mark(version, world_size)
        mark.touch()
        for other in self.folder.glob("stored-*"):
            if other != mark and not any(
                other == self._get_mark(known, world_size) for known, _ in self._open_index(world_size).list_versions()
            ):
                other.unlink(missing_ok=True)

    def remove_shards(self, keep: Collection[int], world_size: int) -> None:
        """Remove all shards of other ranks than `keep`: those that have moved to other workers."""
        pattern = re.compile(rf"shard-(\d+)-of-{world_size}\.\d")
        for path in self.folder.iterdir():
            if (found := pattern.fullmatch(path.name)) and int(found[1]) not in keep:
                path.unlink(missing_ok=True)

    def void_saves(self, saves: Collection[tuple[StateVersion, int]]) -> None:
        """Void saves of earlier rounds, by version and world size: their slots are written next."""
        for version, size, rank in self.list_saves("").shards:
            if (version, size) in saves:
                self.open_shard(rank, size).void_version(version)
        for version, size in saves:
            self._open_index(size).void_version(version)

    def remove_all(self) -> None:
        """Remove all saves of this name from the worker's memory: they are outdated."""
        for slots in self._indices.values():
            slots.release_slots()
        for path in self.folder.glob("*-of-*"):
            path.unlink(missing_ok=True)
        self._known_indices.clear()

    def _open_index(self, world_size: int) -> Snapshots:
        if world_size not in self._indices:
            self._indices[world_size] = self._open(f"index-of-{world_size}", None)
        return self._indices[world_size]

    def _open(self, file_name: str, copies: SlotCopies | None) -> Snapshots:
        return Snapshots(
            self.folder,
            file_name,
            round_=self._round,
            world_size=1,
            fingerprint=self._fingerprint,
            copies=copies,
            memory=self._memory,
        )

    def _get_mark(self, version: StateVersion, world_size: int) -> Path:
        return self.folder / f"stored-{version.step}-{version.round}-of-{world_size}.0"


class ShardWriter:
    """Writes one rank's shard."""

    def __init__(self, memory: SaveMemory, rank: int, world_size: int) -> None:
        self._memory = memory
        self._rank = rank
        self._world_size = world_size
        self._slots: Snapshots | None = None

    def write(self, sequence: int, items: Sequence[WriteItem], planner: SavePlanner, kept: StateVersion) -> list[int]:
        """Copy what the rank writes into the slot that does not hold `kept`; return the bytes of each item.

        `publish` makes it valid. Raises OSError without memory, and what the planner raises.
        """
        state, sizes = _encode_items(items, planner)
        slots = self._slots
        if slots is None:
            slots = self._slots = self._memory.create_shard(self._rank, self._world_size, _choose_copies(state))
        slots.write_other_next(kept)
        slots.write(sequence, state, self._memory._fingerprint, wait=True)
        slots.finish_copy()
        return sizes

    def publish(self) -> None:
        """Make the shard valid. Whether the save counts depends on its index."""
        assert self._slots is not None, "write() comes first"
        self._slots.publish(_NO_RANK_STATES)

    def release(self) -> None:
        """Release the memory of the slot that was written, or would be next."""
        if self._slots is not None:
            self._slots.release_slot()

    def forget(self) -> None:
        """Release the mapped memory of both slots, whose files are removed."""
        if self._slots is not None:
            self._slots.release_slots()
            self._slots = None


def read_items(slot: torch.Tensor) -> list[SavedItem]:
    """Return the items of a shard's slot. Raises InputError if it holds something else."""
    state, _ = unpack_slot(slot, None, copying_objects={"items", "values", "blob"})
    try:
        values, blob, items = iter(state["values"]), state["blob"], []
        for name, offset, hint, start, end in state["items"]:
            index = MetadataIndex(name, offset, hint)
            content = next(values) if start is None else blob[start:end]
            items.append(SavedItem(index, content, start is not None))
    except (LookupError, TypeError, ValueError, StopIteration, RuntimeError) as error:
        raise InputError(f"not a save: {error!r}") from error
    return items


def make_index(checkpoint_id: str, metadata: Metadata, places: Sequence[tuple[MetadataIndex, ItemPlace]]) -> SaveIndex:
    """Return the index of a save, without what a storage adds to its metadata."""
    return SaveIndex(checkpoint_id, replace(metadata, storage_data=None, storage_meta=None), tuple(places))


def find_chunk(description: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """Return the chunk of a tensor that `index` names."""
    return next(chunk for chunk in description.chunks if index.offset in (None, chunk.offsets))


def _encode_items(items: Sequence[WriteItem], planner: SavePlanner) -> tuple[dict[str, Any], list[int]]:
    """Return the state of a slot, which refers to the live tensors, and the bytes of each item."""
    encoded: list[list[Any]] = []
    values: list[torch.Tensor] = []
    blob = io.BytesIO()
    sizes = []
    for item in items:
        value = planner.resolve_data(item)
        offset = None if item.index.offset is None else list(item.index.offset)
        if isinstance(value, torch.Tensor):
            encoded.append([item.index.fqn, offset, item.index.index, None, None])
            values.append(value.detach())
            sizes.append(value.nbytes)
        else:
            start = blob.tell()
            blob.write(value.getbuffer())
            encoded.append([item.index.fqn, offset, item.index.index, start, blob.tell()])
            sizes.append(blob.tell() - start)
    capacity = max(_MIN_BLOB_BYTES, 1 << (blob.tell() - 1).bit_length())
    content = torch.frombuffer(bytearray(blob.getvalue().ljust(capacity, b"\0")), dtype=torch.uint8)
    return {"items": encoded, "values": values, "blob": content}, sizes


def _choose_copies(state: dict[str, Any]) -> SlotCopies:
    """Return the copies for a state. A copy from a GPU needs registered memory to be fast."""
    on_gpu = any(value.is_cuda for value in state["values"])
    return DeviceCopies(CudaCopyStreams(), ()) if on_gpu else HostCopies()


allow_classes(StateVersion, SaveEntry, WorkerSaves, ItemPlace, SaveIndex)
allow_classes(Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata)
allow_classes(TensorProperties)
