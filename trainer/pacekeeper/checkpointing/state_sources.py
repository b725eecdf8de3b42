"""Sources from which a job's state is restored. A new source is one more class here, and an entry in `StateStore`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pacekeeper.object_collectives import broadcast_object
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.records import StateOrigin

from .snapshots.peer_replication import PeerShards
from .snapshots.snapshot_slots import SLOT_HEADER_BYTES, SLOTS_PER_RANK, PeerSlot, Snapshots, unpack_slot
from .storage.checkpoint_folder import describe_error, summarize_reasons
from .storage.checkpoint_storage import CheckpointStorage, StorageUnavailableError
from .storage.distributed_checkpoint import TornCheckpointError, load_checkpoint
from .storage.manifests import Manifest
from .training_state import TrainingState
from .versions import NO_STATE_VERSION, StateVersion, choose_version, plan_transfers

_SLOT_PART_BYTES = 4 << 20
"""Bytes of a part of a slot that is sent to another rank.

The group's time-out applies to each part, which should fit into the cache.
"""
_log = logging.getLogger(__name__)


class StateSource(Protocol):
    """One rank's access to a source."""

    @property
    def origin(self) -> StateOrigin:
        """Origin of what was loaded last."""

    def find_newest(self) -> StateVersion:
        """Return the newest state that all ranks can get from here, the same on all ranks; NO_STATE_VERSION: none.

        Collective.

        Raises InputError if it is of another model. Nothing is changed yet.
        """

    def load(self, version: StateVersion) -> int | None:
        """Restore the version that `find_newest` returned, and return this rank's samples. Collective.

        None, on all ranks: one of them has an invalid copy. `find_newest` then returns another version, or the same if
        others have a copy of it. Some objects may already have changed; the next restore overwrites them.
        """

    def check_unchanged(self) -> None:
        """Raise InputError if a state was restored partially. Called if no other state was restored afterwards."""


