"""Reads the ring of records of a rank (`pacekeeper_rank.record_ring`), at any time and without the rank's help.

The file is read, and never mapped: a rank that truncates its ring would end a process that has mapped it by SIGBUS.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper.runtime_folder import read_zero_padded
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.records import RING_RECORD, RING_STATE
from pacekeeper_rank.record_ring import RingError, find_newest_index, open_ring
from pacekeeper_rank.records import RING_HEADER_BYTES

_INDEX_BYTES = 8


class RingReader:
    """A reader of one rank's ring. The ring of the next round is another file of the same name: see `is_current`."""

    def __init__(self, path: Path) -> None:
        """Open the ring.

        Raises FileNotFoundError if there is none yet, InputError if `path` is no ring, OSError if it cannot be read.
        """
        self._path = path
        try:
            self._file, self._capacity = open_ring(path)
        except RingError as error:
            raise InputError(str(error)) from error
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self._identity = (status.st_dev, status.st_ino)

    @property
    def is_current(self) -> bool:
        """False once a later round has replaced the ring, or it cannot be found."""
        try:
            status = self._path.lstat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def state(self) -> np.void:
        """Return the rank's present state (`records.RING_STATE`). Raises InputError if the file was truncated."""
        content = os.pread(self._file, RING_STATE.itemsize, 0)
        if len(content) < RING_STATE.itemsize:
            raise InputError(f"{self._path}: the ring was truncated while it was in use; only its rank may write it")
        state: np.void = np.frombuffer(content, RING_STATE)[0]
        return state

    def records(self, since: int = 0) -> NDArray[np.void]:
        """Return the complete records with an index above `since` (`records.RING_RECORD`), oldest first.

        The time is proportional to their number. If the first index is not `since` + 1, earlier records were
        overwritten unread. Records that a truncated file no longer has are missing.
        """
        newest = find_newest_index(self._read_index, self._capacity)
        oldest = max(since, newest - self._capacity) + 1
        if oldest > newest:
            return np.empty(0, RING_RECORD)
        begin, end = (oldest - 1) % self._capacity, (newest - 1) % self._capacity + 1
        spans = [(begin, end)] if begin < end else [(begin, self._capacity), (0, end)]
        slots = self._read_slots(spans)
        indices_after = self._read_slots(spans)["index"]
        expected = np.arange(oldest, oldest + len(slots), dtype=np.uint64)
        is_complete = (slots["index"] == expected) & (indices_after == expected)
        if is_complete.all():
            return slots
        whole = slots.view(f"V{RING_RECORD.itemsize}")  # ten times as fast as a selection of records with fields
        records: NDArray[np.void] = whole[is_complete].view(RING_RECORD)
        return records

    def _read_index(self, slot: int) -> int:
        offset = RING_HEADER_BYTES + slot * RING_RECORD.itemsize
        return int.from_bytes(os.pread(self._file, _INDEX_BYTES, offset), "little")

    def _read_slots(self, spans: list[tuple[int, int]]) -> NDArray[np.void]:
        size = RING_RECORD.itemsize
        parts = [
            read_zero_padded(self._file, (end - begin) * size, RING_HEADER_BYTES + begin * size) for begin, end in spans
        ]
        slots: NDArray[np.void] = (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(RING_RECORD)
        return slots
