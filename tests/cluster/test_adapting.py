"""A job that changes how it trains: another mode for a slow link, and back; and a plan that it cannot follow."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from testcluster import api, faults
from tests.support.cluster import Cluster, scratch_namespace
from tests.support.jobs import Job, manifest, paced
from tests.support.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("resources")

WIDTH = "512"
"""Gradients of 2 MB: they need a tenth of a second over the slow link, and steps are half as long without it."""
SLOW = "200mbit"
SLOWDOWN = 1.5
"""On two cores anybody is slow for a moment; the slow link makes steps at least twice as long."""


@pytest.fixture(scope="module")
def job(cluster: Cluster, operator_process: OperatorProcess) -> Iterator[Job]:  # noqa: ARG001  # it serves the job
    """Three workers that train for as long as the tests want."""
    with scratch_namespace(cluster) as namespace:
        body = paced(
            "adapting",
            steps=1_000_000,
            environment={"WIDTH": WIDTH},
            replicas=3,
            checkpoint={"everySteps": 200, "volumeClaimName": "adapting"},
            detection={"stragglerSlowdown": SLOWDOWN, "windowSteps": 16},
            remediation={"allow": ["RestartRanks", "ReplaceWorker", "LocalSGD"]},
        )
        job = Job.apply(cluster, namespace, body)
        job.until_calm()
        job.until_step(150, timeout=120)  # the fastest of the first eight windows is what later ones are held against
        yield job
        job.delete()


def changes_of_mode(job: Job) -> list[str]:
    """What the events say of them, oldest first."""
    found = api.get(f"/apis/events.k8s.io/v1/namespaces/{job.namespace}/events")["items"]
    told = sorted(
        (str(event["eventTime"]), str(event["note"])) for event in found if event["reason"] == "SyncModeChanged"
    )
    return [note for _, note in told]


def test_a_slow_link_is_trained_around_by_local_sgd_until_it_is_well(job: Job) -> None:
    known, round_, told = job.incident_names(), job.status["round"], len(changes_of_mode(job))
    node = job.node(1)
    faults.slow_link(node, SLOW)
    try:
        job.until(lambda: job.plan()["sync_mode"] == "AsyncEDiT", 90, "the plan wants AsyncEDiT")
        job.until(lambda: job.status["syncMode"] == "AsyncEDiT", 60, "the ranks train in AsyncEDiT")
        incident = job.until_over("slow-communication", known, timeout=120)
    finally:
        faults.clear_link(node)
    status = incident["status"]
    assert (status["remedy"], status["stepsLost"]) == ("LocalSGD", 0)
    assert status["outcome"] in ("Recovered", "Mitigated"), incident
    assert status["slowdownAfter"] < status["slowdownBefore"]
    job.until(lambda: job.plan()["sync_mode"] == "Sync", 120, "the plan wants Sync again")
    job.until(lambda: job.status["syncMode"] == "Sync", 60, "the ranks train in Sync again")
    job.until_trained_on()
    assert job.status["round"] == round_, "nobody was restarted"
    to, back = changes_of_mode(job)[told:]
    assert to.startswith("Sync → AsyncEDiT")
    assert back.startswith("AsyncEDiT → Sync")


def test_a_plan_that_the_ranks_cannot_follow_shows_in_the_condition_and_they_train_on(job: Job) -> None:
    """The operator finds what was edited by hand at its next look, half a minute later at most."""
    edit(job, shares=[1, 1, 1])  # of 24 samples
    job.until(lambda: job.condition("Degraded").get("reason") == "PlanRefused", 90, "the condition says so")
    assert "share" in job.condition("Degraded")["message"]
    job.until_trained_on(20)
    edit(job, shares=None)
    job.until(lambda: job.condition("Degraded").get("reason") != "PlanRefused", 90, "all is well again")


def test_sequences_are_balanced_by_what_they_cost(cluster: Cluster, operator_process: OperatorProcess) -> None:  # noqa: ARG001
    """Their cost grows as the square of the length, by which the script has its loader deal them."""
    with scratch_namespace(cluster) as namespace:
        body = manifest(
            "lengths",
            ["pacekeeper", "run", "tests/support/scripts/lengths.py"],
            environment={"FOLDER": "/checkpoints", "UNTIL": "1000000", "SECONDS_A_SQUARE": "3e-8"},
            checkpoint={"everySteps": 200, "volumeClaimName": "lengths"},
            remediation={"allow": ["RestartRanks", "BalanceLengths"]},
        )
        job = Job.apply(cluster, namespace, body)
        incident = job.until_over("uneven-lengths", known=(), timeout=180)
        status = incident["status"]
        assert (status["remedy"], status["stepsLost"]) == ("BalanceLengths", 0)
        assert status["outcome"] in ("Recovered", "Mitigated"), incident
        assert status["slowdownAfter"] < status["slowdownBefore"]
        _, _, per_token_squared = job.plan()["sequence_cost"]
        assert per_token_squared == pytest.approx(3e-8, rel=0.3)
        assert job.status["round"] == 1, "nobody was restarted"
        job.delete()


def edit(job: Job, **changes: object) -> None:
    """Of the plan, as by `kubectl edit`."""
    data = json.dumps({"data": {"plan.json": json.dumps(job.plan() | changes)}})
    job.cluster.kubectl("patch", "configmap", f"{job.name}-plan", "-n", job.namespace, "--type=merge", "-p", data)
