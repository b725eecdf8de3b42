"""Snapshots of the training state in shared memory. They outlive the rank, so that a crash costs the job few steps.

Replicated models are the same on all ranks, so one rank of each worker (local rank 0) keeps a copy for all of them,
which they map after a restart. Of sharded models each rank keeps its part. The random states of all ranks are exchanged
with each snapshot and stored in every copy. A replacement of a rank therefore gets its exact state.

A copy is two slots, each a file, written alternately, so that one is complete at every moment:
header (one page) | rank states | skeleton (JSON, `safe_serialization`) | tensors. A slot's step is voided before it is
written and set last. A checksum of the whole slot shows a reader that the bytes are those that were written.
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
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from pacekeeper.cgroup import compute_memory_left
from pacekeeper.safe_serialization import (
    TensorLayout,
    align_bytes,
    compute_layout_bytes,
    decode_tree,
    describe_layout,
    encode_tree,
    get_layout,
    read_layout,
    view_tensors,
)
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json

from ..background import run_in_background
from ..rank_state import RANK_STATE_BYTES
from ..versions import NO_STATE_VERSION, StateVersion
from .snapshot_copies import CopyTime, HostCopies, SlotCopies, TornCopyError, map_pages

_SLOT_HEADER = struct.Struct("<QqqQqqqqQ")
"""Header of a slot.

Its fields are magic, step (-1: void), round, fingerprint of the model, world size, bytes of the skeleton, offset of the
tensors, bytes of the slot, checksum.
"""
_SLOT_MAGIC = 0x504B_534E_4150_0003
SLOT_HEADER_BYTES = 4096
CHECKSUM_WORD_BYTES = 8
_WORDS_PER_SUM = 1 << 17
"""Words that are added up before the checksum takes their sum: 1 MiB."""
_SNAPSHOT_RESERVE_BYTES = 64 << 20
"""Bytes of the control group's free memory that a new slot leaves to the training."""
_PEER_MEMORY_SHARE = 0.9
"""Share of that memory that other workers' shards may use: training may need more later."""
_LOCK_FILE = ".turn"
"""A file that a rank locks while it checks for and allocates the memory of its slot."""
_LOCK_TIMEOUT_SECONDS = 10.0
_LOCK_POLL_INTERVAL_SECONDS = 0.01
SLOTS_PER_RANK = 2
"""One slot is valid while the other is being written."""
_log = logging.getLogger(__name__)


class CopyOutcome(Enum):
    """Outcome of copying a state into a slot."""

    COPIED = "Copied"
    ALLOCATED_AND_COPIED = "MadeAndCopied"  # the slot was allocated first, which takes much longer
    DEFERRED = "Later"  # not copied: the slot is being allocated in the background


@dataclass(frozen=True)
class SlotMemory:
    """The memory that slots are allocated in."""

    read_bytes_left: Callable[[], float] = compute_memory_left
    """Returns the bytes of memory that the control group may still use."""
    free: Callable[[], bool] = lambda: False
    """Releases memory that is less important than a slot, if there is not enough; returns whether there was any."""


