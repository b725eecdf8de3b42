"""Reads what NCCL's profiler plugin has written of a rank's transfers. Where it does not run, the transport is unknown.

The file is made and written by the rank, with one record a proxy operation (`pacekeeper_analysis.transport`): what a
reader finds torn it leaves out, as in a ring of records.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.transport import (
    TRANSPORT_COMMUNICATOR,
    MAX_RECORDED_COMMUNICATORS,
    COMMUNICATORS_OFFSET,
    TRANSPORT_FILE_BYTES,
    TRANSPORT_HEADER,
    TRANSPORT_MAGIC,
    PROXY_OPERATION,
    MAX_RECORDED_OPERATIONS,
    OPERATIONS_OFFSET,
    STEPS_UNTIL_OFFSET,
)


def open_transport(path: Path) -> TransportReader | None:
    """None: unknown, as there is no file. Raises InputError where `path` is none of this version."""
    try:
        return TransportReader(path)
    except FileNotFoundError:
        return None


class TransportReader:
    """Of one rank in one round; the next round has another file."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, and InputError where `path` is no such file of this version."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != TRANSPORT_FILE_BYTES:
                raise InputError(f"{path}: {size} bytes are not a file of NCCL's transfers; {TRANSPORT_FILE_BYTES} are")
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self._path = path
        header = np.frombuffer(self._map[: TRANSPORT_HEADER.itemsize], TRANSPORT_HEADER)[0]
        if header["magic"] != TRANSPORT_MAGIC or header["capacity"] != MAX_RECORDED_OPERATIONS:
            raise InputError(f"{path}: not a file of NCCL's transfers of this version; was the plugin built with it?")
        self._communicators = np.frombuffer(self._map, TRANSPORT_COMMUNICATOR, MAX_RECORDED_COMMUNICATORS, COMMUNICATORS_OFFSET)
        self._operations = np.frombuffer(self._map, PROXY_OPERATION, MAX_RECORDED_OPERATIONS, OPERATIONS_OFFSET)

    def communicators(self) -> NDArray[np.void]:
        """The newest ones (`TRANSPORT_COMMUNICATOR`), in order of creation."""
        return _select_whole_entries(self._communicators, "order")

    def operations(self) -> NDArray[np.void]:
        """The newest ones (`OPERATION`), in the order in which they were started."""
        return _select_whole_entries(self._operations, "index")

    def measure_steps(self, until_ns: int) -> None:
        """Has the rank measure the steps of its operations until then: exact bytes and waits, for some 2 µs each.

        Whoever asked last has its way. Raises OSError where the file may not be written.
        """
        file = os.open(self._path, os.O_WRONLY)
        try:
            os.pwrite(file, struct.pack("<q", until_ns), STEPS_UNTIL_OFFSET)
        finally:
            os.close(file)


def _select_whole_entries(entries: NDArray[np.void], number: str) -> NDArray[np.void]:
    """A copy of those that were not written meanwhile, by their `number`."""
    before = entries[number].copy()
    copy = entries.copy()
    whole = (before > 0) & (copy[number] == before) & (entries[number] == before)
    ordered: NDArray[np.void] = copy[whole][np.argsort(copy[number][whole])]
    return ordered
