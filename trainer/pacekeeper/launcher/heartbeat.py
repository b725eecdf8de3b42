"""What the sidecar is told of the launcher: the worker's present state, and that the launcher is alive at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from pacekeeper.keep.news import NO_CHECKPOINT_STATUS, CheckpointStatus
from pacekeeper.runtime import write_json
from pacekeeper_analysis.plan import SYNC_MODES, WorkerPlan
from pacekeeper_analysis.records import StateOrigin
from pacekeeper_analysis.reports import Heartbeat, LauncherState, ReachedStage, StartStage

from .rounds import RoundState

HEARTBEAT_WRITE_INTERVAL_SECONDS = 0.5
"""Seconds between two writes while only steps and ages have changed; all else is written at once."""

LIVENESS_INTERVAL_SECONDS = 0.5
"""Seconds between two signs of life."""

WRITE_FAILURE_LOG_SECONDS = 60.0
"""Seconds until the log says again that something cannot be written."""

log = logging.getLogger(__name__)


class WriteFailures:
    """What a full volume keeps the launcher from writing: said from time to time, and no reason to end the training."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    @contextmanager
    def suppress_errors(self, what: str) -> Iterator[None]:
        """`what` is written inside of it, or else another time, soon."""
        try:
            yield
        except OSError as error:
            now = time.monotonic()
            if now - self._logged_at.get(what, float("-inf")) >= WRITE_FAILURE_LOG_SECONDS:
                self._logged_at[what] = now
                log.warning("cannot be written for the operator: %s: %s; training goes on", what, error)


