"""Where a job's state comes back from. A new source is one more class here, and its place in `Store`'s order."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pacekeeper.exchange import broadcast
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.records import StateOrigin

from .checkpoints import CheckpointFolder
from .distributed_checkpoint import Torn, load
from .manifests import Manifest
from .neighbours import KeptShards
from .snapshots import HEADER_BYTES, SLOTS, Snapshots, unpack
from .state import TrainingState
from .versions import NOTHING, Version, choose, transfers

_PART_BYTES = 64 << 20
"""Of a slot that goes to another rank: the group's time-out counts for each part."""
_log = logging.getLogger(__name__)


class Source(Protocol):
    """One rank's access to it."""

    @property
    def origin(self) -> StateOrigin:
        """Of what was loaded last."""

    def newest(self) -> Version:
        """The newest state that all ranks can have from here, the same on all of them; NOTHING: none. Collective.

        Raises InputError where it is another model's. Nothing is changed yet.
        """

    def load(self, version: Version) -> int | None:
        """Brings back the version that `newest` has named; returns this rank's samples. Collective.

        None, on all ranks: one of them doubts what it has, and `newest` will name another, or the same where others
        have a copy of what that one had. Something may be changed already; what is brought back then changes it anew.
        """

    def check_unchanged(self) -> None:
        """Raises InputError where something was brought back in part. Called where nothing else was afterwards."""


