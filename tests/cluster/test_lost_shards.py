"""A node is lost, and a sharded job goes on from what another node has kept for it: there is no checkpoint yet."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster
from tests.support.jobs import Job, paced, unplugged

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000
EVERY = 8
"""Steps between two snapshots."""


def test_a_lost_node_costs_a_sharded_job_the_steps_since_the_snapshot(cluster: Cluster, namespace: str) -> None:
    snapshots = {"SHARD": "1", "SNAPSHOT_EVERY": str(EVERY)}
    checkpoint = {"everySteps": LONG, "volumeClaimName": "shards"}
    job = Job.apply(cluster, namespace, paced("shards", LONG, spares=1, environment=snapshots, checkpoint=checkpoint))
    job.until_calm(spares=1)
    job.until_trained_on(3 * EVERY)
    known = job.incident_names()
    try:
        with unplugged(job) as (worker, _):
            incident = job.until_over("node-lost", known)
            assert incident["spec"]["worker"] == worker
    finally:
        cluster.kubectl("delete", "nodequarantine", "--all", "--timeout=60s")
    assert job.began_behind()[-1] > EVERY
    assert incident["status"]["stepsLost"] <= 2 * EVERY, "since the last, whose copy was perhaps under way"
    assert not list(job.folder().glob("step-*")), "nothing that could have been read from the volume"
