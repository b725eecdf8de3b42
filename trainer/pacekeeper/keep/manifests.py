"""What a checkpoint says of itself: what it holds, and what each of its files must be like to be trusted."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pacekeeper.plain import allow
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import Longest, Within, read

_CHUNK = 1 << 22
_CHECKSUM = "checksum"


@dataclass(frozen=True)
class FileSum:
    """What a file must be like to be trusted."""

    nbytes: Annotated[int, Within(0)]
    crc32: Annotated[int, Within(0, 2**32 - 1)]


@dataclass(frozen=True)
class Manifest:
    """What a published checkpoint holds."""

    step: Annotated[int, Within(0)]
    round: Annotated[int, Within(0)]
    world_size: Annotated[int, Within(1)]
    model: dict[str, str]
    """Name → shape and type (`rank_state.describe`)."""
    objects: Annotated[tuple[str, ...], Longest(1 << 16)]
    """Names that were registered."""
    files: dict[str, FileSum] = field(default_factory=dict)
    job: str = ""
    """Name of the job that wrote it (`JobIdentity`); "": unknown, as in those of older versions."""
    uid: str = ""
    """Of that job."""

    def to_json(self) -> dict[str, Any]:
        """With a checksum of all that it says."""
        content = asdict(self)
        return {**content, _CHECKSUM: _crc32(content)}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Raises InputError that names the field, or where it does not say what was written.

        One without a checksum is of an older version.
        """
        if isinstance(data, dict) and _CHECKSUM in data:
            content = {name: value for name, value in data.items() if name != _CHECKSUM}
            if data[_CHECKSUM] != _crc32(content):
                raise InputError(f"manifest.{_CHECKSUM}: what it says is not what was written")
        return read(cls, data, "manifest")


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


allow(FileSum, Manifest)


def checksum(path: Path) -> FileSum:
    """Reads the whole file."""
    crc = nbytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            nbytes += len(chunk)
    return FileSum(nbytes, crc)
