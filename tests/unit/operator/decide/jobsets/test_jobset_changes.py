"""The TrainingJob of a JobSet: what it is, how it follows the JobSet, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pacekeeper_operator.api.jobset import JobSetReason
from pacekeeper_operator.api.names import ANNOTATION_TRAINER, LABEL_PRIORITY, LABEL_QUEUE, Object
from pacekeeper_operator.api.training_job import TrainingJob
from pacekeeper_operator.decide.jobsets.changes import decide_jobset
from pacekeeper_operator.decide.jobsets.conversion import convert_managed_jobset
from testing.operators.managed_jobsets import (
    JOBSET_NAME,
    JOBSET_UID,
    build_managed_jobset,
    build_replicated_job,
)

FLAVOR: dict[str, Any] = {"nodeSelector": {"pool": "a"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}


def build_stored_job(jobset: Object, phase: str = "Running") -> Object:
    """Return the TrainingJob that was created for the JobSet, as the API server stores it."""
    job = convert_managed_jobset(copy.deepcopy(jobset)).job
    job["metadata"] |= {"uid": "uid-of-job", "resourceVersion": "7", "generation": 1}
    job["spec"] |= {"schedulingTimeout": "5m", "runPolicy": {"cleanPodPolicy": "Running"}}  # defaults of the CRD
    return job | {"status": {"phase": phase} if phase else {}}


def build_placed_jobset(suspend: bool, **pod: Any) -> Object:
    return build_managed_jobset(build_replicated_job("node", **pod), queue="team", suspend=suspend)


def test_the_job_is_owned_named_like_the_jobset_and_not_queued_again() -> None:
    jobset = build_managed_jobset(queue="team", suspend=True, ttlSecondsAfterFinished=5)
    created = decide_jobset(jobset, None).created
    assert created is not None
    (owner,) = created["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("JobSet", JOBSET_UID, True)
    assert not owner["blockOwnerDeletion"], "the operator has no right on finalizers of JobSets"
    assert not {LABEL_QUEUE, LABEL_PRIORITY} & created["metadata"].get("labels", {}).keys()
    job = TrainingJob.parse({**created, "metadata": {**created["metadata"], "uid": "u"}})
    assert (job.name, job.queue, job.spec.suspend, job.spec.replicas) == (JOBSET_NAME, "", True, 2)
    assert job.spec.run_policy.ttl_seconds_after_finished is None, "a job that is gone would be created again"


def test_an_annotation_names_the_container_with_the_ranks() -> None:
    containers = [{"name": name, "image": "i", "command": ["torchrun", "t.py"]} for name in "ab"]
    jobset = build_managed_jobset(build_replicated_job("node", containers=containers))
    assert ANNOTATION_TRAINER in decide_jobset(jobset, None).sync.message
    jobset["metadata"]["annotations"] = {ANNOTATION_TRAINER: "b"}
    created = decide_jobset(jobset, None).created
    assert created is not None
    assert created["spec"]["trainerContainer"] == "b"


@pytest.mark.parametrize(
    ("jobset", "remedy"),
    [
        (build_managed_jobset(name="a" * 41), "1 to 40 characters"),
        (build_managed_jobset(build_replicated_job("node"), build_replicated_job("idle", replicas=0)), "idle"),
        (build_managed_jobset(volumeClaimPolicies=[{"templates": []}]), "create them"),
        (build_managed_jobset(build_replicated_job("ps")), "DistributedDataParallel"),
        ({**build_managed_jobset(), "spec": {"managedBy": "pacekeeper.dev/operator"}}, "replicatedJobs"),
    ],
)
def test_a_jobset_that_cannot_be_converted_fails_with_a_remedy(jobset: Object, remedy: str) -> None:
    decision = decide_jobset(jobset, None)
    assert (decision.sync.reason, decision.has_failed) == (JobSetReason.CONVERSION_REFUSED, True)
    assert (decision.created, remedy in decision.sync.message) == (None, True)


def test_flavors_that_differ_fail_no_jobset() -> None:
    """Kueue has assigned them, and may assign others."""
    jobs = build_replicated_job("leader", **FLAVOR), build_replicated_job("workers")
    decision = decide_jobset(build_managed_jobset(*jobs), None)
    assert (decision.sync.reason, decision.has_failed) == (JobSetReason.CONVERSION_REFUSED, False)
    assert "nodeSelector" in decision.sync.message


WAITING, ADMITTED, ELSEWHERE = (
    build_placed_jobset(True),
    build_placed_jobset(False, **FLAVOR),
    build_placed_jobset(False, **{**FLAVOR, "nodeSelector": {"zone": "b"}}),
)
EVICTED = build_placed_jobset(True, **FLAVOR)


@pytest.mark.parametrize(
    ("stored", "phase", "jobset", "spec"),
    [
        (WAITING, "", WAITING, None),
        (WAITING, "", ADMITTED, {"suspend": False, "template": {"spec": FLAVOR}}),
        (WAITING, "Suspended", ADMITTED, {"suspend": False, "template": {"spec": FLAVOR}}),
        (ADMITTED, "Running", ADMITTED, None),
        (ADMITTED, "Running", EVICTED, {"suspend": True}),
        (ADMITTED, "Running", WAITING, {"suspend": True}),
        (EVICTED, "Running", WAITING, None),  # its pods leave
        (EVICTED, "Running", ELSEWHERE, None),
        (
            EVICTED,
            "Suspended",
            WAITING,
            {"template": {"spec": {"nodeSelector": None, "tolerations": None}}},
        ),
        (
            EVICTED,
            "Suspended",
            ELSEWHERE,
            {"suspend": False, "template": {"spec": {"nodeSelector": {"pool": None, "zone": "b"}}}},
        ),
        (ADMITTED, "Running", ELSEWHERE, {"suspend": True}),  # an eviction was missed: first it leaves its nodes
    ],
)
def test_the_job_follows_suspension_and_placement(stored: Object, phase: str, jobset: Object, spec: Any) -> None:
    """The API server accepts another template only while the job is suspended."""
    patch = decide_jobset(jobset, build_stored_job(stored, phase)).patch
    assert (None if patch is None else patch["spec"]) == spec
    if patch is not None:
        assert patch["metadata"]["resourceVersion"] == "7"
        assert ("annotations" in patch["metadata"]) == ("template" in spec)


def test_another_conversion_of_the_same_jobset_restarts_nothing() -> None:
    """An operator of another version may convert differently."""
    job = build_stored_job(ADMITTED)
    job["spec"]["template"]["metadata"]["labels"] = {"set-by": "an earlier version"}
    job["spec"]["nprocPerNode"] = 8
    decision = decide_jobset(ADMITTED, job)
    assert (decision.patch, decision.sync.reason) == (None, JobSetReason.IN_SYNC)


def test_a_running_job_follows_a_jobset_that_cannot_be_converted_any_more() -> None:
    """It can be suspended, and resumes where it was, but not elsewhere."""
    jobset, job = build_placed_jobset(True), build_stored_job(build_placed_jobset(False))
    jobset["spec"]["volumeClaimPolicies"] = [{}]
    decision = decide_jobset(jobset, job)
    assert (decision.sync.reason, decision.has_failed) == (JobSetReason.CONVERSION_REFUSED, False)
    assert (decision.patch or {})["spec"] == {"suspend": True}
    job["spec"]["suspend"] = True
    jobset["spec"]["suspend"] = False
    assert (decide_jobset(jobset, job).patch or {})["spec"] == {"suspend": False}
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"] |= FLAVOR
    assert decide_jobset(jobset, job).patch is None


def test_other_changes_are_refused_by_name() -> None:
    job, jobset = build_stored_job(build_managed_jobset()), build_managed_jobset(suspend=True)
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["spec"]["containers"][0]["image"] = "other"
    decision = decide_jobset(jobset, job)
    assert decision.sync.reason is JobSetReason.CHANGE_REFUSED
    assert "spec.template.spec.containers[pytorch].image" in decision.sync.message
    assert (decision.patch or {})["spec"] == {"suspend": True}, "what may change is applied"


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([], "delete it"),
        ([{"kind": "JobSet", "name": JOBSET_NAME, "uid": "of-its-predecessor", "controller": True}], "waits until"),
        ([{"kind": "JobSet", "name": JOBSET_NAME, "uid": JOBSET_UID}], "delete it"),
    ],
)
def test_a_job_of_that_name_that_is_not_its_own_is_left_alone(owners: list[Object], message: str) -> None:
    job = build_stored_job(build_managed_jobset())
    job["metadata"]["ownerReferences"] = owners
    decision = decide_jobset(build_managed_jobset(suspend=True), job)
    assert (decision.sync.reason, decision.has_failed) == (JobSetReason.NAME_TAKEN, False)
    assert (decision.created, decision.patch, message in decision.sync.message) == (None, None, True)


def test_after_its_end_only_the_ttl_is_applied() -> None:
    jobset = build_managed_jobset(ttlSecondsAfterFinished=60) | {"status": {"terminalState": "Completed"}}
    job = build_stored_job(jobset, "Complete")
    patch = decide_jobset(jobset, job).patch
    assert (patch or {})["spec"] == {"runPolicy": {"ttlSecondsAfterFinished": 60}}
    job["spec"]["runPolicy"] = {"ttlSecondsAfterFinished": 60}
    assert decide_jobset(jobset, job).patch is None
    assert decide_jobset(jobset, None).created is None, "what has ended does not run again"
    del jobset["spec"]["ttlSecondsAfterFinished"]
    assert decide_jobset(jobset, job).patch is None, "a TTL that a user has set in the TrainingJob stays"
