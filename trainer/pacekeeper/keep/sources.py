"""Where a job's state comes back from. A new source is one more class here, and its place in `Store`'s order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pacekeeper.exchange import broadcast_object
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.records import StateOrigin

from .checkpoints import CheckpointFolder
from .distributed_checkpoint import TornCheckpointError, load_checkpoint
from .manifests import Manifest
from .neighbours import PeerShards
from .snapshots import SLOT_HEADER_BYTES, SLOTS_PER_RANK, PeerSlot, Snapshots, unpack_slot
from .state import TrainingState
from .versions import NO_STATE_VERSION, StateVersion, choose_version, plan_transfers

_SLOT_PART_BYTES = 4 << 20
"""Of a slot that goes to another rank: the group's time-out counts for each part, which is to stay in the cache."""
_log = logging.getLogger(__name__)


class StateSource(Protocol):
    """One rank's access to it."""

    @property
    def origin(self) -> StateOrigin:
        """Of what was loaded last."""

    def find_newest(self) -> StateVersion:
        """The newest state that all ranks can have from here, the same on all of them; NOTHING: none. Collective.

        Raises InputError where it is another model's. Nothing is changed yet.
        """

    def load(self, version: StateVersion) -> int | None:
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
        self, snapshots: Snapshots | None, state: TrainingState, peers: CpuGroup, stores_copy: bool, peer_shards: PeerShards
    ) -> None:
        """
        snapshots: None: this rank has no shared memory.
        keeps: whether this rank is one of those that keep a copy: of replicas, for all ranks of its worker.
        kept: shards of other workers' ranks that this one can hand out.
        """
        self._snapshots = snapshots
        self._state = state
        self._peers = peers
        self._stores_copy = stores_copy
        self._peer_shards = peer_shards
        self._versions_by_rank: list[list[tuple[StateVersion, int]]] = []
        """What each rank holds: versions and their bytes."""
        self._copy_holders: list[bool] = []
        self._offers: dict[tuple[int, StateVersion], tuple[int, int]] = {}
        """Of each rank's shard: who has it for that rank, and its bytes."""
        self._failure = ""
        """Why a snapshot could not be taken over when some of it already was; "": none was begun in vain."""

    def find_newest(self) -> StateVersion:
        held = self._snapshots.list_versions() if self._snapshots is not None else [(NO_STATE_VERSION, 0)] * SLOTS_PER_RANK
        numbers = [number for version, nbytes in held for number in (version.step, version.round, nbytes)]
        mine = torch.tensor([int(self._stores_copy), *numbers])
        everybody = torch.empty(self._peers.group.size() * len(mine), dtype=torch.int64)
        dist.all_gather_into_tensor(everybody, mine, group=self._peers.group)
        rows = everybody.view(self._peers.group.size(), len(mine))
        self._copy_holders = rows[:, 0].bool().tolist()
        self._versions_by_rank = [
            [(StateVersion(step, round_), nbytes) for step, round_, nbytes in rank]
            for rank in rows[:, 1:].reshape(-1, SLOTS_PER_RANK, 3).tolist()
        ]
        self._offers = self._gather_offers() if self._state.sharded else {}
        versions = [[version for version, _ in rank] for rank in self._versions_by_rank]
        for rank, version in self._offers:
            versions[rank].append(version)
        return choose_version(versions, self._state.sharded)

    def _gather_offers(self) -> dict[tuple[int, StateVersion], tuple[int, int]]:
        """Where several have the same, the first. Collective."""
        mine = [[rank, version.step, version.round, nbytes] for rank, version, nbytes in self._peer_shards.list_versions()]
        offers: dict[tuple[int, StateVersion], tuple[int, int]] = {}
        for keeper, theirs in enumerate(self._peers.all_gather(mine)):
            for rank, step, round_, nbytes in theirs:
                offers.setdefault((rank, StateVersion(step, round_)), (keeper, nbytes))
        return offers

    def load(self, version: StateVersion) -> int | None:
        rank, holds = self._peers.group.rank(), [version in dict(its) for its in self._versions_by_rank]
        parcels = [] if all(holds) else self._plan_transfers(version, holds)
        shards = self._collect_shards(version, [its.receiver for its in parcels if its.sender == rank])
        if not self._peers.all_agree(shards is not None):
            return None  # it has gone meanwhile, and `newest` looks who else has it
        assert shards is not None, "all ranks agree that they have theirs"
        comes = next((its for its in parcels if its.receiver == rank), None)
        room = None if comes is None else self._allocate_slot(version, comes.nbytes)
        if not self._peers.all_agree(room is not None or comes is None):
            return self._agree_on_result(version, None)
        slot = self._transfer_slots(version, parcels, shards, room, holds[rank])
        usable = self._peers.all_gather(slot is not None)
        if not all(usable):
            torn = [its for its in shards if not usable[its] and self._peer_shards.read(its, version) is None]
            found = bool(torn) or (holds[rank] and slot is None)
            # What is torn is none any more, and `newest` looks who else has it; where no rank has found the reason,
            # it would name the same for ever.
            return None if any(self._peers.all_gather(found)) else self._agree_on_result(version, None)
        assert slot is not None, "all ranks have theirs"
        self.origin = StateOrigin.MEMORY if holds[rank] else StateOrigin.NEIGHBOUR
        return self._agree_on_result(version, self._load_slot(version, slot))

    def check_unchanged(self) -> None:
        if self._failure:
            raise InputError(
                f"{self._failure}; there is no other state to go back to: mend the script, or let the job begin anew "
                "(another spec.checkpoint.path, and no pods of its round before)"
            )

    def _collect_shards(self, version: StateVersion, receivers: list[int]) -> dict[int, torch.Tensor] | None:
        """What this rank keeps for these, unread: they hold it against its checksum. None: one has gone meanwhile."""
        shards: dict[int, torch.Tensor] = {}
        for receiver in receivers if self._state.sharded else []:
            shard = self._peer_shards.read_unchecked(receiver, version)
            if shard is None:
                self._peer_shards.exclude_version(version)
                return None
            shards[receiver] = shard
        return shards

    def _transfer_slots(
        self,
        version: StateVersion,
        parcels: list[_SlotTransfer],
        shards: Mapping[int, torch.Tensor],
        peer_slot: PeerSlot | None,
        holds: bool,
    ) -> torch.Tensor | None:
        """Fills the room of whoever lacks this replica, or a shard of its own, with the bytes of whoever has it.

        This rank's slot then, held against its checksum: each rank checks what it goes on from itself, and nothing
        else. None: its bytes are not those that were written. `holds`: it had one before. Collective.
        """
        rank, group, snapshots = self._peers.group.rank(), self._peers.group, self._snapshots
        proved = False
        sends: list[dist.Work] = []
        for its in parcels:  # in one order for all: who sends to each other would wait for each other
            if its.receiver == rank:
                assert peer_slot is not None, "this rank is ready"
                proved = self._receive_transfer(version, peer_slot, its)
            elif its.sender == rank:
                sends += send_slot(self._get_slot_to_send(version, shards.get(its.receiver), peer_slot), its.receiver, group)
        own = snapshots.read(version, proved) if snapshots is not None and (holds or proved) else None
        for send in sends:  # which went on meanwhile
            send.wait()
        if parcels and not self._state.sharded:
            self._peers.all_agree(True)  # the ranks of a worker wait for the one that receives
            if own is None and peer_slot is None and snapshots is not None:
                own = snapshots.read(version)
        return own

    def _receive_transfer(self, version: StateVersion, peer_slot: PeerSlot, transfer: _SlotTransfer) -> bool:
        """Whether it is what was written."""
        try:
            receive_slot(peer_slot, transfer.nbytes, transfer.sender, self._peers.group)
        except InputError as error:
            _log.warning("the snapshot of step %d from rank %d is not used: %s", version.step, transfer.sender, error)
            return False
        return True

    def _get_slot_to_send(self, version: StateVersion, shard: torch.Tensor | None, peer_slot: PeerSlot | None) -> torch.Tensor:
        """Another rank's shard, or this replica; it is sent on by who has just received it."""
        if shard is not None:
            return shard
        if peer_slot is not None:
            return peer_slot.map_content()
        assert self._snapshots is not None, "it holds a replica"
        slot = self._snapshots.read_unchecked(version)
        assert slot is not None, "nobody removes a replica before all ranks are back"
        return slot

    def _plan_transfers(self, version: StateVersion, holds: list[bool]) -> list[_SlotTransfer]:
        if not self._state.sharded:
            nbytes = next(dict(rank)[version] for rank in self._versions_by_rank if version in dict(rank))
            return [_SlotTransfer(sender, receiver, nbytes) for sender, receiver in plan_transfers(holds, self._copy_holders)]
        lacking = (rank for rank, has in enumerate(holds) if not has)
        return [_SlotTransfer(self._offers[rank, version][0], rank, self._offers[rank, version][1]) for rank in lacking]

    def _allocate_slot(self, version: StateVersion, nbytes: int) -> PeerSlot | None:
        try:
            if self._snapshots is None:
                raise OSError("this rank has no runtime folder")
            return self._snapshots.allocate_slot(nbytes, may_replace=True)  # all ranks go to this version
        except OSError as error:
            _log.warning(
                "no room for the snapshot of step %d from a peer: %s; give the container and its runtime volume more "
                "memory",
                version.step,
                error,
            )
            return None

    def _load_slot(self, version: StateVersion, slot: torch.Tensor) -> int | None:
        """None: this rank cannot, or another one. Collective."""
        found = self._unpack_state(slot, version)
        if not self._peers.all_agree(found is not None):
            return None
        assert found is not None, "all ranks agree that they have it"
        return self._apply_state(version, *found, slot)

    def _unpack_state(self, slot: torch.Tensor, version: StateVersion) -> tuple[Any, list[bytes]] | None:
        try:
            state, rank_states = unpack_slot(slot, self._state.mesh, copying_objects=self._state.copying_objects)
            if different := self._state.explain_local_misfit(state):
                raise InputError(different)
        except (InputError, LookupError, TypeError, AttributeError) as error:
            _log.warning("the snapshot of step %d is not used: %s", version.step, error)
            return None
        return state, rank_states

    def _apply_state(self, version: StateVersion, state: Any, rank_states: list[bytes], slot: torch.Tensor) -> int | None:
        try:
            return self._state.restore_local(state, rank_states[self._peers.group.rank() % len(rank_states)], slot)
        except Exception as error:  # an object of the script's may raise anything
            _log.warning("the snapshot of step %d could not be taken over", version.step, exc_info=True)
            self._failure = f"the snapshot of step {version.step} could not be taken over: {error!r}"
            return None

    def _agree_on_result(self, version: StateVersion, samples: int | None) -> int | None:
        """This rank's samples, where all ranks have some."""
        if self._peers.all_agree(samples is not None):
            return samples
        if self._snapshots is not None:
            self._snapshots.exclude_version(version)
        self._peer_shards.exclude_version(version)
        if samples is not None:
            self._failure = f"the snapshot of step {version.step} could not be taken over by another rank"
        return None


