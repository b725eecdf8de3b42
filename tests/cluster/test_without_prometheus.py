"""An operator without Prometheus: sidecars report how ranks train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.kubernetes.cluster import KubectlCluster, scratch_namespace
from testing.kubernetes.jobs import ClusterJob, build_job_manifest
from testing.operators.operator_process import run_operator_process

pytestmark = pytest.mark.usefixtures("resources")

SECONDS_A_SAMPLE = 0.01


@pytest.fixture(scope="module")
def job(cluster: KubectlCluster) -> Iterator[ClusterJob]:
    """Two workers whose ranks sleep for each sample, for as long as a file of theirs sets."""
    if not cluster.is_testcluster:
        pytest.skip("the operator runs as a process on the test cluster's machine")
    with run_operator_process(cluster, prometheus_url=""), scratch_namespace(cluster) as namespace:
        body = build_job_manifest(
            "slowed",
            ["pacekeeper", "run", "testing/scripts/slowed.py"],
            environment={"FOLDER": "/checkpoints", "SECONDS_A_SAMPLE": str(SECONDS_A_SAMPLE)},
            checkpoint={"everySteps": 1000, "volumeClaimName": "slowed"},
            detection={"stragglerSlowdown": 1.25, "windowSteps": 16},
            remediation={"allow": ["RestartRanks", "Rebalance"]},
        )
        job = ClusterJob.apply(cluster, namespace, body)
        yield job
        job.delete()


def test_a_rank_that_becomes_slow_is_found_and_remedied(job: ClusterJob) -> None:
    # Its page of metrics is unreachable here: no network policy admits a Prometheus that does not exist.
    job.wait_until(lambda: int(job.status.get("step") or 0) >= 30, 120, "the job has trained for 30 steps")
    condition = job.get_condition("MetricsAvailable")
    assert (condition["status"], condition["reason"]) == ("False", "PrometheusNotConfigured")
    assert "DCGM's GPU errors cannot be detected" in condition["message"]
    known = job.list_incident_names()
    (job.find_checkpoint_folder() / "seconds-1").write_text(str(2 * SECONDS_A_SAMPLE))
    status = job.wait_until_incident_ended("straggler", known)["status"]
    assert (status["remedy"], status["stepsLost"]) == ("Rebalance", 0)
    assert status["outcome"] in ("Recovered", "Mitigated"), status
