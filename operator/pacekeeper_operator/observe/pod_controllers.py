"""Controllers of watched pods, reduced to what follows when a pod is deleted. Pure.

The rules are those of Kubernetes' Job controller and of JobSet. A value that is missing has its API's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..state.effect_results import JobPolicy, JobSetPolicy, JobSetRule

JOB_SET_GROUP = "jobset.x-k8s.io"
JOB_SET_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
DEFAULT_JOB_BACKOFF_LIMIT = 6
JOB_MANAGERS = ("", "kubernetes.io/job-controller")
JOB_SET_MANAGERS = ("", "jobset.sigs.k8s.io/jobset-controller")
_KNOWN_RULE_FIELDS = frozenset({"name", "action", "onJobFailureReasons", "targetReplicatedJobs"})
_JOB_END_CONDITIONS = ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet", "Suspended")
_JOB_SET_END_CONDITIONS = ("Completed", "Failed", "Suspended")


def read_job_policy(job: Mapping[str, Any]) -> JobPolicy:
    """Reduce a `batch/v1` Job."""
    metadata, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    uncounted = (status.get("uncountedTerminatedPods") or {}).get("failed") or ()
    limit = spec.get("backoffLimit")
    return JobPolicy(
        name=metadata["name"],
        backoff_limit=DEFAULT_JOB_BACKOFF_LIMIT if limit is None else limit,
        failed_pods=(status.get("failed") or 0) + len(uncounted),
        replicated_job=(metadata.get("labels") or {}).get(REPLICATED_JOB_LABEL, ""),
        uses_exit_codes=spec.get("podFailurePolicy") is not None or spec.get("podReplacementPolicy") == "Failed",
        limits_each_index=spec.get("backoffLimitPerIndex") is not None,
        inactive_reason=_find_inactive_reason(job, JOB_MANAGERS, _JOB_END_CONDITIONS),
    )


def read_job_set_policy(job_set: Mapping[str, Any]) -> JobSetPolicy:
    """Reduce a JobSet."""
    metadata, spec, status = job_set["metadata"], job_set.get("spec") or {}, job_set.get("status") or {}
    policy = spec.get("failurePolicy")
    ended = f"its state is {status['terminalState']}" if status.get("terminalState") else ""
    return JobSetPolicy(
        name=metadata["name"],
        max_restarts=None if policy is None else policy.get("maxRestarts") or 0,
        restarts=_count_restarts(status),
        rules=() if policy is None else tuple(map(_read_rule, policy.get("rules") or ())),
        strategy=(policy or {}).get("restartStrategy") or "Recreate",
        inactive_reason=ended or _find_inactive_reason(job_set, JOB_SET_MANAGERS, _JOB_SET_END_CONDITIONS),
    )


def _count_restarts(status: Mapping[str, Any]) -> int:
    """Return the restarts that count against the limit.

    Versions before `restartsCountTowardsMax` count all. Later ones omit it where it is 0, so that more may be counted
    than the controller does.
    """
    counted = status.get("restartsCountTowardsMax")
    restarts: int = (status.get("restarts") or 0) if counted is None else counted
    of_jobs = (job.get("jobRestartsCountTowardsMax") or () for job in status.get("replicatedJobsStatus") or ())
    return restarts + sum(sum(counts) for counts in of_jobs)


def _read_rule(rule: Mapping[str, Any]) -> JobSetRule:
    return JobSetRule(
        action=str(rule.get("action")),
        reasons=tuple(rule.get("onJobFailureReasons") or ()),
        replicated_jobs=tuple(rule.get("targetReplicatedJobs") or ()),
        is_conditional=bool(rule.keys() - _KNOWN_RULE_FIELDS),
    )


def _find_inactive_reason(body: Mapping[str, Any], managers: Sequence[str], ends: Sequence[str]) -> str:
    """Return why the controller would not act on the object now; "": it would."""
    spec, status = body.get("spec") or {}, body.get("status") or {}
    manager = spec.get("managedBy") or ""
    if manager not in managers:
        return f"{manager} manages it"
    if "deletionTimestamp" in body["metadata"]:
        return "it is being deleted"
    if spec.get("suspend"):
        return "it is suspended"
    conditions = (item for item in status.get("conditions") or () if item.get("status") == "True")
    ended = next((item["type"] for item in conditions if item.get("type") in ends), "")
    return f"its condition {ended} is True" if ended else ""
