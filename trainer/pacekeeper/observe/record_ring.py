"""The ring of records of one rank: a file in shared memory with one writer (the rank) and any number of readers.

Neither side waits for the other: every slot has its own sequence lock. A rank writes a record in about half a
microsecond, and a reader drops the few slots that were being written during its read.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.records import (
    MAX_ENTERED_GROUPS,
    RING_HEADER_BYTES,
    RING_MAGIC,
    RING_RECORD,
    RING_RECORD_FORMAT,
    RING_STATE,
    Collective,
    Phase,
    RecordKind,
    compute_ring_bytes,
)

DEFAULT_RING_CAPACITY = 131_072
"""Number of records in a ring.

80 layers under FSDP2 make 242 collectives per microbatch, 882 with tensor parallelism: 32 steps
(`detection.windowSteps`) of four microbatches are 113,000. 8 MiB.
"""

_RECORD_STRUCT = struct.Struct(RING_RECORD_FORMAT)
_UNWRITTEN = -1


class RingWriter:
    """The rank's side. Its methods may be called from any thread, signal handler, or gc callback.

    In a process that the rank forks, they write into that process's own memory. `state` holds the fields of
    `records.RING_STATE` as attributes: `ring.state.step = 7`. Each assignment is one store of an aligned word, which
    readers see as a whole.
    """

    def __init__(self, path: Path) -> None:
        """Map the ring that the launcher has created at `path`, and continue after its last record."""
        self._map = _map_ring(path, write=True)
        self.state = StateFields(self._map)
        self.state.pid = os.getpid()
        self._capacity = self.state.capacity
        self._index = memoryview(self._map).cast("Q")
        self._written = _find_newest_index(np.frombuffer(self._map, RING_RECORD, offset=RING_HEADER_BYTES)["index"])
        """Index of the last record that was there before."""
        self._counter = itertools.count(self._written + 1)
        _writers.add(self)

    def detach_in_child(self) -> None:
        """Replace the ring by private memory in this process, which was just forked.

        Views and addresses stay the same, so that this applies to all writers here, including the part in C.
        """
        header, size = self._map[:RING_HEADER_BYTES], len(self._map)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        self._map[:RING_HEADER_BYTES] = header

    def write(  # noqa: PLR0913  # the fields of a record, as the same method in C has them (native/recording.c)
        self,
        kind: RecordKind | int,
        start_ns: int,
        end_ns: int,
        step: int = 0,
        phase: Phase | int = 0,
        value: float = 0.0,
        collective: Collective | int = 0,
        group: int = 0,
        sequence: int = 0,
        nbytes: int = 0,
        peer: int = -1,
        flags: int = 0,
    ) -> None:
        """Append one record with the fields of `records.RING_RECORD` (times: ns of CLOCK_MONOTONIC)."""
        index = next(self._counter)  # atomic: two threads never get the same slot
        offset = RING_HEADER_BYTES + (index - 1) % self._capacity * 64
        # The slot is void (index 0) while its fields change; its index, stored last, makes it valid.
        _RECORD_STRUCT.pack_into(
            self._map, offset,
            0, kind, phase, collective, flags, step, sequence, group, start_ns, end_ns, nbytes, value, peer, 0,
        )  # fmt: skip
        self._index[offset >> 3] = index

    def enter_phase(self, phase: Phase, now_ns: int | None = None) -> None:
        """Enter `phase`, whose deadline applies to the rank from now on."""
        state = self.state
        state._words[_PHASE_SINCE] = time.monotonic_ns() if now_ns is None else now_ns
        state._halves[_PHASE] = phase

    def take_place(self, group: int) -> int:
        """Return a place for `enter_collective` to store the rank's progress in this group.

        Release it with the group.
        """
        words = self.state._words
        for place in range(_ENTERED_FIRST + 2, _ENTERED_END, 2):
            if words[place] == 0:
                words[place + 1], words[place] = 0, group
                return place + 1
        return NO_PLACE

    def release_place(self, place: int) -> None:
        if place != NO_PLACE:
            self.state._words[place - 1] = 0

    def enter_collective(
        self, collective: Collective | int, group: int, sequence: int, now_ns: int, place: int
    ) -> None:
        """Record that the rank is inside the `sequence`-th collective of `group`; `place` is from `take_place`."""
        words, halves = self.state._words, self.state._unsigned
        words[_COLLECTIVE_SINCE] = now_ns
        words[_SEQUENCE] = words[place] = sequence
        halves[_GROUP] = group
        words[_ENTERED] += 1
        halves[_COLLECTIVE] = collective

    def leave_collective(self) -> None:
        """Record that the rank is outside of collectives."""
        self.state._unsigned[_COLLECTIVE] = 0

    def end_load(self, duration_ns: int) -> None:
        """Record that the rank has waited `duration_ns` for its loader."""
        words = self.state._words
        if duration_ns > words[_LONGEST_LOAD]:
            words[_LONGEST_LOAD] = duration_ns

    def end_step(self, step: int, now_ns: int) -> None:
        """Record that optimizer step `step` of the job is complete."""
        words = self.state._words
        words[_STEP] = step
        words[_STEPS_IN_ROUND] += 1
        words[_STEP_END] = now_ns


class RingReader:
    """A reader's side. The ring of the next round is another file of the same name: see `is_current`."""

    def __init__(self, path: Path) -> None:
        """Open the ring. Raises FileNotFoundError if there is none yet, InputError if `path` is no ring."""
        self._path = path
        self._map = _map_ring(path, write=False)
        self._identity = _read_file_identity(path)
        records = np.frombuffer(self._map, RING_RECORD, offset=RING_HEADER_BYTES)
        self._index = records["index"]
        self._slots = records.view(f"V{RING_RECORD.itemsize}")  # whole slots, copied ten times as fast as single fields

    @property
    def is_current(self) -> bool:
        """False once a later round has replaced the ring."""
        return _read_file_identity(self._path) == self._identity

    def state(self) -> np.void:
        """Return a copy of the rank's present state (`records.RING_STATE`)."""
        copy: np.void = np.frombuffer(self._map[: RING_STATE.itemsize], RING_STATE)[0]
        return copy

    def records(self, since: int = 0) -> NDArray[np.void]:
        """Return the complete records with an index above `since` (`records.RING_RECORD`), oldest first.

        The time is proportional to their number. If the first index is not `since` + 1, earlier records were
        overwritten unread.
        """
        newest, capacity = _find_newest_index(self._index), len(self._index)
        oldest = max(since, newest - capacity) + 1
        begin, end = (oldest - 1) % capacity, (newest - 1) % capacity + 1
        spans = [slice(begin, end)] if begin < end else [slice(begin, None), slice(0, end)]
        if oldest > newest:
            spans = [slice(0)]
        slots = np.concatenate([self._slots[span] for span in spans])
        indices_after = np.concatenate([self._index[span] for span in spans])
        expected = np.arange(oldest, oldest + len(slots), dtype=np.uint64)
        is_complete = (slots.view(RING_RECORD)["index"] == expected) & (indices_after == expected)
        records: NDArray[np.void] = slots[is_complete].view(RING_RECORD)
        return records


