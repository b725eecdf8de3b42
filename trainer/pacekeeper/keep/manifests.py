"""What a checkpoint says of itself: what it holds, and what each of its files must be like to be trusted."""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pacekeeper.plain import allow

_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileSum:
    """What a file must be like to be trusted."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a published checkpoint holds."""

    step: int
    round: int
    world_size: int
    model: dict[str, str]
    """Name → shape and type (`rank_state.describe`)."""
    objects: tuple[str, ...]
    """Names that were registered."""
    files: dict[str, FileSum] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        files = {name: FileSum(**entry) for name, entry in data["files"].items()}
        return cls(**{**data, "files": files, "objects": tuple(data["objects"])})


allow(FileSum, Manifest)


def checksum(path: Path) -> FileSum:
    """Reads the whole file."""
    crc = nbytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            nbytes += len(chunk)
    return FileSum(nbytes, crc)
