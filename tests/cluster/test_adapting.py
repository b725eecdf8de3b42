"""A job that changes how it trains while it trains: who gets which sequences; and a plan that it cannot follow.

Another mode for a slow link, and back, is in the demo (test_demo.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, scratch_namespace
from tests.support.jobs import Job, manifest

pytestmark = pytest.mark.usefixtures("operator")

SECONDS_A_SQUARE = 3e-8


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> Iterator[Job]:
    """Two workers whose sequences cost as the square of their length, by which the script has its loader deal them."""
    with scratch_namespace(cluster) as namespace:
        body = manifest(
            "lengths",
            ["pacekeeper", "run", "tests/support/scripts/lengths.py"],
            environment={"FOLDER": "/checkpoints", "UNTIL": "1000000", "SECONDS_A_SQUARE": str(SECONDS_A_SQUARE)},
            checkpoint={"everySteps": 200, "volumeClaimName": "lengths"},
            detection={"windowSteps": 16},
            remediation={"allow": ["RestartRanks", "BalanceLengths"]},
        )
        job = Job.apply(cluster, namespace, body)
        yield job
        job.delete()


def test_sequences_are_balanced_by_what_they_cost(job: Job) -> None:
    incident = job.until_over("uneven-lengths", known=(), timeout=180)
    status = incident["status"]
    assert (status["remedy"], status["stepsLost"]) == ("BalanceLengths", 0)
    assert status["outcome"] in ("Recovered", "Mitigated"), incident
    assert status["slowdownAfter"] < status["slowdownBefore"]
    _, _, per_token_squared = job.plan()["sequence_cost"]
    assert per_token_squared == pytest.approx(SECONDS_A_SQUARE, rel=0.3)
    assert job.status["round"] == 1, "nobody was restarted"


def test_a_plan_that_the_ranks_cannot_follow_shows_in_the_condition_and_they_train_on(job: Job) -> None:
    """The operator finds what was edited by hand at its next look, half a minute later at most."""
    job.until_calm()
    edit(job, shares=[1, 1])  # of 8 samples
    job.until(lambda: job.condition("Degraded").get("reason") == "PlanRefused", 90, "the condition says so")
    assert "share" in job.condition("Degraded")["message"]
    job.until_trained_on(20)
    edit(job, shares=None)
    job.until(lambda: job.condition("Degraded").get("reason") != "PlanRefused", 90, "all is well again")


def edit(job: Job, **changes: object) -> None:
    """Of the plan, as by `kubectl edit`."""
    data = json.dumps({"data": {"plan.json": json.dumps(job.plan() | changes)}})
    job.cluster.kubectl("patch", "configmap", f"{job.name}-plan", "-n", job.namespace, "--type=merge", "-p", data)
