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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .records import (
    MAX_ENTERED_GROUPS,
    RING_HEADER_BYTES,
    RING_MAGIC,
    RING_RECORD_BYTES,
    RING_RECORD_FIELDS,
    RING_STATE_FIELDS,
    Collective,
    Phase,
    RecordKind,
    build_struct_format,
    compute_field_bytes,
    compute_offsets,
    compute_ring_bytes,
)

DEFAULT_RING_CAPACITY = 131_072
"""Number of records in a ring.

80 layers under FSDP2 make 242 collectives per microbatch, 882 with tensor parallelism: 32 steps
(`detection.windowSteps`) of four microbatches are 113,000. 8 MiB.
"""

FIRST_PROCESS_OWNER = -1
"""Owner of a ring that belongs to the first process that takes it, if a rank is an arbitrary program."""

_RECORD_STRUCT = struct.Struct(build_struct_format(RING_RECORD_FIELDS))
_HEAD_STRUCT = struct.Struct(build_struct_format(RING_STATE_FIELDS[:2]))
"""Magic and capacity, the first fields of the state."""
_UNWRITTEN = -1


class RingError(ValueError):
    """A file is not a ring of records of this version. The message names it and the remedy."""


class RingWriter:
    """The rank's side. Its methods may be called from any thread, signal handler, or gc callback.

    In a process that the rank forks, they write into that process's own memory. `state` holds the fields of
    `records.RING_STATE_FIELDS` as attributes: `ring.state.step = 7`. Each assignment is one store of an aligned word,
    which readers see as a whole.
    """

    def __init__(self, path: Path) -> None:
        """Map the ring that was created at `path`, and continue after its last record. Raises as `open_ring`."""
        self._map = map_ring(path)
        self.state = StateFields(self._map)
        self.state.pid = os.getpid()
        self._capacity = self.state.capacity
        self._index = memoryview(self._map).cast("Q")
        self._written = find_newest_index(self._read_index, self._capacity)
        """Index of the last record that was there before."""
        self._counter = itertools.count(self._written + 1)
        _writers.add(self)

    def _read_index(self, slot: int) -> int:
        return self._index[(RING_HEADER_BYTES + slot * RING_RECORD_BYTES) >> 3]

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
        """Append one record with the fields of `records.RING_RECORD_FIELDS` (times: ns of CLOCK_MONOTONIC)."""
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


class StateFields:
    """The fields of `records.RING_STATE_FIELDS` of a mapped ring as attributes."""

    __slots__ = ("_doubles", "_halves", "_unsigned", "_words")

    def __init__(self, ring: mmap.mmap | bytearray) -> None:
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


def may_take_ring(path: Path) -> bool:
    """Return whether this process may record on the ring as the rank: the ring holds its process ID, or no owner.

    A child of the rank inherits its environment, but does not act as the rank. Also True if there is no ring.
    """
    try:
        with path.open("rb") as file:
            header = file.read(RING_HEADER_BYTES)
    except OSError:
        return True
    if len(header) != RING_HEADER_BYTES:
        return True
    state = StateFields(bytearray(header))
    return (state.pid if state.owner == FIRST_PROCESS_OWNER else state.owner) in (0, os.getpid())


def create_ring(path: Path, rank: int, round_: int, capacity: int = DEFAULT_RING_CAPACITY, owner: int = 0) -> None:
    """Create a new ring at `path` atomically, for a rank of round `round_` that has not started.

    `owner`: process ID of the only process that may take it (`may_take_ring`); 0: any; -1: the first
    one that does. Raises OSError if the volume has no room for it.
    """
    header = bytearray(RING_HEADER_BYTES)
    state = StateFields(header)
    for name in ("step", "checkpoint_step", "snapshot_step", "restored_step", "sync_mode", "bad_loss_step", "peer"):
        setattr(state, name, _UNWRITTEN)
    state.magic, state.capacity = RING_MAGIC, capacity
    state.rank, state.round, state.owner = rank, round_, owner
    state.phase, state.phase_since_ns = Phase.START, time.monotonic_ns()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            os.posix_fallocate(
                file.fileno(), 0, compute_ring_bytes(capacity)
            )  # otherwise a write to a full volume would raise SIGBUS
            file.write(header)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def find_newest_index(read_index: Callable[[int], int], capacity: int) -> int:
    """Return the index of the newest record; 0: none. `read_index` returns the index in a slot.

    It uses bisection, because the slots are filled in cyclic order.
    """
    first = read_index(0)
    if first == 0:  # the first slot is being written, after the last one
        return read_index(capacity - 1)
    previous = first - 1
    low, high = 0, capacity
    while high - low > 1:
        middle = (low + high) // 2
        if read_index(middle) > previous:
            low = middle
        else:
            high = middle
    return previous + low + 1


def map_ring(path: Path) -> mmap.mmap:
    """Map a ring for its writer. Raises as `open_ring`.

    Readers do not map it: a process that truncates the file would end them by SIGBUS.
    """
    file, capacity = open_ring(path, os.O_RDWR)
    try:
        return mmap.mmap(file, compute_ring_bytes(capacity), access=mmap.ACCESS_WRITE)
    finally:
        os.close(file)


def open_ring(path: Path, access: int = os.O_RDONLY) -> tuple[int, int]:
    """Open a ring, and return its file descriptor and its capacity.

    Opens neither a link nor a pipe that blocks: a reader may not trust the writer. Raises FileNotFoundError if there is
    none, RingError if `path` is no ring of this version, OSError if it cannot be read.
    """
    file = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return file, _read_capacity(file, path)
    except BaseException:
        os.close(file)
        raise


def _read_capacity(file: int, path: Path) -> int:
    size, head = os.fstat(file).st_size, os.pread(file, _HEAD_STRUCT.size, 0)
    if size < RING_HEADER_BYTES or len(head) < _HEAD_STRUCT.size:
        raise RingError(
            f"{path}: {size} bytes are not a ring of records; the launcher creates it, do not create it manually"
        )
    magic, capacity = _HEAD_STRUCT.unpack(head)
    if magic != RING_MAGIC or compute_ring_bytes(capacity) != size:
        raise RingError(
            f"{path}: not a ring of records of this version; do library and launcher have the same version?"
        )
    if capacity > DEFAULT_RING_CAPACITY:  # of a sparse file, which needs no memory before it is read
        raise RingError(f"{path}: {capacity} records, but a rank's ring has {DEFAULT_RING_CAPACITY} at most")
    return int(capacity)


_VIEWS = {"i8": "_words", "u8": "_words", "i4": "_halves", "u4": "_unsigned", "f8": "_doubles"}
_STATE_OFFSETS = compute_offsets(RING_STATE_FIELDS)
_FIELD_LOCATIONS = {
    name: (_VIEWS[format_[1:]], _STATE_OFFSETS[name] // compute_field_bytes(format_))
    for name, format_ in RING_STATE_FIELDS
    if name != "entered"
}
"""The view of the header that holds each field, and its position there."""
_ENTERED_FIRST = _STATE_OFFSETS["entered"] // 8
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