class SnapshotSource:
    """The snapshots in shared memory."""

    origin = StateOrigin.MEMORY

    def __init__(
        self, snapshots: Snapshots | None, state: TrainingState, peers: CpuGroup, keeps: bool, kept: KeptShards
    ) -> None:
        """
        snapshots: None: this rank has no shared memory.
        keeps: whether this rank is one of those that keep a copy: of replicas, for all ranks of its worker.
        kept: shards of other workers' ranks that this one can hand out.
        """
        self._snapshots = snapshots
        self._state = state
        self._peers = peers
        self._keeps = keeps
        self._kept = kept
        self._held: list[list[tuple[Version, int]]] = []
        """What each rank holds: versions and their bytes."""
        self._keepers: list[bool] = []
        self._offers: dict[tuple[int, Version], tuple[int, int]] = {}
        """Of each rank's shard: who has it for that rank, and its bytes."""
        self._failure = ""
        """Why a snapshot could not be taken over when some of it already was; "": none was begun in vain."""

    def newest(self) -> Version:
        held = self._snapshots.held() if self._snapshots is not None else [(NOTHING, 0)] * SLOTS
        numbers = [number for version, nbytes in held for number in (version.step, version.round, nbytes)]
        mine = torch.tensor([int(self._keeps), *numbers])
        everybody = torch.empty(self._peers.group.size() * len(mine), dtype=torch.int64)
        dist.all_gather_into_tensor(everybody, mine, group=self._peers.group)
        rows = everybody.view(self._peers.group.size(), len(mine))
        self._keepers = rows[:, 0].bool().tolist()
        self._held = [
            [(Version(step, round_), nbytes) for step, round_, nbytes in rank]
            for rank in rows[:, 1:].reshape(-1, SLOTS, 3).tolist()
        ]
        self._offers = self._offered() if self._state.sharded else {}
        versions = [[version for version, _ in rank] for rank in self._held]
        for rank, version in self._offers:
            versions[rank].append(version)
        return choose(versions, self._state.sharded)

    def _offered(self) -> dict[tuple[int, Version], tuple[int, int]]:
        """Where several have the same, the first. Collective."""
        mine = [[rank, version.step, version.round, nbytes] for rank, version, nbytes in self._kept.held()]
        offers: dict[tuple[int, Version], tuple[int, int]] = {}
        for keeper, theirs in enumerate(self._peers.gather(mine)):
            for rank, step, round_, nbytes in theirs:
                offers.setdefault((rank, Version(step, round_)), (keeper, nbytes))
        return offers

    def load(self, version: Version) -> int | None:
        copies = self._read(version)
        if not self._peers.all_agree(copies is not None):
            return None  # a torn one is none any more, and `newest` looks who else has what it held
        assert copies is not None, "all ranks agree that they have it"
        return self._agreed(version, self._load(version, copies))

    def check_unchanged(self) -> None:
        if self._failure:
            raise InputError(
                f"{self._failure}; there is no other state to go back to: mend the script, or let the job begin anew "
                "(another spec.checkpoint.path, and no pods of its round before)"
            )

    def _read(self, version: Version) -> _Copies | None:
        """What this rank has of it, for itself and for others; None: one is not what was written."""
        rank, holds = self._peers.group.rank(), [version in dict(its) for its in self._held]
        parcels = [] if all(holds) else self._parcels(version, holds)
        own = self._snapshots.read(version) if self._snapshots is not None and holds[rank] else None
        found = _Copies(parcels, own)
        for receiver in (its.receiver for its in parcels if self._state.sharded and its.sender == rank):
            kept = self._kept.read(receiver, version)
            if kept is None:
                return None
            found.of_others[receiver] = kept
        return None if holds[rank] and own is None else found

    def _load(self, version: Version, copies: _Copies) -> int | None:
        """None: this rank cannot, or another one. All ranks come here, and take the same part in what is collective."""
        slot = copies.own
        self.origin = StateOrigin.NEIGHBOUR if slot is None else StateOrigin.MEMORY
        if copies.parcels:
            if not self._distribute(version, copies):
                return None
            if slot is None and self._snapshots is not None:
                slot = self._snapshots.read(version)
        found = None if slot is None else self._unpacked(slot, version)
        if not self._peers.all_agree(found is not None):
            return None
        assert found is not None, "all ranks agree that they have it"
        return self._take_over(version, *found)

    def _distribute(self, version: Version, copies: _Copies) -> bool:
        """Has a slot made wherever this replica, or a rank's own shard, is lacking, with the bytes of whoever has it.

        Whether there was memory for it on all of them. Collective.
        """
        rank, group = self._peers.group.rank(), self._peers.group
        mine = next((its for its in copies.parcels if its.receiver == rank), None)
        room = None if mine is None else self._room(version, mine.nbytes)
        if not self._peers.all_agree(room is not None or mine is None):
            return False
        whole = room if copies.own is None else copies.own  # a replica is sent on by who has just received it
        for its in copies.parcels:  # in one order for all: who sends to each other would wait for each other
            if its.receiver == rank:
                assert room is not None, "this rank is ready"
                receive_slot(room, its.sender, group)
            elif its.sender == rank:
                sent = copies.of_others.get(its.receiver, whole)
                assert sent is not None, "it is sent by who has it"
                send_slot(sent, its.receiver, group)
        return self._peers.all_agree(True)  # the ranks of a worker wait for the one that receives

    def _parcels(self, version: Version, holds: list[bool]) -> list[_Parcel]:
        if not self._state.sharded:
            nbytes = next(dict(rank)[version] for rank in self._held if version in dict(rank))
            return [_Parcel(sender, receiver, nbytes) for sender, receiver in transfers(holds, self._keepers)]
        lacking = (rank for rank, has in enumerate(holds) if not has)
        return [_Parcel(self._offers[rank, version][0], rank, self._offers[rank, version][1]) for rank in lacking]

    def _room(self, version: Version, nbytes: int) -> torch.Tensor | None:
        try:
            if self._snapshots is None:
                raise OSError("this rank has no runtime folder")
            return self._snapshots.room(nbytes, may_replace=True)  # all ranks go to this version
        except OSError as error:
            _log.warning(
                "no room for the snapshot of step %d from a peer: %s; give the container and its runtime volume more "
                "memory",
                version.step,
                error,
            )
            return None

    def _unpacked(self, slot: torch.Tensor, version: Version) -> tuple[Any, list[bytes]] | None:
        try:
            state, rank_states = unpack(slot, self._state.mesh, copying=self._state.models)
            if different := self._state.misfit_own(state):
                raise InputError(different)
        except (InputError, LookupError, TypeError, AttributeError) as error:
            _log.warning("the snapshot of step %d is not used: %s", version.step, error)
            return None
        return state, rank_states

    def _take_over(self, version: Version, state: Any, rank_states: list[bytes]) -> int | None:
        try:
            return self._state.set_own(state, rank_states[self._peers.group.rank() % len(rank_states)])
        except Exception as error:  # an object of the script's may raise anything
            _log.warning("the snapshot of step %d could not be taken over", version.step, exc_info=True)
            self._failure = f"the snapshot of step {version.step} could not be taken over: {error!r}"
            return None

    def _agreed(self, version: Version, samples: int | None) -> int | None:
        """This rank's samples, where all ranks have some."""
        if self._peers.all_agree(samples is not None):
            return samples
        if self._snapshots is not None:
            self._snapshots.doubt(version)
        self._kept.doubt(version)
        if samples is not None:
            self._failure = f"the snapshot of step {version.step} could not be taken over by another rank"
        return None


