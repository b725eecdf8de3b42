"""The store of the job's state: kept in shared memory and on the volume, and brought back from where it is newest.

`TrainingState` gathers the state and hands it back. A snapshot writer copies it into shared memory, a checkpoint writer
writes it to the volume in the background; a source brings it back from each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pacekeeper.environment import Environment
from pacekeeper.exchange import broadcast
from pacekeeper.observe.cpu_group import CpuGroup
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.records import StateOrigin

from .checkpoint_writer import CheckpointWriter, WriteOutcome
from .checkpoints import ONE_VOLUME, CheckpointFolder
from .copies import SlotCopies, copies_for
from .manifests import Manifest
from .neighbours import Neighbours
from .news import open_news
from .rank_state import fingerprint
from .shard_names import shard_name
from .snapshot_writer import SnapshotWriter
from .snapshots import Snapshots
from .sources import CheckpointSource, SnapshotSource, Source
from .state import TrainingState
from .versions import NOTHING, Version

LAST_COPY_SECONDS = 5.0
"""Of the grace that ranks are given when they are told to leave, what a copy on its way to a neighbour may take."""


@dataclass(frozen=True)
class Restored:
    """What a rank was brought back to."""

    step: int
    samples: int
    """This rank's, since the job's beginning."""
    checkpoint_step: int
    """Of the newest checkpoint on the volume, by its manifest; -1: none."""
    origin: StateOrigin
    """Where this rank's state came from."""


