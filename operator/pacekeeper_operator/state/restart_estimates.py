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
    """What it costs a job to restart its ranks now. Measured times of 0: not measured yet."""

    progress: TrainingProgress
    measured_restart_seconds: float  # of the last restart, without the lost steps
    measured_start_seconds: float  # of the last new pod

    @property
    def restart_seconds(self) -> float:
        """Cost of a new round in seconds, without the lost steps.

        Before the first measurement: the time from the present round's start to its first step, and 5 s at least.
        """
        return self.measured_restart_seconds or max(MIN_UNMEASURED_RESTART_SECONDS, self.progress.round_start_seconds)

    @property
    def start_seconds(self) -> float:
        """Seconds from a new pod's creation until it is warm: scheduling, images, imports."""
        return self.measured_start_seconds or UNMEASURED_START_SECONDS

    def estimate_cost(self, *, snapshots: bool = True) -> float:
        """Return the seconds of training that a new round costs now: those since the last saved state, and the restart.

        `snapshots`: whether snapshots in the workers' memory count, because all of the workers stay. A worker that goes
        takes its part of a sharded model along, and the operator does not know which models are sharded.
        """
        snapshot_step = self.progress.snapshot_step if snapshots else -1
        steps = self.progress.step - max(self.progress.checkpoint_step, snapshot_step, 0)
        if steps <= 0:
            return self.restart_seconds
        lost = steps * self.progress.step_seconds
        if not lost and snapshot_step <= self.progress.checkpoint_step:  # without reported step times
            lost = self.progress.checkpoint_age
        return lost + self.restart_seconds