@dataclass(frozen=True)
class _Parcel:
    """A slot that goes from rank to rank."""

    sender: int
    receiver: int
    nbytes: int


@dataclass
class _Copies:
    """What one rank brings to a version's coming back. The bytes are those that were written."""

    parcels: list[_Parcel]
    """What goes from rank to rank, of all of them."""
    own: torch.Tensor | None
    """The slot that this rank has for itself."""
    of_others: dict[int, torch.Tensor] = field(default_factory=dict)
    """The shards that it sends, by the rank that they go to."""


class CheckpointSource:
    """The checkpoints on the volume: the newest of them that is not torn."""

    origin = StateOrigin.CHECKPOINT

    def __init__(self, folder: CheckpointFolder | None, state: TrainingState, peers: CpuGroup) -> None:
        """`folder`: None: there is no volume."""
        self._folder = folder
        self._state = state
        self._peers = peers
        self._manifests: dict[Version, Manifest] = {}
        self._torn: set[Version] = set()
        self._failure = ""
        """Why the one that was tried last could not be loaded; "": none was tried that could not."""

    def newest(self) -> Version:
        """By the manifests and the files' sizes: their bytes are checked by whoever reads them, in `load`."""
        folder = self._folder
        if folder is None:
            return NOTHING
        published: list[Manifest] = broadcast(
            folder.published() if self._peers.group.rank() == 0 else None, self._peers.group
        )
        self._manifests = {Version(manifest.step, manifest.round): manifest for manifest in published}
        version = max(self._manifests.keys() - self._torn, default=NOTHING)
        if version != NOTHING and (different := self._state.misfit(self._manifests[version])):
            raise InputError(
                f"spec.checkpoint.path: {folder.folder(self._manifests[version])} is of another model: {different}. "
                "Give this job a path of its own, or the model that was trained there"
            )
        return version

    def load(self, version: Version) -> int | None:
        folder, manifest = self._folder, self._manifests[version]
        assert folder is not None, "`newest` has found something there"

        def fill(state: dict[str, Any]) -> None:
            torn = ""
            try:
                load(state, folder.folder(manifest), manifest.files)
            except Torn as error:
                torn = f"rank {self._peers.group.rank()}: {error}"
            if said := [its for its in self._peers.gather(torn) if its]:
                raise Torn("; ".join(said))

        try:
            return self._state.set_portable(manifest, fill)
        except Torn as error:
            self._failure = str(error)
            self._torn.add(version)
            if self._peers.group.rank() == 0:
                _log.warning("the checkpoint of step %d is torn; looking for an older one: %s", manifest.step, error)
            return None

    def check_unchanged(self) -> None:
        if self._folder is not None and self._failure:
            raise InputError(
                f"spec.checkpoint.path: no checkpoint in {self._folder.path} can be loaded: {self._failure}. "
                "Mend the volume and start the job again, or empty the folder to begin anew"
            )


def send_slot(slot: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> None:
    """To a rank of the group, which calls `receive_slot`."""
    for part in _parts(slot):
        dist.send(part, group=group, group_dst=receiver)


def receive_slot(room: torch.Tensor, sender: int, group: dist.ProcessGroup) -> None:
    """Into `room`, which has as many bytes as the slot."""
    for part in _parts(room):
        dist.recv(part, group=group, group_src=sender)


def _parts(slot: torch.Tensor) -> list[torch.Tensor]:
    """The header last: until it has come, what is there is no slot."""
    header, content = slot[:HEADER_BYTES], slot[HEADER_BYTES:]
    return [*content.split(_PART_BYTES), header]
