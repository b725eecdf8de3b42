"""What the launcher publishes to the sidecar: the worker's present state, and a liveness file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pacekeeper.checkpointing.storage.checkpoint_status import NO_CHECKPOINT_STATUS, CheckpointStatus
from pacekeeper.runtime_folder import write_json
from pacekeeper_analysis.protocol.plan import SYNC_MODES, WorkerPlan
from pacekeeper_analysis.protocol.reports import (
    BadLoss,
    CheckpointReport,
    Heartbeat,
    LauncherState,
    ReachedStage,
    RoundStart,
    StartStage,
    StepProgress,
    TrainingReport,
)
from pacekeeper_rank.records import StateOrigin

from ..rendezvous.rounds import RoundState

HEARTBEAT_WRITE_INTERVAL_SECONDS = 0.5
"""Seconds between two writes while only steps and ages change. Other changes are written at once."""

LIVENESS_INTERVAL_SECONDS = 0.5
"""Seconds between two updates of the liveness file."""

WRITE_FAILURE_LOG_SECONDS = 60.0
"""Seconds between two log lines about the same failure to write."""

log = logging.getLogger(__name__)


class WriteFailures:
    """Failures to write, such as on a full volume. They are logged from time to time, and do not end the training."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    @contextmanager
    def suppress_errors(self, description: str) -> Iterator[None]:
        """Suppress OSErrors while writing what `description` names. The caller retries soon."""
        try:
            yield
        except OSError as error:
            now = time.monotonic()
            logged_at = self._logged_at.get(description)
            if logged_at is None or now - logged_at >= WRITE_FAILURE_LOG_SECONDS:
                self._logged_at[description] = now
                log.warning("cannot be written for the operator: %s: %s; training goes on", description, error)


class LivenessFile:
    """A file that is touched while the launcher follows the plan.

    It does not exist while torch is being imported, nor after an orderly exit: then, no update is expected.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_at: float | None = None
        self.remove()

    def touch(self, now: float) -> None:
        """Update the file if it is due. `now`: seconds of the monotonic clock."""
        if self._touched_at is None or now - self._touched_at >= LIVENESS_INTERVAL_SECONDS:
            self._path.touch()
            self._touched_at = now

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class HeartbeatFile:
    """Writes the heartbeat file when it has changed."""

    def __init__(self, path: Path, worker: str) -> None:
        self._path = path
        # A container's first process has no parent there. Any other one may be a shell's command, before others.
        self._heartbeat = self._written = Heartbeat(worker=worker, commands_may_follow=os.getppid() != 0)
        self._written_at: float | None = None
        with WriteFailures().suppress_errors("the first heartbeat"):
            write_json(path, self._heartbeat.to_json())

    def write(self, heartbeat: Heartbeat, now: float) -> None:
        """Write the heartbeat if it is due.

        `now`: seconds of the monotonic clock. Raises OSError, for example on a full volume; call it again then.
        """
        if heartbeat == self._written:
            return
        if (
            _select_rare_fields(heartbeat) == _select_rare_fields(self._written)
            and self._written_at is not None
            and now - self._written_at < HEARTBEAT_WRITE_INTERVAL_SECONDS
        ):
            return
        self._heartbeat = heartbeat
        write_json(self._path, heartbeat.to_json())
        self._written, self._written_at = heartbeat, now

    @property
    def last(self) -> Heartbeat:
        return self._heartbeat


def _select_rare_fields(heartbeat: Heartbeat) -> tuple[Heartbeat, object]:
    progress = replace(heartbeat.progress, step=None, steps_in_round=0)
    checkpoint = replace(heartbeat.checkpoint, age_seconds=None)
    return replace(heartbeat, progress=progress, checkpoint=checkpoint, gpus=()), heartbeat.gpu_signs


@dataclass(frozen=True)
class RankZeroNotes:
    """What rank 0 last wrote in the runtime folder."""

    refused: str = ""  # why it does not follow the plan; "": it does
    checkpoints: CheckpointStatus = NO_CHECKPOINT_STATUS


_NO_NOTES = RankZeroNotes()


def build_next_heartbeat(
    previous: Heartbeat,
    state: RoundState,
    plan: WorkerPlan | None,
    ranks: Collection[np.void],
    wall: float,
    monotonic: float,
    notes: RankZeroNotes = _NO_NOTES,
) -> Heartbeat:
    """Build the heartbeat after `previous`.

    `ranks`: their `records.STATE`; `wall`, `monotonic`: now, in seconds. `notes`: what rank 0 last wrote here; they
    count while it runs here. Values that a new round does not have yet (step, checkpoints) stay as the previous round
    left them.
    """
    heartbeat = replace(
        previous,
        state=state.stage,
        plan_version=0 if plan is None else plan.version,
        membership=0 if state.membership is None else state.membership,
        round=state.round,
        restarts=state.restarts,
        training=replace(previous.training, refused=""),
        unkillable_ranks=state.unkillable,
    )
    if state.round != previous.round:
        heartbeat = replace(
            heartbeat,
            start=RoundStart(),
            progress=replace(heartbeat.progress, steps_in_round=0),
            training=replace(heartbeat.training, bad_loss=None),
        )
    if state.stage is LauncherState.RUNNING and heartbeat.start.started_at is None:
        started_at = wall - (monotonic - state.started)
        heartbeat = replace(heartbeat, start=replace(heartbeat.start, started_at=started_at))
    if not ranks:
        return heartbeat
    slowest = min(ranks, key=lambda rank: int(rank["step"]))
    start = replace(heartbeat.start, restored_step=_read_position(slowest["restored_step"]))
    if start.first_step_at is None and slowest["steps_in_round"] > 0:
        # Exact for the round's first step, which is seen within a tick. A later step is seen only after a long tick.
        first_step = int(slowest["step_end_ns"]) * 1e-9
        start = replace(
            start,
            first_step_at=wall - (monotonic - first_step),
            teardown_seconds=state.teardown_seconds,
            stages=measure_start_stages(ranks, state.started, first_step, int(slowest["rank"])),
            origin=_read_state_origin(ranks),
        )
    rank_0_is_here = any(rank["rank"] == 0 for rank in ranks)
    if not rank_0_is_here:
        notes = _NO_NOTES
    return replace(
        heartbeat,
        start=start,
        progress=_build_progress(heartbeat.progress, slowest),
        checkpoint=_build_checkpoint_report(heartbeat.checkpoint, ranks, notes.checkpoints, monotonic),
        training=_build_training_report(ranks, slowest, notes.refused),
    )


def _build_progress(previous: StepProgress, slowest: np.void) -> StepProgress:
    step = _read_position(slowest["step"])
    return StepProgress(
        step=previous.step if step is None else step,
        steps_in_round=int(slowest["steps_in_round"]),
        total_steps=_read_amount(slowest["total_steps"]),
    )


def _build_checkpoint_report(
    previous: CheckpointReport, ranks: Collection[np.void], status: CheckpointStatus, monotonic: float
) -> CheckpointReport:
    published = [int(rank["checkpoint_step"]) for rank in ranks if rank["checkpoint_step"] >= 0]
    if previous.step is not None:
        published.append(previous.step)
    snapshots = [int(rank["snapshot_step"]) for rank in ranks if rank["snapshot_step"] >= 0]
    replicated = [int(rank["replicated_step"]) for rank in ranks if rank["snapshot_step"] >= 0]
    return CheckpointReport(
        step=max(published, default=None),
        # With replicas, one rank per worker keeps snapshots for all.
        snapshot_step=min(snapshots, default=None),
        replicated_step=min(replicated, default=0) or None,
        request=min(int(rank["checkpoint_request"]) for rank in ranks),
        failed_rank=status.failed_rank,
        error=status.error,
        age_seconds=status.compute_age(monotonic),
    )


def _build_training_report(ranks: Collection[np.void], slowest: np.void, refused: str) -> TrainingReport:
    bad_losses = [
        BadLoss(int(rank["rank"]), int(rank["bad_loss_step"])) for rank in ranks if rank["bad_loss_step"] >= 0
    ]
    global_batch = _read_amount(slowest["global_batch"])
    return TrainingReport(
        managed=global_batch is not None,
        sync_mode=_read_sync_mode(int(slowest["sync_mode"])),
        global_batch=global_batch,
        replica_ranks=_read_amount(slowest["replica_ranks"]),
        refused=refused,
        bad_loss=min(bad_losses, key=lambda loss: loss.step, default=None),
    )


def _read_position(value: np.int64) -> int | None:
    """Return a step of a rank's state. None: the rank has none."""
    return int(value) if value >= 0 else None