_DEFAULT_SLOT_MEMORY = SlotMemory()


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
        copies: SlotCopies | None = None,
        memory: SlotMemory = _DEFAULT_SLOT_MEMORY,
    ) -> None:
        """Open the snapshots.

        `name`: name of the copy: "replica", or that of the shard.
        `fingerprint`: fingerprint of the model to restore; snapshots of other models are ignored.
        `copies`: how the state is copied into a slot; None: as a state on the host.
        """
        self._folder = folder
        self._name = name
        self._paths = [folder / f"{name}.{slot}" for slot in range(SLOTS_PER_RANK)]
        self._round = round_
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._copies = copies or HostCopies()
        self._memory = memory
        self._excluded_versions: set[StateVersion] = set()
        self._slots: list[SnapshotSlot | None] = [None] * SLOTS_PER_RANK
        self._next_slot = 0
        """The slot that is written next, or that is being written."""
        self._pending_slot: Future[SnapshotSlot] | None = None
        """That slot, while it is allocated in the background."""

    def list_versions(self) -> list[tuple[StateVersion, int]]:
        """Return version and bytes of both slots; NO_STATE_VERSION for a slot without a snapshot of this model."""
        return [self._read_version(path) for path in self._paths]

    def write(self, step: int, state: Any, fingerprint: int, wait: bool = False) -> CopyOutcome:
        """Copy `state` into the older slot. `publish` makes it valid once the rank states have arrived.

        `fingerprint`: fingerprint of the model in `state`; the model may have grown since the round began.
        `wait`: wait for a slot that is allocated in the background.

        Raises OSError if there is not enough memory, InputError if `state` contains a value that cannot be saved.
        """
        tensors: list[torch.Tensor] = []
        skeleton = _encode_skeleton(encode_tree(state, tensors), tensors)
        outcome = CopyOutcome.COPIED
        if not self._has_fitting_slot(tensors, skeleton):
            outcome = CopyOutcome.ALLOCATED_AND_COPIED
            self._make_slot(tensors, skeleton, wait)
        slot = self._slots[self._next_slot]
        if slot is None:
            return CopyOutcome.DEFERRED
        slot.fill(step, self._round, fingerprint, tensors, skeleton, self._copies)
        return outcome

    def publish(self, rank_states: torch.Tensor) -> int:
        """Make the last slot valid, and return its step. `rank_states`: uint8, world size · RANK_STATE_BYTES."""
        slot = self._slots[self._next_slot]
        assert slot is not None, "write() comes first"
        self._next_slot = (self._next_slot + 1) % SLOTS_PER_RANK
        return slot.publish(rank_states)

    def finish_copy(self) -> CopyTime | None:
        """Wait for the last copy; as `SlotCopies.finish`."""
        return self._copies.finish()

    def release_slot(self) -> None:
        """Release the memory of the slot that was written last, or would be next. The other one stays."""
        with suppress(TornCopyError):
            self._copies.finish()
        slot, self._slots[self._next_slot] = self._slots[self._next_slot], None
        if slot is not None:
            slot.unpin()
        self._paths[self._next_slot].unlink(missing_ok=True)

    def release_slots(self) -> None:
        """Release the memory of both slots, and remove their files."""
        for _ in range(SLOTS_PER_RANK):
            self.release_slot()
            self._next_slot = (self._next_slot + 1) % SLOTS_PER_RANK

    def write_other_next(self, version: StateVersion) -> None:
        """Write next the slot that does not hold `version`; without it, the older one."""
        number = self._find_slot(version)
        self._next_slot = self._sort_by_age()[0] if number is None else (number + 1) % SLOTS_PER_RANK

    def write_oldest_next(self) -> None:
        """Write the older slot next."""
        self._next_slot = self._sort_by_age()[0]

    def read(self, version: StateVersion, is_verified: bool = False) -> torch.Tensor | None:
        """Return the slot that holds `version`, uint8, mapped, for `unpack_slot`.

        `is_verified`: its checksum was already verified when it was received. Mapped content does not change: the first
        write of a round recreates the slot. None: no slot has the version, or its bytes are not those that were
        written. Such a slot is voided for all readers, so that a copy of it from elsewhere can replace it.
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
        self._next_slot = (number + 1) % SLOTS_PER_RANK  # this slot stays until there is another
        return slot

    def read_unchecked(self, version: StateVersion) -> torch.Tensor | None:
        """As `read`, without the checksum: for a sender whose receiver verifies it, so that it is read once."""
        number = self._find_slot(version)
        try:
            return None if number is None else _map_slot(self._paths[number])
        except (OSError, ValueError):  # the slot was removed, or is being created
            return None

    def _find_slot(self, version: StateVersion) -> int | None:
        """Return the number of the slot that holds the version."""
        return next((number for number, (stored, _) in enumerate(self.list_versions()) if stored == version), None)

    def explain_missing(self, version: StateVersion) -> str:
        """Return why `read` and `read_unchecked` do not have the version."""
        if any(
            _read_slot_header(path)[0] == version and self._read_version(path)[0] != version for path in self._paths
        ):
            return (
                "register(): the model has grown since it was registered, so a round that begins as this one did "
                "cannot restore it; register the model with all its final parameters"
            )
        return "it is no longer there"

    def allocate_slot(self, nbytes: int, may_replace: bool = False) -> PeerSlot:
        """Create a slot of `nbytes` bytes for a peer's snapshot that replaces the oldest one.

        `may_replace`: whether it may replace the other one, if there is memory for one slot only. Raises OSError if
        there is not enough memory.
        """
        oldest, newest = (self._paths[number] for number in self._sort_by_age())
        replaced = oldest
        try:
            self._allocate(oldest, nbytes).close()
        except OSError:
            if not may_replace or self._read_version(newest)[1] < nbytes:  # that would not make enough room
                raise
            self._allocate(newest, nbytes).close()
            replaced = newest
        return PeerSlot(replaced)

    def allocate_peer_slot(self, nbytes: int, reserved: int = 0) -> PeerSlot:
        """Create a slot for the shard of another worker's rank that replaces the oldest one.

        A file of the same size is reused: new memory takes as long to allocate as to fill. `reserved`: bytes that this
        worker will still allocate, in addition to a tenth of what is left. Raises OSError if there is not enough
        memory.
        """
        path = self._paths[self._sort_by_age()[0]]
        if not _void_if_size_matches(path, nbytes):
            self._allocate(path, nbytes, reserved, share=_PEER_MEMORY_SHARE).close()
        return PeerSlot(path)

    @property
    def unallocated_slots(self) -> int:
        """Number of slots that have neither memory nor a file whose memory they will reuse."""
        return sum(slot is None and not path.exists() for slot, path in zip(self._slots, self._paths, strict=True))

    def exclude_version(self, version: StateVersion) -> None:
        """Exclude a version from `list_versions` from now on."""
        self._excluded_versions.add(version)

    def void_version(self, version: StateVersion) -> None:
        """Void the slot that holds a version, for all readers. It is written next, and nothing may write it now."""
        number = self._find_slot(version)
        if number is not None and not _void_slot(self._paths[number]):
            self.exclude_version(version)

    def _has_fitting_slot(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> bool:
        """Return whether the next slot exists, and is large enough."""
        slot = self._slots[self._next_slot]
        return slot is not None and slot.fits(tensors, skeleton)

    def _make_slot(self, tensors: Sequence[torch.Tensor], skeleton: bytes, wait: bool) -> None:
        """Allocate the next slot. If training continues, that runs in the background, and there is no slot at first."""
        layout, path = get_layout(tensors), self._paths[self._next_slot]
        while not self._has_fitting_slot(
            tensors, skeleton
        ):  # the state may have changed while the slot was being allocated
            if self._pending_slot is None:
                self.release_slot()  # releases its memory first: there is room for two slots, not for three
                if not self._copies.asynchronous:
                    self._adopt_slot(self._create_slot(path, layout, len(skeleton)))
                    return
                self._pending_slot = run_in_background(
                    lambda: self._create_slot(path, layout, len(skeleton)), "pacekeeper-slot"
                )
            if not wait and not self._pending_slot.done():
                return
            future, self._pending_slot = self._pending_slot, None
            self._adopt_slot(future.result())
            del future  # it refers to the slot, too

    def _adopt_slot(self, slot: SnapshotSlot) -> None:
        """Use a slot as the next one.

        Call it in the training thread, which captures no graph now: pinning would break it.
        """
        slot.unpin = self._copies.pin(slot.content)
        self._slots[self._next_slot] = slot

    def _create_slot(self, path: Path, layout: TensorLayout, skeleton_bytes: int) -> SnapshotSlot:
        self._remove_unused_files()
        slot = SnapshotSlot(
            lambda total: self._allocate_with_priority(path, total), self._world_size, layout, skeleton_bytes
        )
        if self._copies.asynchronous:
            map_pages(slot.content)
        return slot

    def _sort_by_age(self) -> list[int]:
        """Return the slots in order of completion, the oldest first.

        A later round may have gone back to an earlier step; the snapshots ahead of it are then obsolete.
        """
        versions = self.list_versions()
        return sorted(range(SLOTS_PER_RANK), key=lambda number: (versions[number][0].round, versions[number][0].step))

    def _allocate_with_priority(self, path: Path, total: int) -> mmap.mmap:
        """Allocate a slot, with less important memory released if necessary."""
        try:
            return self._allocate(path, total)
        except OSError as error:
            if error.errno not in {errno.ENOMEM, errno.ENOSPC} or not self._memory.free():
                raise
        return self._allocate(path, total)

    def _allocate(self, path: Path, total: int, reserved: int = 0, share: float = 1.0) -> mmap.mmap:
        """Allocate shared memory that replaces an existing file. Raises OSError if there is not enough.

        `reserved`: bytes that stay free, of the `share` of what is left.
        """
        with hold_file_lock(self._folder / _LOCK_FILE):  # each rank counts what the others are about to allocate
            path.unlink(missing_ok=True)
            unallocated_bytes = _sum_unallocated_bytes(self._folder)
            bytes_left = self._memory.read_bytes_left() - unallocated_bytes
            if total + _SNAPSHOT_RESERVE_BYTES + reserved > share * bytes_left:
                note = f", of which {reserved >> 20} MiB and a tenth are reserved" if reserved else ""
                raise OSError(
                    errno.ENOMEM,
                    f"a slot needs {total >> 20} MiB, but the control group has {int(bytes_left) >> 20} MiB left{note}",
                )
            file = path.open("x+b")  # not a valid slot before its header is written
            os.ftruncate(file.fileno(), total)
        with file:
            try:
                os.posix_fallocate(file.fileno(), 0, total)  # fails here, instead of with SIGBUS later
            except OSError:
                path.unlink()
                raise
            return mmap.mmap(file.fileno(), total)

    def _remove_unused_files(self) -> None:
        """Remove files that no rank of this round reads: shards of another world size, and unfinished ones.

        When a round takes its first snapshot, all its ranks have restored their state, and earlier rounds are gone.
        """
        _, separator, size = self._name.rpartition("-of-")
        suffix = f"{separator}{size}."
        for path in self._folder.iterdir():
            if path.name != _LOCK_FILE and (suffix not in path.name or path.name.startswith(".")):
                path.unlink(missing_ok=True)

    def _read_version(self, path: Path) -> tuple[StateVersion, int]:
        version, fingerprint, nbytes = _read_slot_header(path)
        return (
            (NO_STATE_VERSION, 0)
            if fingerprint != self._fingerprint or version in self._excluded_versions
            else (version, nbytes)
        )


def _read_slot_header(path: Path) -> tuple[StateVersion, int, int]:
    """Return version, model fingerprint and bytes from a slot's header; NO_STATE_VERSION: it is not valid."""
    no_version = (NO_STATE_VERSION, 0, 0)
    try:
        with path.open("rb") as file:
            header = file.read(_SLOT_HEADER.size)
            nbytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return no_version
    if len(header) < _SLOT_HEADER.size:
        return no_version
    magic, step, round_, fingerprint, _, _, _, total, _ = _SLOT_HEADER.unpack(header)
    if (
        magic != _SLOT_MAGIC
        or step < 0
        or total != nbytes
        or nbytes < SLOT_HEADER_BYTES
        or nbytes % CHECKSUM_WORD_BYTES
    ):
        return no_version
    return StateVersion(step, round_), fingerprint, nbytes