class LivenessFile:
    """The file that is touched as long as the launcher follows the plan. It is gone before that, while torch is being
    imported, and after an orderly end: nobody is to miss a sign then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched_at = float("-inf")
        self.remove()

    def touch(self, now: float) -> None:
        """`now`: seconds of the monotonic clock."""
        if now - self._touched_at >= LIVENESS_INTERVAL_SECONDS:
            self._path.touch()
            self._touched_at = now

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class HeartbeatFile:
    """Writes the file when there is something new to say."""

    def __init__(self, path: Path, worker: str) -> None:
        self._path = path
        self._heartbeat = self._written = Heartbeat(worker=worker)
        self._written_at = float("-inf")
        with WriteFailures().suppress_errors("the first heartbeat"):
            write_json(path, self._heartbeat.to_json())

    def write(self, heartbeat: Heartbeat, now: float) -> None:
        """`now`: seconds of the monotonic clock. Raises OSError where the volume is full; call it again, then."""
        if heartbeat == self._written:
            return
        if _select_rare_fields(heartbeat) == _select_rare_fields(self._written) and now - self._written_at < HEARTBEAT_WRITE_INTERVAL_SECONDS:
            return
        self._heartbeat = heartbeat
        write_json(self._path, heartbeat.to_json())
        self._written, self._written_at = heartbeat, now

    @property
    def last(self) -> Heartbeat:
        return self._heartbeat


def _select_rare_fields(beat: Heartbeat) -> tuple[Heartbeat, object]:
    return replace(beat, step=0, steps_in_round=0, checkpoint_age_seconds=0.0, gpus=()), beat.gpu_signs


def build_next_heartbeat(
    before: Heartbeat,
    state: RoundState,
    plan: WorkerPlan | None,
    ranks: Collection[np.void],
    wall: float,
    monotonic: float,
    refused: str = "",
    checkpoints: CheckpointStatus = NO_CHECKPOINT_STATUS,
) -> Heartbeat:
    """The heartbeat after `before`. `ranks`: their `records.STATE`; `wall`, `monotonic`: now, in seconds.

    refused, checkpoints: what rank 0 wrote of why it does not follow the plan, and of checkpoints, when it was here
    last.
    What a new round does not know yet (step, checkpoints) stays as the round before left it.
    """
    beat = replace(
        before,
        state=state.stage,
        plan_version=0 if plan is None else plan.version,
        membership=max(state.membership, 0),
        round=state.round,
        restarts=state.restarts,
        refused="",
        unkillable_ranks=state.unkillable,
    )
    if state.round != before.round:
        beat = replace(beat, steps_in_round=0, restored_step=-1, first_step_at=0.0, round_started_at=0.0)
        beat = replace(beat, bad_loss_rank=-1, bad_loss_step=-1, teardown_seconds=0.0, start=())
        beat = replace(beat, origin=StateOrigin.UNKNOWN.name)
    if state.stage is LauncherState.RUNNING and beat.round_started_at == 0.0:
        beat = replace(beat, round_started_at=wall - (monotonic - state.started))
    if not ranks:
        return beat
    slowest = min(ranks, key=lambda rank: int(rank["step"]))
    if beat.first_step_at == 0.0 and slowest["steps_in_round"] > 0:
        # Exact for the round's first step, which is seen within a tick; a later one is seen only after a long tick.
        first_step = int(slowest["step_end_ns"]) * 1e-9
        beat = replace(
            beat,
            first_step_at=wall - (monotonic - first_step),
            teardown_seconds=state.teardown_seconds,
            start=measure_start_stages(ranks, state.started, first_step, int(slowest["rank"])),
            origin=_read_state_origin(ranks),
        )
    step = int(slowest["step"])
    rank_0_is_here = any(rank["rank"] == 0 for rank in ranks)
    told = checkpoints if rank_0_is_here else NO_CHECKPOINT_STATUS
    bad = [rank for rank in ranks if rank["bad_loss_step"] >= 0]
    first_bad = min(bad, key=lambda rank: int(rank["bad_loss_step"]), default=None)
    return replace(
        beat,
        step=beat.step if step < 0 else step,
        steps_in_round=int(slowest["steps_in_round"]),
        total_steps=max(0, int(slowest["total_steps"])),
        checkpoint_step=max(beat.checkpoint_step, *(int(rank["checkpoint_step"]) for rank in ranks)),
        # Of replicas one rank a worker keeps snapshots, for all.
        snapshot_step=min((int(rank["snapshot_step"]) for rank in ranks if rank["snapshot_step"] >= 0), default=-1),
        restored_step=int(slowest["restored_step"]),
        checkpoint_request=min(int(rank["checkpoint_request"]) for rank in ranks),
        global_batch=int(slowest["global_batch"]),
        replica_ranks=max(0, int(slowest["replica_ranks"])),
        steered=bool(slowest["global_batch"] > 0),
        refused=refused if rank_0_is_here else "",
        checkpoint_failed_rank=told.failed_rank,
        checkpoint_error=told.error,
        checkpoint_age_seconds=told.compute_age(monotonic),
        sync_mode=_read_sync_mode(int(slowest["sync_mode"])),
        bad_loss_rank=-1 if first_bad is None else int(first_bad["rank"]),
        bad_loss_step=-1 if first_bad is None else int(first_bad["bad_loss_step"]),
    )


_STAGE_TIMESTAMPS = {
    StartStage.DEVICE: "device_ns",
    StartStage.COMMUNICATORS: "joined_ns",
    StartStage.SCRIPT: "restoring_ns",
    StartStage.LOAD: "restored_ns",
}


def measure_start_stages(ranks: Collection[np.void], began: float, first_step: float, last: int) -> tuple[ReachedStage, ...]:
    """How the round started here. `ranks`: their `records.STATE`.

    began, first_step: of the round, and the end of its first step on rank `last`; seconds, monotonic.
    A stage is left out where a rank does not tell it, or tells what cannot be: ranks write what they like.
    """
    found = []
    for stage, stamp in _STAGE_TIMESTAMPS.items():
        moments = [(int(rank[stamp]) * 1e-9, int(rank["rank"])) for rank in ranks]
        if all(began <= moment <= first_step for moment, _ in moments):
            moment, rank = max(moments)
            found.append(ReachedStage(stage, moment - began, rank))
    return (*found, ReachedStage(StartStage.FIRST_STEP, max(0.0, first_step - began), last))


def _read_state_origin(ranks: Collection[np.void]) -> str:
    """The farthest; a rank that does not tell, or tells nonsense, leaves it unknown."""
    told = [int(rank["origin"]) for rank in ranks]
    known = all(StateOrigin.UNKNOWN < origin <= max(StateOrigin) for origin in told)
    return StateOrigin(max(told)).name if known else StateOrigin.UNKNOWN.name


def _read_sync_mode(position: int) -> str:
    """Of the ranks; "": they are not steered, or have not begun."""
    return "" if position < 0 else SYNC_MODES[position]
