"""Which save is loaded from memory, and which rank serves each of its parts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..versions import StateVersion


@dataclass(frozen=True)
class SaveEntry:
    """A save whose index a worker holds. The index is written after all ranks have written their shards."""

    version: StateVersion
    world_size: int
    """Number of ranks that wrote it, and of its shards."""
    checkpoint_id: str
    """The script's name for it; the same name may be saved again."""
    is_stored: bool
    """Whether the script's storage has it, too."""


@dataclass(frozen=True)
class WorkerSaves:
    """What a rank sees in the memory of its worker."""

    worker: str
    entries: tuple[SaveEntry, ...]
    shards: frozenset[tuple[StateVersion, int, int]]
    """Version, world size, and rank of each shard, of this worker's ranks and of others."""

    def has_shard(self, entry: SaveEntry, shard: int) -> bool:
        return (entry.version, entry.world_size, shard) in self.shards


def choose_save(saves_by_rank: Sequence[WorkerSaves], is_wanted: Callable[[SaveEntry], bool]) -> SaveEntry | None:
    """Return the newest wanted save of which the workers together hold all parts; None: use the storage.

    If the storage has a newer save of the same ID, that one counts.
    """
    entries: dict[StateVersion, SaveEntry] = {}
    for saves in saves_by_rank:
        for entry in saves.entries:
            known = entries.get(entry.version)
            if known is None or entry.is_stored:  # each worker learns by itself that the storage has it
                entries[entry.version] = entry
    passed_ids: set[str] = set()
    for version in sorted(entries, reverse=True):
        entry = entries[version]
        if not is_wanted(entry) or entry.checkpoint_id in passed_ids:
            continue
        if all(any(saves.has_shard(entry, shard) for saves in saves_by_rank) for shard in range(entry.world_size)):
            return entry
        if entry.is_stored:
            passed_ids.add(entry.checkpoint_id)
    return None


def assign_servers(entry: SaveEntry, saves_by_rank: Sequence[WorkerSaves]) -> list[int]:
    """Return the rank that verifies each shard of a complete save, and sends its items to other workers' ranks.

    It is the rank that wrote the shard if its worker holds it, so that no other worker's copy is read.
    """
    servers = []
    for shard in range(entry.world_size):
        holders = [rank for rank, saves in enumerate(saves_by_rank) if saves.has_shard(entry, shard)]
        first_worker = [rank for rank in holders if saves_by_rank[rank].worker == saves_by_rank[holders[0]].worker]
        servers.append(shard if shard in holders else first_worker[shard % len(first_worker)])
    return servers


def find_index_server(entry: SaveEntry, saves_by_rank: Sequence[WorkerSaves]) -> int:
    """Return the first rank whose worker holds the save's index."""
    return next(
        rank
        for rank, saves in enumerate(saves_by_rank)
        if any(other.version == entry.version for other in saves.entries)
    )
