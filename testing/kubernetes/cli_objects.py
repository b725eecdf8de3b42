"""Objects as kubectl shows them, written by the operator's own hands."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import API_VERSION, Object
from pacekeeper_operator.api.training_job import JobStatus, TrainingJob
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.services import incidents
from pacekeeper_operator.state.desired_state import Incident
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.observations import NOW, TEMPLATE, build_policy


def build_job_object(
    observation: Observation, *, seen: bool = True, spec: Object | None = None, **policy_changes: Any
) -> Object:
    """A TrainingJob with the status that the operator gives it."""
    job = observation.job
    job_status = (
        build_job_status(observation, build_policy(**policy_changes), JobStatus())
        if seen
        else JobStatus(observed_generation=-1)
    )
    status = {name: value for name, value in job_status.to_patch().items() if value is not None}
    base_spec = {"template": TEMPLATE, "replicas": job.spec.replicas, "spares": job.spec.spares}
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainingJob",
        "metadata": build_metadata(job.name, job.uid) | {"generation": job.generation},
        "spec": base_spec | (spec or {}),
        "status": status,
    }


def build_incident_object(job: TrainingJob, incident: Incident) -> Object:
    cluster = FakeCluster()
    asyncio.run(incidents.write_incident(cluster, job, incident, retention=3600.0))
    ((_, _, name), body), *_ = cluster.objects.items()
    body = {**body, "metadata": build_metadata(name, f"uid-{name}") | {"labels": {}}}
    return {**body, "status": {key: value for key, value in body["status"].items() if value is not None}}


def build_metadata(name: str, uid: str) -> Object:
    return {"name": name, "namespace": "ns", "uid": uid, "creationTimestamp": format_time(NOW - 1000)}


def close_incident(incident: Incident, **changes: Any) -> Incident:
    return replace(incident, **changes)
