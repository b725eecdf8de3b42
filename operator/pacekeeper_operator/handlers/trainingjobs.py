"""One reconcile loop a TrainingJob, woken by whatever concerns it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import kopf

from pacekeeper_analysis.errors import InputError

from .. import metrics
from ..api import GROUP, MANAGER, VERSION, Job
from ..cluster import REQUEST_SECONDS
from ..limits import Backoff
from ..services.operator import Operator
from ..services.reconcile import clean_up, close_incidents, desk_for, hide, reconcile

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
CLEANING_SECONDS = 1.0
"""Between two looks at what is left of a deleted job."""
log = logging.getLogger(__name__)


@kopf.daemon(GROUP, VERSION, "trainingjobs", cancellation_polling=1)
async def keep(memo: kopf.Memo, body: kopf.Body, stopped: kopf.DaemonStopped, **_: Any) -> None:
    """Reconcile until the job is deleted or the operator ends; errors are tried again, ever more slowly."""
    operator: Operator = memo.operator
    await operator.runtime.either(operator.know(), stopped.wait())
    while not stopped:
        try:
            job = Job.parse(dict(body))
        except InputError as error:
            log.warning("a TrainingJob cannot be read: %s", error)
            await operator.runtime.either(operator.runtime.sleep(LONGEST_BACKOFF_SECONDS), stopped.wait())
            continue
        if job.deleted:
            break
        async with operator.memory.of(job).kept:
            await _keep(operator, job, body, stopped)


@kopf.on.delete(GROUP, VERSION, "trainingjobs")
async def take_down(memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:
    """Return when nothing of the job is left but its incidents: kopf takes the finalizer off only then. Where this
    operator ends before that, the next one starts over.

    Neither a spec nor a bookkeeping that cannot be read holds this up.
    """
    operator: Operator = memo.operator
    await operator.know()
    job = Job.named(dict(body))
    async with operator.memory.of(job).kept:
        await _take_down(operator, job, body)
    operator.memory.forget(job)
    operator.passes((job.namespace, job.name))  # the ends of its own pods are no losses


async def _keep(operator: Operator, job: Job, body: kopf.Body, stopped: kopf.DaemonStopped) -> None:
    """As long as the job can be read."""
    desk, backoff = desk_for(operator, job, dict(body)), Backoff(FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS)
    where = f"job {job.namespace}/{job.name}"
    try:
        while not stopped:
            await operator.runtime.either(operator.begin_pass(), stopped.wait())
            operator.passes((job.namespace, job.name))
            if stopped:
                break
            started = operator.runtime.monotonic()
            job = Job.parse(dict(body))  # as it is now: what has changed meanwhile is no news after this pass
            if job.deleted:
                break
            try:
                desk.job, desk.body = job, dict(body)
                wait = await reconcile(operator, desk)
                backoff.succeeded()
            except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
                metrics.RECONCILE_ERRORS.inc()
                wait = backoff.failed()
                log.warning("%s: %s; tried again in %.1f s", where, error, wait)
            except Exception:
                metrics.RECONCILE_ERRORS.inc()
                wait = backoff.failed()
                log.exception("%s: a pass failed; tried again in %.1f s", where, wait)
            metrics.RECONCILE_SECONDS.observe(operator.runtime.monotonic() - started)
            await operator.runtime.either(desk.memory.wake.wait(), stopped.wait(), operator.runtime.sleep(wait))
    except InputError as error:
        log.warning("%s cannot be read any more: %s", where, error)
    finally:
        hide(job)
        operator.passes((job.namespace, job.name))
        if "deletionTimestamp" in body["metadata"]:
            # A pod whose creation is cut off may appear after the list that finds none, and so outlive its job.
            await desk.errands.drain(REQUEST_SECONDS)
        await desk.errands.close()
        await desk.status_writer.close()


async def _take_down(operator: Operator, job: Job, body: kopf.Body) -> None:
    desk, backoff = desk_for(operator, job, dict(body)), Backoff(CLEANING_SECONDS, LONGEST_BACKOFF_SECONDS)
    where = f"job {job.namespace}/{job.name}"
    try:
        await close_incidents(operator, desk)
    except Exception as error:  # its namespace may be going, too
        log.warning("%s is being deleted, its incidents stay open: %r", where, error)
    while True:
        wait = CLEANING_SECONDS
        try:
            if await clean_up(operator, desk):
                return
            backoff.succeeded()
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            wait = backoff.failed()
            log.warning("%s is being deleted: %s", where, error)
        except Exception:
            wait = backoff.failed()
            log.exception("%s is being deleted", where)
        await operator.runtime.sleep(wait)


@kopf.on.event(GROUP, VERSION, "trainingjobs")
async def changed(memo: kopf.Memo, body: kopf.Body, namespace: str | None, name: str, **_: Any) -> None:
    """The user wants something else. Our own words on how the job is wake nobody."""
    operator: Operator = memo.operator
    known = operator.memory.find(namespace or "", name)
    if known is not None and _is_news(known.job, dict(body)):
        known.wake.set()


def _is_news(known: Job | None, body: dict[str, Any]) -> bool:
    """Whether more than its status may have changed; of one that another controller runs, that is news as well."""
    if known is None or known.spec.managed_by != MANAGER:
        return True
    return replace(Job.named(body), spec=known.spec, queued=known.queued) != known  # its generation tells of its spec