class StateFields:
    """The fields of `records.RING_STATE` of a mapped ring as attributes."""

    __slots__ = ("_doubles", "_halves", "_unsigned", "_words")

    def __init__(self, ring: mmap.mmap) -> None:
        header = memoryview(ring)[:RING_HEADER_BYTES]
        self._words = header.cast("q")
        self._halves = header.cast("i")
        self._unsigned = header.cast("I")
        self._doubles = header.cast("d")

    def __getattr__(self, name: str) -> Any:
        view, position = self._locate_field(name)
        return view[position]

    def __setattr__(self, name: str, value: float) -> None:
        if name in StateFields.__slots__:
            object.__setattr__(self, name, value)
        else:
            view, position = self._locate_field(name)
            view[position] = value

    def _locate_field(self, name: str) -> tuple[Any, int]:
        try:
            view, position = _FIELD_LOCATIONS[name]
        except KeyError:
            raise AttributeError(f"a ring's state has no field {name!r}") from None
        return getattr(self, view), position


def create_ring(path: Path, rank: int, round_: int, capacity: int = DEFAULT_RING_CAPACITY, owner: int = 0) -> None:
    """Create a new ring at `path` atomically, for a rank of round `round_` that has not started.

    `owner`: process ID of the only process that may take it (`RuntimeFolder.is_rank_process`); 0: any; -1: the first
    one that does. Raises OSError if the volume has no room for it.
    """
    header = np.zeros((), RING_STATE)
    for name in ("step", "checkpoint_step", "snapshot_step", "restored_step", "sync_mode", "bad_loss_step", "peer"):
        header[name] = _UNWRITTEN
    header["magic"], header["capacity"] = RING_MAGIC, capacity
    header["rank"], header["round"], header["owner"] = rank, round_, owner
    header["phase"], header["phase_since_ns"] = Phase.START, time.monotonic_ns()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            os.posix_fallocate(
                file.fileno(), 0, compute_ring_bytes(capacity)
            )  # otherwise a write to a full volume would raise SIGBUS
            file.write(header.tobytes())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _find_newest_index(index: NDArray[np.uint64]) -> int:
    """Return the index of the newest record; 0: none. `index`: indices of all slots, shape (capacity,).

    It uses bisection, because the slots are filled in cyclic order.
    """
    if index[0] == 0:  # the first slot is being written, after the last one
        return int(index[-1])
    previous = int(index[0]) - 1
    low, high = 0, len(index)
    while high - low > 1:
        middle = (low + high) // 2
        if index[middle] > previous:
            low = middle
        else:
            high = middle
    return previous + low + 1


