"""Where one operator works at one job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..api import Job, JobStatus, Object
from ..observe.memory import JobMemory
from ..state import Incident
from .errands import Errands


@dataclass
class Desk:
    """What is remembered between passes, only to save work: all of it may be lost at any time."""

    job: Job
    body: Object
    memory: JobMemory
    errands: Errands
    told: dict[str, Incident] = field(default_factory=dict)  # incidents as they are written in the cluster
    status: JobStatus | None = None  # as it is written
    status_at: float = -math.inf  # when it was written, by the monotonic clock: the other one may jump
    read_at: float = -math.inf  # when the bookkeeping was last seen to be as it is known, by the monotonic clock
