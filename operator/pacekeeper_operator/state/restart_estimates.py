"""Estimates of what a restart costs, from the last measurements of a job."""

from __future__ import annotations

from dataclasses import dataclass

from .training_progress import TrainingProgress

MIN_UNMEASURED_RESTART_SECONDS = 5.0
"""Least estimate of a restart before the first measurement."""
UNMEASURED_START_SECONDS = 30.0
"""Estimate of a pod's start before the first measurement."""


@dataclass(frozen=True)
class RestartEstimates:
    """What it costs a job to restart its ranks now. Measured times of None: not measured yet."""

    progress: TrainingProgress
    measured_restart_seconds: float | None  # of the last restart, without the lost steps
    measured_start_seconds: float | None  # of the last new pod

    @property
    def restart_seconds(self) -> float:
        """Cost of a new round in seconds, without the lost steps.

        Before the first measurement: the time from the present round's start to its first step, and 5 s at least.
        """
        if self.measured_restart_seconds is not None:
            return self.measured_restart_seconds
        return max(MIN_UNMEASURED_RESTART_SECONDS, self.progress.round_start_seconds or 0.0)

    @property
    def start_seconds(self) -> float:
        """Seconds from a new pod's creation until it is warm: scheduling, images, imports."""
        return UNMEASURED_START_SECONDS if self.measured_start_seconds is None else self.measured_start_seconds

    def estimate_cost(self, *, snapshots: bool = True) -> float:
        """Return the seconds of training that a new round costs now: those since the last saved state, and the restart.

        `snapshots`: whether snapshots in the workers' memory count, because all of the workers stay. A worker that goes
        takes its part of a sharded model along, and the operator does not know which models are sharded.
        """
        checkpoint_step, snapshot_step = (
            self.progress.checkpoint_step,
            self.progress.snapshot_step if snapshots else None,
        )
        steps = (self.progress.step or 0) - max(checkpoint_step or 0, snapshot_step or 0)
        if steps <= 0:
            return self.restart_seconds
        if self.progress.step_seconds is not None:
            return steps * self.progress.step_seconds + self.restart_seconds
        if snapshot_step is not None and (checkpoint_step is None or snapshot_step > checkpoint_step):
            return self.restart_seconds
        return self.restart_seconds + (self.progress.checkpoint_age or 0.0)
