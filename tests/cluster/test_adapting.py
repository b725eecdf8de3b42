"""A job that changes how it trains while it trains: who gets which sequences; and in which mode.

Another mode for a slow link, and back, is in the demo (test_demo.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from testing.kubernetes.cluster import KubectlCluster, scratch_namespace
from testing.kubernetes.jobs import ClusterJob, build_job_manifest

pytestmark = pytest.mark.usefixtures("operator")

SECONDS_A_SQUARE = 8e-8
"""Equal costs save 50 ms of a step of 270 ms: more than a busy machine adds."""


@pytest.fixture(scope="module")
def job(cluster: KubectlCluster) -> Iterator[ClusterJob]:
    """Two workers whose sequences cost as the square of their length, by which the script has its loader deal them."""
    with scratch_namespace(cluster) as namespace:
        body = build_job_manifest(
            "lengths",
            ["pacekeeper", "run", "testing/scripts/lengths.py"],
            environment={"FOLDER": "/checkpoints", "UNTIL": "1000000", "SECONDS_A_SQUARE": str(SECONDS_A_SQUARE)},
            checkpoint={"everySteps": 200, "volumeClaimName": "lengths"},
            detection={"windowSteps": 16},
            remediation={"allow": ["RestartRanks", "BalanceLengths"]},
        )
        job = ClusterJob.apply(cluster, namespace, body)
        yield job
        job.delete()


def test_sequences_are_balanced_by_their_cost(job: ClusterJob) -> None:
    incident = job.wait_until_incident_ended("uneven-lengths", known=(), timeout=180)
    status = incident["status"]
    assert (status["remedy"], status["stepsLost"]) == ("BalanceLengths", 0)
    assert status["outcome"] in ("Recovered", "Mitigated"), incident
    assert status["slowdownAfter"] < status["slowdownBefore"]
    _, _, per_token_squared = job.read_plan()["sequence_cost"]
    assert per_token_squared == pytest.approx(SECONDS_A_SQUARE, rel=0.3)
    assert job.status["round"] == 1, "no rank was restarted"


def test_the_mode_of_the_spec_is_in_force_and_auto_reverts_it(job: ClusterJob) -> None:
    job.wait_until_calm()
    for wanted, mode in (("EDiT", "EDiT"), ("Auto", "Sync")):
        job.patch(syncMode=wanted)
        job.wait_until(partial(trains_in, job, mode), 120, f"the ranks train in mode {mode}")
        job.wait_for_more_steps(20)
    assert job.status["round"] == 1, "no rank was restarted"


def trains_in(job: ClusterJob, mode: str) -> bool:
    return bool(job.status.get("syncMode") == mode)