@dataclass(frozen=True)
class _SlotTransfer:
    """A slot that goes from rank to rank."""

    sender: int
    receiver: int
    nbytes: int


class CheckpointSource:
    """The checkpoints on the volume: the newest of them that is not torn."""

    origin = StateOrigin.CHECKPOINT

    def __init__(self, folder: CheckpointFolder | None, state: TrainingState, peers: CpuGroup) -> None:
        """`folder`: None: there is no volume."""
        self._folder = folder
        self._state = state
        self._peers = peers
        self._manifests: dict[StateVersion, Manifest] = {}
        self._torn_versions: set[StateVersion] = set()
        self._failure = ""
        """Why the one that was tried last could not be loaded; "": none was tried that could not."""

    def find_newest(self) -> StateVersion:
        """By the manifests and the files' sizes: their bytes are checked by whoever reads them, in `load`."""
        folder = self._folder
        if folder is None:
            return NO_STATE_VERSION
        published: list[Manifest] = broadcast_object(
            folder.list_published() if self._peers.group.rank() == 0 else None, self._peers.group
        )
        self._manifests = {StateVersion(manifest.step, manifest.round): manifest for manifest in published}
        version = max(self._manifests.keys() - self._torn_versions, default=NO_STATE_VERSION)
        if version != NO_STATE_VERSION and (different := self._state.explain_misfit(self._manifests[version], in_part=folder.read_only)):
            raise InputError(
                f"spec.checkpoint.path: {folder.find_folder(self._manifests[version])} is of another model: {different}. "
                "Give this job a path of its own, or the model that was trained there"
            )
        return version

    def load(self, version: StateVersion) -> int | None:
        folder, manifest = self._folder, self._manifests[version]
        assert folder is not None, "`newest` has found something there"

        def fill(state: dict[str, Any]) -> None:
            torn = ""
            try:
                load_checkpoint(state, folder.find_folder(manifest), manifest.files)
            except TornCheckpointError as error:
                torn = f"rank {self._peers.group.rank()}: {error}"
            if said := [its for its in self._peers.all_gather(torn) if its]:
                raise TornCheckpointError("; ".join(said))

        try:
            return self._state.restore_portable(manifest, fill)
        except TornCheckpointError as error:
            self._failure = str(error)
            self._torn_versions.add(version)
            if self._peers.group.rank() == 0:
                _log.warning("the checkpoint of step %d is torn; looking for an older one: %s", manifest.step, error)
            return None

    def check_unchanged(self) -> None:
        if self._folder is not None and self._failure:
            raise InputError(
                f"spec.checkpoint.path: no checkpoint in {self._folder.path} can be loaded: {self._failure}. "
                "Mend the volume and start the job again, or empty the folder to begin anew"
            )