class SnapshotSource:
    """Snapshots in shared memory."""

    origin = StateOrigin.MEMORY

    def __init__(
        self,
        snapshots: Snapshots | None,
        state: TrainingState,
        peers: CpuGroup,
        stores_copy: bool,
        peer_shards: PeerShards,
    ) -> None:
        """Create the source.

        `snapshots` None: this rank has no shared memory.
        `stores_copy`: whether this rank keeps a copy; of a replica, one rank does so for all ranks of its worker.
        `peer_shards`: shards of other workers' ranks that this one can send.
        """
        self._snapshots = snapshots
        self._state = state
        self._peers = peers
        self._stores_copy = stores_copy
        self._peer_shards = peer_shards
        self._versions_by_rank: list[list[tuple[StateVersion, int]]] = []
        """Versions that each rank holds, and their bytes."""
        self._copy_holders: list[bool] = []
        self._offers: dict[tuple[int, StateVersion], tuple[int, int]] = {}
        """Rank that has each rank's shard for it, and its bytes."""
        self._failure = ""
        """Why a snapshot could only be restored partially; "": none."""

    def find_newest(self) -> StateVersion:
        own_versions = (
            self._snapshots.list_versions() if self._snapshots is not None else [(NO_STATE_VERSION, 0)] * SLOTS_PER_RANK
        )
        numbers = [number for version, nbytes in own_versions for number in (version.step, version.round, nbytes)]
        own_row = torch.tensor([int(self._stores_copy), *numbers])
        gathered = torch.empty(self._peers.group.size() * len(own_row), dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, own_row, group=self._peers.group)
        rows = gathered.view(self._peers.group.size(), len(own_row))
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
        """Return the offers of all ranks; if several have the same, the first one. Collective."""
        own_offers = [
            [rank, version.step, version.round, nbytes] for rank, version, nbytes in self._peer_shards.list_versions()
        ]
        offers: dict[tuple[int, StateVersion], tuple[int, int]] = {}
        for keeper, rank_offers in enumerate(self._peers.all_gather(own_offers)):
            for rank, step, round_, nbytes in rank_offers:
                offers.setdefault((rank, StateVersion(step, round_)), (keeper, nbytes))
        return offers

    def load(self, version: StateVersion) -> int | None:
        rank, holds = self._peers.group.rank(), [version in dict(entry) for entry in self._versions_by_rank]
        transfers = [] if all(holds) else self._plan_transfers(version, holds)
        shards = self._collect_shards(version, [entry.receiver for entry in transfers if entry.sender == rank])
        if not self._peers.all_agree(shards is not None):
            return None  # it was removed, and `find_newest` looks for another copy
        assert shards is not None, "all ranks agree that they have theirs"
        incoming = next((entry for entry in transfers if entry.receiver == rank), None)
        peer_slot = None if incoming is None else self._allocate_slot(version, incoming.nbytes)
        if not self._peers.all_agree(peer_slot is not None or incoming is None):
            return self._agree_on_result(version, None)
        slot = self._transfer_slots(version, transfers, shards, peer_slot, holds[rank])
        usable = self._peers.all_gather(slot is not None)
        if not all(usable):
            torn = [entry for entry in shards if not usable[entry] and self._peer_shards.read(entry, version) is None]
            found_torn = bool(torn) or (holds[rank] and slot is None)
            # A torn copy is voided, and `find_newest` looks for another one. If no rank has found the reason, it would
            # return the same version again and again.
            return None if any(self._peers.all_gather(found_torn)) else self._agree_on_result(version, None)
        assert slot is not None, "all ranks have theirs"
        self.origin = StateOrigin.MEMORY if holds[rank] else StateOrigin.PEER
        return self._agree_on_result(version, self._load_slot(version, slot))

    def check_unchanged(self) -> None:
        if self._failure:
            raise InputError(
                f"{self._failure}; there is no other state to restore: fix the script, or restart the job from scratch "
                "(another spec.checkpoint.path, and no pods of the previous round)"
            )

    def _collect_shards(self, version: StateVersion, receivers: list[int]) -> dict[int, torch.Tensor] | None:
        """Return the shards for the receivers, unread, since they verify the checksum. None: one was removed."""
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
        transfers: list[_SlotTransfer],
        shards: Mapping[int, torch.Tensor],
        peer_slot: PeerSlot | None,
        holds: bool,
    ) -> torch.Tensor | None:
        """Send and receive slots, so that each rank that lacks its replica or shard gets it. Collective.

        Returns this rank's slot with a verified checksum: each rank verifies only what it restores. None: its bytes are
        not those that were written. `holds`: this rank had one before.
        """
        rank, group, snapshots = self._peers.group.rank(), self._peers.group, self._snapshots
        is_verified = False
        sends: list[dist.Work] = []
        for transfer in transfers:  # in the same order on all ranks: otherwise two could wait for each other
            if transfer.receiver == rank:
                assert peer_slot is not None, "this rank is ready"
                is_verified = self._receive_transfer(version, peer_slot, transfer)
            elif transfer.sender == rank:
                sends += send_slot(
                    self._get_slot_to_send(version, shards.get(transfer.receiver), peer_slot), transfer.receiver, group
                )
        slot = snapshots.read(version, is_verified) if snapshots is not None and (holds or is_verified) else None
        for send in sends:  # they ran in the background
            send.wait()
        if transfers and not self._state.sharded:
            self._peers.all_agree(True)  # the ranks of a worker wait for the one that receives
            if slot is None and peer_slot is None and snapshots is not None:
                slot = snapshots.read(version)
        return slot

    def _receive_transfer(self, version: StateVersion, peer_slot: PeerSlot, transfer: _SlotTransfer) -> bool:
        """Receive a slot, and return whether its checksum matches."""
        try:
            receive_slot(peer_slot, transfer.nbytes, transfer.sender, self._peers.group)
        except InputError as error:
            _log.warning("the snapshot of step %d from rank %d is not used: %s", version.step, transfer.sender, error)
            return False
        return True

    def _get_slot_to_send(
        self, version: StateVersion, shard: torch.Tensor | None, peer_slot: PeerSlot | None
    ) -> torch.Tensor:
        """Return another rank's shard, or this replica, which a rank forwards that has just received it."""
        if shard is not None:
            return shard
        if peer_slot is not None:
            return peer_slot.map_content()
        assert self._snapshots is not None, "it holds a replica"
        slot = self._snapshots.read_unchecked(version)
        assert slot is not None, "a replica is not removed before all ranks have restored it"
        return slot

    def _plan_transfers(self, version: StateVersion, holds: list[bool]) -> list[_SlotTransfer]:
        if not self._state.sharded:
            nbytes = next(dict(rank)[version] for rank in self._versions_by_rank if version in dict(rank))
            return [
                _SlotTransfer(sender, receiver, nbytes)
                for sender, receiver in plan_transfers(holds, self._copy_holders)
            ]
        missing = (rank for rank, has_slot in enumerate(holds) if not has_slot)
        return [_SlotTransfer(self._offers[rank, version][0], rank, self._offers[rank, version][1]) for rank in missing]

    def _allocate_slot(self, version: StateVersion, nbytes: int) -> PeerSlot | None:
        try:
            if self._snapshots is None:
                raise OSError("this rank has no runtime folder")
            return self._snapshots.allocate_slot(nbytes, may_replace=True)  # all ranks restore this version
        except OSError as error:
            _log.warning(
                "no room for the snapshot of step %d from a peer: %s; give the container and its runtime volume more "
                "memory",
                version.step,
                error,
            )
            return None

    def _load_slot(self, version: StateVersion, slot: torch.Tensor) -> int | None:
        """Restore from the slot. Returns None if any rank cannot. Collective."""
        unpacked = self._unpack_state(slot, version)
        if not self._peers.all_agree(unpacked is not None):
            return None
        assert unpacked is not None, "all ranks agree that they have it"
        return self._apply_state(version, *unpacked, slot)

    def _unpack_state(self, slot: torch.Tensor, version: StateVersion) -> tuple[Any, list[bytes]] | None:
        try:
            state, rank_states = unpack_slot(slot, self._state.mesh, copying_objects=self._state.copying_objects)
            if difference := self._state.explain_local_misfit(state):
                raise InputError(difference)
        except (InputError, LookupError, TypeError, AttributeError) as error:
            _log.warning("the snapshot of step %d is not used: %s", version.step, error)
            return None
        return state, rank_states

    def _apply_state(
        self, version: StateVersion, state: Any, rank_states: list[bytes], slot: torch.Tensor
    ) -> int | None:
        try:
            return self._state.restore_local(state, rank_states[self._peers.group.rank() % len(rank_states)], slot)
        except Exception as error:  # an object of the script may raise anything
            _log.warning("the snapshot of step %d could not be restored", version.step, exc_info=True)
            self._failure = f"the snapshot of step {version.step} could not be restored: {error!r}"
            return None

    def _agree_on_result(self, version: StateVersion, samples: int | None) -> int | None:
        """Return this rank's samples if all ranks have restored the version."""
        if self._peers.all_agree(samples is not None):
            return samples
        if self._snapshots is not None:
            self._snapshots.exclude_version(version)
        self._peer_shards.exclude_version(version)
        if samples is not None:
            self._failure = f"the snapshot of step {version.step} could not be restored by another rank"
        return None


