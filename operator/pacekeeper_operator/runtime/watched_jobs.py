"""One pass over a watched job, and the loops over all of them.

A pass describes pods and ranks as a plan that no launcher follows, evaluates it by steps that only observe, and writes
Incidents and the WatchedJob's status. Nothing else is written or created for it. Where platform and namespace have
enabled that, the pod of a rank that blocks all others is deleted (`pod_restarts`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import kopf

from pacekeeper_analysis.accounting.gpu_account import GpuAccount
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Plan

from .. import metrics
from ..api.formats import format_time
from ..api.names import ANNOTATION_RETAIN_UNTIL
from ..api.training_job import RemediationMode, Remedy, TrainingJob
from ..api.watched_job import AccountStatus, WatchedJobPhase, WatchedJobStatus
from ..decide.effects import Effect
from ..decide.library_failure import find_library_failure
from ..decide.watched.described_plan import WatchedPodReport, build_virtual_job, describe_plan, place_reports
from ..decide.watched.estimated_faults import Suspect, identify_suspects
from ..decide.watched.evaluate import evaluate_watched_job, list_watched_effects
from ..decide.watched.job_account import account_for_gpus
from ..decide.watched.status import build_watched_status, is_reporting
from ..kube.client import WATCHED_JOBS, Conflict, NotFound
from ..kube.store import Key
from ..limits import Backoff
from ..observe import gather
from ..observe.watched_pods import select_own_gpus
from ..services.operator import Operator
from ..services.shared.watched_stores import STORE_RESYNC_RETRY_SECONDS, STORE_RESYNC_SECONDS
from ..settings import Settings
from ..state.desired_state import DesiredState, State
from ..state.observation import Observation
from ..state.policy import Policy
from . import job_state
from .effect_handlers import handle_effect
from .effect_runner import EffectRunner
from .job_context import JobContext
from .pod_restarts import read_restart_facts
from .reconcile import (
    IDLE_PASS_INTERVAL_SECONDS,
    INVESTIGATION_POLL_SECONDS,
    MAX_IDLE_PASSES_PER_SECOND,
    MIN_STATUS_INTERVAL_SECONDS,
    count_step_failures,
    drop_closed_incidents,
    estimate_stragglers,
    prefetch_analysis,
)
from .status_writer import StatusWriter

WATCHED_PODS_POLL_SECONDS = 1.0
"""Seconds between two assignments of pods to jobs, if no pod changes: their ranks describe themselves in that time."""
WATCHED_CLEANUP_SECONDS = 600.0
FIRST_WATCHED_BACKOFF_SECONDS, LONGEST_WATCHED_BACKOFF_SECONDS = 0.5, 30.0
log = logging.getLogger(__name__)


@dataclass
class WatchedJobContext:
    """State between passes over a watched job. All of it may be lost at any time."""

    base: JobContext
    status: WatchedJobStatus | None = None  # as it is stored; None: not known
    status_written_at: float | None = None  # by the monotonic clock
    suspects: frozenset[Suspect] | None = None  # at that time; None: not known
    account: GpuAccount | None = None  # until the last pass; None: it continues from the status
    retain_until: str | None = None  # the annotation, as it is stored
    last_step: int | None = None  # last completed step that was observed


async def reconcile_watched_job(operator: Operator, context: WatchedJobContext) -> float:
    """Run one pass and return the seconds until the next one, unless something wakes it earlier.

    Raises the errors that prevent the pass.
    """
    base = context.base
    cache = base.cache
    cache.wake.clear()
    operator.require_leadership()
    if not cache.is_loaded:
        await job_state.load_state(operator.cluster, base.job, cache)
    if context.status is None:
        context.status = await _read_status(operator, base.job)
    await _report_library_failure(operator, context)
    await _describe_job(operator, context)
    observation = _observe_job(operator, context)
    if observation.evidence:
        await operator.runtime.compute_in_thread(partial(prefetch_analysis, observation))
    facts = await read_restart_facts(operator, base.job, observation)
    observation = replace(observation, pod_restart=facts)
    policy = build_watch_policy(operator.settings)
    observation = await estimate_stragglers(operator, base, observation, policy)
    with operator.passes.measure_compute():
        result = evaluate_watched_job(observation, policy)
    count_step_failures(result)
    await _write_state(operator, context, result.desired)
    assert cache.desired is not None
    observation = result.observation.with_desired(cache.desired)
    await base.effect_runner.submit(list_watched_effects(observation, base.written_incidents))
    context.last_step = observation.progress.step if observation.progress.step is not None else context.last_step
    await _report_status(operator, context, observation)
    return _get_pass_delay(operator, context, observation)


def build_watch_policy(settings: Settings) -> Policy:
    """Return the policy of all watched jobs: nothing is applied, and every remedy is priced."""
    return Policy(
        mode=RemediationMode.RECOMMEND,
        allow=frozenset(Remedy),
        max_restarts=1,  # none is ever counted, so that the budget is never spent
        restart_window=3600.0,
        rounds_without_progress=0,
        grace_after_start=settings.grace_after_start,
        applies_network_policy=False,
        link_probes_per_hour=0,
        profiles_per_hour=settings.profiles_per_hour,
        observes_links=settings.watch_links,
        observes_profiles=settings.watch_profiles,
        observes_only=True,
    )


async def _read_status(operator: Operator, job: TrainingJob) -> WatchedJobStatus:
    """Return the status that an earlier leader has written, with which the account goes on. Raises NotFound."""
    body = await operator.cluster.get(WATCHED_JOBS, job.name, job.namespace)
    return WatchedJobStatus.parse(body.get("status") or {})


async def _report_library_failure(operator: Operator, context: WatchedJobContext) -> None:
    """Have the injection switched off if the watch has made a rank fail.

    It comes first in a pass: once the pass has settled the fault, its sidecar does not send it again, and the next
    leader would not know of it. Raises the errors of the cluster client.
    """
    job, watched = context.base.job, operator.watched
    found = find_library_failure(context.base.cache.faults.values(), f"{job.namespace}/{job.name}")
    if found is None or watched.on_library_failure is None:
        return
    fault, failure = found
    created = [pod.view.created_at for pod in watched.select_pods(job) if pod.view.name == fault.worker]
    await watched.on_library_failure(failure, created[0] if created else fault.noticed_at)


async def _describe_job(operator: Operator, context: WatchedJobContext) -> None:
    """Store pods and ranks as they are now."""
    base, cache, now = context.base, context.base.cache, operator.runtime.now()
    before = cache.desired or DesiredState(Plan(version=int(now)), State())
    uids = {record.name: record.uid for record in before.state.placement.workers}
    reports = []
    for pod in operator.watched.select_pods(base.job):
        if uids.get(pod.view.name, pod.view.uid) != pod.view.uid:  # what an earlier pod of that name has reported
            cache.contacts.pop(pod.view.name, None)
        contact = cache.contacts.get(pod.view.name)
        report = None if contact is None else contact.heartbeat.watched
        reports.append(WatchedPodReport(pod.view, () if report is None else report.ranks))
    described = describe_plan(before, reports, now, context.last_step)
    cache.update(job=build_virtual_job(base.job, described))
    if described is not cache.desired:
        await _write_state(operator, context, described)


def _observe_job(operator: Operator, context: WatchedJobContext) -> Observation:
    cache, now, watched = context.base.cache, operator.runtime.now(), operator.watched
    assert cache.job is not None
    assert cache.desired is not None
    pods = {f"{pod.namespace}/{pod.view.name}" for pod in watched.select_pods(cache.job)}
    series = select_own_gpus(operator.prometheus.get_metrics(cache.job, now), pods)
    cache.metrics = gather.collect_metrics(cache, series, now)
    nodes = operator.stores.refresh_node_snapshot(now)
    observation = gather.build_observation(
        watched.jobs.started_at,
        cache,
        [pod.view for pod in watched.select_pods(cache.job)],
        gather.collect_cluster_view(watched.jobs, cache.job, cache.desired, nodes, now),
        now,
        operator.runtime.create_identifier(),
        clock_agrees=operator.clock.agrees,
    )
    return place_reports(observation.with_desired(drop_closed_incidents(context.base, observation.desired)))


async def _write_state(operator: Operator, context: WatchedJobContext, desired: DesiredState) -> None:
    """Write the described plan and the bookkeeping. Raises Conflict if another writer was faster."""
    cache, before = context.base.cache, context.base.cache.desired
    if desired == before:
        return
    if before is not None and desired.is_stored_as(before):
        cache.publish_requests(desired.requests)
        return
    try:
        await job_state.write_state(operator.cluster, context.base.job, cache, desired)
    except (Conflict, NotFound):
        cache.resource_version = ""
        raise


async def _report_status(operator: Operator, context: WatchedJobContext, observation: Observation) -> None:
    """Patch the status: at once if phase, conditions, or culprits change, rarely for metrics.

    A new leader waits until the pods have reached it: before, it would report them as silent.
    """
    before, now = context.status or WatchedJobStatus(), operator.runtime.monotonic()
    pods = [view for view in observation.workers if view.alive]
    is_new = observation.operator_age < operator.settings.grace_after_start
    if is_new and not all(map(is_reporting, pods)):
        return
    if context.account is None:
        context.account = (before.account or AccountStatus()).to_account()
    context.account = account_for_gpus(observation, context.account)  # in each pass: few of them write the status
    if context.base.status_writer.defer_if_busy():
        return
    status = build_watched_status(observation, before, context.account, injection_stop=operator.watched.injection_stop)
    metrics.publish_watched_metrics(context.base.job.namespace, context.base.job.name, status)
    ended_at = observation.state.lifecycle.completed_at
    retain_until = None if ended_at is None else format_time(ended_at + operator.settings.watch_retention)
    if (status, retain_until) == (context.status, context.retain_until):
        return
    suspects = identify_suspects(observation)
    is_urgent = _select_urgent_fields(status) != _select_urgent_fields(before) or suspects != context.suspects
    metrics_only = context.status is not None and not is_urgent
    written_at = context.status_written_at
    if metrics_only and written_at is not None and now - written_at < MIN_STATUS_INTERVAL_SECONDS:
        return
    job = context.base.job

    async def write() -> None:
        if retain_until != context.retain_until:
            annotations = {"metadata": {"annotations": {ANNOTATION_RETAIN_UNTIL: retain_until}}}
            await operator.cluster.patch(WATCHED_JOBS, job.name, annotations, job.namespace)
            context.retain_until = retain_until
        patch = {"status": status.to_patch()}
        await operator.cluster.patch(WATCHED_JOBS, job.name, patch, job.namespace, subresource="status")
        context.status, context.status_written_at, context.suspects = status, now, suspects

    await context.base.status_writer.write(write, waits=not metrics_only)


def _select_urgent_fields(status: WatchedJobStatus) -> object:
    conditions = [(condition.type, condition.status, condition.reason) for condition in status.conditions]
    return status.phase, status.pods, status.ranks, conditions, status.waiting, len(status.rounds)


def _get_pass_delay(operator: Operator, context: WatchedJobContext, observation: Observation) -> float:
    if observation.state.lifecycle.completed_at is not None:
        return IDLE_PASS_INTERVAL_SECONDS
    if observation.faults or observation.requests.evidence is not None:
        return INVESTIGATION_POLL_SECONDS
    jobs = sum(1 for _ in operator.watched.jobs)
    interval = max(operator.settings.sample_seconds, jobs / MAX_IDLE_PASSES_PER_SECOND)
    return max(0.05, min(interval, context.base.effect_runner.get_retry_delay()))


def create_watched_context(operator: Operator, job: TrainingJob) -> WatchedJobContext:
    """Create the context in which this operator observes the job."""
    cache = operator.watched.jobs.get_or_create(job)

    async def do(effect: Effect) -> float:
        operator.require_leadership()
        return await handle_effect(operator, base, effect)

    name = f"watched job {job.namespace}/{job.name}"
    effect_runner = EffectRunner(operator.runtime, do, cache.wake.set, name)
    base = JobContext(job, {}, cache, effect_runner, StatusWriter(operator.runtime, cache.wake.set, name))
    return WatchedJobContext(base)


async def run_watched_jobs(operator: Operator) -> None:
    """Watch the pods, and run one loop per watched job, until cancelled."""
    watched, runtime, loops = operator.watched, operator.runtime, dict[Key, asyncio.Task[None]]()
    await _retry_until_read(operator, "WatchedJobs cannot be listed", watched.load)
    await _retry_until_read(operator, "watched pods cannot be listed", watched.reflector.refresh)
    tasks = [
        runtime.start_task(watched.reflector.run(), "watch of watched pods"),
        runtime.start_task(_resync_pods(operator), "resync of watched pods"),
    ]
    cleaned_at = runtime.monotonic()
    try:
        while True:
            watched.changed.clear()
            try:
                for job in await watched.refresh():
                    key = job.namespace, job.name
                    if key not in loops or loops[key].done():
                        loops[key] = runtime.start_task(_run_job_loop(operator, job), f"watched job {key}")
                if runtime.monotonic() - cleaned_at >= WATCHED_CLEANUP_SECONDS and operator.clock.agrees:
                    cleaned_at = runtime.monotonic()
                    await watched.clean_up(runtime.now())
            except (kopf.TemporaryError, kopf.PermanentError) as error:
                log.warning("watched jobs cannot be read; retrying: %s", error)
            loops = {key: task for key, task in loops.items() if not task.done()}
            await runtime.wait_for_any(watched.changed.wait(), runtime.sleep(WATCHED_PODS_POLL_SECONDS))
            await runtime.sleep(INVESTIGATION_POLL_SECONDS)  # a job's pods change together
    finally:
        for task in (*tasks, *loops.values()):
            task.cancel()
        await asyncio.gather(*tasks, *loops.values(), return_exceptions=True)


async def _resync_pods(operator: Operator) -> None:
    while True:
        await operator.runtime.sleep(STORE_RESYNC_SECONDS)
        await _retry_until_read(operator, "watched pods cannot be listed", operator.watched.reflector.refresh)


async def _retry_until_read(operator: Operator, problem: str, read: Callable[[], Awaitable[None]]) -> None:
    """Call `read` until it succeeds."""
    while True:
        try:
            return await read()
        except (kopf.TemporaryError, kopf.PermanentError) as error:
            log.warning("%s; retrying: %s", problem, error)
        await operator.runtime.sleep(STORE_RESYNC_RETRY_SECONDS)


async def _run_job_loop(operator: Operator, job: TrainingJob) -> None:
    """Reconcile until the job has ended and that is written, or its WatchedJob is gone. Errors are retried."""
    context = create_watched_context(operator, job)
    backoff = Backoff(FIRST_WATCHED_BACKOFF_SECONDS, LONGEST_WATCHED_BACKOFF_SECONDS)
    runtime, key = operator.runtime, (job.namespace, job.name)
    try:
        while True:
            await operator.passes.wait_for_pass()
            try:
                async with context.base.cache.reconcile_lock:
                    wait = await reconcile_watched_job(operator, context)
                backoff.record_success()
                if _is_end_written(context):
                    operator.watched.ended.add(key)
                    return
            except Exception as error:
                metrics.RECONCILE_ERRORS.inc()
                wait = backoff.record_failure()
                is_expected = isinstance(error, kopf.TemporaryError | kopf.PermanentError | InputError)
                trace = None if is_expected else error
                log.warning("watched job %s/%s: %s; retrying in %.1f s", *key, error, wait, exc_info=trace)
                if isinstance(error, NotFound | kopf.TemporaryError) and await operator.watched.is_gone(job):
                    return
            await runtime.wait_for_any(context.base.cache.wake.wait(), runtime.sleep(wait))
    finally:
        metrics.publish_watched_metrics(job.namespace, job.name, None)
        await context.base.effect_runner.close()
        await context.base.status_writer.close()


def _is_end_written(context: WatchedJobContext) -> bool:
    """Return whether the job's end, and that of its incidents, are written."""
    cache = context.base.cache
    is_written = context.status is not None and context.status.phase is WatchedJobPhase.ENDED
    is_over = cache.desired is not None and cache.desired.state.lifecycle.completed_at is not None
    return is_written and is_over and cache.desired is not None and not cache.desired.state.incidents.current
