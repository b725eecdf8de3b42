"""The status of a JobSet, from that of its TrainingJob."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_operator.api.jobset import JobSetReason
from pacekeeper_operator.api.names import Object
from pacekeeper_operator.decide.jobsets.changes import JobSetDecision, SyncState
from pacekeeper_operator.decide.jobsets.status import JobProgress, build_jobset_status, list_new_conditions
from testing.operators.managed_jobsets import build_managed_jobset, build_replicated_job

NOW, EARLIER = 1_800_000_000.0, "2020-01-01T00:00:00Z"
SYNCED = JobSetDecision(SyncState())


def build_job(phase: str, *, ready: int = 0, suspend: bool = False, observed: int = 3, **status: Any) -> Object:
    condition = {"type": "Suspended", "status": "True" if phase == "Suspended" else "False", "reason": "R"}
    reported = {
        "phase": phase,
        "observedGeneration": observed,
        "workers": {"desired": 4, "ready": ready},
        "conditions": [condition],
        **status,
    }
    return {"metadata": {"generation": 3}, "spec": {"suspend": suspend}, "status": reported if phase else {}}


def build_status(job: Object | None, decision: JobSetDecision = SYNCED, **jobset: Any) -> Object:
    body = build_managed_jobset(build_replicated_job("leader"), build_replicated_job("workers"), **jobset)
    return build_jobset_status(body, None if job is None else JobProgress.read(job), decision, NOW)


def list_true_conditions(status: Object) -> dict[str, str]:
    return {item["type"]: item["reason"] for item in status["conditions"] if item["status"] == "True"}


@pytest.mark.parametrize(
    ("job", "counts", "conditions", "terminal_state"),
    [
        (None, {}, {}, None),
        (build_job(""), {"active": 1}, {}, None),
        (build_job("Pending"), {"active": 1}, {}, None),
        (build_job("Running", ready=4, restarts=2), {"active": 1, "ready": 1}, {}, None),
        (build_job("Running", ready=3), {"active": 1}, {}, None),
        (build_job("Running", ready=4, suspend=True, observed=2), {"active": 1, "ready": 1}, {}, None),
        (build_job("Suspended", suspend=True), {"suspended": 1}, {"Suspended": "SuspendedJobs"}, None),
        (build_job("Suspended", suspend=True, observed=2), {"active": 1}, {}, None),
        (build_job("Suspended"), {"active": 1}, {}, None),
        (build_job("Complete"), {"succeeded": 1}, {"Completed": "AllJobsCompleted"}, "Completed"),
        (build_job("Failed", reason="ScriptFailed"), {"failed": 1}, {"Failed": "FailedJobs"}, "Failed"),
        (build_job("Failed", reason="RestartBudgetSpent"), {"failed": 1}, {"Failed": "ReachedMaxRestarts"}, "Failed"),
    ],
)
def test_the_status_reports_the_job(
    job: Object | None, counts: dict[str, int], conditions: dict[str, str], terminal_state: str | None
) -> None:
    """Kueue takes the quota back once no job is active: pods may exist until the operator has seen them leave."""
    status = build_status(job)
    none = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
    assert status["replicatedJobsStatus"] == [{"name": name, **none, **counts} for name in ("leader", "workers")]
    assert list_true_conditions(status) == {"TrainingJobSynced": "InSync", **conditions}
    assert status.get("terminalState") == terminal_state
    assert status["restarts"] == ((job or {}).get("status") or {}).get("restarts", 0)


def test_a_waiting_jobset_is_suspended_before_it_has_a_job() -> None:
    assert list_true_conditions(build_status(None, suspend=True))["Suspended"] == "SuspendedJobs"
    created = {"metadata": {"generation": 1}, "spec": {"suspend": True}}
    assert build_status(created)["replicatedJobsStatus"][0]["suspended"] == 1


def test_a_refusal_fails_only_a_jobset_that_never_ran() -> None:
    refusal = SyncState(JobSetReason.CONVERSION_REFUSED, "the field, and the remedy")
    status = build_status(None, JobSetDecision(refusal, has_failed=True))
    assert list_true_conditions(status) == {"Failed": "ConversionRefused"}
    assert (status["terminalState"], status["conditions"][-1]["message"]) == ("Failed", refusal.message)
    assert "terminalState" not in build_status(build_job("Running"), JobSetDecision(refusal))


@pytest.mark.parametrize(
    ("phase", "condition"),
    [
        ("Starting", "StartupPolicyInProgress"),
        ("Running", "StartupPolicyCompleted"),
        ("Recovering", "StartupPolicyCompleted"),
    ],
)
def test_an_ordered_startup_is_reported(phase: str, condition: str) -> None:
    status = build_status(build_job(phase), startupPolicy={"startupPolicyOrder": "InOrder"})
    assert [kind for kind in list_true_conditions(status) if kind.startswith("Startup")] == [condition]


def test_conditions_keep_their_times_and_those_of_others() -> None:
    body = build_managed_jobset()
    others = {"type": "OfOthers", "status": "True", "reason": "R", "lastTransitionTime": EARLIER}
    synced = {"type": "TrainingJobSynced", "status": "True", "reason": "InSync", "lastTransitionTime": EARLIER}
    suspended = {"type": "Suspended", "status": "True", "reason": "SuspendedJobs", "lastTransitionTime": EARLIER}
    before = {"conditions": [others, synced, suspended]}
    status = build_jobset_status(body | {"status": before}, JobProgress.read(build_job("Running")), SYNCED, NOW)
    assert [item["lastTransitionTime"] == EARLIER for item in status["conditions"]] == [True, True, False]
    assert [item["type"] for item in list_new_conditions(before, status)] == ["Suspended"]


def test_an_end_is_final() -> None:
    ended = build_managed_jobset() | {"status": {"terminalState": "Failed"}}
    assert build_jobset_status(ended, JobProgress.read(build_job("Running")), SYNCED, NOW) == {}
