"""Snapshots of the training state in shared memory: they outlive the rank, so that a crash costs the job few steps.

Replicated models are the same on all ranks, so one rank of each worker (local rank 0) keeps a copy for all of them,
which they map when they come back; of sharded models each rank keeps its part. The random states of all ranks are
exchanged with each snapshot and stand in every copy: whoever takes over a rank gets the very state that it had.

A copy is two slots, each a file, written in turn, so that one is whole at every moment:
header (one page) | rank states | skeleton (JSON, `plain`) | tensors. A slot's step is voided before it is written and
set last. A checksum over all of it tells a reader that these are the bytes that were written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from pacekeeper.cgroup import compute_memory_left
from pacekeeper.plain import (
    TensorLayout,
    align_bytes,
    describe_layout,
    get_layout,
    decode_tree,
    read_layout,
    compute_layout_bytes,
    encode_tree,
    view_tensors,
)
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json

from .beside import run_in_background
from .copies import CopyTime, HostCopies, SlotCopies, TornCopyError, map_pages
from .rank_state import RANK_STATE_BYTES
from .versions import NO_STATE_VERSION, StateVersion

_SLOT_HEADER = struct.Struct("<QqqQqqqqQ")
"""Magic, step (-1: void), round, fingerprint of the model, world size, bytes of the skeleton, offset of the tensors,
bytes of the slot, checksum."""
_SLOT_MAGIC = 0x504B_534E_4150_0003
SLOT_HEADER_BYTES = 4096
CHECKSUM_WORD_BYTES = 8
_WORDS_PER_SUM = 1 << 17
"""Words that are added up before the checksum takes their sum: 1 MiB."""
_SNAPSHOT_RESERVE_BYTES = 64 << 20
"""Of the memory that the control group has left, what a new slot leaves to the training."""
_PEER_MEMORY_SHARE = 0.9
"""Of that memory, what other workers' shards may have: the training may come to need more."""
_LOCK_FILE = ".turn"
"""A file that a rank holds locked while it looks whether there is memory for its slot."""
_LOCK_TIMEOUT_SECONDS = 10.0
_LOCK_POLL_INTERVAL_SECONDS = 0.01
SLOTS_PER_RANK = 2
"""One is valid while the other is being written."""
_log = logging.getLogger(__name__)


class CopyOutcome(Enum):
    """What has become of a state that was to be copied into a slot."""

    COPIED = "Copied"
    ALLOCATED_AND_COPIED = "MadeAndCopied"  # the slot had to be made for it, which takes much longer
    DEFERRED = "Later"  # not copied: the slot is being made for it, beside the training


