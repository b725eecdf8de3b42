"""File names of the shards' snapshots in a runtime folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def format_shard_name(rank: int, world_size: int) -> str:
    """Return the name of a shard; the suffix distinguishes its two slots."""
    return f"shard-{rank}-of-{world_size}"


def list_shard_files(folder: Path, world_size: int) -> Iterator[tuple[int, Path]]:
    """Yield rank and file of each existing slot of jobs with `world_size` ranks."""
    for path in folder.glob(f"shard-*-of-{world_size}.?"):
        rank = path.name.split("-")[1]
        if rank.isdecimal():
            yield int(rank), path
