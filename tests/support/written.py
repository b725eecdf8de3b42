"""A job as the API server holds it."""

from __future__ import annotations

from pacekeeper_operator import ledger
from pacekeeper_operator.cluster import TRAINING_JOBS, PODS, TRAINING_JOB_STATES
from pacekeeper_operator.manifests import Installation, build_state_object, build_worker_pod
from pacekeeper_operator.observation import Observation
from tests.support.fake_cluster import FakeCluster

INSTALLATION = Installation("https://operator", "")


async def store_job(cluster: FakeCluster, world: Observation) -> None:
    """The API server holds the job, its plan and its pods."""
    await cluster.create(
        TRAINING_JOBS, {"metadata": {"namespace": world.job.namespace, "name": world.job.name, "uid": world.job.uid}}
    )
    await cluster.create(TRAINING_JOB_STATES, build_state_object(world.job, ledger.encode_state(world.desired, world.job.name)))
    for record in world.state.placement.workers:
        pod = build_worker_pod(world.job, record.ordinal, record.incarnation, INSTALLATION)
        pod["metadata"] |= {"uid": record.uid, "creationTimestamp": "2026-01-01T00:00:00Z"}
        pod["spec"]["nodeName"] = record.node
        pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{record.ordinal}"}
        await cluster.create(PODS, pod)