def send_slot(slot: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begins to send it to a rank of the group, which calls `receive_slot`; the slot stays until all of it is done.

    The header goes last: until it has come, what is there is no slot.
    """
    sends = [
        dist.isend(part, group=group, group_dst=receiver)
        for part in (*slot[SLOT_HEADER_BYTES:].split(_SLOT_PART_BYTES), slot[:SLOT_HEADER_BYTES])
    ]
    return [its for its in sends if its is not None]


def receive_slot(peer_slot: PeerSlot, nbytes: int, sender: int, group: dist.ProcessGroup) -> None:
    """A slot of so many bytes into its room. Raises InputError where it is not what was written: there is none then.

    While a part is on its way, the one before is added up and lies down.
    """
    whole, rest = divmod(nbytes - SLOT_HEADER_BYTES, _SLOT_PART_BYTES)
    lengths = [_SLOT_PART_BYTES] * whole + [rest] * bool(rest)
    buffers = torch.empty(2, min(_SLOT_PART_BYTES, nbytes), dtype=torch.uint8)
    parts = [buffers[number % 2, :length] for number, length in enumerate(lengths)]
    header = torch.empty(SLOT_HEADER_BYTES, dtype=torch.uint8)
    coming = [*parts, header]
    arrival = dist.irecv(coming[0], group=group, group_src=sender)
    for part, after in zip(parts, coming[1:], strict=True):
        assert arrival is not None, "this rank belongs to the group"
        arrival.wait()
        arrival = dist.irecv(after, group=group, group_src=sender)
        peer_slot.add(part.numpy().data)
    assert arrival is not None, "this rank belongs to the group"
    arrival.wait()
    peer_slot.finish(bytearray(header.numpy()))
