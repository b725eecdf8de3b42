"""The ring of records of one rank: a file in shared memory with one writer (the rank) and any number of readers.

Neither side ever waits for the other: every slot carries its own sequence lock, so that a rank writes a record in about
half a microsecond and a reader drops the few slots that were being written while it looked.
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
from pacekeeper_analysis.records import (
    MAX_ENTERED_GROUPS,
    RING_HEADER_BYTES,
    RING_MAGIC,
    RING_RECORD,
    RING_RECORD_FORMAT,
    RING_STATE,
    Collective,
    RecordKind,
    Phase,
    compute_ring_bytes,
)

DEFAULT_RING_CAPACITY = 131_072
"""Records a ring holds. 80 layers under FSDP2 make 242 collectives a microbatch, 882 with tensor parallelism: 32 steps
(`detection.windowSteps`) of four microbatches are 113,000. 8 MiB."""

_RECORD_STRUCT = struct.Struct(RING_RECORD_FORMAT)
_UNWRITTEN = -1


class RingWriter:
    """The rank's side. Its methods may be called from any thread, from signal handlers and from gc's callbacks. In a
    process that the rank forks they write into that process's own memory.

    `state` holds the fields of `records.STATE` as attributes: `ring.state.step = 7`. Each assignment is one store of an
    aligned word, so that readers see it whole.
    """

    def __init__(self, path: Path) -> None:
        """Maps the ring that the launcher has made at `path` and goes on behind its last record."""
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
        """Puts memory of this process, just forked, in the place of the ring.

        Views and addresses of it stay as they are, so that this holds for all that writes here, the part in C included.
        """
        header, size = self._map[:RING_HEADER_BYTES], len(self._map)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        self._map[:RING_HEADER_BYTES] = header

    def write(
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
        """Appends one record, fields as in `records.RECORD` (times: ns of CLOCK_MONOTONIC). Fastest by position."""
        index = next(self._counter)  # atomic: two threads never get the same slot
        offset = RING_HEADER_BYTES + (index - 1) % self._capacity * 64
        # The slot is void (index 0) while its fields change; its index, stored last, makes it valid.
        _RECORD_STRUCT.pack_into(
            self._map, offset,
            0, kind, phase, collective, flags, step, sequence, group, start_ns, end_ns, nbytes, value, peer, 0,
        )  # fmt: skip
        self._index[offset >> 3] = index

    def enter_phase(self, phase: Phase, now_ns: int | None = None) -> None:
        """From now on the rank is in `phase`, and judged by that phase's deadline."""
        state = self.state
        state._words[_PHASE_SINCE] = time.monotonic_ns() if now_ns is None else now_ns
        state._halves[_PHASE] = phase

    def take_place(self, group: int) -> int:
        """Where `enter_collective` is to note how far the rank has come in this group; give it back when it is gone."""
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
        """The rank is now inside the `sequence`-th collective of `group`, whose place is `place` (`take_place`)."""
        words, halves = self.state._words, self.state._unsigned
        words[_COLLECTIVE_SINCE] = now_ns
        words[_SEQUENCE] = words[place] = sequence
        halves[_GROUP] = group
        words[_ENTERED] += 1
        halves[_COLLECTIVE] = collective

    def leave_collective(self) -> None:
        """The rank is outside of collectives again."""
        self.state._unsigned[_COLLECTIVE] = 0

    def end_load(self, duration_ns: int) -> None:
        """The rank has waited so long for its loader."""
        words = self.state._words
        if duration_ns > words[_LONGEST_LOAD]:
            words[_LONGEST_LOAD] = duration_ns

    def end_step(self, step: int, now_ns: int) -> None:
        """Optimizer step `step` of the job is complete."""
        words = self.state._words
        words[_STEP] = step
        words[_STEPS_IN_ROUND] += 1
        words[_STEP_END] = now_ns


