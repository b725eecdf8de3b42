"""Files that a reader sees whole, whenever the process that writes them dies."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace `path` atomically: a reader sees the old content or the new one, never a part.

    `mode`: permissions of the file, less the process's umask. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # left by a killed process, possibly with another mode
    try:
        with open(temporary, "w", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)) as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
