"""Where a job's state comes back from. A new source is one more class here, and its place in `Store`'s order."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pacekeeper.exchange import broadcast
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper_analysis.errors import InputError

from .checkpoints import CheckpointFolder
from .distributed_checkpoint import load
from .manifests import Manifest
from .snapshots import Snapshots, unpack
from .state import TrainingState
from .versions import NOTHING, Version, choose

_log = logging.getLogger(__name__)


class Source(Protocol):
    """One rank's access to it."""

    def newest(self) -> Version:
        """The newest state that all ranks can have from here, the same on all of them; NOTHING: none. Collective.

        Raises InputError where it is another model's. Nothing is changed yet.
        """

    def load(self, version: Version) -> int | None:
        """Brings back the version that `newest` has named; returns this rank's samples. Collective.

        None, on all ranks: one of them doubts what it has. Nothing is changed, and `newest` will name another.
        """


class SnapshotSource:
    """The snapshots in shared memory."""

    def __init__(self, snapshots: Snapshots | None, state: TrainingState, peers: CpuGroup) -> None:
        """`snapshots`: None: this rank has no shared memory."""
        self._snapshots = snapshots
        self._state = state
        self._peers = peers
        self._holder = -1
        """A rank that has the newest version."""

    def newest(self) -> Version:
        held = self._snapshots.held() if self._snapshots is not None else [NOTHING, NOTHING]
        mine = torch.tensor([number for version in held for number in (version.step, version.round)])
        everybody = torch.empty(self._peers.group.size() * len(mine), dtype=torch.int64)
        dist.all_gather_into_tensor(everybody, mine, group=self._peers.group)
        of_ranks = everybody.view(self._peers.group.size(), len(held), 2).tolist()
        version, self._holder = choose(
            [[Version(*numbers) for numbers in rank] for rank in of_ranks], self._state.sharded
        )
        return version

    def load(self, version: Version) -> int | None:
        snapshots = self._snapshots
        had = snapshots is not None and version in snapshots.held()
        slot = snapshots.read(version) if snapshots is not None and had else None
        if not self._peers.all_agree((slot is not None) == had):
            return None
        if not self._peers.all_agree(had):
            slot = receive_or_send(slot, self._holder, self._peers.group)
        assert slot is not None, "this rank has it, or has received it"
        found = self._unpacked(slot, version)
        if not self._peers.all_agree(found is not None):
            if snapshots is not None:
                snapshots.doubt(version)
            return None
        assert found is not None, "all ranks agree that they have it"
        state, rank_states = found
        return self._state.set_own(state, rank_states[self._peers.group.rank() % len(rank_states)])

    def _unpacked(self, slot: torch.Tensor, version: Version) -> tuple[Any, list[bytes]] | None:
        try:
            state, rank_states = unpack(slot, self._state.mesh)
            if different := self._state.misfit_own(state):
                raise InputError(different)
        except InputError as error:
            _log.warning("the snapshot of step %d is not used: %s", version.step, error)
            return None
        return state, rank_states


class CheckpointSource:
    """The checkpoints on the volume: the newest of them that is not torn."""

    def __init__(self, folder: CheckpointFolder | None, state: TrainingState, peers: CpuGroup) -> None:
        """`folder`: None: there is no volume."""
        self._folder = folder
        self._state = state
        self._peers = peers
        self._manifests: dict[Version, Manifest] = {}

    def newest(self) -> Version:
        folder = self._folder
        if folder is None:
            return NOTHING
        rank, ranks = self._peers.group.rank(), self._peers.group.size()
        manifests: list[Manifest] = broadcast(folder.published() if rank == 0 else None, self._peers.group)
        for manifest in manifests:
            if self._peers.all_agree(folder.intact(manifest, rank, ranks)):
                if different := self._state.misfit(manifest):
                    raise InputError(
                        f"spec.checkpoint.path: {folder.folder(manifest)} is of another model: {different}. "
                        "Give this job a path of its own, or the model that was trained there"
                    )
                version = Version(manifest.step, manifest.round)
                self._manifests = {version: manifest}
                return version
            if rank == 0:
                _log.warning("the checkpoint of step %d is torn; looking for an older one", manifest.step)
        return NOTHING

    def load(self, version: Version) -> int:
        folder, manifest = self._folder, self._manifests[version]
        assert folder is not None, "`newest` has found something there"
        return self._state.set_portable(manifest, lambda state: load(state, folder.folder(manifest)))


def receive_or_send(slot: torch.Tensor | None, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Rank `source`'s slot on all ranks, whatever they hold themselves. Collective."""
    size = torch.tensor([0 if slot is None else slot.numel()])
    dist.broadcast(size, source, group=group)
    if slot is None or slot.numel() != size.item():  # equal states need not be described in equally many bytes
        slot = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.broadcast(slot, source, group=group)
    return slot
