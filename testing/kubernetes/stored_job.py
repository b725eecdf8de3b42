"""A job as the API server holds it."""

from __future__ import annotations

from pacekeeper_operator.kube.client import PODS, TRAINING_JOB_STATES, TRAINING_JOBS
from pacekeeper_operator.pods.manifests import Installation, build_state_object, build_worker_pod
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes.fake_cluster import FakeCluster

INSTALLATION = Installation("https://operator", "")


async def store_job(cluster: FakeCluster, observation: Observation) -> None:
    """The API server holds the job, its plan and its pods."""
    await cluster.create(
        TRAINING_JOBS,
        {
            "metadata": {
                "namespace": observation.job.namespace,
                "name": observation.job.name,
                "uid": observation.job.uid,
            }
        },
    )
    await cluster.create(
        TRAINING_JOB_STATES,
        build_state_object(observation.job, state_codec.encode_state(observation.desired, observation.job.name)),
    )
    for record in observation.state.placement.workers:
        pod = build_worker_pod(observation.job, record.ordinal, record.incarnation, INSTALLATION)
        pod["metadata"] |= {"uid": record.uid, "creationTimestamp": "2026-01-01T00:00:00Z"}
        pod["spec"]["nodeName"] = record.node
        pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{record.ordinal}"}
        await cluster.create(PODS, pod)
