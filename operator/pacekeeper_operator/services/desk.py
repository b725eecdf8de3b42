"""Where one operator works at one job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..api import TrainingJob, JobStatus, Object
from ..observe.memory import JobCache
from ..state import Incident
from .errands import EffectRunner
from .status_writer import StatusWriter


@dataclass
class JobContext:
    """What is remembered between passes, only to save work: all of it may be lost at any time."""

    job: TrainingJob
    body: Object
    cache: JobCache
    effect_runner: EffectRunner
    status_writer: StatusWriter
    written_incidents: dict[str, Incident] = field(default_factory=dict)  # incidents as they are written in the cluster
    status: JobStatus | None = None  # as it is written
    status_written_at: float = -math.inf  # when it was written, by the monotonic clock: the other one may jump
    status_jitter: float = 0.0  # by so much of the time between two figures later: jobs part that began together
