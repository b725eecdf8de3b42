"""When the job's state is saved: due and requested checkpoints, snapshots, and both before the rank leaves."""

from __future__ import annotations

import logging
import math
import time

from pacekeeper.checkpointing.state_store import StateStore
from pacekeeper.checkpointing.storage.checkpoint_writer import WriteOutcome
from pacekeeper.data.loader import Loader
from pacekeeper.replication.replication import Replication
from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import Phase, StateOrigin

from .progress import Progress
from .training_config import crosses_multiple

_UNKNOWN_STEP_TIME_INTERVAL = 100
_log = logging.getLogger(__name__)


class StateSaver:
    """One rank's part in saving the state. All ranks decide alike, from what they have agreed on."""

    def __init__(
        self,
        state_store: StateStore,
        recorder: Recorder,
        progress: Progress,
        replication: Replication,
        checkpoint_every: int,
        snapshot_every: int | None,
    ) -> None:
        """Create the saver. `snapshot_every` None: as often as 1 % of the training time allows; 0: never."""
        self._store = state_store
        self._recorder = recorder
        self._state = recorder.ring.state
        self._progress = progress
        self._replication = replication
        self._checkpoint_every = checkpoint_every if state_store.has_folder else 0
        self._snapshot_every = snapshot_every
        self._checkpoint_step: int | None = None
        """Step of the newest checkpoint that is published or being written; None: there is none.

        It is reset after a failure, but only when all ranks have waited for the outcome, so that they decide alike.
        """
        self._published_step: int | None = None

    def restore(self) -> int:
        """Restore the newest state that all ranks have, and return its step; 0: there is none."""
        progress = self._progress
        self._state.restoring_ns = time.monotonic_ns()
        with self._recorder.run_phase(Phase.RESTORE):
            restored = self._store.restore()
        self._state.restored_ns = time.monotonic_ns()
        self._state.origin = StateOrigin.NOTHING if restored is None else restored.origin
        if restored is not None:
            assert progress.step == restored.step, "the job's own counters are part of its state"
            self._checkpoint_step = self._published_step = restored.checkpoint_step
            self._state.checkpoint_step = -1 if restored.checkpoint_step is None else restored.checkpoint_step
            self._state.samples = progress.own_samples = restored.samples
            if restored.is_in_memory and self._store.stores_snapshots:
                self._state.snapshot_step = restored.step
        self._state.restored_step = progress.step
        return progress.step

    def is_checkpoint_due(self, before: int, after: int) -> bool:
        """Return whether a checkpoint is due at the sync point after step `after`, given the one after `before`."""
        return after > (self._checkpoint_step or 0) and crosses_multiple(before, after, self._checkpoint_every)

    def is_snapshot_due(self, before: int, after: int, every: int, check_delivery: bool) -> bool:
        """Return whether a snapshot is due; `before` and `after` as in `is_checkpoint_due`.

        `check_delivery`: also check that the snapshot would not be skipped because the one before is still on its way
        to a peer, which would make the preparations useless. The check is collective if a snapshot is due.
        """
        if not crosses_multiple(before, after, every):
            return False
        if not check_delivery:
            return True
        self.settle()
        return self._store.is_snapshot_possible()

    def choose_snapshot_interval(self, step_seconds: float | None, exposed_seconds: float) -> int:
        """Return rank 0's choice of the steps between snapshots; 0: never.

        `step_seconds`: None: unknown. `exposed_seconds`: cost of a snapshot in addition to its own time.
        """
        if not self._store.stores_snapshots:
            return 0
        if self._snapshot_every is not None:
            return self._snapshot_every
        return compute_snapshot_interval(self._store.snapshot_seconds + exposed_seconds, step_seconds)

    def checkpoint(self) -> None:
        """Write a checkpoint of the present state, unless one exists; it is published in the background. Collective.

        An open request is answered once a checkpoint is published: by this one, or after a failure by a later one.
        """
        progress, answered_request = self._progress, self._progress.answered_request
        self._wait_for_outcome()
        if not self._store.has_folder or progress.step <= (self._checkpoint_step or 0):
            self._state.checkpoint_request = answered_request
            return
        self._checkpoint_step = progress.step
        with self._recorder.run_phase(Phase.CHECKPOINT):
            self._replication.equalize()
            self._store.checkpoint(
                progress.step, progress.own_samples, lambda step: self._record_published(step, answered_request)
            )

    def answer_request(self, request: int) -> None:
        """Write the checkpoint that the plan requests."""
        self._progress.answered_request = request
        self.checkpoint()

    def snapshot(self, leaving: bool = False) -> None:
        """Take a snapshot of the present state, which the next `settle` makes valid. Collective.

        `leaving`: as for `StateStore.snapshot`. What differs between independently training replicas is saved as the
        saving rank has it.
        """
        self.settle(wait=True)
        self._replication.finish()
        self._store.snapshot(self._progress.step, self._progress.own_samples, leaving)

    def equalize_other_objects(self) -> None:
        """Copy to all ranks what is neither parameter nor optimizer state and must be the same in Sync. Collective.

        Loader and progress are excluded: they are already the same, except for each rank's own part.
        """
        self._store.equalize_other_objects(excluded_types=(Loader, Progress))

    def settle(self, wait: bool = False) -> None:
        """Make the last snapshot valid.

        If the host still works on it in the background, a later call or `wait` does.
        """
        if (step := self._store.settle(wait)) is not None:
            self._state.snapshot_step = step
        self._state.replicated_step = self._store.replicated_step

    def finish(self) -> None:
        """Save the state after the last step; the rank has nothing left to do then.

        No later checkpoint follows, so a failed one is attempted a second time.
        """
        self.checkpoint()
        outcome = self._wait_for_outcome()
        if outcome is WriteOutcome.FAILED:  # on all ranks
            self.checkpoint()
            outcome = self._wait_for_outcome()
        if outcome is not WriteOutcome.PUBLISHED:
            _log.error(
                "the state after step %d, the last one, is NOT saved on the volume: the newest checkpoint there is %s; "
                "see the log of rank 0 for the reason (spec.checkpoint)",
                self._progress.step,
                f"of step {self._published_step}" if self._published_step is not None else "none",
            )
        self._recorder.enter_phase(Phase.FINISHED)

    def leave(self, snapshot: bool) -> None:
        """Save the state on all ranks before they leave on request."""
        if snapshot:
            self.snapshot(leaving=True)
            self.settle(wait=True)
        self.finish()

    def wait(self) -> None:
        """Wait until the present checkpoint is published or given up. Only for this rank, which leaves."""
        with self._recorder.run_phase(Phase.CHECKPOINT):
            self._store.wait_for_checkpoint()

    def _wait_for_outcome(self) -> WriteOutcome:
        """Wait for the outcome that all ranks agree on; a failed step can be written again. Collective."""
        with self._recorder.run_phase(Phase.CHECKPOINT):
            outcome = self._store.agree_on_checkpoint(self._store.wait_for_checkpoint())
        if outcome is WriteOutcome.PUBLISHED:
            self._published_step = self._checkpoint_step
        else:
            self._checkpoint_step = self._published_step
        return outcome

    def _record_published(self, step: int, answered_request: int) -> None:
        self._state.checkpoint_step = step
        self._state.checkpoint_request = answered_request


def compute_snapshot_interval(cost_seconds: float, step_seconds: float | None, max_share: float = 0.01) -> int:
    """Return the steps between snapshots at which they cost at most `max_share` of the training time.

    `step_seconds`: None: unknown.

    It is a power of two. Snapshots are taken at its multiples. An interval that followed each measurement would have
    different multiples each time, so that by chance none might come for a long time.
    """
    if step_seconds is None or step_seconds <= 0:
        return _UNKNOWN_STEP_TIME_INTERVAL
    minimum = max(1, math.ceil(cost_seconds / (max_share * step_seconds)))
    return 1 << (minimum - 1).bit_length()
