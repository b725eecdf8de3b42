"""Incidents as objects: built from the job's state, with deterministic names, kept beyond the job's lifetime."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

import kopf

from ..api.formats import format_time
from ..api.incident import IncidentOutcome, IncidentSpec, IncidentStatus, ObjectRef
from ..api.names import ANNOTATION_RETAIN_UNTIL, API_VERSION, LABEL_JOB
from ..api.training_job import JobKind, TrainingJob
from ..kube.client import INCIDENT_OBJECTS, TRAINING_JOBS, Cluster, Conflict, Object, ResourceKind
from ..state.desired_state import Incident

log = logging.getLogger(__name__)


async def write_incident(
    cluster: Cluster, job: TrainingJob, incident: Incident, retention: float, *, known: bool = False
) -> bool:
    """Create or update the Incident; idempotent. Returns whether it was created.

    `retention`: seconds. `known`: it should exist already.

    A write that timed out, and takes effect later, overwrites no later write. An Incident that has ended keeps its
    outcome: a job whose state was lost may open it again under the same name.
    """
    stored = await cluster.find(INCIDENT_OBJECTS, incident.name, job.namespace) if known else None
    created = False
    if stored is None:
        try:
            stored, created = await cluster.create(INCIDENT_OBJECTS, _build_incident(job, incident, retention)), True
        except Conflict:
            stored = await cluster.get(INCIDENT_OBJECTS, incident.name, job.namespace)
    if _get_outcome(stored) not in ("", incident.outcome):
        return created
    patch = {"metadata": _build_precondition(stored), "status": build_status(incident).to_patch()}
    await cluster.patch(INCIDENT_OBJECTS, incident.name, patch, job.namespace, subresource="status")
    return created


async def supersede_unknown(cluster: Cluster, job: TrainingJob, known_names: Container[str]) -> None:
    """Close the job's open Incidents that its state does not contain (any more): no pass would ever close them."""
    for body in await cluster.collect(
        INCIDENT_OBJECTS, _reduce_incident, job.namespace, labels=f"{LABEL_JOB}={job.name}"
    ):
        if body["metadata"]["name"] not in known_names and _get_job_uid(body) == job.uid:
            await _close_incident(cluster, body, "its bookkeeping was lost")


async def clean_up_incidents(
    cluster: Cluster, namespaces: Sequence[str], now: float | None, job_kinds: Sequence[ResourceKind] = (TRAINING_JOBS,)
) -> None:
    """Delete Incidents whose retention is over, and close those whose job, of one of `job_kinds`, is gone.

    `namespaces` empty: all. `now` None: the clock is in doubt, and none is deleted. Incidents of a job that was deleted
    while no operator ran are closed here.

    An error in one namespace does not stop the others. Raises only if all of them fail.
    """
    scopes = INCIDENT_OBJECTS.list_scopes(namespaces)
    failures = []
    for scope in scopes:
        try:
            await _clean_up_namespace(cluster, scope, now, job_kinds)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("Incidents of %s are not cleaned up: %s", scope or "all namespaces", error)
            failures.append(error)
    if failures and len(failures) == len(scopes):
        raise failures[-1]


async def _clean_up_namespace(
    cluster: Cluster, namespace: str, now: float | None, job_kinds: Sequence[ResourceKind]
) -> None:
    """Clean up page by page, with little memory for each: there may be many Incidents."""
    expired, open_ = [], []
    async for page in cluster.list_pages(INCIDENT_OBJECTS, namespace):
        for body in page.items:
            until = body["metadata"].get("annotations", {}).get(ANNOTATION_RETAIN_UNTIL)
            if now is not None and until is not None and until < format_time(now):
                expired.append(_reduce_incident(body))
            elif not _get_outcome(body):
                open_.append(_reduce_incident(body))
    jobs = {
        uid for kind in job_kinds for uid in await cluster.collect(kind, lambda job: job["metadata"]["uid"], namespace)
    }
    for body in expired:
        await _delete_incident(cluster, body["metadata"])
    for body in open_:
        if _get_job_uid(body) not in jobs:
            await _close_incident(cluster, body, "its job is gone")


