"""Folders in shared memory for one run of a command on this machine. The next run removes those of killed runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY_BYTES = 1 << 30


@contextmanager
def open_local_folder(prefix: str, *, in_memory: bool = True) -> Iterator[Path]:
    """Open a folder whose name begins with `prefix` for one run, and remove it afterwards.

    It is in shared memory if that is large enough, unless `in_memory` is false.
    """
    parent = _SHARED_MEMORY if in_memory and _has_shared_memory() else Path(tempfile.gettempdir())
    _sweep_stale_folders(parent, prefix)
    folder, lock_file = _make_locked_folder(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock_file)


def _has_shared_memory() -> bool:
    return os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= _MIN_SHARED_MEMORY_BYTES


def _make_locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder and return it with an open file whose lock holds it while a process of the run exists."""
    while True:
        # Not a TemporaryDirectory: its finalizer would also run in every rank that exits.
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
        with suppress(FileNotFoundError):  # another run swept the folder before it was locked
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                exists = folder.exists()
            except BlockingIOError:
                exists = False  # another run is sweeping it
            except OSError:
                exists = True  # a file system without locks: no other run can lock this folder and remove it
            if exists:
                return folder, file
            os.close(file)


def _sweep_stale_folders(parent: Path, prefix: str) -> None:
    """Remove the folders that killed runs of this user left behind.

    A lock shows to every process that sees the folder which runs are over. A process ID does not: in a container that
    shares only `/dev/shm`, it belongs to another process, or to none.
    """
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # the folder is locked, belongs to another user, or is swept by another run
            if folder.stat().st_uid != os.getuid():
                continue
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)
