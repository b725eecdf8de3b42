"""Reads the runtime folder of a watched container. Processes of others write it, so that nothing in it is trusted.

A file may be of any type and size, and may change at any time. What is not valid counts as missing.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pacekeeper.runtime_folder import UNTRUSTED_OPEN_FLAGS, read_bounded
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.reports import MAX_WORKER_RANKS
from pacekeeper_analysis.protocol.requests import ProfileRequest
from pacekeeper_analysis.protocol.watched_container import (
    MAX_FILE_BYTES,
    MAX_PROFILE_FILE_BYTES,
    MAX_SOCKETS_FILE_BYTES,
    AgentExits,
    BrokenReport,
    ProcessSamples,
    ProfileRecording,
    RankDescription,
    RankEnd,
    StackAnswer,
    decode_file,
    decode_sockets,
)

MAX_FOLDER_ENTRIES = 4 * MAX_WORKER_RANKS
"""Entries of a folder that are read. More are not from Pacekeeper."""
_LOCK_FORMAT = "hhqqi"
"""`struct flock` of a 64-bit Linux: type, whence, start, length, process ID."""
Content = TypeVar("Content")

log = logging.getLogger(__name__)


class RuntimeFiles:
    """The files of one container, by slot."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rejected: set[str] = set()

    def read_ranks(self) -> dict[int, RankDescription]:
        """Return the described ranks by slot, whether they live or not."""
        ranks = {slot: self._read("ranks", str(slot), RankDescription) for slot in self._list_slots("ranks")}
        return {slot: rank for slot, rank in ranks.items() if rank is not None and rank.slot == slot}

    def read_end(self, slot: int) -> RankEnd | None:
        return self._read("ends", str(slot), RankEnd)

    def read_exits(self) -> dict[int, AgentExits]:
        """Return what agents reported, by the time in the file's name (ns)."""
        exits = {name: self._read("exits", str(name), AgentExits) for name in self._list_numbers("exits")}
        return {name: report for name, report in exits.items() if report is not None}

    def read_broken(self) -> tuple[BrokenReport, ...]:
        names = sorted(self._list_names("broken"))
        reports = (self._read("broken", name, BrokenReport) for name in names)
        return tuple(report for report in reports if report is not None)

    def read_processes(self) -> ProcessSamples | None:
        return self._read("", "processes", ProcessSamples)

    def read_sockets(self) -> dict[int, int]:
        """Return the rank that holds each socket, by inode, as the process monitor last wrote it."""
        path = self._root / "sockets.json"
        content = read_bounded(path, MAX_SOCKETS_FILE_BYTES)
        try:
            return {} if content is None else decode_sockets(content, path.name)
        except InputError as error:
            self._note_rejected(path, error)
            return {}

    def read_profile(self, slot: int) -> ProfileRecording | None:
        return self._read("profiles", str(slot), ProfileRecording, MAX_PROFILE_FILE_BYTES)

    def read_stack(self, slot: int) -> StackAnswer | None:
        return self._read("stacks", str(slot), StackAnswer)

    def read_stack_dump(self, slot: int) -> tuple[str, str]:
        """Return the main thread's name, and the newest dump by faulthandler; "" for what is missing."""
        content = read_bounded(self._root / "stacks" / str(slot), MAX_FILE_BYTES) or b""
        head, _, dump = content.decode(errors="replace").partition("\n")
        return head.removeprefix("main thread "), dump

    def read_dump_time(self, slot: int) -> int:
        """Return when the file of the dumps changed last (ns); 0: there is none."""
        try:
            return os.lstat(self._root / "stacks" / str(slot)).st_mtime_ns
        except OSError:
            return 0

    def is_locked(self, slot: int) -> bool | None:
        """Return whether a process holds the slot's lock; None: unknown."""
        return is_locked(self._root / "locks" / str(slot))

    def request_stacks(self, name: str) -> None:
        """Ask the ranks for their stacks. A folder that cannot be written leaves them unasked."""
        self._write_request("stack_request", name)

    def request_profile(self, request: ProfileRequest) -> None:
        """Ask the ranks for a profile window. A folder that cannot be written leaves them unasked."""
        fields = (request.name, request.first_step, request.steps, request.seconds)
        self._write_request("profile_request", " ".join(map(str, fields)))

    def _write_request(self, name: str, content: str) -> None:
        path = self._root / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(content)
            temporary.replace(path)
        except OSError as error:
            log.warning("cannot ask the ranks (%s): %s", name, error)

    def _read(self, folder: str, name: str, cls: type[Content], max_bytes: int = MAX_FILE_BYTES) -> Content | None:
        path = self._root / folder / f"{name}.json"
        content = read_bounded(path, max_bytes)
        if content is None:
            return None
        try:
            return decode_file(cls, content, path.name, max_bytes)
        except InputError as error:
            self._note_rejected(path, error)
            return None

    def _note_rejected(self, path: Path, error: InputError) -> None:
        if str(path) not in self._rejected and len(self._rejected) < MAX_FOLDER_ENTRIES:
            self._rejected.add(str(path))
            log.warning("%s is ignored: %s", path, error)

    def _list_slots(self, folder: str) -> list[int]:
        return [slot for slot in self._list_numbers(folder) if slot < MAX_WORKER_RANKS]

    def _list_numbers(self, folder: str) -> list[int]:
        names = self._list_names(folder)
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and len(name) <= 20)

    def _list_names(self, folder: str) -> Iterator[str]:
        """Yield the names of the JSON files in a folder."""
        try:
            with os.scandir(self._root / folder) as entries:
                names = [entry.name for entry in islice(entries, MAX_FOLDER_ENTRIES)]
        except OSError:
            return
        yield from (name[: -len(".json")] for name in names if name.endswith(".json") and not name.startswith("."))


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds a POSIX lock on the file, without taking it; None: unknown."""
    try:
        file = os.open(path, UNTRUSTED_OPEN_FLAGS)
    except OSError:
        return None
    try:
        query = struct.pack(_LOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
        return bool(struct.unpack(_LOCK_FORMAT, answer)[0] != fcntl.F_UNLCK)
    except OSError:
        return None
    finally:
        os.close(file)
