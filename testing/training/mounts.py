"""Mounts that one process sees and no other, as a container has them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

_CLONE_NEWNS = 0x00020000


def can_mount() -> bool:
    """Whether this user may."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


def unshare_mounts() -> None:
    """From here on, what this process mounts is seen by it and its children only."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def mount_memory(path: Path, megabytes: int = 0) -> None:
    """An empty volume at `path`; `megabytes`: 0: as large as the kernel likes."""
    path.mkdir(parents=True, exist_ok=True)
    size = ["-o", f"size={megabytes}m"] if megabytes else []
    subprocess.run(["mount", "-t", "tmpfs", *size, "tmpfs", path], check=True)


def fill_volume(path: Path) -> None:
    """Fills the volume that the new file lies on."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
