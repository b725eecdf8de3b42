"""The store of the job's state: kept in shared memory and on the volume, and brought back from where it is newest.

`TrainingState` gathers the state and hands it back. A snapshot writer copies it into shared memory, a checkpoint writer
writes it to the volume in the background; a source brings it back from each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pacekeeper.environment import Environment
from pacekeeper.exchange import broadcast_object
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.records import StateOrigin

from .checkpoint_writer import CheckpointWriter, WriteOutcome
from .checkpoints import SHARED_VOLUME_REMEDY, CheckpointFolder
from .copies import SlotCopies, create_slot_copies
from .manifests import Manifest
from .neighbours import PeerReplication
from .news import open_checkpoint_reporter
from .rank_state import compute_fingerprint
from .shard_names import format_shard_name
from .snapshot_writer import SnapshotWriter
from .snapshots import Snapshots
from .sources import CheckpointSource, SnapshotSource, StateSource
from .state import TrainingState
from .versions import NO_STATE_VERSION, StateVersion

FINAL_DELIVERY_SECONDS = 5.0
"""Of the grace that ranks are given when they are told to leave, what a copy on its way to a neighbour may take."""


@dataclass(frozen=True)
class RestoredState:
    """What a rank was brought back to."""

    step: int
    samples: int
    """This rank's, since the job's beginning."""
    checkpoint_step: int
    """Of the newest checkpoint on the volume, by its manifest; -1: none."""
    origin: StateOrigin
    """Where this rank's state came from."""