class Store:
    """One rank's part in it."""

    def __init__(
        self, environment: Environment, peers: CpuGroup, state: TrainingState, folder: CheckpointFolder | None
    ) -> None:
        """`folder`: on the volume; None: there are no checkpoints.

        Raises InputError where an object's state cannot be kept.
        """
        copies = copies_for(state.optimizers)
        self.has_folder = folder is not None and not folder.read_only
        """Whether checkpoints can be kept."""
        self._folder = folder
        self._environment = environment
        self._state = state
        self._peers = peers
        self._news = open_news(environment)
        self._volume = CheckpointSource(folder, state, peers)
        keeps = state.sharded or environment.local_rank == 0
        self._neighbours = Neighbours(
            environment,
            peers,
            lambda rank: _open_shard(environment, state, rank),
            sharded=state.sharded,
            slots_to_come=self._slots_to_come,
        )
        snapshots = self._snapshots = _open_snapshots(environment, state, copies, self._neighbours.give_way)
        snapshot_source = SnapshotSource(snapshots, state, peers, keeps, self._neighbours.kept)
        self._sources: list[Source] = [snapshot_source, self._volume]
        """The quickest first: where several have the same step, it comes back from the first."""
        self._snapshot_writer = SnapshotWriter(snapshots, state, peers, keeps, lambda: self._neighbours.seconds)
        self._checkpoint_writer = (
            CheckpointWriter(folder, self._news, peers, copies.pin, self._neighbours.give_way)
            if folder and self.has_folder
            else None
        )
        if snapshots or folder:
            state.check()  # what cannot be kept is said now, not after the first hundred steps

    @property
    def can_snapshot(self) -> bool:
        """Whether this rank keeps snapshots, as far as it knows by now."""
        return self._snapshot_writer.keeps

    def restore(self) -> Restored | None:
        """Brings back the newest state that all ranks can have, from whichever source has it. Collective.

        The folder of checkpoints is this job's from then on, and not before. None: there is nothing to bring back.

        Raises InputError where ranks see different folders or the checkpoint is another model's, before anything is
        changed; where a snapshot or a checkpoint was brought back in part, and there is nothing else; and where another
        job has become the folder's owner.
        """
        self._check_shared()
        newest = {source: source.newest() for source in self._sources}
        while True:
            source, version = max(newest.items(), key=lambda its: its[1].step)
            samples = None if version == NOTHING else source.load(version)
            if samples is not None or version == NOTHING:
                break
            newest[source] = source.newest()
        if samples is None:
            for one in self._sources:
                one.check_unchanged()
        self._claim_folder()
        checkpoint_step = newest[self._volume].step
        self._news.found(checkpoint_step)
        return None if samples is None else Restored(version.step, samples, checkpoint_step, source.origin)

    def _check_shared(self) -> None:
        """Raises InputError, on all ranks, where some do not see what rank 0 writes. Collective."""
        folder, rank = self._folder, self._environment.rank
        if folder is None or folder.read_only:
            return
        mark: str = broadcast(folder.mark() if rank == 0 else None, self._peers.group)
        blind = [its for its, seen in enumerate(self._peers.gather(not mark or folder.sees(mark))) if not seen]
        if rank == 0:
            folder.unmark(mark)
        if blind:
            raise InputError(
                f"spec.checkpoint.path: {folder.path} is another folder for ranks {', '.join(map(str, blind))} than "
                f"for rank 0. {ONE_VOLUME}"
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
        refusal, folder.run_mark = broadcast((refusal, folder.run_mark), self._peers.group)
        if refusal:
            raise InputError(refusal)

    def equalise_others(self, but: tuple[type, ...]) -> None:
        """As `TrainingState.equalise_others`. Collective."""
        self._state.equalise_others(self._peers.group, but)

    # Snapshots

    def may_snapshot(self) -> bool:
        """Whether `snapshot` would take one, as far as neighbours go. `settle` comes first. Collective."""
        return self._neighbours.have_last()

    def snapshot(self, step: int, samples: int, leaving: bool = False) -> None:
        """Copies the state after `step` into shared memory; `settle` makes it valid. Collective.

        None is taken while the one before is on its way to a neighbour: otherwise what neighbours have might soon be
        older than what the others still have.

        samples: of this rank, since the job's beginning. leaving: some rank is about to be gone, and what it has with
        it; there is no later one, so that before this one is left out, the one before is waited for.
        """
        self.settle(wait=True)  # who would know the step of the one before has settled it
        if not self._neighbours.have_last(LAST_COPY_SECONDS if leaving else 0.0):
            return
        self._neighbours.begin_snapshot()
        self._state.equalise_buffers()
        self._snapshot_writer.write(step, samples, wait=leaving)

    def settle(self, wait: bool = False) -> int:
        """Makes the newest snapshot valid, now that all rank states have come; returns its step, -1 without one.

        wait: as for `SnapshotWriter.settle`.
        """
        step = self._snapshot_writer.settle(wait)
        if step >= 0:
            self._neighbours.send(Version(step, self._environment.round))
        return step

    @property
    def snapshot_seconds(self) -> float:
        """What a snapshot and its copy on another node cost the training; 0: not known yet."""
        return self._snapshot_writer.seconds

    def _slots_to_come(self) -> int:
        """For how many copies of its state this rank has not taken the memory yet."""
        checkpoint = self._checkpoint_writer is not None and not self._checkpoint_writer.has_room
        return checkpoint + (0 if self._snapshots is None else self._snapshots.slots_to_come)

    # Checkpoints

    def checkpoint(self, step: int, samples: int, published: Callable[[int], None]) -> None:
        """Copies the state after `step` and writes it in the background; calls `published` from there. Collective.

        `wait_for_checkpoint` comes first: it says what came of the one before.
        """
        if self._checkpoint_writer is None:
            return
        self._state.equalise_buffers()
        manifest = Manifest(
            step=step,
            round=self._environment.round,
            world_size=self._environment.world_size,
            model=self._state.description,
            objects=self._state.names,
            job=self._environment.job.name,
            uid=self._environment.job.uid,
        )
        self._checkpoint_writer.start(manifest, self._state.portable(samples), published)

    def wait_for_checkpoint(self) -> WriteOutcome:
        """Until the checkpoint that is being written is published, or given up; rank 0's log has the reason.

        As far as this rank knows; `agree_on_checkpoint` comes next, where all ranks go on from it.
        """
        return WriteOutcome.KEPT if self._checkpoint_writer is None else self._checkpoint_writer.wait()

    def agree_on_checkpoint(self, outcome: WriteOutcome) -> WriteOutcome:
        """The same on all ranks: LOST where one of them could not wait for it. Collective."""
        return outcome if self._checkpoint_writer is None else self._checkpoint_writer.agree(outcome)


def _open_snapshots(
    environment: Environment, state: TrainingState, copies: SlotCopies, make_room: Callable[[], bool]
) -> Snapshots | None:
    """None: no launcher has made a place for them."""
    if environment.runtime is None:
        return None
    return Snapshots(
        environment.runtime.snapshots,
        shard_name(environment.rank, environment.world_size) if state.sharded else "replica",
        round_=environment.round,
        world_size=environment.world_size,
        fingerprint=fingerprint(state.description),
        copies=copies,
        make_room=make_room,
    )


def _open_shard(environment: Environment, state: TrainingState, rank: int) -> Snapshots:
    """Of any rank, as they lie in this worker's memory."""
    assert environment.runtime is not None, "there are snapshots"
    return Snapshots(
        environment.runtime.snapshots,
        shard_name(rank, environment.world_size),
        round_=environment.round,
        world_size=environment.world_size,
        fingerprint=fingerprint(state.description),
    )
