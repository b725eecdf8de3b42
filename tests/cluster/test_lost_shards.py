"""A node is lost, and a sharded job goes on from what another node has kept for it: there is no checkpoint yet."""

from __future__ import annotations

import pytest

from testing.kubernetes.cluster import KubectlCluster
from testing.kubernetes.jobs import ClusterJob, build_paced_job, unplug_node

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000
EVERY = 8
"""Steps between two snapshots."""


def test_a_lost_node_costs_a_sharded_job_the_steps_since_the_snapshot(cluster: KubectlCluster, namespace: str) -> None:
    snapshots = {"SHARD": "1", "SNAPSHOT_EVERY": str(EVERY)}
    checkpoint = {"everySteps": LONG, "volumeClaimName": "shards"}
    job = ClusterJob.apply(
        cluster, namespace, build_paced_job("shards", LONG, spares=1, environment=snapshots, checkpoint=checkpoint)
    )
    job.wait_until_calm(spares=1)
    job.wait_for_more_steps(3 * EVERY)
    known = job.list_incident_names()
    try:
        with unplug_node(job) as (worker, _):
            incident = job.wait_until_incident_ended("node-lost", known)
            assert incident["spec"]["worker"] == worker
    finally:
        cluster.kubectl("delete", "nodequarantine", "--all", "--timeout=120s")
    assert job.list_start_steps()[-1] > EVERY
    assert incident["status"]["stepsLost"] <= 2 * EVERY, "since the last, whose replication was perhaps in progress"
    assert not list(job.find_checkpoint_folder().glob("step-*")), "nothing that could have been read from the volume"