class StateStore:
    """One rank's part in it."""

    def __init__(
        self, environment: Environment, peers: CpuGroup, state: TrainingState, folder: CheckpointFolder | None
    ) -> None:
        """`folder`: on the volume; None: there are no checkpoints.

        Raises InputError where an object's state cannot be kept.
        """
        copies = create_slot_copies(state.optimizers)
        self.has_folder = folder is not None and not folder.read_only
        """Whether checkpoints can be kept."""
        self._folder = folder
        self._environment = environment
        self._state = state
        self._peers = peers
        self._reporter = open_checkpoint_reporter(environment)
        self._checkpoint_source = CheckpointSource(folder, state, peers)
        keeps = state.sharded or environment.local_rank == 0
        self._peer_replication = PeerReplication(
            environment,
            peers,
            lambda rank: _open_shard(environment, state, rank),
            sharded=state.sharded,
            count_unallocated_slots=self._count_unallocated_slots,
        )
        snapshots = self._snapshots = _open_snapshots(environment, state, copies, self._peer_replication.release_memory)
        snapshot_source = SnapshotSource(snapshots, state, peers, keeps, self._peer_replication.peer_shards)
        self._sources: list[StateSource] = [snapshot_source, self._checkpoint_source]
        """The quickest first: where several have the same step, it comes back from the first."""
        self._snapshot_writer = SnapshotWriter(snapshots, state, peers, keeps, lambda: self._peer_replication.seconds)
        self._checkpoint_writer = (
            CheckpointWriter(folder, self._reporter, peers, copies.pin, self._peer_replication.release_memory)
            if folder and self.has_folder
            else None
        )
        if snapshots or folder:
            state.check_serializable()  # what cannot be kept is said now, not after the first hundred steps

    @property
    def stores_snapshots(self) -> bool:
        """Whether this rank keeps snapshots, as far as it knows by now."""
        return self._snapshot_writer.stores_copy

    def restore(self) -> RestoredState | None:
        """Brings back the newest state that all ranks can have, from whichever source has it. Collective.

        The folder of checkpoints is this job's from then on, and not before. None: there is nothing to bring back.

        Raises InputError where ranks see different folders or the checkpoint is another model's, before anything is
        changed; where a snapshot or a checkpoint was brought back in part, and there is nothing else; and where another
        job has become the folder's owner.
        """
        self._check_shared_folder()
        newest = {source: source.find_newest() for source in self._sources}
        while True:
            source, version = max(newest.items(), key=lambda its: its[1].step)
            samples = None if version == NO_STATE_VERSION else source.load(version)
            if samples is not None or version == NO_STATE_VERSION:
                break
            newest[source] = source.find_newest()
        if samples is None:
            for one in self._sources:
                one.check_unchanged()
        self._claim_folder()
        checkpoint_step = newest[self._checkpoint_source].step
        self._reporter.report_found(checkpoint_step)
        return None if samples is None else RestoredState(version.step, samples, checkpoint_step, source.origin)

    def _check_shared_folder(self) -> None:
        """Raises InputError, on all ranks, where some do not see what rank 0 writes. Collective."""
        folder, rank = self._folder, self._environment.rank
        if folder is None or folder.read_only:
            return
        mark: str = broadcast_object(folder.create_visibility_mark() if rank == 0 else None, self._peers.group)
        blind = [its for its, seen in enumerate(self._peers.all_gather(not mark or folder.has_visibility_mark(mark))) if not seen]
        if rank == 0:
            folder.remove_visibility_mark(mark)
        if blind:
            raise InputError(
                f"spec.checkpoint.path: {folder.path} is another folder for ranks {', '.join(map(str, blind))} than "
                f"for rank 0. {SHARED_VOLUME_REMEDY}"
            )

    def _claim_folder(self) -> None:
        """Raises InputError, on all ranks, where the folder belongs to another job by now. Collective."""
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
        """Whether `snapshot` would take one, as far as neighbours go. `settle` comes first. Collective."""
        return self._peer_replication.wait_for_delivery()

    def snapshot(self, step: int, samples: int, leaving: bool = False) -> None:
        """Copies the state after `step` into shared memory; `settle` makes it valid. Collective.

        None is taken while the one before is on its way to a neighbour: otherwise what neighbours have might soon be
        older than what the others still have.

        samples: of this rank, since the job's beginning. leaving: some rank is about to be gone, and what it has with
        it; there is no later one, so that before this one is left out, the one before is waited for.
        """
        self.settle(wait=True)  # who would know the step of the one before has settled it
        if not self._peer_replication.wait_for_delivery(FINAL_DELIVERY_SECONDS if leaving else 0.0):
            return
        self._peer_replication.begin_snapshot()
        self._state.equalize_buffers()
        self._snapshot_writer.write(step, samples, wait=leaving)

    def settle(self, wait: bool = False) -> int:
        """Makes the newest snapshot valid, now that all rank states have come; returns its step, -1 without one.

        wait: as for `SnapshotWriter.settle`.
        """
        step = self._snapshot_writer.settle(wait)
        if step >= 0:
            self._peer_replication.send(StateVersion(step, self._environment.round))
        return step

    @property
    def snapshot_seconds(self) -> float:
        """What a snapshot and its copy on another node cost the training; 0: not known yet."""
        return self._snapshot_writer.seconds

    def _count_unallocated_slots(self) -> int:
        """For how many copies of its state this rank has not taken the memory yet."""
        checkpoint = self._checkpoint_writer is not None and not self._checkpoint_writer.has_buffer
        return checkpoint + (0 if self._snapshots is None else self._snapshots.unallocated_slots)

    # Checkpoints

    def checkpoint(self, step: int, samples: int, on_published: Callable[[int], None]) -> None:
        """Copies the state after `step` and writes it in the background; calls `published` from there. Collective.

        `wait_for_checkpoint` comes first: it says what came of the one before.
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
        """Until the checkpoint that is being written is published, or given up; rank 0's log has the reason.

        As far as this rank knows; `agree_on_checkpoint` comes next, where all ranks go on from it.
        """
        return WriteOutcome.PUBLISHED if self._checkpoint_writer is None else self._checkpoint_writer.wait()

    def agree_on_checkpoint(self, outcome: WriteOutcome) -> WriteOutcome:
        """The same on all ranks: LOST where one of them could not wait for it. Collective."""
        return outcome if self._checkpoint_writer is None else self._checkpoint_writer.agree_on_outcome(outcome)


def _open_snapshots(
    environment: Environment, state: TrainingState, copies: SlotCopies, free_memory: Callable[[], bool]
) -> Snapshots | None:
    """None: no launcher has made a place for them."""
    if environment.runtime is None:
        return None
    return Snapshots(
        environment.runtime.snapshots,
        format_shard_name(environment.rank, environment.world_size) if state.sharded else "replica",
        round_=environment.round,
        world_size=environment.world_size,
        fingerprint=compute_fingerprint(state.model_description),
        copies=copies,
        free_memory=free_memory,
    )


def _open_shard(environment: Environment, state: TrainingState, rank: int) -> Snapshots:
    """Of any rank, as they lie in this worker's memory."""
    assert environment.runtime is not None, "there are snapshots"
    return Snapshots(
        environment.runtime.snapshots,
        format_shard_name(rank, environment.world_size),
        round_=environment.round,
        world_size=environment.world_size,
        fingerprint=compute_fingerprint(state.model_description),
    )
