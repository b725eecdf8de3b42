"""Reads the transfers that NCCL's profiler plugin has written for a rank. Without the plugin, the transport is unknown.

The rank creates and writes the file, with one record per proxy operation (`pacekeeper_analysis.protocol.transport`). A
reader skips torn records, and never maps the file, as with a ring of records.
"""

from __future__ import annotations

import os
import stat
import struct
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper.runtime_folder import UNTRUSTED_OPEN_FLAGS, read_zero_padded
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
    """Open a rank's file; None if it is missing.

    Raises InputError if `path` is not a file of this version, OSError if it cannot be read.
    """
    try:
        return TransportReader(path)
    except FileNotFoundError:
        return None


class TransportReader:
    """Reader of one rank's file in one round; the next round has another file."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError, and InputError if `path` is not a file of this version."""
        self._path = path
        self._file = os.open(path, UNTRUSTED_OPEN_FLAGS)
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != TRANSPORT_FILE_BYTES:
            raise InputError(
                f"{path}: {status.st_size} bytes, but a file of NCCL's transfers has {TRANSPORT_FILE_BYTES}"
            )
        header = read_zero_padded(self._file, TRANSPORT_HEADER.itemsize, 0).view(TRANSPORT_HEADER)[0]
        if header["magic"] != TRANSPORT_MAGIC or header["capacity"] != MAX_RECORDED_OPERATIONS:
            raise InputError(f"{path}: not a file of NCCL's transfers of this version; was the plugin built with it?")

    def communicators(self) -> NDArray[np.void]:
        """Return the newest communicators (`TRANSPORT_COMMUNICATOR`), in order of creation."""
        return self._read_whole_entries(
            TRANSPORT_COMMUNICATOR, MAX_RECORDED_COMMUNICATORS, COMMUNICATORS_OFFSET, "order"
        )

    def operations(self) -> NDArray[np.void]:
        """Return the newest operations (`PROXY_OPERATION`), in the order of their start."""
        return self._read_whole_entries(PROXY_OPERATION, MAX_RECORDED_OPERATIONS, OPERATIONS_OFFSET, "index")

    def _read_whole_entries(
        self, entry: np.dtype[np.void], count: int, offset: int, number_field: str
    ) -> NDArray[np.void]:
        """Return the entries that were not written while they were read, sorted by their number, their first field."""
        entries, later = (read_zero_padded(self._file, count * entry.itemsize, offset).view(entry) for _ in range(2))
        is_complete = (entries[number_field] > 0) & (later[number_field] == entries[number_field])
        complete = entries[is_complete]
        ordered: NDArray[np.void] = complete[np.argsort(complete[number_field])]
        return ordered

    def measure_steps(self, until_ns: int) -> None:
        """Make the rank measure the steps of its operations until `until_ns`.

        This gives exact bytes and waits, for about 2 µs each. The last request counts. Raises OSError if the file is
        not writable.
        """
        file = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.pwrite(file, struct.pack("<q", until_ns), STEPS_UNTIL_OFFSET)
        finally:
            os.close(file)
