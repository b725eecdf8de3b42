"""Estimates of what a restart costs, from the last measurements of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from pacekeeper_analysis.stragglers import price

from .training_progress import TrainingProgress

MIN_UNMEASURED_RESTART_SECONDS = 5.0
"""Least estimate of a restart before the first measurement."""
COLD_SPARE_SECONDS = 0.5
"""By how much a replacement takes longer than a restart in place, before the first measurement: cold first steps."""
UNMEASURED_START_SECONDS = 30.0
"""Estimate of a pod's start before the first measurement."""
UNMEASURED_CHECKPOINT_WAIT_STEPS = 3.0
"""Estimate of the steps from the decision of an exchange to its checkpoint, before the first measurement.

The step under way, the one at whose end all ranks agree, and the time to publish.
"""
MAX_MEASURED_RESTARTS = 5
"""Measurements that are kept of each kind. Their median is the estimate, so that one long restart sets no price."""


class RestartKind(StrEnum):
    """A kind of new round, by what has to start again. The values are fields of `RestartMeasurements`."""

    SAME_WORKERS = "same_workers"  # all workers stay, and their memory holds the state
    EXCHANGE = "exchange"  # a spare takes over from a worker that trains: from a checkpoint, the spare is cold
    REPLACEMENT = "replacement"  # a worker takes over after the job has stopped: nothing is torn down


class SavedState(StrEnum):
    """The newest state that a new round can begin from, by what changes before it."""

    SNAPSHOT = "snapshot"  # all workers stay, with the snapshots in their memory
    REPLICA = "replica"  # a worker goes, with its memory: what another one has, too
    CHECKPOINT = "checkpoint"  # the number of ranks changes: snapshots of shards do not fit


@dataclass(frozen=True)
class RestartMeasurements:
    """The job's last restarts: seconds from the new membership to the first step, by kind, oldest first."""

    same_workers: tuple[float, ...] = ()
    exchange: tuple[float, ...] = ()
    replacement: tuple[float, ...] = ()
    checkpoint_wait_steps: tuple[float, ...] = ()  # from the decision of an exchange, in steps of that time

    def add_restart(self, kind: RestartKind, seconds: float) -> RestartMeasurements:
        """Return the measurements with one more restart of this kind."""
        durations: tuple[float, ...] = getattr(self, kind)
        return replace(self, **{kind: (*durations, seconds)[-MAX_MEASURED_RESTARTS:]})

    def add_checkpoint_wait(self, steps: float) -> RestartMeasurements:
        """Return the measurements with one more wait for the checkpoint of an exchange."""
        return replace(self, checkpoint_wait_steps=(*self.checkpoint_wait_steps, steps)[-MAX_MEASURED_RESTARTS:])

    def find_seconds(self, *kinds: RestartKind) -> float | None:
        """Return the median duration of the first of these kinds that was measured; None: none was."""
        measured = (getattr(self, kind) for kind in kinds)
        return next((median(durations) for durations in measured if durations), None)

    @property
    def round_seconds(self) -> float | None:
        """Seconds of a round with the same workers. Others count where there were none; None: not measured."""
        return self.find_seconds(RestartKind.SAME_WORKERS, RestartKind.REPLACEMENT, RestartKind.EXCHANGE)


@dataclass(frozen=True)
class RestartEstimates:
    """What it costs a job to restart its ranks now. Measured times of None: not measured yet."""

    progress: TrainingProgress
    measurements: RestartMeasurements
    measured_start_seconds: float | None  # of the last new pod

    @property
    def restart_seconds(self) -> float:
        """Cost of a new round with the same workers in seconds, without the lost steps."""
        return self.estimate_round_seconds(RestartKind.SAME_WORKERS)

    def estimate_round_seconds(self, kind: RestartKind) -> float:
        """Return the seconds of a new round of this kind, without the lost steps.

        Before the first measurement: the time from the present round's start to its first step, and 5 s at least.
        """
        known = self.measurements.round_seconds
        restart_seconds = self._estimate_unmeasured_seconds() if known is None else known
        if kind is RestartKind.SAME_WORKERS:
            return restart_seconds
        measured = self.measurements.find_seconds(kind)
        if kind is RestartKind.REPLACEMENT:  # the spare starts cold in addition: it is never preferred by a few tenths
            return restart_seconds + (COLD_SPARE_SECONDS if measured is None else max(0.0, measured - restart_seconds))
        if measured is not None:
            return measured
        # Restarts in place show the least that it may take: ranks that train are torn down in addition.
        return max(
            self._estimate_unmeasured_seconds(), restart_seconds + (0.0 if known is None else COLD_SPARE_SECONDS)
        )

    def estimate_exchange_seconds(self, slowdown: float = 1.0) -> float:
        """Return the seconds of training that an exchange costs a job that trains at this slowdown.

        The job trains on until the requested checkpoint is published, and no steps are lost. On this way, it loses what
        the slowdown costs.
        """
        waits = self.measurements.checkpoint_wait_steps
        wait_steps = median(waits) if waits else UNMEASURED_CHECKPOINT_WAIT_STEPS
        wait_seconds = wait_steps * (self.progress.step_seconds or 0.0)
        return self.estimate_round_seconds(RestartKind.EXCHANGE) + wait_seconds * price.compute_loss_rate(slowdown)

    @property
    def start_seconds(self) -> float:
        """Seconds from a new pod's creation until it is warm: scheduling, images, imports."""
        return UNMEASURED_START_SECONDS if self.measured_start_seconds is None else self.measured_start_seconds

    def estimate_cost(
        self, kind: RestartKind = RestartKind.SAME_WORKERS, state: SavedState = SavedState.SNAPSHOT
    ) -> float:
        """Return the seconds of training that a new round costs now: those since `state` was saved, and the restart."""
        restart_seconds = self.estimate_round_seconds(kind)
        checkpoint_step, memory_step = self.progress.checkpoint_step, self._get_step_in_memory(state)
        steps = (self.progress.step or 0) - max(checkpoint_step or 0, memory_step or 0)
        if steps <= 0:
            return restart_seconds
        if self.progress.step_seconds is not None:
            return steps * self.progress.step_seconds + restart_seconds
        if memory_step is not None and (checkpoint_step is None or memory_step > checkpoint_step):
            return restart_seconds
        return restart_seconds + (self.progress.checkpoint_age or 0.0)

    def _get_step_in_memory(self, state: SavedState) -> int | None:
        match state:
            case SavedState.SNAPSHOT:
                return self.progress.snapshot_step
            case SavedState.REPLICA:
                return self.progress.replicated_step
        return None

    def _estimate_unmeasured_seconds(self) -> float:
        return max(MIN_UNMEASURED_RESTART_SECONDS, self.progress.round_start_seconds or 0.0)
