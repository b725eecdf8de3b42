"""The status of a JobSet, in the terms of the JobSet API, from that of its TrainingJob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ...api.conditions import JobCondition, Reason
from ...api.formats import format_time
from ...api.jobset import JobSetCondition, JobSetReason
from ...api.names import Object
from ...api.training_job import JobPhase, JobStatus
from ...formatting import shorten_text
from .changes import JobSetDecision

MAX_JOBSET_MESSAGE_CHARACTERS = 4000
"""Characters of a condition's message."""
_STARTED_PHASES = (JobPhase.RUNNING, JobPhase.RECOVERING, JobPhase.COMPLETE)
_COMPLETED_MESSAGE = "the ranks of all workers have finished"


@dataclass(frozen=True)
class JobProgress:
    """The TrainingJob's progress."""

    status: JobStatus
    is_suspended: bool  # it has no pods, and gets none

    @classmethod
    def read(cls, job: Object) -> Self:
        """Read the progress.

        Raises InputError if the status cannot be read.
        """
        status, generation = JobStatus.parse(job.get("status") or {}), job["metadata"].get("generation", 0)
        requested = bool(job["spec"].get("suspend"))
        if status.phase is None:
            return cls(status, requested and generation <= 1)  # created suspended
        is_current = status.observed_generation == generation
        has_left = any(
            condition.type == JobCondition.SUSPENDED and condition.status == "True" for condition in status.conditions
        )
        return cls(status, requested and is_current and has_left)


@dataclass(frozen=True)
class _ConditionState:
    type: JobSetCondition
    holds: bool
    reason: JobSetReason
    message: str = ""


def build_jobset_status(body: Object, progress: JobProgress | None, decision: JobSetDecision, now: float) -> Object:
    """Return the fields of the JobSet's status that its controller writes. `now` is in seconds since the epoch.

    `progress` is its TrainingJob's; None: there is none. The fields are a merge patch.
    """
    before = body.get("status") or {}
    if before.get("terminalState"):
        return {}  # an end is final, and what is reported then stays
    phase = None if progress is None else progress.status.phase
    terminal_state = (
        JobSetCondition.FAILED
        if decision.has_failed or phase is JobPhase.FAILED
        else JobSetCondition.COMPLETED
        if phase is JobPhase.COMPLETE
        else None
    )
    states = _build_conditions(body, progress, decision, terminal_state)
    status: Object = {
        "conditions": _merge_conditions(before.get("conditions") or [], states, body, now),
        "restarts": 0 if progress is None else progress.status.restarts or 0,
        "replicatedJobsStatus": _count_replicated_jobs(body, progress, terminal_state),
    }
    return status | ({} if terminal_state is None else {"terminalState": str(terminal_state)})


def list_new_conditions(before: Object, after: Object) -> list[Object]:
    """Return the conditions of a status that have changed, for events."""
    known = {item["type"]: (item["status"], item.get("reason")) for item in before.get("conditions") or ()}
    return [item for item in after["conditions"] if known.get(item["type"]) != (item["status"], item["reason"])]


def _build_conditions(
    body: Object, progress: JobProgress | None, decision: JobSetDecision, terminal_state: JobSetCondition | None
) -> list[_ConditionState]:
    is_suspended = bool(body["spec"].get("suspend")) if progress is None else progress.is_suspended
    sync = decision.sync
    states = [
        _ConditionState(JobSetCondition.SYNCED, sync.reason is JobSetReason.IN_SYNC, sync.reason, sync.message),
        _ConditionState(JobSetCondition.SUSPENDED, True, JobSetReason.SUSPENDED_JOBS, "its TrainingJob is suspended")
        if is_suspended and terminal_state is None
        else _ConditionState(JobSetCondition.SUSPENDED, False, JobSetReason.RESUMED_JOBS, "its TrainingJob is resumed"),
    ]
    if terminal_state is JobSetCondition.COMPLETED:
        states.append(_ConditionState(terminal_state, True, JobSetReason.ALL_JOBS_COMPLETED, _COMPLETED_MESSAGE))
    elif terminal_state is JobSetCondition.FAILED:
        states.append(_build_failure(progress, decision))
    if (body["spec"].get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder":
        has_started = progress is not None and progress.status.phase in _STARTED_PHASES
        is_starting = progress is not None and not is_suspended and not has_started and terminal_state is None
        states += [
            _ConditionState(JobSetCondition.STARTUP_IN_PROGRESS, is_starting, JobSetReason.STARTUP_IN_PROGRESS),
            _ConditionState(JobSetCondition.STARTUP_COMPLETED, has_started, JobSetReason.STARTUP_COMPLETED),
        ]
    return states


def _build_failure(progress: JobProgress | None, decision: JobSetDecision) -> _ConditionState:
    if progress is None:
        return _ConditionState(JobSetCondition.FAILED, True, JobSetReason.CONVERSION_REFUSED, decision.sync.message)
    status = progress.status
    is_budget = status.reason == Reason.RESTART_BUDGET_SPENT
    reason = JobSetReason.REACHED_MAX_RESTARTS if is_budget else JobSetReason.FAILED_JOBS
    return _ConditionState(JobSetCondition.FAILED, True, reason, f"{status.reason}: {status.message or ''}")


def _merge_conditions(before: list[Object], states: list[_ConditionState], body: Object, now: float) -> list[Object]:
    """Return the conditions. One that is false is added only if it was true before, as JobSet's controller does."""
    conditions = {item["type"]: item for item in before}
    for state in states:
        previous = conditions.get(state.type)
        if previous is None and not state.holds and state.type is not JobSetCondition.SYNCED:
            continue
        status = "True" if state.holds else "False"
        is_same = previous is not None and previous["status"] == status
        conditions[state.type] = {
            "type": str(state.type),
            "status": status,
            "reason": str(state.reason),
            "message": shorten_text(state.message, MAX_JOBSET_MESSAGE_CHARACTERS),
            "lastTransitionTime": previous["lastTransitionTime"] if previous and is_same else format_time(now),
            "observedGeneration": body["metadata"].get("generation", 0),
        }
    return list(conditions.values())


def _count_replicated_jobs(
    body: Object, progress: JobProgress | None, terminal_state: JobSetCondition | None
) -> list[Object]:
    """Return the state of each replicated job.

    The workers of all of them are one group, so that each has its share of what is ready. A job is active as long as it
    has or may get pods: Kueue takes back the quota of a JobSet that has no active jobs.
    """
    counts = []
    for job in body["spec"].get("replicatedJobs") or ():
        replicas = job.get("replicas", 1)
        is_suspended = bool(body["spec"].get("suspend")) if progress is None else progress.is_suspended
        is_active = progress is not None and terminal_state is None and not is_suspended
        workers = None if progress is None else progress.status.workers
        ready = replicas * workers.ready // workers.desired if workers and workers.desired and is_active else 0
        counts.append(
            {
                "name": job["name"],
                "ready": min(ready, replicas),
                "succeeded": replicas if terminal_state is JobSetCondition.COMPLETED else 0,
                "failed": replicas if terminal_state is JobSetCondition.FAILED else 0,
                "active": replicas if is_active else 0,
                "suspended": replicas if is_suspended and terminal_state is None else 0,
            }
        )
    return counts