class RingReader:
    """A reader's side. The ring of the next round is another file of the same name: `is_current` tells."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError where no ring is there yet, InputError where `path` is no ring."""
        self._path = path
        self._map = _map_ring(path, write=False)
        self._identity = _read_file_identity(path)
        records = np.frombuffer(self._map, RING_RECORD, offset=RING_HEADER_BYTES)
        self._index = records["index"]
        self._slots = records.view(f"V{RING_RECORD.itemsize}")  # copied whole, ten times as fast as field by field

    @property
    def is_current(self) -> bool:
        """False once a later round has put its own ring in this place."""
        return _read_file_identity(self._path) == self._identity

    def state(self) -> np.void:
        """A copy of the rank's present state (`records.STATE`)."""
        copy: np.void = np.frombuffer(self._map[: RING_STATE.itemsize], RING_STATE)[0]
        return copy

    def records(self, since: int = 0) -> NDArray[np.void]:
        """The records with an index above `since` that the ring still holds whole (`records.RECORD`), oldest first.

        Takes as long as there are such. Where the first of them is not `since` + 1, others were overwritten unread.
        """
        newest, capacity = _find_newest_index(self._index), len(self._index)
        oldest = max(since, newest - capacity) + 1
        begin, end = (oldest - 1) % capacity, (newest - 1) % capacity + 1
        spans = [slice(begin, end)] if begin < end else [slice(begin, None), slice(0, end)]
        if oldest > newest:
            spans = [slice(0)]
        slots = np.concatenate([self._slots[span] for span in spans])
        behind = np.concatenate([self._index[span] for span in spans])
        expected = np.arange(oldest, oldest + len(slots), dtype=np.uint64)
        whole = (slots.view(RING_RECORD)["index"] == expected) & (behind == expected)
        records: NDArray[np.void] = slots[whole].view(RING_RECORD)
        return records


class StateFields:
    """The fields of `records.STATE` of a mapped ring as attributes."""

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
    """Puts a fresh ring at `path` in one step, for a rank of round `round_` that is still to start.

    owner: process id of the only process that may take it (`Runtime.is_rank_process`); 0: any may, -1: the first that does.
    Raises OSError where the volume has no room for all of it.
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
            os.posix_fallocate(file.fileno(), 0, compute_ring_bytes(capacity))  # or a write to a full volume would be a SIGBUS
            file.write(header.tobytes())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _find_newest_index(index: NDArray[np.uint64]) -> int:
    """Index of the newest record; 0: there is none. `index`: of all slots, shape (capacity,).

    By bisection, since the slots are filled in order, time and again.
    """
    if index[0] == 0:  # it is written right now, behind the last one
        return int(index[-1])
    before = int(index[0]) - 1
    low, high = 0, len(index)
    while high - low > 1:
        middle = (low + high) // 2
        if index[middle] > before:
            low = middle
        else:
            high = middle
    return before + low + 1


def _map_ring(path: Path, *, write: bool) -> mmap.mmap:
    with path.open("r+b" if write else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < RING_HEADER_BYTES:
            raise InputError(
                f"{path}: {size} bytes are not a ring of records; the launcher makes it, do not make it by hand"
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
    """Which view of the header holds the field, and where in it."""
    dtype, offset = RING_STATE.fields[name][:2]  # type: ignore[index]  # STATE is a structure, so it has fields
    view = {"i8": "_words", "u8": "_words", "i4": "_halves", "u4": "_unsigned", "f8": "_doubles"}[dtype.str[1:]]
    return view, offset // dtype.itemsize


_FIELD_LOCATIONS = {name: _compute_field_location(name) for name in RING_STATE.names or () if name != "entered"}
_ENTERED_FIRST = RING_STATE.fields["entered"][1] // 8  # type: ignore[index]  # STATE is a structure, so it has fields
_ENTERED_END = _ENTERED_FIRST + 2 * MAX_ENTERED_GROUPS
NO_PLACE = _ENTERED_FIRST + 1
"""For groups that find none free."""
_COLLECTIVE, _GROUP = _FIELD_LOCATIONS["collective"][1], _FIELD_LOCATIONS["group"][1]
_SEQUENCE, _COLLECTIVE_SINCE, _ENTERED = (
    _FIELD_LOCATIONS[name][1] for name in ("sequence", "collective_since_ns", "collectives_entered")
)
_PHASE, _PHASE_SINCE = _FIELD_LOCATIONS["phase"][1], _FIELD_LOCATIONS["phase_since_ns"][1]
_LONGEST_LOAD = _FIELD_LOCATIONS["longest_load_ns"][1]
_STEP, _STEPS_IN_ROUND, _STEP_END = (_FIELD_LOCATIONS[name][1] for name in ("step", "steps_in_round", "step_end_ns"))

_MAP_FIXED = 0x10
"""Of Linux, on all machines; Python's mmap module does not have it."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_writers: weakref.WeakSet[RingWriter] = weakref.WeakSet()


def _detach_all_in_child() -> None:
    for writer in list(_writers):
        writer.detach_in_child()


os.register_at_fork(after_in_child=_detach_all_in_child)
