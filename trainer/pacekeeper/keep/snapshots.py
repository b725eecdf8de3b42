"""Snapshots of the training state in shared memory: they outlive the rank, so that a crash costs the job few steps.

Replicated models are the same on all ranks, so one rank of each worker (local rank 0) keeps a copy; of sharded models
each rank keeps its part. The random states of all ranks are exchanged with each snapshot and stand in every copy:
whoever takes over a rank gets the very state that it had.

A copy is a file with two slots, written in turn, so that one is whole at every moment:
header (one page) | rank states | skeleton (JSON, `plain`) | tensors. A slot's step is voided before it is written and
set last.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from pacekeeper.plain import aligned, describe_layout, layout_of, put_together, read_layout, size, take_apart, views
from pacekeeper.torch_internals import copy_all
from pacekeeper_analysis.errors import InputError

from .rank_state import RANK_STATE_BYTES
from .versions import NOTHING, Version

_HEADER = struct.Struct("<QqqQqqq")
"""Magic, step (-1: void), round, fingerprint of the model, world size, bytes of the skeleton, offset of the tensors."""
_MAGIC = 0x504B_534E_4150_0002
_HEADER_BYTES = 4096
SLOTS = 2
"""One is valid while the other is being written."""


class Snapshots:
    """One rank's snapshots in the runtime folder."""

    def __init__(self, folder: Path, name: str, *, round_: int, world_size: int, fingerprint: int) -> None:
        """`name`: of the copy; "replica", or the shard's."""
        self._paths = [folder / f"{name}.{slot}" for slot in range(SLOTS)]
        self._round = round_
        self._world_size = world_size
        self._fingerprint = fingerprint
        self._slots: list[Slot | None] = [None] * SLOTS
        self._next = 0

    def held(self) -> list[Version]:
        """What the two slots hold of this model: two versions, NOTHING for a slot without."""
        return [self._version(path) for path in self._paths]

    def write(self, step: int, state: Any) -> Slot:
        """Copies `state` into the older slot. It becomes valid with `Slot.publish`, when the rank states have come.

        Raises OSError where shared memory does not suffice, InputError where `state` has what cannot be kept.
        """
        tensors: list[torch.Tensor] = []
        skeleton = _described(take_apart(state, tensors), tensors)
        slot = self._slots[self._next]
        if slot is None or not slot.fits(tensors, skeleton):
            slot = Slot(self._paths[self._next], self._world_size, tensors, len(skeleton))
            self._slots[self._next] = slot
        slot.fill(step, self._round, self._fingerprint, tensors, skeleton)
        self._next = (self._next + 1) % SLOTS
        return slot

    def read(self, version: Version) -> torch.Tensor:
        """The whole slot that holds `version`, uint8; `unpack` makes a state of it."""
        path = next(path for path in self._paths if self._version(path) == version)
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)

    def _version(self, path: Path) -> Version:
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
        except FileNotFoundError:
            return NOTHING
        if len(header) < _HEADER.size:
            return NOTHING
        magic, step, round_, fingerprint, *_ = _HEADER.unpack(header)
        if magic != _MAGIC or step < 0 or fingerprint != self._fingerprint:
            return NOTHING
        return Version(step, round_)


def unpack(slot: torch.Tensor, mesh: DeviceMesh | None) -> tuple[Any, list[bytes]]:
    """The state and the rank states (one each rank of the job that wrote it) in the bytes of a slot.

    Raises InputError where a peer has sent something else.
    """
    content = slot.numpy().data
    try:
        _, _, _, _, world_size, skeleton_bytes, offset = _HEADER.unpack_from(content)
        ranks_end = _HEADER_BYTES + world_size * RANK_STATE_BYTES
        skeleton, layout = json.loads(bytes(content[ranks_end : ranks_end + skeleton_bytes]))
        tensors = views(slot, offset, read_layout(layout))
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

    def __init__(self, path: Path, world_size: int, tensors: Sequence[torch.Tensor], skeleton_bytes: int) -> None:
        self._layout = layout_of(tensors)
        self._ranks_end = _HEADER_BYTES + world_size * RANK_STATE_BYTES
        self._world_size = world_size
        self._skeleton_room = 2 * skeleton_bytes + 4096  # numbers in it may grow
        self._offset = aligned(self._ranks_end + self._skeleton_room)
        total = self._offset + size(self._layout)
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
        self._pending = (step, round_, fingerprint, self._world_size, len(skeleton), self._offset)

    def publish(self, rank_states: torch.Tensor) -> int:
        """Adds the rank states (uint8, world size · RANK_STATE_BYTES) and makes the slot valid; returns its step."""
        self._bytes[_HEADER_BYTES : self._ranks_end].copy_(rank_states)
        step, *rest = self._pending
        _HEADER.pack_into(self._map, 0, _MAGIC, -1, *rest)
        self._words[1] = step  # one store: a rank that is killed leaves a valid slot or a void one
        return step

    def _void(self) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, -1, -1, 0, 0, 0, 0)
