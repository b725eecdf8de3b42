"""Incidents as objects: made from the job's bookkeeping, under deterministic names, kept beyond the job's life."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

import kopf

from ..api import (
    ANNOTATION_RETAIN_UNTIL,
    API_VERSION,
    LABEL_JOB,
    IncidentSpec,
    IncidentStatus,
    TrainingJob,
    ObjectRef,
    IncidentOutcome,
    format_time,
)
from ..cluster import INCIDENT_OBJECTS, TRAINING_JOBS, Cluster, Conflict, Object
from ..state import Incident

log = logging.getLogger(__name__)


async def write_incident(cluster: Cluster, job: TrainingJob, incident: Incident, retention: float, *, known: bool = False) -> bool:
    """Create or update; doing it twice is doing it once. `retention`: seconds. `known`: it should be there. True: it
    was not there before.

    A write that was given up for want of an answer, and takes effect later all the same, undoes no later one. What is
    over stays as it ended: bookkeeping that was lost may begin it anew under its name.
    """
    there = await cluster.find(INCIDENT_OBJECTS, incident.name, job.namespace) if known else None
    fresh = False
    if there is None:
        try:
            there, fresh = await cluster.create(INCIDENT_OBJECTS, _build_incident(job, incident, retention)), True
        except Conflict:
            there = await cluster.get(INCIDENT_OBJECTS, incident.name, job.namespace)
    if _get_outcome(there) not in ("", incident.outcome):
        return fresh
    patch = {"metadata": _build_precondition(there), "status": build_status(incident).to_patch()}
    await cluster.patch(INCIDENT_OBJECTS, incident.name, patch, job.namespace, subresource="status")
    return fresh


async def supersede_unknown(cluster: Cluster, job: TrainingJob, known: Container[str]) -> None:
    """Those of the job that are open, and that no bookkeeping knows (any more): nobody would ever close them."""
    for body in await cluster.collect(INCIDENT_OBJECTS, _reduce_incident, job.namespace, labels=f"{LABEL_JOB}={job.name}"):
        if body["metadata"]["name"] not in known and _get_job_uid(body) == job.uid:
            await _close_incident(cluster, body, "its bookkeeping was lost")


async def clean_up_incidents(cluster: Cluster, namespaces: Sequence[str], now: float | None) -> None:
    """Of these namespaces (none: of all): delete those whose time is over, close those whose job is gone. A job that is
    deleted while no operator runs takes nobody's word along. `now`: None: the time is in doubt, and none is deleted.

    A namespace that cannot be looked at does not keep the others. Raises only where none can.
    """
    places = INCIDENT_OBJECTS.list_scopes(namespaces)
    failures = []
    for place in places:
        try:
            await _clean_up_namespace(cluster, place, now)
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("incidents of %s are not looked after: %s", place or "all namespaces", error)
            failures.append(error)
    if failures and len(failures) == len(places):
        raise failures[-1]


async def _clean_up_namespace(cluster: Cluster, place: str, now: float | None) -> None:
    """Page by page, and little is kept of each: they may be many."""
    over, open_ = [], []
    async for page in cluster.list_pages(INCIDENT_OBJECTS, place):
        for body in page.items:
            until = body["metadata"].get("annotations", {}).get(ANNOTATION_RETAIN_UNTIL)
            if now is not None and until is not None and until < format_time(now):
                over.append(_reduce_incident(body))
            elif not _get_outcome(body):
                open_.append(_reduce_incident(body))
    jobs = set(await cluster.collect(TRAINING_JOBS, lambda job: job["metadata"]["uid"], place))
    for body in over:
        await _delete_incident(cluster, body["metadata"])
    for body in open_:
        if _get_job_uid(body) not in jobs:
            await _close_incident(cluster, body, "its job is gone")


async def _delete_incident(cluster: Cluster, metadata: Object) -> None:
    """One that cannot be deleted does not keep the others."""
    try:
        await cluster.delete(INCIDENT_OBJECTS, metadata["name"], metadata["namespace"], uid=metadata["uid"])
    except (kopf.TemporaryError, kopf.PermanentError) as error:
        log.warning("incident %s/%s cannot be deleted: %s", metadata["namespace"], metadata["name"], error)


async def _close_incident(cluster: Cluster, body: Object, why: str) -> None:
    """Where it is open. One that has gone meanwhile, or cannot be written, does not keep the others."""
    if _get_outcome(body):
        return
    metadata = body["metadata"]
    patch = {"metadata": _build_precondition(body), "status": {"outcome": IncidentOutcome.SUPERSEDED, "message": why}}
    try:
        await cluster.patch(INCIDENT_OBJECTS, metadata["name"], patch, metadata["namespace"], subresource="status")
    except (kopf.TemporaryError, kopf.PermanentError) as error:
        log.warning("incident %s/%s cannot be closed: %s", metadata["namespace"], metadata["name"], error)


def _build_precondition(body: Object) -> Object:
    """Metadata of a patch that is for this object as it is: refused by Conflict once it has changed."""
    return {"resourceVersion": body["metadata"]["resourceVersion"]}


def _reduce_incident(body: Object) -> Object:
    """What it takes to delete or close it, and to find its job. Little: they may be many, and large."""
    kept = ("name", "namespace", "uid", "resourceVersion")
    return {
        "metadata": {name: body["metadata"][name] for name in kept},
        "spec": {"jobRef": {"uid": _get_job_uid(body)}},
        "status": {"outcome": _get_outcome(body)},
    }


def _get_outcome(body: Object) -> str:
    """ "": it is open."""
    return str((body.get("status") or {}).get("outcome") or "")


def _get_job_uid(body: Object) -> str:
    uid: str = body["spec"]["jobRef"].get("uid", "")
    return uid


def build_status(incident: Incident) -> IncidentStatus:
    """How it goes on, as far as is known by now."""
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
        diagnosis=incident.finding,
        outcome=incident.outcome,
        message="; ".join(filter(None, (incident.shown, incident.quarantine))) or None,
    )


def _build_incident(job: TrainingJob, incident: Incident, retention: float) -> Object:
    spec = IncidentSpec(
        job_ref=ObjectRef(job.name, job.namespace, job.uid),
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
