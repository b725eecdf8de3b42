"""One reconcile loop per TrainingJob."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import kopf

from pacekeeper_analysis.errors import InputError

from .. import metrics
from ..api.names import DEFAULT_MANAGER, GROUP, VERSION
from ..api.training_job import TrainingJob
from ..kube.client import REQUEST_SECONDS
from ..limits import Backoff
from ..runtime.reconcile import clean_up, close_incidents, create_job_context, hide_job_metrics, reconcile_job
from ..services.operator import Operator

FIRST_PASS_BACKOFF_SECONDS = 0.5
LONGEST_PASS_BACKOFF_SECONDS = 30.0
CLEANUP_POLL_SECONDS = 1.0
"""Seconds between two checks of what is left of a deleted job."""
log = logging.getLogger(__name__)


@kopf.daemon(GROUP, VERSION, "trainingjobs", cancellation_polling=1)
async def run_job_loop(memo: kopf.Memo, body: kopf.Body, stopped: kopf.DaemonStopped, **_: Any) -> None:
    """Reconcile until the job is deleted or the operator ends. Errors are retried with backoff."""
    operator: Operator = memo.operator
    await operator.runtime.wait_for_any(operator.stores.wait_until_listed(), stopped.wait())
    while not stopped:
        try:
            job = TrainingJob.parse(dict(body))
        except InputError as error:
            log.warning("a TrainingJob cannot be read: %s", error)
            await operator.runtime.wait_for_any(operator.runtime.sleep(LONGEST_PASS_BACKOFF_SECONDS), stopped.wait())
            continue
        if job.deleting:
            break
        async with operator.jobs.get_or_create(job).reconcile_lock:
            await _reconcile_until_stopped(operator, job, body, stopped)


@kopf.on.delete(GROUP, VERSION, "trainingjobs")
async def finalize_job(memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:
    """Return when nothing of the job is left but its Incidents: only then does kopf remove the finalizer.

    If this operator ends before that, the next one starts over. Neither an unreadable spec nor an unreadable state
    blocks the deletion.
    """
    operator: Operator = memo.operator
    await operator.stores.wait_until_listed()
    job = TrainingJob.parse_identity(dict(body))
    async with operator.jobs.get_or_create(job).reconcile_lock:
        await _clean_up_until_gone(operator, job, body)
    operator.jobs.forget(job)
    operator.passes.mark_evaluated((job.namespace, job.name))  # the ends of the job's own pods are not lost workers


async def _reconcile_until_stopped(
    operator: Operator, job: TrainingJob, body: kopf.Body, stopped: kopf.DaemonStopped
) -> None:
    """Reconcile as long as the job can be read."""
    context, backoff = (
        create_job_context(operator, job, dict(body)),
        Backoff(FIRST_PASS_BACKOFF_SECONDS, LONGEST_PASS_BACKOFF_SECONDS),
    )
    label = f"job {job.namespace}/{job.name}"
    try:
        while not stopped:
            await operator.runtime.wait_for_any(operator.passes.wait_for_pass(), stopped.wait())
            operator.passes.mark_evaluated((job.namespace, job.name))
            if stopped:
                break
            started = operator.runtime.monotonic()
            job = TrainingJob.parse(dict(body))  # the current body: earlier changes need no further pass
            if job.deleting:
                break
            try:
                context.job, context.body = job, dict(body)
                wait = await reconcile_job(operator, context)
                backoff.record_success()
            except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
                metrics.RECONCILE_ERRORS.inc()
                wait = backoff.record_failure()
                log.warning("%s: %s; retrying in %.1f s", label, error, wait)
            except Exception:
                metrics.RECONCILE_ERRORS.inc()
                wait = backoff.record_failure()
                log.exception("%s: a pass failed; retrying in %.1f s", label, wait)
            metrics.RECONCILE_SECONDS.observe(operator.runtime.monotonic() - started)
            await operator.runtime.wait_for_any(context.cache.wake.wait(), stopped.wait(), operator.runtime.sleep(wait))
    except InputError as error:
        log.warning("%s cannot be read any more: %s", label, error)
    finally:
        hide_job_metrics(job)
        operator.passes.mark_evaluated((job.namespace, job.name))
        if "deletionTimestamp" in body["metadata"]:
            # A pod whose creation is cut off may appear after the list that finds none, and would outlive its job.
            await context.effect_runner.drain(REQUEST_SECONDS)
        await context.effect_runner.close()
        await context.status_writer.close()


async def _clean_up_until_gone(operator: Operator, job: TrainingJob, body: kopf.Body) -> None:
    context, backoff = (
        create_job_context(operator, job, dict(body)),
        Backoff(CLEANUP_POLL_SECONDS, LONGEST_PASS_BACKOFF_SECONDS),
    )
    label = f"job {job.namespace}/{job.name}"
    try:
        await close_incidents(operator, context)
    except Exception as error:  # its namespace may be terminating, too
        log.warning("%s is being deleted, its incidents stay open: %r", label, error)
    while True:
        wait = CLEANUP_POLL_SECONDS
        try:
            if await clean_up(operator, context):
                return
            backoff.record_success()
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            wait = backoff.record_failure()
            log.warning("%s is being deleted: %s", label, error)
        except Exception:
            wait = backoff.record_failure()
            log.exception("%s is being deleted", label)
        await operator.runtime.sleep(wait)


@kopf.on.event(GROUP, VERSION, "trainingjobs")
async def on_job_changed(memo: kopf.Memo, body: kopf.Body, namespace: str | None, name: str, **_: Any) -> None:
    """Wake the job's loop if the user changed it. The operator's own status writes wake no loop."""
    operator: Operator = memo.operator
    operator.jobsets.wake_for_job((namespace or "", name), dict(body))
    cache = operator.jobs.find(namespace or "", name)
    if cache is not None and _needs_pass(cache.job, dict(body)):
        cache.wake.set()


def _needs_pass(cached: TrainingJob | None, body: dict[str, Any]) -> bool:
    """Return whether more than the status may have changed.

    For a job that another controller runs, the status counts, too.
    """
    if cached is None or cached.spec.managed_by != DEFAULT_MANAGER:
        return True
    return (
        replace(TrainingJob.parse_identity(body), spec=cached.spec, queue_hold_reason=cached.queue_hold_reason)
        != cached
    )  # a changed spec shows in the generation
