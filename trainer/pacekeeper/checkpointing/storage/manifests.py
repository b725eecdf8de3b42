"""Manifest of a checkpoint: its content, and the size and checksum of each file."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pacekeeper.safe_serialization import allow_classes
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import MaxLength, Within, read_dataclass

_CHECKSUM_CHUNK_BYTES = 1 << 22
_CHECKSUM_KEY = "checksum"


@dataclass(frozen=True)
class FileChecksum:
    """Size and checksum that a valid file must have."""

    nbytes: Annotated[int, Within(0)]
    crc32: Annotated[int, Within(0, 2**32 - 1)]


@dataclass(frozen=True)
class Manifest:
    """Content of a published checkpoint."""

    step: Annotated[int, Within(0)]
    round: Annotated[int, Within(0)]
    world_size: Annotated[int, Within(1)]
    model: dict[str, str]
    """Name → shape and type (`rank_state.describe_models`)."""
    objects: Annotated[tuple[str, ...], MaxLength(1 << 16)]
    """Names that were registered."""
    files: dict[str, FileChecksum] = field(default_factory=dict)
    job: str = ""
    """Name of the job that wrote it (`JobIdentity`); "": unknown, as in older versions."""
    uid: str = ""
    """UID of that job."""
    folder: str = ""
    """Folder in an object store from which it was read; "": unknown. It is not written."""

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON, with a checksum of its content."""
        content = asdict(self)
        del content["folder"]
        return {**content, _CHECKSUM_KEY: _compute_crc32(content)}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a manifest. Raises InputError that names the field, or if its checksum does not match.

        A manifest without a checksum is from an older version.
        """
        if isinstance(data, dict) and _CHECKSUM_KEY in data:
            content = {name: value for name, value in data.items() if name != _CHECKSUM_KEY}
            if data[_CHECKSUM_KEY] != _compute_crc32(content):
                raise InputError(f"manifest.{_CHECKSUM_KEY}: the content has changed since it was written")
        return read_dataclass(cls, data, "manifest")


def _compute_crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


allow_classes(FileChecksum, Manifest)


def compute_checksum(path: Path) -> FileChecksum:
    """Read the whole file, and return its checksum."""
    crc = nbytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHECKSUM_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            nbytes += len(chunk)
    return FileChecksum(nbytes, crc)
