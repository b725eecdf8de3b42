"""How far a job is, and for how long it will train on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..api import JobPhase, JobStatus, format_duration
from ..observation import Observation

ACTIVE_PHASES = frozenset({JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RECOVERING})
RECENT_SPEED_WEIGHT = 0.5
"""Weight of the pace of the last steps beside the mean since the job began: it may have changed for good."""
MIN_LASTING_SHARE = 0.1
"""Of its time, that is taken to go into steps that last: a job that loses more has no pace."""
MAX_REMAINING_SECONDS = 10 * 365 * 86400.0
"""What would take longer is no estimate, but somebody's mistake or lie."""
ROUNDING_STEPS = ((300.0, 10.0), (7200.0, 60.0), (86400.0, 600.0), (float("inf"), 3600.0))
"""Up to so many seconds, to a multiple of so many: what changes with every look would be written with every look."""


@dataclass(frozen=True)
class TrainingSpeed:
    """Of a job since it began, or was resumed."""

    steps: int  # that were done, and have lasted
    seconds: float  # in which they were; those of interruptions included
    step_seconds: float | None = None  # of the last steps; None: not known
    lasting_share: float = 1.0  # share of the time that went into steps that lasted


def estimate_remaining_seconds(left: int, speed: TrainingSpeed) -> float | None:
    """For `left` steps; None: nothing that could be believed is known."""
    if left <= 0 or speed.steps <= 0 or speed.seconds <= 0:
        return 0.0 if left <= 0 else None
    each = speed.seconds / speed.steps
    if speed.step_seconds:
        each += RECENT_SPEED_WEIGHT * (speed.step_seconds / max(speed.lasting_share, MIN_LASTING_SHARE) - each)
    seconds = left * each
    return seconds if 0 <= seconds <= MAX_REMAINING_SECONDS else None


def format_progress(done: int, total: int) -> str | None:
    """`24%`; 100% only when all are done."""
    return f"{100 * done // total}%" if 0 <= done <= total and total else None


def report_progress(
    observation: Observation, phase: JobPhase, before: JobStatus, step: int | None, lasting_share: float | None
) -> tuple[int | None, str | None, str | None]:
    """`totalSteps`, `progress` and `remaining` of a status."""
    heard = observation.total_steps
    total = (before.total_steps or 0) if heard is None or phase is JobPhase.COMPLETE else heard
    if not total or step is None or step > total:  # who has done more than there is to do contradicts himself
        return None, None, None
    left = estimate_remaining_seconds(total - step, _measure_speed(observation, step, lasting_share)) if phase in ACTIVE_PHASES else None
    return total, format_progress(step, total), None if left is None else format_duration(round_remaining_seconds(left))


def round_remaining_seconds(seconds: float) -> float:
    grain = next(grain for limit, grain in ROUNDING_STEPS if seconds < limit)
    return grain * round(seconds / grain)


def _measure_speed(observation: Observation, step: int, lasting_share: float | None) -> TrainingSpeed:
    life, metrics = observation.state.life, observation.metrics
    recent = None
    if metrics.throughput and observation.global_batch and not metrics.untold:
        recent = observation.global_batch / metrics.throughput  # in Local-SGD modes no rank's step is the job's
    seconds = observation.now - life.paced_since if life.paced_since else 0.0
    return TrainingSpeed(step - life.paced_step, seconds, recent, 1.0 if lasting_share is None else lasting_share)