class Snapshots:
    """One rank's snapshots in the runtime folder."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        round_: int,
        world_size: int,
        fingerprint: int,
        read_memory_left: Callable[[], float] = compute_memory_left,
        copies: SlotCopies | None = None,
        free_memory: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        name: of the copy; "replica", or the shard's.
        fingerprint: of the model that is to be restored; other models' snapshots count as none.
        left: bytes of memory that the control group may still take.
        copies: how the state comes into a slot; None: as a state on the host does.
        make_room: has what is worth less than a slot of its own give its memory back, where there is not enough;
        returns whether there was any.
        """
        self._folder = folder
        self._name = name
        self._paths = [folder / f"{name}.{slot}" for slot in range(SLOTS_PER_RANK)]
        self._round = round_
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._read_memory_left = read_memory_left
        self._copies = copies or HostCopies()
        self._free_memory = free_memory
        self._excluded_versions: set[StateVersion] = set()
        self._slots: list[SnapshotSlot | None] = [None] * SLOTS_PER_RANK
        self._next_slot = 0
        """The slot that is written next, or that is being written."""
        self._pending_slot: Future[SnapshotSlot] | None = None
        """It, beside the training."""

    def list_versions(self) -> list[tuple[StateVersion, int]]:
        """What the two slots hold of this model: two versions and their bytes; NOTHING for a slot without."""
        return [self._read_version(path) for path in self._paths]

    def write(self, step: int, state: Any, fingerprint: int, wait: bool = False) -> CopyOutcome:
        """Copies `state` into the older slot. It becomes valid with `publish`, when the rank states have come.

        fingerprint: of the model as it is in `state`; it may have grown since the round began.
        wait: for a slot that is made beside the training.

        Raises OSError where memory does not suffice, InputError where `state` has what cannot be kept.
        """
        tensors: list[torch.Tensor] = []
        skeleton = _encode_skeleton(encode_tree(state, tensors), tensors)
        written = CopyOutcome.COPIED
        if not self._has_fitting_slot(tensors, skeleton):
            written = CopyOutcome.ALLOCATED_AND_COPIED
            self._make_slot(tensors, skeleton, wait)
        slot = self._slots[self._next_slot]
        if slot is None:
            return CopyOutcome.DEFERRED
        slot.fill(step, self._round, fingerprint, tensors, skeleton, self._copies)
        return written

    def publish(self, rank_states: torch.Tensor) -> int:
        """Makes what was written last valid; returns its step. rank_states: uint8, world size · RANK_STATE_BYTES."""
        slot = self._slots[self._next_slot]
        assert slot is not None, "write() comes first"
        self._next_slot = (self._next_slot + 1) % SLOTS_PER_RANK
        return slot.publish(rank_states)

    def finish_copy(self) -> CopyTime | None:
        """Until what was written last is there; as `SlotCopies.finish`."""
        return self._copies.finish()

    def release_slot(self) -> None:
        """The slot that was written last, or would be next, gives its memory back. The other one stays."""
        with suppress(TornCopyError):
            self._copies.finish()
        slot, self._slots[self._next_slot] = self._slots[self._next_slot], None
        if slot is not None:
            slot.unpin()
        self._paths[self._next_slot].unlink(missing_ok=True)

    def read(self, version: StateVersion, is_verified: bool = False) -> torch.Tensor | None:
        """The whole slot that holds `version`, uint8, mapped; `unpack` makes a state of it.

        proved: it has been held against its checksum as it came.

        What is mapped does not change: the first write of a round makes the slot anew. None: no slot has it, or its
        bytes are not those that were written. The slot is void then, for whoever looks: a copy of it from elsewhere
        counts as if this one had never been.
        """
        number = self._find_slot(version)
        if number is None:
            return None
        path = self._paths[number]
        try:
            slot = _map_slot(path)
            if not is_verified:
                check_slot(slot)
        except (OSError, ValueError, InputError) as error:
            _log.warning("the snapshot of step %d in %s is not used: %s", version.step, path, error)
            if not isinstance(error, InputError) or not _void_slot(path):
                self.exclude_version(version)
            return None
        self._next_slot = (number + 1) % SLOTS_PER_RANK  # this one stays until there is another
        return slot

    def read_unchecked(self, version: StateVersion) -> torch.Tensor | None:
        """As `read`, for who sends it to somebody who holds it against its checksum: one reading of it suffices."""
        number = self._find_slot(version)
        try:
            return None if number is None else _map_slot(self._paths[number])
        except (OSError, ValueError):  # the slot has gone meanwhile, or is being made
            return None

    def _find_slot(self, version: StateVersion) -> int | None:
        """Of the slot that holds it."""
        return next((number for number, (held, _) in enumerate(self.list_versions()) if held == version), None)

    def explain_missing(self, version: StateVersion) -> str:
        """Why `read` and `unchecked` have nothing of it."""
        if any(_read_slot_header(path)[0] == version and self._read_version(path)[0] != version for path in self._paths):
            return (
                "register(): the model has grown since it was registered, and is another one to a round that begins as "
                "this one did; register it with all the parameters that it will have"
            )
        return "it is not there any more"

    def allocate_slot(self, nbytes: int, may_replace: bool = False) -> PeerSlot:
        """A slot for a peer's snapshot of so many bytes: where what is held is the oldest.

        may_replace: whether it may be in the place of the other one, where there is memory for one slot only.
        Raises OSError where memory does not suffice.
        """
        oldest, other = (self._paths[number] for number in self._sort_by_age())
        replaced = oldest
        try:
            self._allocate(oldest, nbytes).close()
        except OSError:
            if not may_replace or self._read_version(other)[1] < nbytes:  # nor would there be room without it
                raise
            self._allocate(other, nbytes).close()
            replaced = other
        return PeerSlot(replaced)

    def allocate_peer_slot(self, nbytes: int, reserved: int = 0) -> PeerSlot:
        """A slot for the shard of another worker's rank: where what is held is the oldest.

        What has as many bytes is used again: new memory takes as long to have as it takes to fill. spared: bytes that
        this worker is yet to take, beside a tenth of what is left. Raises OSError where memory does not suffice.
        """
        path = self._paths[self._sort_by_age()[0]]
        if not _void_if_size_matches(path, nbytes):
            self._allocate(path, nbytes, reserved, share=_PEER_MEMORY_SHARE).close()
        return PeerSlot(path)

    @property
    def unallocated_slots(self) -> int:
        """That have neither memory yet nor a file whose memory they will have."""
        return sum(slot is None and not path.exists() for slot, path in zip(self._slots, self._paths, strict=True))

    def exclude_version(self, version: StateVersion) -> None:
        """It is not `held` any longer."""
        self._excluded_versions.add(version)

    def _has_fitting_slot(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> bool:
        """Whether the next slot is there, and has room for these."""
        slot = self._slots[self._next_slot]
        return slot is not None and slot.fits(tensors, skeleton)

    def _make_slot(self, tensors: Sequence[torch.Tensor], skeleton: bytes, wait: bool) -> None:
        """The next slot, for these; where the training goes on meanwhile, beside it: then there is none at first."""
        layout, path = get_layout(tensors), self._paths[self._next_slot]
        while not self._has_fitting_slot(tensors, skeleton):  # what they were when it was begun, they may not be when it is made
            if self._pending_slot is None:
                self.release_slot()  # its memory goes first: there is room for two slots, not for three
                if not self._copies.asynchronous:
                    self._adopt_slot(self._create_slot(path, layout, len(skeleton)))
                    return
                self._pending_slot = run_in_background(lambda: self._create_slot(path, layout, len(skeleton)), "pacekeeper-slot")
            if not wait and not self._pending_slot.done():
                return
            making, self._pending_slot = self._pending_slot, None
            self._adopt_slot(making.result())
            del making  # it holds the slot, too

    def _adopt_slot(self, slot: SnapshotSlot) -> None:
        """As the next one. In the training's own thread: it captures no graph now, which pinning would break."""
        slot.unpin = self._copies.pin(slot.content)
        self._slots[self._next_slot] = slot

    def _create_slot(self, path: Path, layout: TensorLayout, skeleton_bytes: int) -> SnapshotSlot:
        self._remove_unused_files()
        slot = SnapshotSlot(lambda total: self._allocate_with_priority(path, total), self._world_size, layout, skeleton_bytes)
        if self._copies.asynchronous:
            map_pages(slot.content)
        return slot

    def _sort_by_age(self) -> list[int]:
        """The slots, the one that was completed first at the front: a later round may have gone back to an earlier
        step, and what is ahead of it is of no more use."""
        held = self.list_versions()
        return sorted(range(SLOTS_PER_RANK), key=lambda number: (held[number][0].round, held[number][0].step))

    def _allocate_with_priority(self, path: Path, total: int) -> mmap.mmap:
        """Before what gives way."""
        try:
            return self._allocate(path, total)
        except OSError as error:
            if error.errno not in {errno.ENOMEM, errno.ENOSPC} or not self._free_memory():
                raise
        return self._allocate(path, total)

    def _allocate(self, path: Path, total: int, reserved: int = 0, share: float = 1.0) -> mmap.mmap:
        """Shared memory in the place of the file that is there. Raises OSError where there is not enough of it.

        spared: bytes that stay, of the `share` of what is left.
        """
        with hold_file_lock(self._folder / _LOCK_FILE):  # each rank sees what the others are about to take
            path.unlink(missing_ok=True)
            owed = _sum_unallocated_bytes(self._folder)
            bytes_left = self._read_memory_left() - owed
            if total + _SNAPSHOT_RESERVE_BYTES + reserved > share * bytes_left:
                less = f", of which {reserved >> 20} MiB and a tenth are spared" if reserved else ""
                raise OSError(
                    errno.ENOMEM,
                    f"a slot takes {total >> 20} MiB, and the control group has {int(bytes_left) >> 20} MiB left{less}",
                )
            file = path.open("x+b")  # no slot before its header says so
            os.ftruncate(file.fileno(), total)
        with file:
            try:
                os.posix_fallocate(file.fileno(), 0, total)  # fails now, not by SIGBUS later
            except OSError:
                path.unlink()
                raise
            return mmap.mmap(file.fileno(), total)

    def _remove_unused_files(self) -> None:
        """Removes what no rank of this round reads: other sizes' shards, and what was never finished.

        When a round takes its first snapshot, all its ranks have their state, and the rounds before are gone.
        """
        _, of, size = self._name.rpartition("-of-")
        fellows = f"{of}{size}."
        for path in self._folder.iterdir():
            if path.name != _LOCK_FILE and (fellows not in path.name or path.name.startswith(".")):
                path.unlink(missing_ok=True)

    def _read_version(self, path: Path) -> tuple[StateVersion, int]:
        version, fingerprint, nbytes = _read_slot_header(path)
        return (NO_STATE_VERSION, 0) if fingerprint != self._fingerprint or version in self._excluded_versions else (version, nbytes)


def _read_slot_header(path: Path) -> tuple[StateVersion, int, int]:
    """By its header, what a slot holds: version, fingerprint of the model, bytes; NOTHING: it is none."""
    nothing = (NO_STATE_VERSION, 0, 0)
    try:
        with path.open("rb") as file:
            header = file.read(_SLOT_HEADER.size)
            nbytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return nothing
    if len(header) < _SLOT_HEADER.size:
        return nothing
    magic, step, round_, fingerprint, _, _, _, total, _ = _SLOT_HEADER.unpack(header)
    if magic != _SLOT_MAGIC or step < 0 or total != nbytes or nbytes < SLOT_HEADER_BYTES or nbytes % CHECKSUM_WORD_BYTES:
        return nothing
    return StateVersion(step, round_), fingerprint, nbytes


def _void_slot(path: Path) -> bool:
    """What lies there is no slot from now on, for whoever looks; False: that could not be written."""
    try:
        with path.open("r+b") as file:
            file.write(bytes(SLOT_HEADER_BYTES))
    except OSError:
        return False
    return True


def _map_slot(path: Path) -> torch.Tensor:
    """All of it, uint8. What is written to the tensor does not reach the file."""
    with path.open("rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _void_if_size_matches(path: Path, nbytes: int) -> bool:
    """The slot that is there is none from now on; False: it has not so many bytes."""
    try:
        with path.open("r+b") as file:
            status = os.fstat(file.fileno())
            if status.st_size != nbytes or 512 * status.st_blocks < nbytes:
                return False
            file.write(bytes(SLOT_HEADER_BYTES))
    except FileNotFoundError:
        return False
    return True


def _sum_unallocated_bytes(folder: Path) -> int:
    """Bytes that files there are to have, and have not been given yet."""
    owed = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            status = path.stat()
            owed += max(0, status.st_size - 512 * status.st_blocks)
    return owed


@contextmanager
def hold_file_lock(path: Path, timeout: float = _LOCK_TIMEOUT_SECONDS) -> Iterator[None]:
    """One process at a time is inside, of those that name this file. Raises TimeoutError.

    Who is killed inside lets the next one in.
    """
    deadline = time.monotonic() + timeout
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, f"{path} was taken for {timeout:.0f} s") from None
                time.sleep(_LOCK_POLL_INTERVAL_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # to close it is not enough where a process was forked meanwhile


def check_slot(slot: torch.Tensor) -> None:
    """Raises InputError where the bytes of a slot are not those that were written."""
    content = memoryview(slot.numpy().data)
    if len(content) < SLOT_HEADER_BYTES or len(content) % CHECKSUM_WORD_BYTES:
        raise InputError(f"not a snapshot: {len(content)} bytes")
    sums = _SlotChecksum()
    sums.add(content[SLOT_HEADER_BYTES:])
    _check_header(content[:SLOT_HEADER_BYTES], len(content), sums)


def _check_header(header: bytearray | memoryview, nbytes: int, sums: _SlotChecksum) -> None:
    *fields, total, checksum = _SLOT_HEADER.unpack_from(header)
    if fields[0] != _SLOT_MAGIC or total != nbytes:
        raise InputError(f"not a snapshot: {nbytes} bytes, of which its header says {total}")
    if checksum != sums.checksum([*fields, total]):
        raise InputError("its checksum is another than when it was written")


class _SlotChecksum:
    """Of what follows the header, as it comes: at the speed at which memory is read.

    Each bit that flips changes its MiB's sum; the sums are hashed, so that their order counts.
    """

    def __init__(self) -> None:
        self._full_sums: list[int] = []
        self._partial_sum, self._missing_words = np.int64(0), _WORDS_PER_SUM
        """The sum of the MiB that is not whole yet, and how many words it lacks."""

    def add(self, content: memoryview) -> None:
        """`content`: whole words."""
        words = np.frombuffer(content, dtype=np.int64)
        while len(words):
            part, words = words[: self._missing_words], words[self._missing_words :]
            self._partial_sum = np.add(self._partial_sum, part.sum())
            self._missing_words -= len(part)
            if not self._missing_words:
                self._full_sums.append(int(self._partial_sum))
                self._partial_sum, self._missing_words = np.int64(0), _WORDS_PER_SUM

    def checksum(self, fields: Sequence[int]) -> int:
        """`fields`: the header's other ones."""
        digest = hashlib.blake2b(repr((list(fields), [*self._full_sums, int(self._partial_sum)])).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


class PeerSlot:
    """A slot that is filled with what comes from elsewhere.

    It is written to, not mapped: to have a page mapped takes longer than to copy it there. And it is not held open: a
    loader's processes that are forked meanwhile would keep its memory until they end, when it has given way.
    """

    def __init__(self, path: Path) -> None:
        """`path`: of as many bytes as are to come, and without a header."""
        self._path = path
        self._inode = path.stat().st_ino
        self._sums = _SlotChecksum()
        self._end = SLOT_HEADER_BYTES
        """How far it is filled."""

    def add(self, content: memoryview) -> None:
        """What comes next, behind the header: whole words. Raises OSError where the slot has given way."""
        self._sums.add(content)
        self._write(content, self._end)
        self._end += len(content)

    def finish(self, header: bytearray) -> None:
        """The header makes it a slot. Raises InputError where it does not fit what has been added, OSError as `add`."""
        _check_header(header, self._end, self._sums)
        self._write(memoryview(header)[16:], 16)
        self._write(memoryview(header)[:16], 0)  # the magic number and the step make it valid

    def map_content(self) -> torch.Tensor:
        """What lies there by now, mapped, uint8."""
        return _map_slot(self._path)

    def _write(self, content: memoryview, start: int) -> None:
        with self._path.open("r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino != self._inode:
                raise FileNotFoundError(errno.ENOENT, "another slot is in its place", str(self._path))
            while content:
                written = os.pwrite(file.fileno(), content, start)
                content, start = content[written:], start + written


def unpack_slot(slot: torch.Tensor, mesh: DeviceMesh | None, copying_objects: Container[str] = ()) -> tuple[Any, list[bytes]]:
    """The state and the rank states (one each rank of the job that wrote it) in the bytes of a slot.

    copying: names in the state whose owners copy what they load: their tensors lie in `slot`. All others have memory of
    their own. Raises InputError where a peer has sent something else.
    """
    content = slot.numpy().data
    try:
        _, _, _, _, world_size, skeleton_bytes, offset, _, _ = _SLOT_HEADER.unpack_from(content)
        ranks_end = SLOT_HEADER_BYTES + world_size * RANK_STATE_BYTES
        skeleton, layout = parse_json(bytes(content[ranks_end : ranks_end + skeleton_bytes]))
        if world_size < 1 or offset < 0 or ranks_end + skeleton_bytes > len(content):
            raise ValueError("parts that lie outside of it")
        tensors = view_tensors(slot, offset, read_layout(layout))
        own = _ClonedTensors(tensors)
        state = {name: decode_tree(part, tensors if name in copying_objects else own, mesh) for name, part in skeleton["dict"]}
    except (LookupError, TypeError, ValueError, RuntimeError, RecursionError, struct.error) as error:
        raise InputError(f"not a snapshot: {error!r}") from error
    rank_states = [
        bytes(content[start : start + RANK_STATE_BYTES]) for start in range(SLOT_HEADER_BYTES, ranks_end, RANK_STATE_BYTES)
    ]
    return state, rank_states


class _ClonedTensors(Sequence[torch.Tensor]):
    """The same tensors, each a copy that is made when it is asked for, once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        return self._tensors[index].clone()


def _encode_skeleton(skeleton: Any, tensors: Sequence[torch.Tensor]) -> bytes:
    """How a state is put together from its tensors, and how these lie in a slot."""
    return json.dumps([skeleton, describe_layout(get_layout(tensors))], separators=(",", ":")).encode()


class SnapshotSlot:
    """A file in shared memory, laid out for tensors of given types and shapes."""

    def __init__(
        self,
        allocate: Callable[[int], mmap.mmap],
        world_size: int,
        layout: TensorLayout,
        skeleton_bytes: int,
    ) -> None:
        """`allocate`: gives so many bytes of shared memory, or raises OSError."""
        self._layout = layout
        self._ranks_end = SLOT_HEADER_BYTES + world_size * RANK_STATE_BYTES
        self._world_size = world_size
        self._skeleton_capacity = 2 * skeleton_bytes + 4096  # numbers in it may grow
        self._offset = align_bytes(self._ranks_end + self._skeleton_capacity)
        self._map = allocate(self._offset + compute_layout_bytes(self._layout))
        self._words = memoryview(self._map).cast("q")
        self.content = torch.frombuffer(self._map, dtype=torch.uint8)
        self._tensors = view_tensors(self.content, self._offset, self._layout)
        self.unpin: Callable[[], None] = lambda: None
        self._void()

    def fits(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> bool:
        return len(skeleton) <= self._skeleton_capacity and get_layout(tensors) == self._layout

    def fill(
        self,
        step: int,
        round_: int,
        fingerprint: int,
        tensors: list[torch.Tensor],
        skeleton: bytes,
        copies: SlotCopies,
    ) -> None:
        """Begins to copy everything but the rank states."""
        self._void()
        self._map[self._ranks_end : self._ranks_end + len(skeleton)] = skeleton
        copies.begin(self._tensors, tensors)
        self._pending = (step, round_, fingerprint, self._world_size, len(skeleton), self._offset, len(self._map))

    def publish(self, rank_states: torch.Tensor) -> int:
        """Adds the rank states (uint8, world size · RANK_STATE_BYTES) and makes the slot valid; returns its step."""
        self.content[SLOT_HEADER_BYTES : self._ranks_end].copy_(rank_states)
        step, *rest = self._pending
        sums = _SlotChecksum()
        sums.add(memoryview(self._map)[SLOT_HEADER_BYTES:])
        _SLOT_HEADER.pack_into(self._map, 0, _SLOT_MAGIC, -1, *rest, sums.checksum([_SLOT_MAGIC, step, *rest]))
        self._words[1] = step  # one store: a rank that is killed leaves a valid slot or a void one
        return step

    def _void(self) -> None:
        _SLOT_HEADER.pack_into(self._map, 0, _SLOT_MAGIC, -1, -1, 0, 0, 0, 0, 0, 0)
