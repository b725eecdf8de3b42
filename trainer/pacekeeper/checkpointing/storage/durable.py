"""Files that are written completely, and survive a crash of the host."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace the file atomically. Raises OSError, and then leaves the file unchanged."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make changes to the entries of a folder survive a crash. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
