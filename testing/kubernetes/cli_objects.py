"""Objects as kubectl shows them, written by the operator's own hands."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import API_VERSION, Object
from pacekeeper_operator.api.training_job import JobStatus, TrainingJob
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.services import incidents
from pacekeeper_operator.state.desired_state import Incident
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes import kubectl_stand_in
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


def install_kubectl_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, objects: Sequence[Object]) -> None:
    """Put a stand-in for kubectl first on PATH. It has these objects, and records its calls in `folder`."""
    program = folder / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {kubectl_stand_in.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(folder))
    (folder / "objects.json").write_text(json.dumps(objects))
