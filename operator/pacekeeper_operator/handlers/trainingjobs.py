"""One reconcile loop a TrainingJob, woken by whatever concerns it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import kopf

from pacekeeper_analysis.errors import InputError

from .. import metrics
from ..api import GROUP, VERSION, Job
from ..services.operator import Operator
from ..services.reconcile import Desk, clean_up, close_incidents, gone, reconcile

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
log = logging.getLogger(__name__)


@kopf.daemon(GROUP, VERSION, "trainingjobs", cancellation_polling=1)
async def keep(
    memo: kopf.Memo, body: kopf.Body, namespace: str | None, name: str, stopped: kopf.DaemonStopped, **_: Any
) -> None:
    """Reconcile until the job is deleted or the operator ends; errors are tried again, ever more slowly."""
    operator: Operator = memo.operator
    memory = operator.memory.of(namespace or "", name)
    desk = Desk(Job.parse(dict(body)), dict(body), memory)
    backoff = FIRST_BACKOFF_SECONDS
    while not stopped:
        started = time.monotonic()
        try:
            desk.job, desk.body = Job.parse(dict(body)), dict(body)
            if desk.job.deleted:
                break
            wait, backoff = await reconcile(operator, desk), FIRST_BACKOFF_SECONDS
        except (kopf.TemporaryError, kopf.PermanentError, InputError) as error:
            metrics.RECONCILE_ERRORS.inc()
            log.warning("job %s/%s: %s; tried again in %.1f s", namespace, name, error, backoff)
            wait, backoff = backoff, min(LONGEST_BACKOFF_SECONDS, 2 * backoff)
        except Exception:
            metrics.RECONCILE_ERRORS.inc()
            log.exception("job %s/%s: a pass failed; tried again in %.1f s", namespace, name, backoff)
            wait, backoff = backoff, min(LONGEST_BACKOFF_SECONDS, 2 * backoff)
        metrics.RECONCILE_SECONDS.observe(time.monotonic() - started)
        await _pause(wait, memory.wake, stopped)
    if Job.parse(dict(body)).deleted:
        await _take_down(operator, desk)


async def _take_down(operator: Operator, desk: Desk) -> None:
    """Until nothing of the job is left but its incidents; then kopf takes the finalizer off."""
    try:
        await close_incidents(operator, desk)
    except (kopf.TemporaryError, kopf.PermanentError) as error:  # its namespace may be going, too
        log.warning("job %s/%s is being deleted, its incidents stay open: %s", desk.job.namespace, desk.job.name, error)
    while True:
        try:
            await clean_up(operator, desk)
            if await gone(operator, desk):
                break
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("job %s/%s is being deleted: %s", desk.job.namespace, desk.job.name, error)
        await asyncio.sleep(1)
    operator.memory.forget(desk.job.namespace, desk.job.name)


@kopf.on.event(GROUP, VERSION, "trainingjobs")
async def changed(memo: kopf.Memo, namespace: str | None, name: str, **_: Any) -> None:
    """The user wants something else."""
    memory = memo.operator.memory.find(namespace or "", name)
    if memory is not None:
        memory.wake.set()


async def _pause(seconds: float, wake: asyncio.Event, stopped: kopf.DaemonStopped) -> None:
    """Until the time is over, something wakes the loop, or it is to end."""
    waits = [asyncio.ensure_future(wake.wait()), asyncio.ensure_future(stopped.wait())]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
