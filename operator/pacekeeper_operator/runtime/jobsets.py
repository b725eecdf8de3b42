"""One pass over a JobSet that the operator runs, and the loop over all of them.

A pass reads the JobSet and its TrainingJob, creates or patches the latter, and writes the status of the former. It
keeps no state: the next pass does what another operator has left undone.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import kopf

from pacekeeper_analysis.errors import InputError

from ..api.jobset import JOBSET_API_VERSION, JOBSET_KIND, JobSetCondition, JobSetReason, ManagedJobSet
from ..api.names import Object
from ..decide.jobsets.changes import JobSetDecision, SyncState, decide_jobset, is_controlled_by
from ..decide.jobsets.status import JobProgress, build_jobset_status, list_new_conditions
from ..kube.client import JOBSETS, TRAINING_JOBS, Denied, NotFound, ObjectRejected
from ..kube.store import Key
from ..limits import Backoff
from ..services.events import emit_event
from ..services.operator import Operator
from ..services.shared.watched_stores import STORE_RESYNC_SECONDS

FIRST_JOBSET_BACKOFF_SECONDS, LONGEST_JOBSET_BACKOFF_SECONDS = 0.5, 30.0
"""Bounds of the pause after a failed pass. The longest one also comes after a refusal that others can lift."""
_WARNING_CONDITIONS = (
    (JobSetCondition.FAILED, "True"),
    (JobSetCondition.SYNCED, "False"),
)
log = logging.getLogger(__name__)


async def reconcile_jobset(operator: Operator, key: Key) -> float | None:
    """Run one pass over the JobSet. Return the seconds until the next one; None: when something changes.

    Raises the errors of the cluster client, and InputError if the TrainingJob's status cannot be read.
    """
    cluster, (namespace, name) = operator.cluster, key
    operator.require_leadership()
    body = await cluster.find(JOBSETS, name, namespace)
    jobset = None if body is None else ManagedJobSet.parse(body)
    if body is None or jobset is None or jobset.deleting:
        return None  # its TrainingJob is deleted with it
    job = await cluster.find(TRAINING_JOBS, name, namespace)
    decision = decide_jobset(body, job)
    job, decision = await _apply_decision(operator, job, decision)
    is_own = job is not None and is_controlled_by(job, body)
    progress = JobProgress.read(job) if job is not None and is_own else None
    await _write_status(operator, body, build_jobset_status(body, progress, decision, operator.runtime.now()))
    is_blocked = decision.sync.reason in (JobSetReason.NAME_TAKEN, JobSetReason.JOB_REJECTED)
    return LONGEST_JOBSET_BACKOFF_SECONDS if is_blocked else None


async def _apply_decision(
    operator: Operator, job: Object | None, decision: JobSetDecision
) -> tuple[Object | None, JobSetDecision]:
    """Create or patch the TrainingJob. Return it, and the decision with what the API server has rejected.

    A rejection may be that of a policy or a quota, which others change: the JobSet does not fail by it.
    """
    cluster = operator.cluster
    try:
        if decision.created is not None:
            job = await cluster.create(TRAINING_JOBS, decision.created)
        elif decision.patch is not None and job is not None:
            metadata = job["metadata"]
            job = await cluster.patch(TRAINING_JOBS, metadata["name"], decision.patch, metadata["namespace"])
    except (ObjectRejected, Denied) as error:
        message = f"the API server rejects its TrainingJob; the operator retries: {error}"
        return job, replace(decision, sync=SyncState(JobSetReason.JOB_REJECTED, message))
    return job, decision


async def _write_status(operator: Operator, body: Object, status: Object) -> None:
    """Patch the JobSet's status by compare-and-swap if it changes, and emit an Event about each changed condition."""
    before, metadata = body.get("status") or {}, body["metadata"]
    if all(before.get(name) == value for name, value in status.items()):
        return
    patch = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": status}
    try:
        await operator.cluster.patch(JOBSETS, metadata["name"], patch, metadata["namespace"], subresource="status")
    except NotFound:
        return
    regarding = {
        "apiVersion": JOBSET_API_VERSION,
        "kind": JOBSET_KIND,
        **{name: metadata[name] for name in ("name", "namespace", "uid")},
    }
    for condition in list_new_conditions(before, status):
        await emit_event(
            operator.cluster,
            operator.runtime,
            regarding,
            condition["reason"],
            condition["message"] or f"{condition['type']} is {condition['status']}",
            condition["type"],
            warning=(condition["type"], condition["status"]) in _WARNING_CONDITIONS,
        )


async def run_jobset_loop(operator: Operator) -> None:
    """Run passes over JobSets as they become due, until cancelled. Without JobSet's CRD there are none."""
    jobsets, runtime, backoffs = operator.jobsets, operator.runtime, dict[Key, Backoff]()
    tasks = [
        runtime.start_task(jobsets.reflector.run(), "watch of JobSets"),
        runtime.start_task(_resync_jobsets(operator), "resync of JobSets"),
    ]
    try:
        while True:
            jobsets.changed.clear()
            for key in jobsets.take_due():
                await _run_pass(operator, key, backoffs)
            backoffs = {key: backoff for key, backoff in backoffs.items() if backoff.is_failing}
            delay = jobsets.get_delay(STORE_RESYNC_SECONDS)
            await runtime.wait_for_any(jobsets.changed.wait(), runtime.sleep(delay))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_pass(operator: Operator, key: Key, backoffs: dict[Key, Backoff]) -> None:
    """Run one pass, and request the next one."""
    backoff = backoffs.setdefault(key, Backoff(FIRST_JOBSET_BACKOFF_SECONDS, LONGEST_JOBSET_BACKOFF_SECONDS))
    try:
        delay = await reconcile_jobset(operator, key)
        backoff.record_success()
    except Exception as error:
        delay = backoff.record_failure()
        is_expected = isinstance(error, kopf.TemporaryError | kopf.PermanentError | InputError)
        trace = None if is_expected else error
        log.warning("JobSet %s/%s: %s; retrying in %.1f s", *key, error, delay, exc_info=trace)
    if delay is not None:
        operator.jobsets.request_pass(key, delay)


async def _resync_jobsets(operator: Operator) -> None:
    """Check the store against a list every minute, and request passes: a watch may have missed a change."""
    while True:
        await operator.runtime.sleep(STORE_RESYNC_SECONDS)
        try:
            await operator.jobsets.reflector.refresh()
        except NotFound:
            continue  # this cluster has no JobSets
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("JobSets could not be listed; retrying: %s", error)
        operator.jobsets.wake_all()