@dataclass(frozen=True)
class _SlotTransfer:
    """A slot that one rank sends to another."""

    sender: int
    receiver: int
    nbytes: int


class CheckpointSource:
    """Checkpoints on the volume: the newest one that is not torn."""

    origin = StateOrigin.CHECKPOINT

    def __init__(self, folder: CheckpointStorage | None, state: TrainingState, peers: CpuGroup) -> None:
        """Create the source. `folder` None: there is no volume."""
        self._folder = folder
        self._state = state
        self._peers = peers
        self._manifests: dict[StateVersion, Manifest] = {}
        self._torn_versions: set[StateVersion] = set()
        self._failure = ""
        """Why the last attempt to load a checkpoint failed; "": none failed."""

    def find_newest(self) -> StateVersion:
        """Return the newest version by manifests and file sizes.

        The ranks that read the bytes check them, in `load`.
        """
        folder = self._folder
        if folder is None:
            return NO_STATE_VERSION
        published: list[Manifest] | str = broadcast_object(
            _list_published(folder) if self._peers.group.rank() == 0 else None, self._peers.group
        )
        if isinstance(published, str):  # a snapshot in memory may have the state
            self._failure, self._manifests = published, {}
            return NO_STATE_VERSION
        self._manifests = {StateVersion(manifest.step, manifest.round): manifest for manifest in published}
        version = max(self._manifests.keys() - self._torn_versions, default=NO_STATE_VERSION)
        if version != NO_STATE_VERSION and (
            difference := self._state.explain_misfit(self._manifests[version], in_part=folder.read_only)
        ):
            raise InputError(
                f"{folder.field}: {folder.open_checkpoint(self._manifests[version]).describe('')} is of another model: "
                f"{difference}. "
                "Give this job its own folder, or the model that was trained there"
            )
        return version

    def load(self, version: StateVersion) -> int | None:
        folder, manifest = self._folder, self._manifests[version]
        assert folder is not None, "`newest` has found something there"

        def fill(state: dict[str, Any]) -> None:
            own_failure = own_outage = ""
            try:
                load_checkpoint(state, folder.open_checkpoint(manifest), manifest.files)
            except StorageUnavailableError as error:
                # It may hold the checkpoint undamaged: an older one would cost steps, and another round costs none.
                own_outage = f"rank {self._peers.group.rank()}: {describe_error(error)}"
            except TornCheckpointError as error:
                own_failure = f"rank {self._peers.group.rank()}: {error}"
            results = self._peers.all_gather((own_failure, own_outage))
            if outages := [outage for _, outage in results if outage]:
                raise InputError(f"{folder.field}: {folder.location} cannot be read now: {summarize_reasons(outages)}")
            if failures := [failure for failure, _ in results if failure]:
                raise TornCheckpointError("; ".join(failures))

        try:
            return self._state.restore_portable(manifest, fill)
        except TornCheckpointError as error:
            self._failure = str(error)
            self._torn_versions.add(version)
            if self._peers.group.rank() == 0:
                _log.warning("the checkpoint of step %d is torn; trying an older one: %s", manifest.step, error)
            return None

    def check_unchanged(self) -> None:
        if self._folder is not None and self._failure:
            raise InputError(
                f"{self._folder.field}: no checkpoint in {self._folder.location} can be loaded: {self._failure}. "
                "Repair the storage and restart the job, or empty the folder to start from scratch"
            )


