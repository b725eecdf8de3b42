"""What an incident is about: its identity, and the name that is made of it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from .api import IncidentCause, TrainingJob


@dataclass(frozen=True)
class IncidentKey:
    """A cause in a round, and whom it has befallen: a worker, a rank, a GPU's error, or the round as a whole.

    Two findings with one subject are one incident.
    """

    cause: IncidentCause
    round: int
    worker: str = ""
    rank: int = -1
    gpu: str = ""  # one error of one GPU: "<node>/<gpu>/<what it says>"
    occurrence: int = 1  # tells troubles apart that come back in one round: live remedies start no new one

    def incident_name(self, job: TrainingJob) -> str:
        """Deterministic, so that writing an incident twice is "already exists".

        It ends with the job's UID: incidents outlive their job, and the next job of that name must not find its own
        written already.
        """
        again = f"-{self.occurrence}" if self.occurrence > 1 else ""
        return f"{self._build_stem(job)}{again}-{job.uid[:5]}"

    def find_occurrence(self, name: str, job: TrainingJob) -> int:
        """The `number` with which this subject has that name; 0: it is another subject's."""
        found = re.fullmatch(rf"{re.escape(self._build_stem(job))}(?:-(\d+))?-{re.escape(job.uid[:5])}", name)
        return int(found[1] or 1) if found else 0

    def _build_stem(self, job: TrainingJob) -> str:
        who = ""
        if self.worker:
            who = f"-{self.worker.removeprefix(f'{job.name}-')}"
        elif self.rank >= 0:
            who = f"-rank{self.rank}"
        elif self.gpu:
            who = f"-gpu{hashlib.sha256(self.gpu.encode()).hexdigest()[:8]}"
        return f"{job.name}-r{self.round}-{self.cause}{who}"
