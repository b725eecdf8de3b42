"""Objects as kubectl shows them, written by the operator's own hands."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from pacekeeper_operator.api import API_VERSION, TrainingJob, JobStatus, Object, format_time
from pacekeeper_operator.decide.status import build_job_status
from pacekeeper_operator.observation import Observation
from pacekeeper_operator.services import incidents
from pacekeeper_operator.state import Incident
from tests.support.fake_cluster import FakeCluster
from tests.support.worlds import NOW, TEMPLATE, build_policy


def build_job_object(world: Observation, *, seen: bool = True, spec: Object | None = None, **of_policy: Any) -> Object:
    """A TrainingJob with the status that the operator gives it."""
    job = world.job
    told = build_job_status(world, build_policy(**of_policy), JobStatus()) if seen else JobStatus(observed_generation=-1)
    status = {name: value for name, value in told.to_patch().items() if value is not None}
    wanted = {"template": TEMPLATE, "replicas": job.spec.replicas, "spares": job.spec.spares}
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainingJob",
        "metadata": build_metadata(job.name, job.uid) | {"generation": job.generation},
        "spec": wanted | (spec or {}),
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
