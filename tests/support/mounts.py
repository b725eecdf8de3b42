"""Mounts that one process sees and no other, as a container has them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

_CLONE_NEWNS = 0x00020000


def may_mount() -> bool:
    """Whether this user may."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


def leave_the_others_mounts() -> None:
    """From here on, what this process mounts is seen by it and its children only."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def mount_memory(path: Path) -> None:
    """An empty volume at `path`."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
