"""Progress: how far a job is, and how long the rest will take. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from ...api.formats import format_duration
from ...api.training_job import JobPhase, JobStatus
from ...state.observation import Observation

ACTIVE_PHASES = frozenset({JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RECOVERING})
RECENT_SPEED_WEIGHT = 0.5
"""Weight of the speed of the last steps against the mean since the job began: the speed may have changed for good."""
MIN_LASTING_SHARE = 0.1
"""Least share of the time that is assumed to go into steps that are not lost again."""
MAX_REMAINING_SECONDS = 10 * 365 * 86400.0
"""Longest estimate. A longer one comes from a wrong or forged number."""
ROUNDING_STEPS = ((300.0, 10.0), (7200.0, 60.0), (86400.0, 600.0), (float("inf"), 3600.0))
"""(limit, multiple): an estimate below the limit is rounded to the multiple, in seconds. A value that changes in every
pass would be written in every pass."""


@dataclass(frozen=True)
class TrainingSpeed:
    """The speed of a job since it began, or was resumed."""

    steps: int  # steps that were done and not lost again
    seconds: float  # time since then, including interruptions
    step_seconds: float | None = None  # time of one of the last steps; None: not known
    lasting_share: float = 1.0  # share of the time that went into steps that were not lost


def estimate_remaining_seconds(remaining_steps: int, speed: TrainingSpeed) -> float | None:
    """Return the seconds that `remaining_steps` steps will take; None: there is no credible estimate."""
    if remaining_steps <= 0 or speed.steps <= 0 or speed.seconds <= 0:
        return 0.0 if remaining_steps <= 0 else None
    step_seconds = speed.seconds / speed.steps
    if speed.step_seconds:
        step_seconds += RECENT_SPEED_WEIGHT * (
            speed.step_seconds / max(speed.lasting_share, MIN_LASTING_SHARE) - step_seconds
        )
    seconds = remaining_steps * step_seconds
    return seconds if 0 <= seconds <= MAX_REMAINING_SECONDS else None


def format_progress(done: int, total: int) -> str | None:
    """Return `24%`, and 100% only when all steps are done; None: the numbers make no sense."""
    return f"{100 * done // total}%" if 0 <= done <= total and total else None


def report_progress(
    observation: Observation, phase: JobPhase, before: JobStatus, step: int | None, lasting_share: float | None
) -> tuple[int | None, str | None, str | None]:
    """Return `totalSteps`, `progress` and `remaining` of a status; None for each that is not known."""
    reported = observation.progress.total_steps
    total = (before.total_steps or 0) if reported is None or phase is JobPhase.COMPLETE else reported
    if not total or step is None or step > total:  # a report of more steps than the total contradicts itself
        return None, None, None
    remaining_seconds = (
        estimate_remaining_seconds(total - step, _measure_speed(observation, step, lasting_share))
        if phase in ACTIVE_PHASES
        else None
    )
    return (
        total,
        format_progress(step, total),
        None if remaining_seconds is None else format_duration(round_remaining_seconds(remaining_seconds)),
    )


def round_remaining_seconds(seconds: float) -> float:
    # The first limit above the estimate applies.
    multiple = next(multiple for limit, multiple in ROUNDING_STEPS if seconds < limit)
    return multiple * round(seconds / multiple)


def _measure_speed(observation: Observation, step: int, lasting_share: float | None) -> TrainingSpeed:
    lifecycle, metrics = observation.state.lifecycle, observation.metrics
    recent, global_batch = None, observation.progress.global_batch
    if metrics.throughput and global_batch is not None and not metrics.unreported_members:
        # In Local-SGD modes no rank's step is the job's.
        recent = global_batch / metrics.throughput
    seconds = 0.0 if lifecycle.progress_since is None else observation.now - lifecycle.progress_since
    return TrainingSpeed(
        step - lifecycle.progress_step, seconds, recent, 1.0 if lasting_share is None else lasting_share
    )
