"""One reconcile loop a TrainingJob, woken by whatever concerns it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import kopf

from pacekeeper_analysis.errors import InputError

from .. import metrics
from ..api import GROUP, DEFAULT_MANAGER, VERSION, TrainingJob
from ..cluster import REQUEST_SECONDS
from ..limits import Backoff
from ..services.operator import Operator
from ..services.reconcile import clean_up, close_incidents, create_job_context, hide_job_metrics, reconcile_job

FIRST_PASS_BACKOFF_SECONDS = 0.5
LONGEST_PASS_BACKOFF_SECONDS = 30.0
CLEANUP_POLL_SECONDS = 1.0
"""Between two looks at what is left of a deleted job."""
log = logging.getLogger(__name__)


@kopf.daemon(GROUP, VERSION, "trainingjobs", cancellation_polling=1)
async def run_job_loop(memo: kopf.Memo, body: kopf.Body, stopped: kopf.DaemonStopped, **_: Any) -> None:
    """Reconcile until the job is deleted or the operator ends; errors are tried again, ever more slowly."""
    operator: Operator = memo.operator
    await operator.runtime.wait_for_any(operator.wait_until_listed(), stopped.wait())
    while not stopped:
        try:
            job = TrainingJob.parse(dict(body))
        except InputError as error:
            log.warning("a TrainingJob cannot be read: %s", error)
            await operator.runtime.wait_for_any(operator.runtime.sleep(LONGEST_PASS_BACKOFF_SECONDS), stopped.wait())
            continue
        if job.deleted:
            break
        async with operator.jobs.get_or_create(job).reconcile_lock:
            await _reconcile_until_stopped(operator, job, body, stopped)


@kopf.on.delete(GROUP, VERSION, "trainingjobs")
async def finalize_job(memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:
    """Return when nothing of the job is left but its incidents: kopf takes the finalizer off only then. Where this
    operator ends before that, the next one starts over.

    Neither a spec nor a bookkeeping that cannot be read holds this up.
    """
    operator: Operator = memo.operator
    await operator.wait_until_listed()
    job = TrainingJob.parse_identity(dict(body))
    async with operator.jobs.get_or_create(job).reconcile_lock:
        await _clean_up_until_gone(operator, job, body)
    operator.jobs.forget(job)
    operator.mark_evaluated((job.namespace, job.name))  # the ends of its own pods are no losses


async def _reconcile_until_stopped(operator: Operator, job: TrainingJob, body: kopf.Body, stopped: kopf.DaemonStopped) -> None:
    """As long as the job can be read."""
    desk, backoff = create_job_context(operator, job, dict(body)), Backoff(FIRST_PASS_BACKOFF_SECONDS, LONGEST_PASS_BACKOFF_SECONDS)
    where = f"job {job.namespace}/{job.name}"
    try:
        while not stopped:
            await operator.runtime.wait_for_any(operator.wait_for_pass(), stopped.wait())
            operator.mark_evaluated((job.namespace, job.name))
            if stopped:
                break
            started = operator.runtime.monotonic()
            job = TrainingJob.parse(dict(body))  # as it is now: what has changed meanwhile is no news after this pass
            if job.deleted:
                break
            try:
                desk.job, desk.body = job, dict(body)
                wait = await reconcile_job(operator, desk)
                backoff.record_success()
            except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
                metrics.RECONCILE_ERRORS.inc()
                wait = backoff.record_failure()
                log.warning("%s: %s; tried again in %.1f s", where, error, wait)
            except Exception:
                metrics.RECONCILE_ERRORS.inc()
                wait = backoff.record_failure()
                log.exception("%s: a pass failed; tried again in %.1f s", where, wait)
            metrics.RECONCILE_SECONDS.observe(operator.runtime.monotonic() - started)
            await operator.runtime.wait_for_any(desk.cache.wake.wait(), stopped.wait(), operator.runtime.sleep(wait))
    except InputError as error:
        log.warning("%s cannot be read any more: %s", where, error)
    finally:
        hide_job_metrics(job)
        operator.mark_evaluated((job.namespace, job.name))
        if "deletionTimestamp" in body["metadata"]:
            # A pod whose creation is cut off may appear after the list that finds none, and so outlive its job.
            await desk.effect_runner.drain(REQUEST_SECONDS)
        await desk.effect_runner.close()
        await desk.status_writer.close()


async def _clean_up_until_gone(operator: Operator, job: TrainingJob, body: kopf.Body) -> None:
    desk, backoff = create_job_context(operator, job, dict(body)), Backoff(CLEANUP_POLL_SECONDS, LONGEST_PASS_BACKOFF_SECONDS)
    where = f"job {job.namespace}/{job.name}"
    try:
        await close_incidents(operator, desk)
    except Exception as error:  # its namespace may be going, too
        log.warning("%s is being deleted, its incidents stay open: %r", where, error)
    while True:
        wait = CLEANUP_POLL_SECONDS
        try:
            if await clean_up(operator, desk):
                return
            backoff.record_success()
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            wait = backoff.record_failure()
            log.warning("%s is being deleted: %s", where, error)
        except Exception:
            wait = backoff.record_failure()
            log.exception("%s is being deleted", where)
        await operator.runtime.sleep(wait)


@kopf.on.event(GROUP, VERSION, "trainingjobs")
async def on_job_changed(memo: kopf.Memo, body: kopf.Body, namespace: str | None, name: str, **_: Any) -> None:
    """The user wants something else. Our own words on how the job is wake nobody."""
    operator: Operator = memo.operator
    known = operator.jobs.find(namespace or "", name)
    if known is not None and _needs_pass(known.job, dict(body)):
        known.wake.set()


def _needs_pass(known: TrainingJob | None, body: dict[str, Any]) -> bool:
    """Whether more than its status may have changed; of one that another controller runs, that is news as well."""
    if known is None or known.spec.managed_by != DEFAULT_MANAGER:
        return True
    return replace(TrainingJob.parse_identity(body), spec=known.spec, queued=known.queued) != known  # its generation tells of its spec
