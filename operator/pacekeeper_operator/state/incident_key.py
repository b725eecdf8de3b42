"""The identity of an incident, and its name."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ..api.incident import IncidentCause
from ..api.training_job import TrainingJob


@dataclass(frozen=True)
class IncidentKey:
    """A cause in a round, and what it affects: a worker, a rank, a GPU's error, or the round as a whole.

    Two findings with one key are one incident.
    """

    cause: IncidentCause
    round: int
    worker: str = ""
    rank: int | None = None
    gpu: str = ""  # one error of one GPU: "<node>/<gpu>/<error>"
    occurrence: int = 1  # tells apart incidents that recur in one round: live remedies begin no new one

    def incident_name(self, job: TrainingJob) -> str:
        """Return the incident's name. It is deterministic, so that writing an incident twice is "already exists".

        It ends with the job's UID: incidents outlive their job, and the next job of that name must not collide with
        them.
        """
        suffix = f"-{self.occurrence}" if self.occurrence > 1 else ""
        return f"{self._build_stem(job)}{suffix}-{job.uid[:5]}"

    def find_occurrence(self, name: str, job: TrainingJob) -> int:
        """Return the `occurrence` with which this key has that name; 0: it is the name of another key."""
        match = re.fullmatch(rf"{re.escape(self._build_stem(job))}(?:-(\d+))?-{re.escape(job.uid[:5])}", name)
        return int(match[1] or 1) if match else 0

    def _build_stem(self, job: TrainingJob) -> str:
        subject = ""
        if self.worker:
            subject = f"-{self.worker.removeprefix(f'{job.name}-')}"
        elif self.rank is not None:
            subject = f"-rank{self.rank}"
        elif self.gpu:
            subject = f"-gpu{hashlib.sha256(self.gpu.encode()).hexdigest()[:8]}"
        return f"{job.name}-r{self.round}-{self.cause}{subject}"
