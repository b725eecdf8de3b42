"""What one operator keeps of one job between passes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..api.names import Object
from ..api.training_job import JobStatus, TrainingJob
from ..observe.job_cache import JobCache
from ..state.desired_state import Incident
from .effect_runner import EffectRunner
from .status_writer import StatusWriter


@dataclass
class JobContext:
    """State between passes that only saves work: all of it may be lost at any time."""

    job: TrainingJob
    body: Object
    cache: JobCache
    effect_runner: EffectRunner
    status_writer: StatusWriter
    written_incidents: dict[str, Incident] = field(default_factory=dict)  # as they are stored in the cluster
    status: JobStatus | None = None  # as it is stored
    status_written_at: float | None = None  # by the monotonic clock: wall time may jump
    status_jitter: float = 0.0  # share of the interval that is added, so that jobs do not write at once
