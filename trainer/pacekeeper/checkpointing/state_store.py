"""The store of the job's state: saved in shared memory and on the volume, restored from the newest of both.

`TrainingState` gathers the state and restores it into the objects. A snapshot writer copies it into shared memory. A
checkpoint writer writes it to the volume in the background. For each there is a source that restores it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pacekeeper.environment import Environment
from pacekeeper.object_collectives import broadcast_object
from pacekeeper.observe.collectives.cpu_group import CpuGroup
from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.records import StateOrigin

from .rank_state import compute_fingerprint
from .snapshots.peer_replication import PeerReplication
from .snapshots.shard_names import format_shard_name
from .snapshots.snapshot_copies import SlotCopies, create_slot_copies
from .snapshots.snapshot_slots import SlotMemory, Snapshots
from .snapshots.snapshot_writer import SnapshotWriter
from .state_sources import CheckpointSource, SnapshotSource, StateSource
from .storage.checkpoint_status import open_checkpoint_reporter
from .storage.checkpoint_storage import CheckpointStorage
from .storage.checkpoint_writer import CheckpointWriter, WriteOutcome
from .storage.manifests import Manifest
from .training_state import TrainingState
from .versions import NO_STATE_VERSION, StateVersion

FINAL_DELIVERY_SECONDS = 5.0
"""Seconds of the grace period of leaving ranks that a copy on its way to a peer may take."""


@dataclass(frozen=True)
class RestoredState:
    """State that a rank has restored."""

    step: int
    samples: int
    """This rank's samples since the job's beginning."""
    checkpoint_step: int | None
    """Step of the newest checkpoint on the volume, by its manifest; None: none."""
    origin: StateOrigin
    """Where this rank's state came from."""

    @property
    def is_in_memory(self) -> bool:
        """Whether the state is a snapshot, which stays in the workers' memory."""
        return self.origin in (StateOrigin.MEMORY, StateOrigin.PEER)