def _void_slot(path: Path) -> bool:
    """Void a slot for all readers. Returns False if the file is not writable."""
    try:
        with path.open("r+b") as file:
            file.write(bytes(SLOT_HEADER_BYTES))
    except OSError:
        return False
    return True


def _map_slot(path: Path) -> torch.Tensor:
    """Map the whole slot, uint8. Writes to the tensor do not reach the file."""
    with path.open("rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _void_if_size_matches(path: Path, nbytes: int) -> bool:
    """Void the slot if it has `nbytes` bytes; returns False if it has not."""
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
    """Return the bytes of files in the folder that are not allocated yet."""
    nbytes = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            status = path.stat()
            nbytes += max(0, status.st_size - 512 * status.st_blocks)
    return nbytes


@contextmanager
def hold_file_lock(path: Path, timeout: float = _LOCK_TIMEOUT_SECONDS) -> Iterator[None]:
    """Hold a lock on the file, which one process has at a time. Raises TimeoutError.

    The kernel releases the lock of a killed process.
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
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough if a process was forked inside


def check_slot(slot: torch.Tensor) -> None:
    """Raise InputError if the bytes of a slot are not those that were written."""
    content = memoryview(slot.numpy().data)
    if len(content) < SLOT_HEADER_BYTES or len(content) % CHECKSUM_WORD_BYTES:
        raise InputError(f"not a snapshot: {len(content)} bytes")
    sums = _SlotChecksum()
    sums.add(content[SLOT_HEADER_BYTES:])
    _check_header(content[:SLOT_HEADER_BYTES], len(content), sums)


def _check_header(header: bytearray | memoryview, nbytes: int, sums: _SlotChecksum) -> None:
    *fields, total, checksum = _SLOT_HEADER.unpack_from(header)
    if fields[0] != _SLOT_MAGIC or total != nbytes:
        raise InputError(f"not a snapshot: {nbytes} bytes, but its header has {total}")
    if checksum != sums.checksum([*fields, total]):
        raise InputError("its checksum has changed since it was written")


class _SlotChecksum:
    """Checksum of the bytes after the header, computed as they arrive, at memory speed.

    Each flipped bit changes the sum of its MiB; the sums are hashed, so that their order counts.
    """

    def __init__(self) -> None:
        self._full_sums: list[int] = []
        self._partial_sum, self._missing_words = np.int64(0), _WORDS_PER_SUM
        """Sum of the incomplete MiB, and the number of words that it lacks."""

    def add(self, content: memoryview) -> None:
        """Add `content`, which must consist of whole words."""
        words = np.frombuffer(content, dtype=np.int64)
        while len(words):
            part, words = words[: self._missing_words], words[self._missing_words :]
            self._partial_sum = np.add(self._partial_sum, part.sum())
            self._missing_words -= len(part)
            if not self._missing_words:
                self._full_sums.append(int(self._partial_sum))
                self._partial_sum, self._missing_words = np.int64(0), _WORDS_PER_SUM

    def checksum(self, fields: Sequence[int]) -> int:
        """Return the checksum. `fields`: the other fields of the header."""
        digest = hashlib.blake2b(
            repr((list(fields), [*self._full_sums, int(self._partial_sum)])).encode(), digest_size=8
        ).digest()
        return int.from_bytes(digest, "little")


class PeerSlot:
    """A slot that is filled with data from elsewhere.

    It is written, not mapped: mapping a page takes longer than copying into it. It is not held open: processes that a
    loader forks would retain its memory until they end.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path`, which has as many bytes as will arrive, and no header."""
        self._path = path
        self._inode = path.stat().st_ino
        self._sums = _SlotChecksum()
        self._end = SLOT_HEADER_BYTES
        """Offset up to which it is filled."""

    def add(self, content: memoryview) -> None:
        """Add the next content after the header: whole words. Raises OSError if the slot was removed."""
        self._sums.add(content)
        self._write(content, self._end)
        self._end += len(content)

    def finish(self, header: bytearray) -> None:
        """Write the header, which makes the slot valid. Raises InputError if it does not match, OSError as `add`."""
        _check_header(header, self._end, self._sums)
        self._write(memoryview(header)[16:], 16)
        self._write(memoryview(header)[:16], 0)  # magic number and step make it valid

    def map_content(self) -> torch.Tensor:
        """Return the present content, mapped, uint8."""
        return _map_slot(self._path)

    def _write(self, content: memoryview, start: int) -> None:
        with self._path.open("r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino != self._inode:
                raise FileNotFoundError(errno.ENOENT, "another slot has replaced it", str(self._path))
            while content:
                written = os.pwrite(file.fileno(), content, start)
                content, start = content[written:], start + written


def unpack_slot(
    slot: torch.Tensor, mesh: DeviceMesh | None, copying_objects: Container[str] = ()
) -> tuple[Any, list[bytes]]:
    """Return the state and the rank states (one for each rank of the job that wrote it) from the bytes of a slot.

    `copying_objects`: names in the state whose objects copy what they load: their tensors are views of `slot`. All
    others have their own memory. Raises InputError if the content is invalid.
    """
    content = slot.numpy().data
    try:
        _, _, _, _, world_size, skeleton_bytes, offset, _, _ = _SLOT_HEADER.unpack_from(content)
        ranks_end = SLOT_HEADER_BYTES + world_size * RANK_STATE_BYTES
        skeleton, layout = parse_json(bytes(content[ranks_end : ranks_end + skeleton_bytes]))
        if world_size < 1 or offset < 0 or ranks_end + skeleton_bytes > len(content):
            raise ValueError("parts that lie outside of it")
        tensors = view_tensors(slot, offset, read_layout(layout))
        cloned_tensors = _ClonedTensors(tensors)
        state = {
            name: decode_tree(part, tensors if name in copying_objects else cloned_tensors, mesh)
            for name, part in skeleton["dict"]
        }
    except (LookupError, TypeError, ValueError, RuntimeError, RecursionError, struct.error) as error:
        raise InputError(f"not a snapshot: {error!r}") from error
    rank_states = [
        bytes(content[start : start + RANK_STATE_BYTES])
        for start in range(SLOT_HEADER_BYTES, ranks_end, RANK_STATE_BYTES)
    ]
    return state, rank_states


class _ClonedTensors(Sequence[torch.Tensor]):
    """The same tensors, each cloned at its first and only access."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        return self._tensors[index].clone()


def _encode_skeleton(skeleton: Any, tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the structure of a state, and the layout of its tensors in a slot."""
    return json.dumps([skeleton, describe_layout(get_layout(tensors))], separators=(",", ":")).encode()


class SnapshotSlot:
    """A file in shared memory with a layout for tensors of given types and shapes."""

    def __init__(
        self,
        allocate: Callable[[int], mmap.mmap],
        world_size: int,
        layout: TensorLayout,
        skeleton_bytes: int,
    ) -> None:
        """Create the slot. `allocate` returns shared memory of the given bytes, or raises OSError."""
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
        """Begin to copy everything but the rank states."""
        self._void()
        self._map[self._ranks_end : self._ranks_end + len(skeleton)] = skeleton
        copies.begin(self._tensors, tensors)
        self._pending = (step, round_, fingerprint, self._world_size, len(skeleton), self._offset, len(self._map))

    def publish(self, rank_states: torch.Tensor) -> int:
        """Add the rank states (uint8, world size · RANK_STATE_BYTES), make the slot valid, and return its step."""
        self.content[SLOT_HEADER_BYTES : self._ranks_end].copy_(rank_states)
        step, *rest = self._pending
        sums = _SlotChecksum()
        sums.add(memoryview(self._map)[SLOT_HEADER_BYTES:])
        _SLOT_HEADER.pack_into(self._map, 0, _SLOT_MAGIC, -1, *rest, sums.checksum([_SLOT_MAGIC, step, *rest]))
        self._words[1] = step  # one store: a killed rank leaves a valid slot or a void one
        return step

    def _void(self) -> None:
        _SLOT_HEADER.pack_into(self._map, 0, _SLOT_MAGIC, -1, -1, 0, 0, 0, 0, 0, 0)