def _read_amount(value: np.int64) -> int | None:
    """Return a number of a rank's state for which 0 means that it is not known."""
    return int(value) if value > 0 else None


_STAGE_TIMESTAMPS = {
    StartStage.DEVICE: "device_ns",
    StartStage.COMMUNICATORS: "joined_ns",
    StartStage.SCRIPT: "restoring_ns",
    StartStage.LOAD: "restored_ns",
}


def measure_start_stages(
    ranks: Collection[np.void], began: float, first_step: float, last_rank: int
) -> tuple[ReachedStage, ...]:
    """Measure how long each stage of the round's start took here.

    `ranks`: their `records.STATE`. `began`, `first_step`: start of the round, and end of its first step on rank
    `last_rank`; seconds, monotonic. A stage is omitted if a rank's timestamp is missing or implausible: ranks can write
    anything.
    """
    stages = []
    for stage, stamp in _STAGE_TIMESTAMPS.items():
        moments = [(int(rank[stamp]) * 1e-9, int(rank["rank"])) for rank in ranks]
        if all(began <= moment <= first_step for moment, _ in moments):
            moment, rank = max(moments)
            stages.append(ReachedStage(stage, moment - began, rank))
    return (*stages, ReachedStage(StartStage.FIRST_STEP, max(0.0, first_step - began), last_rank))


def _read_state_origin(ranks: Collection[np.void]) -> str:
    """Return the farthest origin of the ranks' state. If a rank's value is missing or invalid, it is unknown."""
    origins = [int(rank["origin"]) for rank in ranks]
    is_known = all(StateOrigin.UNKNOWN < origin <= max(StateOrigin) for origin in origins)
    return StateOrigin(max(origins)).name if is_known else StateOrigin.UNKNOWN.name


def _read_sync_mode(position: int) -> str:
    """Return the ranks' sync mode; "": they are not managed, or have not started."""
    return "" if position < 0 else SYNC_MODES[position]
