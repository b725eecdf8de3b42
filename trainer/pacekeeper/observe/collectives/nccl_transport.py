"""Reads the transfers that NCCL's profiler plugin has written for a rank. Without the plugin, the transport is unknown.

The rank creates and writes the file, with one record per proxy operation (`pacekeeper_analysis.protocol.transport`). A
reader skips torn records, as in a ring of records.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.transport import (
    COMMUNICATORS_OFFSET,
    MAX_RECORDED_COMMUNICATORS,
    MAX_RECORDED_OPERATIONS,
    OPERATIONS_OFFSET,
    PROXY_OPERATION,
    STEPS_UNTIL_OFFSET,
    TRANSPORT_COMMUNICATOR,
    TRANSPORT_FILE_BYTES,
    TRANSPORT_HEADER,
    TRANSPORT_MAGIC,
)


def open_transport(path: Path) -> TransportReader | None:
    """Open a rank's file; None if it is missing. Raises InputError if `path` is not a file of this version."""
    try:
        return TransportReader(path)
    except FileNotFoundError:
        return None


class TransportReader:
    """Reader of one rank's file in one round; the next round has another file."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises FileNotFoundError, and InputError if `path` is not a file of this version."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != TRANSPORT_FILE_BYTES:
                raise InputError(f"{path}: {size} bytes, but a file of NCCL's transfers has {TRANSPORT_FILE_BYTES}")
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self._path = path
        header = np.frombuffer(self._map[: TRANSPORT_HEADER.itemsize], TRANSPORT_HEADER)[0]
        if header["magic"] != TRANSPORT_MAGIC or header["capacity"] != MAX_RECORDED_OPERATIONS:
            raise InputError(f"{path}: not a file of NCCL's transfers of this version; was the plugin built with it?")
        self._communicators = np.frombuffer(
            self._map, TRANSPORT_COMMUNICATOR, MAX_RECORDED_COMMUNICATORS, COMMUNICATORS_OFFSET
        )
        self._operations = np.frombuffer(self._map, PROXY_OPERATION, MAX_RECORDED_OPERATIONS, OPERATIONS_OFFSET)

    def communicators(self) -> NDArray[np.void]:
        """Return the newest communicators (`TRANSPORT_COMMUNICATOR`), in order of creation."""
        return _select_whole_entries(self._communicators, "order")

    def operations(self) -> NDArray[np.void]:
        """Return the newest operations (`PROXY_OPERATION`), in the order of their start."""
        return _select_whole_entries(self._operations, "index")

    def measure_steps(self, until_ns: int) -> None:
        """Make the rank measure the steps of its operations until `until_ns`.

        This gives exact bytes and waits, for about 2 µs each. The last request counts. Raises OSError if the file is
        not writable.
        """
        file = os.open(self._path, os.O_WRONLY)
        try:
            os.pwrite(file, struct.pack("<q", until_ns), STEPS_UNTIL_OFFSET)
        finally:
            os.close(file)


def _select_whole_entries(entries: NDArray[np.void], number_field: str) -> NDArray[np.void]:
    """Return a copy of the entries that were not written during the copy, sorted by `number_field`."""
    numbers = entries[number_field].copy()
    copy = entries.copy()
    is_complete = (numbers > 0) & (copy[number_field] == numbers) & (entries[number_field] == numbers)
    ordered: NDArray[np.void] = copy[is_complete][np.argsort(copy[number_field][is_complete])]
    return ordered
