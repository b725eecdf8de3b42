"""Reads a save's items from shards of this worker, and the others from the ranks that serve them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from pacekeeper_analysis.errors import InputError

from .rank_channel import RankChannel
from .save_choice import SaveEntry
from .save_group import SaveGroup
from .save_memory import ItemPlace, SavedItem, SaveIndex, find_chunk, read_items


class MappedShards:
    """The shards of a save that this rank reads directly: those that a rank of its worker serves."""

    def __init__(self) -> None:
        self.is_intact = True
        """Whether the bytes of the shards that this rank serves are those that were written."""
        self.items: dict[int, list[SavedItem]] = {}
        """Items of each shard."""

    @classmethod
    def open(cls, group: SaveGroup, entry: SaveEntry, servers: Sequence[int]) -> MappedShards:
        """Verify and map the shards that this rank serves. A torn one is void from then on."""
        shards = cls()
        for shard in [shard for shard, server in enumerate(servers) if server == group.rank]:
            slots = group.memory.open_shard(shard, entry.world_size)
            slot = slots.read(entry.version)
            try:
                if slot is None:
                    raise InputError("its bytes have changed")
                shards.items[shard] = read_items(slot)
            except InputError:
                slots.exclude_version(entry.version)
                shards.is_intact = False
        return shards

    def map_local(self, group: SaveGroup, entry: SaveEntry, servers: Sequence[int]) -> bool:
        """Map the shards that other ranks of this worker have verified. Returns False if one is gone."""
        for shard, server in enumerate(servers):
            if shard not in self.items and server in group.worker_ranks:
                slot = group.memory.open_shard(shard, entry.world_size).read_unchecked(entry.version)
                if slot is None:
                    return False
                self.items[shard] = read_items(slot)
        return True


class ItemTransfer:
    """One load of a save from memory."""

    def __init__(
        self, channel: RankChannel, index: SaveIndex, servers: Sequence[int], items_by_shard: dict[int, list[SavedItem]]
    ) -> None:
        self._channel = channel
        self._index = index
        self._places: dict[MetadataIndex, ItemPlace] = dict(index.places)
        self._servers = servers
        self._items_by_shard = items_by_shard

    def load_items(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Load what the plan asks for. Collective. Raises InputError if an item does not fit."""
        requests: dict[tuple[int, int], list[ReadItem]] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            if place.shard in self._items_by_shard:
                _load_item(item, planner, self._items_by_shard[place.shard][place.position].content)
            else:
                requests.setdefault((place.shard, place.position), []).append(item)
        gathered = self._channel.all_gather([list(request) for request in requests])
        sends: list[Any] = []
        tag = 0
        for receiver, places in enumerate(gathered):  # in the same order on all ranks
            for shard, position in places:
                tag += 1
                if receiver == self._channel.rank:
                    content = self._receive(requests[shard, position][0].storage_index, tag)
                    for item in requests[shard, position]:
                        _load_item(item, planner, content)
                elif self._servers[shard] == self._channel.rank:
                    sends += self._send(self._items_by_shard[shard][position], receiver, tag)
        for send in sends:
            send.wait()

    def _send(self, item: SavedItem, receiver: int, tag: int) -> list[Any]:
        content = _view_bytes(item.content)
        return [self._channel.send(content, receiver, tag)] if len(content) else []

    def _receive(self, index: MetadataIndex, tag: int) -> torch.Tensor:
        place = self._places[index]
        content = torch.empty(place.nbytes, dtype=torch.uint8)
        if place.nbytes:
            self._channel.receive(content, self._servers[place.shard], tag)
        description = self._index.metadata.state_dict_metadata[index.fqn]
        if not isinstance(description, TensorStorageMetadata):
            return content
        return content.view(description.properties.dtype).view(find_chunk(description, index).sizes)


def _load_item(item: ReadItem, planner: LoadPlanner, content: torch.Tensor) -> None:
    """Pass an item's content to the planner, as torch's own readers do."""
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(content.numpy().tobytes()))
        return
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        content = content.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    if target.size() != content.size():
        raise InputError(f"{item.dest_index.fqn}: the state has {target.size()}, the save {content.size()}")
    target.copy_(content)
    planner.commit_tensor(item, target)


def _view_bytes(content: torch.Tensor) -> torch.Tensor:
    return content.reshape(-1).view(torch.uint8) if content.numel() else torch.empty(0, dtype=torch.uint8)
