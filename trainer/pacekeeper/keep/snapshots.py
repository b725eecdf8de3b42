"""Snapshots of the training state in shared memory: they outlive the rank, so that a crash costs the job few steps.

Replicated models are the same on all ranks, so one rank of each worker (local rank 0) keeps a copy; of sharded models
each rank keeps its part. The random states of all ranks are exchanged with each snapshot and stand in every copy:
whoever takes over a rank gets the very state that it had.

A copy is two slots, each a file, written in turn, so that one is whole at every moment:
header (one page) | rank states | skeleton (JSON, `plain`) | tensors. A slot's step is voided before it is written and
set last. A checksum over all of it tells a reader that these are the bytes that were written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from pacekeeper.cgroup import memory_left
from pacekeeper.plain import aligned, describe_layout, layout_of, put_together, read_layout, size, take_apart, views
from pacekeeper.torch_internals import copy_all
from pacekeeper_analysis.errors import InputError

from .rank_state import RANK_STATE_BYTES
from .versions import NOTHING, Version

_HEADER = struct.Struct("<QqqQqqqqQ")
"""Magic, step (-1: void), round, fingerprint of the model, world size, bytes of the skeleton, offset of the tensors,
bytes of the slot, checksum."""
_MAGIC = 0x504B_534E_4150_0003
_HEADER_BYTES = 4096
_CHECKED_WORDS = 1 << 17
"""Words of 64 bits that are added up before the checksum takes their sum: 1 MiB."""
_RESERVE_BYTES = 64 << 20
"""Of the memory that the control group has left, what a new slot leaves to the training."""
SLOTS = 2
"""One is valid while the other is being written."""
_log = logging.getLogger(__name__)


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
        left: Callable[[], float] = memory_left,
    ) -> None:
        """
        name: of the copy; "replica", or the shard's.
        fingerprint: of the model that is to be restored; other models' snapshots count as none.
        left: bytes of memory that this process may still take.
        """
        self._paths = [folder / f"{name}.{slot}" for slot in range(SLOTS)]
        self._round = round_
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._left = left
        self._doubted: set[Version] = set()
        self._slots: list[Slot | None] = [None] * SLOTS
        self._next = 0

    def held(self) -> list[Version]:
        """What the two slots hold of this model: two versions, NOTHING for a slot without."""
        return [self._version(path) for path in self._paths]

    def write(self, step: int, state: Any, fingerprint: int) -> Slot:
        """Copies `state` into the older slot. It becomes valid with `Slot.publish`, when the rank states have come.

        fingerprint: of the model as it is in `state`; it may have grown since the round began.

        Raises OSError where memory does not suffice, InputError where `state` has what cannot be kept.
        """
        tensors: list[torch.Tensor] = []
        skeleton = _described(take_apart(state, tensors), tensors)
        slot = self._slots[self._next]
        if slot is None or not slot.fits(tensors, skeleton):
            self._slots[self._next] = slot = None  # its memory first: there is room for two slots, not for three
            path = self._paths[self._next]
            path.unlink(missing_ok=True)
            slot = self._slots[self._next] = Slot(path, self._world_size, tensors, len(skeleton), self._left)
        slot.fill(step, self._round, fingerprint, tensors, skeleton)
        self._next = (self._next + 1) % SLOTS
        return slot

    def read(self, version: Version) -> torch.Tensor | None:
        """The whole slot that holds `version`, uint8, mapped; `unpack` makes a state of it.

        None: no slot has it, or its bytes are not those that were written; it is not `held` any longer then.
        """
        number = next((number for number, held in enumerate(self.held()) if held == version), None)
        if number is None:
            return None
        try:
            with self._paths[number].open("rb") as file:
                slot = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
            check(slot)
        except (OSError, ValueError, InputError) as error:
            _log.warning("the snapshot of step %d in %s is not used: %s", version.step, self._paths[number], error)
            self.doubt(version)
            return None
        self._next = (number + 1) % SLOTS  # this one stays until there is another
        return slot

    def doubt(self, version: Version) -> None:
        """It is not `held` any longer."""
        self._doubted.add(version)

    def _version(self, path: Path) -> Version:
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
                nbytes = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return NOTHING
        if len(header) < _HEADER.size:
            return NOTHING
        magic, step, round_, fingerprint, _, _, _, total, _ = _HEADER.unpack(header)
        if magic != _MAGIC or step < 0 or fingerprint != self._fingerprint or total != nbytes:
            return NOTHING
        version = Version(step, round_)
        return NOTHING if version in self._doubted else version


def check(slot: torch.Tensor) -> None:
    """Raises InputError where the bytes of a slot are not those that were written."""
    content = slot.numpy()
    if len(content) < _HEADER_BYTES or len(content) % 8:
        raise InputError(f"not a snapshot: {len(content)} bytes")
    *fields, total, checksum = _HEADER.unpack_from(content.data)
    if fields[0] != _MAGIC or total != len(content):
        raise InputError(f"not a snapshot: {len(content)} bytes, of which its header says {total}")
    if checksum != _checksum([*fields, total], content):
        raise InputError("its checksum is another than when it was written")


def _checksum(fields: Sequence[int], content: np.ndarray[Any, Any]) -> int:
    """Over the header's other fields and all that follows the header, at the speed at which memory is read.

    Each bit that flips changes its MiB's sum; the sums are hashed, so that their order counts.
    """
    words = content[_HEADER_BYTES:].view(np.int64)
    whole = len(words) - len(words) % _CHECKED_WORDS
    sums = [*words[:whole].reshape(-1, _CHECKED_WORDS).sum(axis=1).tolist(), int(words[whole:].sum())]
    digest = hashlib.blake2b(repr((list(fields), sums)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def unpack(slot: torch.Tensor, mesh: DeviceMesh | None) -> tuple[Any, list[bytes]]:
    """The state and the rank states (one each rank of the job that wrote it) in the bytes of a slot.

    The state's tensors are copies: nothing of `slot` is kept. Raises InputError where a peer has sent something else.
    """
    check(slot)
    content = slot.numpy().data
    try:
        _, _, _, _, world_size, skeleton_bytes, offset, _, _ = _HEADER.unpack_from(content)
        ranks_end = _HEADER_BYTES + world_size * RANK_STATE_BYTES
        skeleton, layout = json.loads(bytes(content[ranks_end : ranks_end + skeleton_bytes]))
        if world_size < 1 or offset < 0 or ranks_end + skeleton_bytes > len(content):
            raise ValueError("parts that lie outside of it")
        tensors = [tensor.clone() for tensor in views(slot, offset, read_layout(layout))]
    except (LookupError, TypeError, ValueError, RuntimeError, RecursionError, struct.error) as error:
        raise InputError(f"not a snapshot: {error!r}") from error
    rank_states = [
        bytes(content[start : start + RANK_STATE_BYTES]) for start in range(_HEADER_BYTES, ranks_end, RANK_STATE_BYTES)
    ]
    return put_together(skeleton, tensors, mesh), rank_states


def _described(skeleton: Any, tensors: Sequence[torch.Tensor]) -> bytes:
    """How a state is put together from its tensors, and how these lie in a slot."""
    return json.dumps([skeleton, describe_layout(layout_of(tensors))], separators=(",", ":")).encode()


class Slot:
    """A file in shared memory, laid out for tensors of given types and shapes."""

    def __init__(
        self,
        path: Path,
        world_size: int,
        tensors: Sequence[torch.Tensor],
        skeleton_bytes: int,
        left: Callable[[], float],
    ) -> None:
        """Raises OSError where there is not enough memory: in the control group (`left`), or for the file."""
        self._layout = layout_of(tensors)
        self._ranks_end = _HEADER_BYTES + world_size * RANK_STATE_BYTES
        self._world_size = world_size
        self._skeleton_room = 2 * skeleton_bytes + 4096  # numbers in it may grow
        self._offset = aligned(self._ranks_end + self._skeleton_room)
        total = self._offset + size(self._layout)
        if total + _RESERVE_BYTES > (bytes_left := left()):
            raise OSError(
                errno.ENOMEM,
                f"a slot takes {total >> 20} MiB, and the control group has {int(bytes_left) >> 20} MiB left",
            )
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with temporary.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, total)  # says now that memory does not suffice, not by SIGBUS later
            self._map = mmap.mmap(file.fileno(), total)
        self._words = memoryview(self._map).cast("q")
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._tensors = views(self._bytes, self._offset, self._layout)
        self._void()
        temporary.replace(path)

    def fits(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> bool:
        return len(skeleton) <= self._skeleton_room and layout_of(tensors) == self._layout

    def fill(self, step: int, round_: int, fingerprint: int, tensors: Sequence[torch.Tensor], skeleton: bytes) -> None:
        """Copies everything but the rank states."""
        self._void()
        self._map[self._ranks_end : self._ranks_end + len(skeleton)] = skeleton
        if tensors:
            copy_all(self._tensors, list(tensors))
        self._pending = (step, round_, fingerprint, self._world_size, len(skeleton), self._offset, len(self._map))

    def publish(self, rank_states: torch.Tensor) -> int:
        """Adds the rank states (uint8, world size · RANK_STATE_BYTES) and makes the slot valid; returns its step."""
        self._bytes[_HEADER_BYTES : self._ranks_end].copy_(rank_states)
        step, *rest = self._pending
        _HEADER.pack_into(self._map, 0, _MAGIC, -1, *rest, _checksum([_MAGIC, step, *rest], self._bytes.numpy()))
        self._words[1] = step  # one store: a rank that is killed leaves a valid slot or a void one
        return step

    def _void(self) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, -1, -1, 0, 0, 0, 0, 0, 0)
