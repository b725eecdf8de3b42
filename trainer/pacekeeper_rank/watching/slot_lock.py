"""Locks of the runtime folder. The kernel releases them however their process ends, and readers notice that.

POSIX locks belong to the process: a forked child does not hold them. A process loses its lock when it closes *any*
file of that path, so it opens each path once.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from .watch_folder import WatchFolder

MAX_SLOTS = 1024


def take_slot(folder: WatchFolder, preferred: int | None) -> int | None:
    """Take the lock of the `preferred` slot, or the first free one, until exit. None: all are taken."""
    slots: list[int] = [*([] if preferred is None else [preferred]), *range(MAX_SLOTS)]
    for slot in slots:
        if take_lock(folder.lock(slot)):
            return slot
    return None


def take_lock(path: Path) -> bool:
    """Take the lock, and write the process ID into its file. False: another process holds it.

    The file stays open until the process exits.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    except OSError:
        os.close(file)
        raise
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    return True
