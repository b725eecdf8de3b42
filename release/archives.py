"""Archives that depend on their content only: entries are sorted, and times, owners, and modes are normalized."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_STICKY = 0o1000
_ANY_EXECUTE = 0o111
COMPRESSION_LEVEL = 6


@dataclass(frozen=True)
class Entry:
    """A file, a folder, or a symbolic link. `content` of a link is its target."""

    content: bytes = b""
    mode: int = 0o644
    type: bytes = tarfile.REGTYPE


def build_tar(entries: Mapping[str, Entry], seconds: int) -> bytes:
    """Build a tar of entries by their paths, all modified at `seconds` since the epoch and owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(entries):
            entry = entries[path]
            header = tarfile.TarInfo(path)
            header.type, header.mode, header.mtime = entry.type, entry.mode, seconds
            if entry.type == tarfile.SYMTYPE:
                header.linkname = entry.content.decode()
                tar.addfile(header)
            else:
                header.size = len(entry.content)
                tar.addfile(header, io.BytesIO(entry.content))
    return buffer.getvalue()


def compress_archive(content: bytes) -> bytes:
    """Compress by gzip, without name and time."""
    return gzip.compress(content, COMPRESSION_LEVEL, mtime=0)


def create_folder(mode: int = 0o755) -> Entry:
    return Entry(mode=mode, type=tarfile.DIRTYPE)


def create_link(target: str) -> Entry:
    return Entry(target.encode(), 0o777, tarfile.SYMTYPE)


def read_tree(root: Path) -> dict[str, Entry]:
    """Return everything below a folder, by its path relative to it. Other kinds of files are errors (ValueError).

    Of a mode only what matters is kept: whether a file is executable, and whether all may write to a folder.
    """
    entries = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            mode = path.lstat().st_mode
            if path.is_symlink():
                entries[relative] = create_link(os.readlink(path))
            elif path.is_dir():
                entries[relative] = create_folder(0o1777 if mode & _STICKY else 0o755)
            elif path.is_file():
                entries[relative] = Entry(path.read_bytes(), 0o755 if mode & _ANY_EXECUTE else 0o644)
            else:
                raise ValueError(f"{path}: neither file, folder, nor link")
    return entries
