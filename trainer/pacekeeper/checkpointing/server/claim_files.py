"""Objects as files below one folder: each appears as a whole, and survives a crash of the host once it is stored.

An upload is a file in the folder `.uploads` until it is complete. No link is followed: the job's own containers have
written here before, or another job that mounted the same claim.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .protocol import is_object_name

UPLOADS_FOLDER = ".uploads"
ABANDONED_UPLOAD_SECONDS = 600.0
"""Time without a new part after which an upload is deleted: its writer was lost."""
MAX_LISTED_FILES = 1 << 17
_MAX_FOLDER_ATTEMPTS = 4
"""Attempts to use a folder that another request removes, since its last object was deleted."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class FileEntry:
    """An entry of a folder. `size`: bytes of an object; None: it is a folder."""

    name: str
    size: int | None


class ClaimFiles:
    """The objects below one folder. All methods raise OSError with the errno of the file system."""

    def __init__(self, root: str) -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root)

    def write_part(self, upload: str, offset: int, content: bytes) -> None:
        """Write a part of an upload. It may be written again."""
        with self._open_folder(UPLOADS_FOLDER, create=True) as folder:
            file = os.open(upload, _WRITE_FLAGS | os.O_CREAT, 0o644, dir_fd=folder)
            try:
                _check_regular(file)
                position = offset
                view = memoryview(content)
                while view:
                    written = os.pwrite(file, view, position)
                    view, position = view[written:], position + written
            finally:
                os.close(file)

    def sync_upload(self, upload: str) -> None:
        """Make what was written of an upload survive a crash of the host."""
        with self._open_folder(UPLOADS_FOLDER) as folder:
            file = os.open(upload, _WRITE_FLAGS, dir_fd=folder)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def store_upload(self, upload: str, name: str, nbytes: int, *, create: bool) -> None:
        """Make an upload of `nbytes` bytes the object `name`.

        `create`: raises FileExistsError if the object exists, and drops the upload. Raises FileNotFoundError if there
        is no upload of that size: it was abandoned, or is stored already.
        """
        parent, _, base = name.rpartition("/")
        with self._open_folder(UPLOADS_FOLDER) as uploads:
            if _check_regular_entry(uploads, upload).st_size != nbytes:
                raise FileNotFoundError(errno.ENOENT, f"no upload of {nbytes} bytes", upload)
            self.sync_upload(upload)
            for attempt in range(_MAX_FOLDER_ATTEMPTS):
                try:
                    with self._open_folder(parent, create=True) as folder:
                        if create:
                            try:
                                os.link(upload, base, src_dir_fd=uploads, dst_dir_fd=folder, follow_symlinks=False)
                            finally:
                                os.unlink(upload, dir_fd=uploads)
                        else:
                            os.rename(upload, base, src_dir_fd=uploads, dst_dir_fd=folder)
                        os.fsync(folder)
                    break
                except FileNotFoundError:
                    if attempt + 1 == _MAX_FOLDER_ATTEMPTS:
                        raise
            if parent:
                os.fsync(self._root)

    def drop_upload(self, upload: str) -> None:
        """Delete an upload, if it exists."""
        with suppress(FileNotFoundError), self._open_folder(UPLOADS_FOLDER) as folder:
            os.unlink(upload, dir_fd=folder)

    def drop_abandoned_uploads(self, now: float) -> None:
        """Delete uploads without a new part for long. `now`: seconds since the epoch."""
        with suppress(FileNotFoundError), self._open_folder(UPLOADS_FOLDER) as folder:
            for entry in os.listdir(folder):
                with suppress(OSError):
                    status = os.stat(entry, dir_fd=folder, follow_symlinks=False)
                    if status.st_mtime < now - ABANDONED_UPLOAD_SECONDS:
                        os.unlink(entry, dir_fd=folder)

    def open_object(self, name: str) -> tuple[int, int]:
        """Open an object for reading, and return its file, which the caller closes, and its size in bytes."""
        parent, _, base = name.rpartition("/")
        with self._open_folder(parent) as folder:
            file = os.open(base, _READ_FLAGS, dir_fd=folder)
        try:
            return file, _check_regular(file).st_size
        except OSError:
            os.close(file)
            raise

    def find_entry(self, name: str) -> FileEntry:
        """Return the entry of a name. Raises FileNotFoundError."""
        parent, _, base = name.rpartition("/")
        with self._open_folder(parent) as folder:
            entry = _build_entry(folder, base)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no object", name)
        return entry

    def list_entries(self, folder_name: str) -> list[FileEntry]:
        """Return the entries of a folder, at most `MAX_LISTED_FILES`. `folder_name`: "" is the root."""
        with self._open_folder(folder_name) as folder:
            entries = (_build_entry(folder, name) for name in os.listdir(folder)[:MAX_LISTED_FILES])
            return [entry for entry in entries if entry is not None and entry.name != UPLOADS_FOLDER]

    def delete_object(self, name: str) -> None:
        """Delete an object, and its folder if it is empty then. Raises FileNotFoundError."""
        parent, _, base = name.rpartition("/")
        with self._open_folder(parent) as folder:
            os.unlink(base, dir_fd=folder)
            os.fsync(folder)
        if parent and "/" not in parent:
            with suppress(OSError):  # it has other objects
                os.rmdir(parent, dir_fd=self._root)

    @contextmanager
    def _open_folder(self, name: str, *, create: bool = False) -> Iterator[int]:
        """Open a folder below the root without following links. `create`: create it, if it does not exist."""
        folder = os.dup(self._root)
        try:
            for part in filter(None, name.split("/")):
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder)
                child = os.open(part, _FOLDER_FLAGS, dir_fd=folder)
                os.close(folder)
                folder = child
            yield folder
        finally:
            os.close(folder)


def get_wall_time() -> float:
    """Return the seconds since the epoch, by which the files of the claim are dated."""
    return time.time()


def _build_entry(folder: int, name: str) -> FileEntry | None:
    """Return an entry of an open folder; None: it is none, or is neither a file nor a folder."""
    if not is_object_name(name):
        return None
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(status.st_mode):
        return FileEntry(name, status.st_size)
    return FileEntry(name, None) if stat.S_ISDIR(status.st_mode) else None


def _check_regular_entry(folder: int, name: str) -> os.stat_result:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "no regular file", name)
    return status


def _check_regular(file: int) -> os.stat_result:
    """Return the status of an open file. Raises FileNotFoundError if it is a folder, a pipe, or a device."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "no regular file")
    return status
