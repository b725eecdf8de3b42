"""JobSet (jobset.x-k8s.io/v1alpha2): what its controller reports in it, and which ones the operator runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from .names import ANNOTATION_TRAINER, DEFAULT_MANAGER, LABEL_QUEUE

JOBSET_GROUP = "jobset.x-k8s.io"
JOBSET_API_VERSION = f"{JOBSET_GROUP}/v1alpha2"
JOBSET_KIND = "JobSet"


class JobSetCondition(StrEnum):
    """Types of a JobSet's conditions."""

    COMPLETED = "Completed"  # these two are also values of status.terminalState
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    STARTUP_IN_PROGRESS = "StartupPolicyInProgress"
    STARTUP_COMPLETED = "StartupPolicyCompleted"
    SYNCED = "TrainingJobSynced"  # Pacekeeper's own: False names what the JobSet's TrainingJob does not follow


class JobSetReason(StrEnum):
    """Reasons of a JobSet's conditions. All but those of SYNCED are the JobSet API's own."""

    ALL_JOBS_COMPLETED = "AllJobsCompleted"
    FAILED_JOBS = "FailedJobs"
    REACHED_MAX_RESTARTS = "ReachedMaxRestarts"
    SUSPENDED_JOBS = "SuspendedJobs"
    RESUMED_JOBS = "ResumeJobs"
    STARTUP_IN_PROGRESS = "InOrderStartupPolicyInProgress"
    STARTUP_COMPLETED = "InOrderStartupPolicyCompleted"
    # TrainingJobSynced
    IN_SYNC = "InSync"
    CONVERSION_REFUSED = "ConversionRefused"
    CHANGE_REFUSED = "ChangeRefused"
    NAME_TAKEN = "NameTaken"
    JOB_REJECTED = "TrainingJobRejected"  # by the API server


@dataclass(frozen=True)
class ManagedJobSet:
    """A JobSet that the operator runs, without its status: a change requires a pass."""

    uid: str
    generation: int
    trainer_container: str  # "": found by the conversion
    queue: str  # "": none
    deleting: bool
    ended: bool  # its end is in its status

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self | None:
        """Return the JobSet; None: another controller runs it."""
        if (body.get("spec") or {}).get("managedBy") != DEFAULT_MANAGER:
            return None
        metadata = body["metadata"]
        return cls(
            metadata["uid"],
            metadata.get("generation", 0),
            str((metadata.get("annotations") or {}).get(ANNOTATION_TRAINER, "")),
            str((metadata.get("labels") or {}).get(LABEL_QUEUE, "")),
            "deletionTimestamp" in metadata,
            bool((body.get("status") or {}).get("terminalState")),
        )