class StateStore:
    """One rank's part in storing the state."""

    def __init__(
        self, environment: Environment, peers: CpuGroup, state: TrainingState, folder: CheckpointStorage | None
    ) -> None:
        """Open the store. `folder` on the volume None: there are no checkpoints.

        Raises InputError if an object's state cannot be saved.
        """
        copies = create_slot_copies(state.optimizers)
        self.has_folder = folder is not None and not folder.read_only
        """Whether checkpoints can be saved."""
        self._folder = folder
        self._environment = environment
        self._state = state
        self._peers = peers
        self._reporter = open_checkpoint_reporter(environment)
        self._checkpoint_source = CheckpointSource(folder, state, peers)
        stores_copy = state.sharded or environment.local_rank == 0
        self._peer_replication = PeerReplication(
            environment,
            peers,
            lambda rank: _open_shard(environment, state, rank),
            sharded=state.sharded,
            count_unallocated_slots=self._count_unallocated_slots,
        )
        snapshots = self._snapshots = _open_snapshots(environment, state, copies, self._peer_replication.release_memory)
        snapshot_source = SnapshotSource(snapshots, state, peers, stores_copy, self._peer_replication.peer_shards)
        self._sources: list[StateSource] = [snapshot_source, self._checkpoint_source]
        """The fastest first: if several have the same step, the first one restores it."""
        self._snapshot_writer = SnapshotWriter(
            snapshots, state, peers, stores_copy, lambda: self._peer_replication.seconds
        )
        self._checkpoint_writer = (
            CheckpointWriter(folder, self._reporter, peers, copies.pin, self._peer_replication.release_memory)
            if folder and self.has_folder
            else None
        )
        self._snapshot_step = -1
        """Step of the newest valid snapshot in memory; -1: none."""
        if snapshots or folder:
            state.check_serializable()  # reports unsupported values now, not after the first hundred steps

    @property
    def stores_snapshots(self) -> bool:
        """Whether this rank stores snapshots, as known so far."""
        return self._snapshot_writer.stores_copy

    def restore(self) -> RestoredState | None:
        """Restore the newest state that all ranks can get, from the source that has it. Collective.

        The folder of checkpoints belongs to this job afterwards, and not before. None: there is nothing to restore.

        Raises InputError before any change if ranks see different folders, or if the checkpoint is of another model.
        Raises it also if a state was restored only partially and there is no other, and if another job has become the
        folder's owner.
        """
        self._check_shared_folder()
        newest = {source: source.find_newest() for source in self._sources}
        while True:
            source, version = max(newest.items(), key=lambda entry: entry[1].step)
            samples = None if version == NO_STATE_VERSION else source.load(version)
            if samples is not None or version == NO_STATE_VERSION:
                break
            newest[source] = source.find_newest()
        if samples is None:
            for other_source in self._sources:
                other_source.check_unchanged()
        self._claim_folder()
        checkpoint = newest[self._checkpoint_source]
        checkpoint_step = None if checkpoint == NO_STATE_VERSION else checkpoint.step
        self._reporter.report_found(checkpoint_step)
        if samples is None:
            return None
        restored = RestoredState(version.step, samples, checkpoint_step, source.origin)
        if restored.is_in_memory:
            self._snapshot_step = restored.step
        return restored

    def _check_shared_folder(self) -> None:
        """Raise InputError, on all ranks, if some do not see what rank 0 writes. Collective."""
        folder, own_rank = self._folder, self._environment.rank
        if folder is None or folder.read_only:
            return
        mark: str = broadcast_object(folder.create_visibility_mark() if own_rank == 0 else None, self._peers.group)
        blind_ranks = [
            rank
            for rank, is_visible in enumerate(self._peers.all_gather(not mark or folder.has_visibility_mark(mark)))
            if not is_visible
        ]
        if own_rank == 0:
            folder.remove_visibility_mark(mark)
        if blind_ranks:
            raise InputError(
                f"{folder.field}: {folder.location} is another folder for ranks {', '.join(map(str, blind_ranks))} "
                f"than for rank 0. {folder.remedy_if_unshared}"
            )

    def _claim_folder(self) -> None:
        """Claim the folder. Raises InputError, on all ranks, if it belongs to another job now. Collective."""
        folder, refusal = self._folder, ""
        if folder is None or folder.read_only:
            return
        if self._environment.rank == 0:
            try:
                folder.claim()
            except InputError as error:
                refusal = str(error)
        refusal, folder.run_tag = broadcast_object((refusal, folder.run_tag), self._peers.group)
        if refusal:
            raise InputError(refusal)

    def equalize_other_objects(self, excluded_types: tuple[type, ...]) -> None:
        """As `TrainingState.equalize_other_objects`. Collective."""
        self._state.equalize_other_objects(self._peers.group, excluded_types)

    # Snapshots

    def is_snapshot_possible(self) -> bool:
        """Return whether the peers are ready for a `snapshot`. Call `settle` first. Collective."""
        return self._peer_replication.wait_for_delivery()

    def snapshot(self, step: int, samples: int, leaving: bool = False) -> None:
        """Copy the state after `step` into shared memory; `settle` makes it valid. Collective.

        No snapshot is taken while the previous one is on its way to a peer: otherwise the peers' copies might soon be
        older than what the other ranks still have.

        `samples`: this rank's samples since the job's beginning. `leaving`: a rank is about to leave with its memory.
        Since there is no later snapshot, this one waits for the previous one before it is skipped.
        """
        self.settle(wait=True)  # callers that need the previous one's step have settled it
        if not self._peer_replication.wait_for_delivery(FINAL_DELIVERY_SECONDS if leaving else 0.0):
            return
        self._peer_replication.begin_snapshot()
        self._state.equalize_buffers()
        self._snapshot_writer.write(step, samples, wait=leaving)

    def settle(self, wait: bool = False) -> int | None:
        """Make the newest snapshot valid once all rank states have arrived. Returns its step, None without one.

        `wait`: as for `SnapshotWriter.settle`.
        """
        step = self._snapshot_writer.settle(wait)
        if step is not None:
            self._snapshot_step = step
            self._peer_replication.send(StateVersion(step, self._environment.round))
        return step

    @property
    def replicated_step(self) -> int:
        """The newest step whose snapshot another worker has, too, as far as this rank knows; 0: none.

        A replica is the same on all workers. A job with one worker has no other; the rank does not know that.
        """
        return max(0, self._peer_replication.delivered_step if self._state.sharded else self._snapshot_step)

    @property
    def snapshot_seconds(self) -> float:
        """Cost to the training of a snapshot and its copy on another node; 0: unknown."""
        return self._snapshot_writer.seconds

    def _count_unallocated_slots(self) -> int:
        """Return for how many copies of its state this rank has not allocated memory yet."""
        checkpoint = self._checkpoint_writer is not None and not self._checkpoint_writer.has_buffer
        return checkpoint + (0 if self._snapshots is None else self._snapshots.unallocated_slots)

    # Checkpoints

    def checkpoint(self, step: int, samples: int, on_published: Callable[[int], None]) -> None:
        """Copy the state after `step`, write it in the background, and call `on_published` from there. Collective.

        Call `wait_for_checkpoint` first, for the outcome of the previous one.
        """
        if self._checkpoint_writer is None:
            return
        self._state.equalize_buffers()
        manifest = Manifest(
            step=step,
            round=self._environment.round,
            world_size=self._environment.world_size,
            model=self._state.model_description,
            objects=self._state.names,
            job=self._environment.job.name,
            uid=self._environment.job.uid,
        )
        self._checkpoint_writer.start(manifest, self._state.capture_portable(samples), on_published)

    def wait_for_checkpoint(self) -> WriteOutcome:
        """Wait until the present checkpoint is published or given up. The log of rank 0 has the reason of a failure.

        The outcome is this rank's; `agree_on_checkpoint` gives the one that all ranks continue with.
        """
        return WriteOutcome.PUBLISHED if self._checkpoint_writer is None else self._checkpoint_writer.wait()

    def agree_on_checkpoint(self, outcome: WriteOutcome) -> WriteOutcome:
        """Return the same outcome on all ranks: UNCONFIRMED if one of them could not wait for it. Collective."""
        return outcome if self._checkpoint_writer is None else self._checkpoint_writer.agree_on_outcome(outcome)


def _open_snapshots(
    environment: Environment, state: TrainingState, copies: SlotCopies, free_memory: Callable[[], bool]
) -> Snapshots | None:
    """Return this rank's snapshots; None: no launcher has created their folder."""
    if environment.runtime is None:
        return None
    return Snapshots(
        environment.runtime.snapshots,
        format_shard_name(environment.rank, environment.world_size) if state.sharded else "replica",
        round_=environment.round,
        world_size=environment.world_size,
        fingerprint=compute_fingerprint(state.model_description),
        copies=copies,
        memory=SlotMemory(free=free_memory),
    )


def _open_shard(environment: Environment, state: TrainingState, rank: int) -> Snapshots:
    """Return the snapshots of any rank's shard in this worker's memory."""
    assert environment.runtime is not None, "there are snapshots"
    return Snapshots(
        environment.runtime.snapshots,
        format_shard_name(rank, environment.world_size),
        round_=environment.round,
        world_size=environment.world_size,
        fingerprint=compute_fingerprint(state.model_description),
    )