async def _delete_incident(cluster: Cluster, metadata: Object) -> None:
    """Delete the Incident. An error is logged, and does not stop the others."""
    try:
        await cluster.delete(INCIDENT_OBJECTS, metadata["name"], metadata["namespace"], uid=metadata["uid"])
    except (kopf.TemporaryError, kopf.PermanentError) as error:
        log.warning("Incident %s/%s cannot be deleted: %s", metadata["namespace"], metadata["name"], error)


async def _close_incident(cluster: Cluster, body: Object, reason: str) -> None:
    """Close the Incident if it is open. An error is logged, and does not stop the others."""
    if _get_outcome(body):
        return
    metadata = body["metadata"]
    patch = {
        "metadata": _build_precondition(body),
        "status": {"outcome": IncidentOutcome.SUPERSEDED, "message": reason},
    }
    try:
        await cluster.patch(INCIDENT_OBJECTS, metadata["name"], patch, metadata["namespace"], subresource="status")
    except (kopf.TemporaryError, kopf.PermanentError) as error:
        log.warning("Incident %s/%s cannot be closed: %s", metadata["namespace"], metadata["name"], error)


def _build_precondition(body: Object) -> Object:
    """Return metadata of a patch that fails with Conflict once the object has changed."""
    return {"resourceVersion": body["metadata"]["resourceVersion"]}


def _reduce_incident(body: Object) -> Object:
    """Keep what is needed to delete or close the Incident, and to find its job: they may be many and large."""
    fields = ("name", "namespace", "uid", "resourceVersion")
    return {
        "metadata": {name: body["metadata"][name] for name in fields},
        "spec": {"jobRef": {"uid": _get_job_uid(body)}},
        "status": {"outcome": _get_outcome(body)},
    }


def _get_outcome(body: Object) -> str:
    """Return the outcome; empty: the Incident is open."""
    return str((body.get("status") or {}).get("outcome") or "")


def _get_job_uid(body: Object) -> str:
    uid: str = body["spec"]["jobRef"].get("uid", "")
    return uid


def build_status(incident: Incident) -> IncidentStatus:
    """Build the status from what is known by now."""
    return IncidentStatus(
        mode=incident.mode,
        remedy=incident.remedy,
        considered=incident.remedies,
        first_sign=incident.first_sign,
        detected=incident.detected,
        decided=incident.decided,
        applied=incident.applied,
        recovered=incident.recovered,
        detected_seconds=incident.detected - incident.first_sign,
        recovered_seconds=None if incident.recovered is None else incident.recovered - incident.first_sign,
        steps_lost=incident.steps_lost,
        restart=incident.restart,
        slowdown_before=incident.slowdown_before,
        slowdown_after=incident.slowdown_after,
        predicted_gain=incident.predicted_gain,
        measured_gain=incident.measured_gain,
        predicted_cost=incident.predicted_cost,
        measured_cost=incident.measured_cost,
        diagnosis=incident.finding,
        outcome=incident.outcome,
        message="; ".join(filter(None, (incident.remedy_result, incident.quarantine_summary))) or None,
    )


def _build_incident(job: TrainingJob, incident: Incident, retention: float) -> Object:
    spec = IncidentSpec(
        job_ref=ObjectRef(
            job.name, job.namespace, job.uid, None if job.kind is JobKind.TRAINING_JOB else str(job.kind)
        ),
        cause=incident.cause,
        class_=incident.class_,
        round=incident.round,
        rank=incident.rank,
        worker=incident.worker,
        node=incident.node,
        message=incident.message,
        evidence=incident.evidence,
    )
    until = format_time(incident.detected + retention)
    return {
        "apiVersion": API_VERSION,
        "kind": "Incident",
        "metadata": {
            "name": incident.name,
            "namespace": job.namespace,
            "labels": {LABEL_JOB: job.name},
            "annotations": {ANNOTATION_RETAIN_UNTIL: until},
        },
        "spec": spec.to_json(),
    }
