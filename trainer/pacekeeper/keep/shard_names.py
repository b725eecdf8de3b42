"""Under which names the shards' snapshots lie in a runtime folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def format_shard_name(rank: int, world_size: int) -> str:
    """Of its two slots, which are told apart by their suffix."""
    return f"shard-{rank}-of-{world_size}"


def list_shard_files(folder: Path, world_size: int) -> Iterator[tuple[int, Path]]:
    """Rank and file of each slot that is there, of jobs with so many ranks."""
    for path in folder.glob(f"shard-*-of-{world_size}.?"):
        rank = path.name.split("-")[1]
        if rank.isdecimal():
            yield int(rank), path
