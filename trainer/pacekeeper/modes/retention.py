"""When the job's state is kept: checkpoints that are due or asked for, snapshots, and both before the rank leaves."""

from __future__ import annotations

import logging
import math
import time

from pacekeeper.data.loader import Loader
from pacekeeper.keep.checkpoint_writer import WriteOutcome
from pacekeeper.keep.store import StateStore
from pacekeeper.observe.recorder import Recorder
from pacekeeper.replication.replication import Replication
from pacekeeper_analysis.records import Phase, StateOrigin

from .course import crosses_multiple
from .progress import Progress

_UNKNOWN_STEP_TIME_INTERVAL = 100
_log = logging.getLogger(__name__)


class StateSaver:
    """One rank's part in it. All ranks decide alike, from what they have agreed on."""

    def __init__(
        self,
        state_store: StateStore,
        recorder: Recorder,
        progress: Progress,
        replication: Replication,
        checkpoint_every: int,
        snapshot_every: int | None,
    ) -> None:
        """`snapshot_every`: None: as often as 1 % of the training time allows; 0: never."""
        self._store = state_store
        self._recorder = recorder
        self._state = recorder.ring.state
        self._progress = progress
        self._replication = replication
        self._checkpoint_every = checkpoint_every if state_store.has_folder else 0
        self._snapshot_every = snapshot_every
        self._checkpoint_step = 0
        """Step of the newest checkpoint that is kept or being written. It goes back where one failed, but only when
        all ranks have waited for it: so they decide alike."""
        self._published_step = 0

    def restore(self) -> int:
        """Goes back to the newest state that all ranks can have; returns its step, 0 without one."""
        progress = self._progress
        self._state.restoring_ns = time.monotonic_ns()
        with self._recorder.run_phase(Phase.RESTORE):
            restored = self._store.restore()
        self._state.restored_ns = time.monotonic_ns()
        self._state.origin = StateOrigin.NOTHING if restored is None else restored.origin
        if restored is not None:
            assert progress.step == restored.step, "the job's own counters are part of its state"
            self._checkpoint_step = self._published_step = self._state.checkpoint_step = restored.checkpoint_step
            self._state.samples = progress.own_samples = restored.samples
        self._state.restored_step = progress.step
        return progress.step

    def is_checkpoint_due(self, before: int, after: int) -> bool:
        """Whether one is due at the ordinal after step `after`, when the ordinal before was after step `before`."""
        return after > self._checkpoint_step and crosses_multiple(before, after, self._checkpoint_every)

    def is_snapshot_due(self, before: int, after: int, every: int, check_delivery: bool) -> bool:
        """Whether one is due, as for `checkpoint_due`.

        look_first: not while it would be left out, since the one before is on its way to a neighbour: all that is done
        for it before would be in vain. Collective then, where one is due.
        """
        if not crosses_multiple(before, after, every):
            return False
        if not check_delivery:
            return True
        self.settle()
        return self._store.is_snapshot_possible()

    def choose_snapshot_interval(self, step_seconds: float, exposed_seconds: float) -> int:
        """Rank 0's word on how often to take snapshots; 0: never.

        exposed_seconds: that a snapshot costs beside its own time.
        """
        if not self._store.stores_snapshots:
            return 0
        if self._snapshot_every is not None:
            return self._snapshot_every
        return compute_snapshot_interval(self._store.snapshot_seconds + exposed_seconds, step_seconds)

    def checkpoint(self) -> None:
        """Of the present state, unless there is one; it is published in the background. Collective.

        A request that is open is answered once it is published: by this one, or if it fails by a later one.
        """
        progress, answered = self._progress, self._progress.answered_request
        self._wait_for_outcome()
        if not self._store.has_folder or progress.step <= self._checkpoint_step:
            self._state.checkpoint_request = answered
            return
        self._checkpoint_step = progress.step
        with self._recorder.run_phase(Phase.CHECKPOINT):
            self._replication.equalize()
            self._store.checkpoint(progress.step, progress.own_samples, lambda step: self._record_published(step, answered))

    def answer_request(self, request: int) -> None:
        """Takes the checkpoint that the plan asks for."""
        self._progress.answered_request = request
        self.checkpoint()

    def snapshot(self, leaving: bool = False) -> None:
        """Of the present state; the next `settle` makes it valid. Collective. `leaving`: as `Store.snapshot`.

        What replicas that train by themselves have each for themselves is the keeping rank's.
        """
        self.settle(wait=True)
        self._replication.finish()
        self._store.snapshot(self._progress.step, self._progress.own_samples, leaving)

    def equalize_other_objects(self) -> None:
        """Gives all ranks what is neither parameter nor moment and must be the same in Sync. Collective.

        The loader and the progress are alike as it is, but for what each rank has of its own.
        """
        self._store.equalize_other_objects(excluded_types=(Loader, Progress))

    def settle(self, wait: bool = False) -> None:
        """Makes the snapshot taken last valid; where the host does something for it beside the training, at a later
        call, or with `wait` at this one."""
        if (settled := self._store.settle(wait)) >= 0:
            self._state.snapshot_step = settled

    def finish(self) -> None:
        """The last step is done: its state is kept, then the rank has nothing left to do.

        Nobody writes a checkpoint after this one, so where it fails there is a second attempt.
        """
        self.checkpoint()
        outcome = self._wait_for_outcome()
        if outcome is WriteOutcome.FAILED:  # on all ranks
            self.checkpoint()
            outcome = self._wait_for_outcome()
        if outcome is not WriteOutcome.PUBLISHED:
            _log.error(
                "the state after step %d, the last one, is NOT kept on the volume: the newest checkpoint there is %s; "
                "rank 0's log has the reason (spec.checkpoint)",
                self._progress.step,
                f"of step {self._published_step}" if self._published_step > 0 else "none",
            )
        self._recorder.enter_phase(Phase.FINISHED)

    def leave(self, snapshot: bool) -> None:
        """Told to leave, all ranks keep the state."""
        if snapshot:
            self.snapshot(leaving=True)
            self.settle(wait=True)
        self.finish()

    def wait(self) -> None:
        """Until the checkpoint that is being written is published, or given up. Of this rank alone, which leaves."""
        with self._recorder.run_phase(Phase.CHECKPOINT):
            self._store.wait_for_checkpoint()

    def _wait_for_outcome(self) -> WriteOutcome:
        """The same of all ranks together, so that they go on alike: its step can be written again then. Collective."""
        with self._recorder.run_phase(Phase.CHECKPOINT):
            outcome = self._store.agree_on_checkpoint(self._store.wait_for_checkpoint())
        if outcome is WriteOutcome.PUBLISHED:
            self._published_step = self._checkpoint_step
        else:
            self._checkpoint_step = self._published_step
        return outcome

    def _record_published(self, step: int, answered: int) -> None:
        self._state.checkpoint_step = step
        self._state.checkpoint_request = answered


def compute_snapshot_interval(cost_seconds: float, step_seconds: float, max_share: float = 0.01) -> int:
    """Steps between snapshots, so that they cost at most the share `most` of the training time.

    A power of two: they are taken at its multiples, and an interval that follows each measurement would have others
    each time, so that by chance none came for many times as long.
    """
    if step_seconds <= 0:
        return _UNKNOWN_STEP_TIME_INTERVAL
    least = max(1, math.ceil(cost_seconds / (max_share * step_seconds)))
    return 1 << (least - 1).bit_length()