def _map_ring(path: Path, *, write: bool) -> mmap.mmap:
    with path.open("r+b" if write else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < RING_HEADER_BYTES:
            raise InputError(
                f"{path}: {size} bytes are not a ring of records; the launcher creates it, do not create it manually"
            )
        ring = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
    header = np.frombuffer(ring[: RING_STATE.itemsize], RING_STATE)[0]
    if header["magic"] != RING_MAGIC or compute_ring_bytes(int(header["capacity"])) != size:
        raise InputError(
            f"{path}: not a ring of records of this version; do library and launcher have the same version?"
        )
    return ring


def _read_file_identity(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (status.st_dev, status.st_ino)


def _compute_field_location(name: str) -> tuple[str, int]:
    """Return the view of the header that holds the field, and its position there."""
    dtype, offset = RING_STATE.fields[name][:2]  # type: ignore[index]  # RING_STATE is a structure, so it has fields
    view = {"i8": "_words", "u8": "_words", "i4": "_halves", "u4": "_unsigned", "f8": "_doubles"}[dtype.str[1:]]
    return view, offset // dtype.itemsize


_FIELD_LOCATIONS = {name: _compute_field_location(name) for name in RING_STATE.names or () if name != "entered"}
_ENTERED_FIRST = RING_STATE.fields["entered"][1] // 8  # type: ignore[index]  # it is a structure, so it has fields
_ENTERED_END = _ENTERED_FIRST + 2 * MAX_ENTERED_GROUPS
NO_PLACE = _ENTERED_FIRST + 1
"""Place of groups for which no other is free."""
_COLLECTIVE, _GROUP = _FIELD_LOCATIONS["collective"][1], _FIELD_LOCATIONS["group"][1]
_SEQUENCE, _COLLECTIVE_SINCE, _ENTERED = (
    _FIELD_LOCATIONS[name][1] for name in ("sequence", "collective_since_ns", "collectives_entered")
)
_PHASE, _PHASE_SINCE = _FIELD_LOCATIONS["phase"][1], _FIELD_LOCATIONS["phase_since_ns"][1]
_LONGEST_LOAD = _FIELD_LOCATIONS["longest_load_ns"][1]
_STEP, _STEPS_IN_ROUND, _STEP_END = (_FIELD_LOCATIONS[name][1] for name in ("step", "steps_in_round", "step_end_ns"))

_MAP_FIXED = 0x10
"""Constant of Linux on all architectures; Python's mmap module lacks it."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_writers: weakref.WeakSet[RingWriter] = weakref.WeakSet()


def _detach_all_in_child() -> None:
    for writer in list(_writers):
        writer.detach_in_child()


os.register_at_fork(after_in_child=_detach_all_in_child)