def _list_published(folder: CheckpointStorage) -> list[Manifest] | str:
    """Return the checkpoints, or why the storage cannot be read."""
    try:
        return folder.list_published()
    except OSError as error:
        _log.warning("%s: the checkpoints cannot be listed: %s", folder.location, error)
        return describe_error(error)


def send_slot(slot: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send a slot to a rank of the group, which calls `receive_slot`. The slot must stay until all is sent.

    The header is sent last: the slot is void until it has arrived.
    """
    sends = [
        dist.isend(part, group=group, group_dst=receiver)
        for part in (*slot[SLOT_HEADER_BYTES:].split(_SLOT_PART_BYTES), slot[:SLOT_HEADER_BYTES])
    ]
    return [work for work in sends if work is not None]


def receive_slot(peer_slot: PeerSlot, nbytes: int, sender: int, group: dist.ProcessGroup) -> None:
    """Receive a slot of `nbytes` bytes. Raises InputError, and leaves no valid slot, if its checksum does not match.

    While a part is received, the previous one is summed up and written.
    """
    full_parts, remainder = divmod(nbytes - SLOT_HEADER_BYTES, _SLOT_PART_BYTES)
    lengths = [_SLOT_PART_BYTES] * full_parts + [remainder] * bool(remainder)
    buffers = torch.empty(2, min(_SLOT_PART_BYTES, nbytes), dtype=torch.uint8)
    parts = [buffers[number % 2, :length] for number, length in enumerate(lengths)]
    header = torch.empty(SLOT_HEADER_BYTES, dtype=torch.uint8)
    destinations = [*parts, header]
    work = dist.irecv(destinations[0], group=group, group_src=sender)
    for part, next_destination in zip(parts, destinations[1:], strict=True):
        assert work is not None, "this rank belongs to the group"
        work.wait()
        work = dist.irecv(next_destination, group=group, group_src=sender)
        peer_slot.add(part.numpy().data)
    assert work is not None, "this rank belongs to the group"
    work.wait()
    peer_slot.finish(bytearray(header.numpy()))
