"""One pass over one job: observe, evaluate, write the state, submit effects, report the status.

Level-triggered: the operator may crash after any step, and the next pass, of any operator, continues from the stored
state. No effect runs before the decision is stored. No effect delays a pass. The status is reported last, even if an
earlier step failed.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Plan

from .. import metrics
from ..api.incident import IncidentOutcome
from ..api.names import DEFAULT_MANAGER
from ..api.training_job import JobPhase, JobStatus, RemediationMode, TrainingJob
from ..decide.effects import Effect, RequestQuarantine
from ..decide.evaluate import PassResult, evaluate_job, list_effects
from ..decide.failures import node_lost
from ..decide.lifecycle import status as statuses
from ..decide.network import slow_communication
from ..decide.placement import workforce
from ..decide.stragglers import collective_waits, shadow, verify
from ..decide.stragglers.straggler import get_window_steps
from ..kube.client import PODS, TRAINING_JOBS, Conflict, NotFound, Object
from ..observe import gather
from ..pods.checkpoint_server import is_checkpoint_server_name
from ..pods.queues import apply_queue_decision, read_remote_progress
from ..services import events, incidents, queues
from ..services.fabrics import update_traffic
from ..services.operator import Operator
from ..services.shared.prometheus_poller import MONITORED_PHASES
from ..state.cluster_view import FRESH_WORKER_SECONDS
from ..state.desired_state import DesiredState
from ..state.effect_results import BlockedAction
from ..state.job_requests import LinkCheck
from ..state.observation import Observation
from ..state.policy import Policy
from . import job_state
from .effect_handlers import QUEUE_POLL_SECONDS, handle_effect
from .effect_runner import EffectRunner
from .job_context import JobContext
from .status_writer import StatusWriter

MAX_IDLE_PASSES_PER_SECOND = 50.0
"""Passes per second over all jobs that train without changes.

A pass takes 2 ms, so that these passes take a tenth of a core. Up to 100 jobs are evaluated as often as Prometheus is
queried.
"""
MAX_CHECKED_WORKERS_PER_SECOND = 1000.0
"""The same limit for the workers of one job.

A pass takes 20 µs per worker. Jobs of up to 2,000 workers are evaluated as often as Prometheus is queried.
"""
PASS_INTERVAL_JITTER = 0.25
"""Share of the interval by which an idle pass comes earlier or later, so that jobs that woke together separate again.
"""
MIN_STATUS_INTERVAL_SECONDS, MAX_STATUSES_PER_SECOND = 15.0, 20.0
"""Bounds of status writes that change only metrics: the minimum interval per job, and the rate of all jobs together."""
STATUS_INTERVAL_JITTER = 0.5
"""Maximum share of the interval by which such a write comes later.

Without it, all jobs would write at once after a restart, indefinitely.
"""
IDLE_PASS_INTERVAL_SECONDS = 30.0
MAX_ESTIMATED_INLINE_RANKS = 64
"""Ranks up to which means are weighed without a thread: it takes less than a thread's start would."""
INVESTIGATION_POLL_SECONDS = 0.5
"""Seconds between two passes over a job with an open investigation."""
log = logging.getLogger(__name__)


async def reconcile_job(operator: Operator, context: JobContext) -> float:
    """Run one pass and return the seconds until the next one, unless something wakes it earlier.

    Raises the errors that prevent the pass.
    """
    context.cache.wake.clear()  # first: a failed pass must not wake itself
    operator.require_leadership()
    context.cache.update(job=context.job)
    if context.job.spec.managed_by != DEFAULT_MANAGER:
        return await _sync_managed_elsewhere(operator, context)
    try:
        if not context.cache.is_loaded:
            await _load_state(operator, context)
        await _refresh_queue_decision(operator, context)
    except Exception as error:
        await _report_unreadable_state(operator, context, str(error))
        raise
    observation = await _observe_job(operator, context)
    policy = build_policy(operator, context.job)
    observation = await estimate_stragglers(operator, context, observation, policy)
    with operator.passes.measure_compute():
        result = evaluate_job(observation, policy)
    blocked = count_step_failures(result)
    metrics.count_disagreements(shadow.list_disagreements(observation, result.desired))
    failure: Exception | None = None
    try:
        await _write_state(operator, context, result.desired)
        await context.effect_runner.submit(list_effects(result.observation, policy, context.written_incidents))
    except Exception as caught:
        blocked, failure = (*blocked, BlockedAction("job state", str(caught))), caught
    stored = context.cache.desired or result.desired  # only the stored state counts
    reported = result.observation.with_desired(stored).with_blocked_actions(
        blocked + context.effect_runner.blocked_actions
    )
    await _report_status(operator, context, reported)
    if failure is not None:
        raise failure
    return _get_pass_delay(operator, context, result.observation)


async def _sync_managed_elsewhere(operator: Operator, context: JobContext) -> float:
    """Synchronize the queue of a job that another controller runs, and whose status that controller writes.

    The job waits in its queue like any other. MultiKueue runs it in another cluster once that cluster has admitted it.
    """
    if not context.job.queue:
        return IDLE_PASS_INTERVAL_SECONDS
    stage = read_remote_progress(JobStatus.parse(context.body.get("status") or {}))
    context.cache.results.queue_decision = await queues.sync_workload(
        operator, context.job, context.cache.results.queue_decision, stage
    )
    return QUEUE_POLL_SECONDS


async def _refresh_queue_decision(operator: Operator, context: JobContext) -> None:
    """Apply the queue's decision to the job before anything else is decided.

    A new operator must neither stop a job that trains, nor start one that waits.
    """
    cache, job = context.cache, context.job
    if job.queue and cache.results.queue_decision is None:
        cache.results.queue_decision = await queues.read_decision(operator, job, cache.desired)
    cache.update(job=apply_queue_decision(job, cache.results.queue_decision))


def build_policy(operator: Operator, job: TrainingJob) -> Policy:
    """Combine the job's remediation settings with the platform's limits."""
    remediation, settings = job.spec.remediation, operator.settings
    return Policy(
        mode=RemediationMode.ACT
        if remediation.mode is RemediationMode.ACT and settings.mode is RemediationMode.ACT
        else RemediationMode.RECOMMEND,
        allow=frozenset(remediation.allow),
        max_restarts=remediation.max_restarts,
        restart_window=remediation.restart_window,
        rounds_without_progress=remediation.max_rounds_without_progress,
        exit_codes=remediation.exit_codes,
        paused=operator.paused,
        grace_after_start=settings.grace_after_start,
        applies_network_policy=settings.network_policies,
        link_probes_per_hour=settings.link_probes_per_hour,
        profiles_per_hour=settings.profiles_per_hour,
    )


async def clean_up(operator: Operator, context: JobContext) -> bool:
    """Delete what remains of a deleted job and its owner references do not remove in time.

    Returns whether nothing is left.

    A pod whose node does not confirm its end is deleted by force. The job's Incidents stay.
    """
    now, remaining = operator.runtime.now(), await gather.list_job_pods(operator.cluster, context.job)
    # Workers save a last checkpoint through the server.
    for pod in [pod for pod in remaining if not is_checkpoint_server_name(context.job, pod.name)] or remaining:
        node = operator.stores.nodes.get(("", pod.node))
        record = (
            context.cache.desired.state.placement.find_worker(pod.name) if context.cache.desired is not None else None
        )
        lost = bool(pod.node) and (node is None or not node.ready)
        overdue = operator.clock.agrees and workforce.is_overdue(pod, now)
        force = lost or overdue or (record is not None and record.force)
        if not pod.deleting or force:
            grace = 0 if force else None
            await operator.cluster.delete(PODS, pod.name, context.job.namespace, uid=pod.uid, grace=grace)
    return not remaining


async def close_incidents(operator: Operator, context: JobContext) -> None:
    """Close the open Incidents of a deleted job as superseded: the operator can no longer observe a recovery."""
    desired = context.cache.desired or await job_state.load_state(operator.cluster, context.job, context.cache)
    current = desired.state.incidents.current if desired is not None else ()
    closed = [
        incident if incident.outcome is not None else replace(incident, outcome=IncidentOutcome.SUPERSEDED)
        for incident in current
    ]
    for ended in closed:
        await incidents.write_incident(operator.cluster, context.job, ended, operator.settings.incident_retention)
    for ended in closed:  # afterwards: a failure here must keep no Incident open
        await operator.node_histories.record_incident(context.job, ended)


async def _load_state(operator: Operator, context: JobContext) -> None:
    """Load the job's stored state into the cache, or create the first one."""
    listed = (
        operator.stores.listed_states.pop((context.job.namespace, context.job.name), None)
        if context.cache.desired is None
        else None
    )
    if await job_state.load_state(operator.cluster, context.job, context.cache, listed) is None:
        pods = gather.select_job_pods(operator.stores.pods, context.job)
        now, status = operator.runtime.now(), _get_status(context)
        await job_state.create_state(
            operator.cluster,
            context.job,
            context.cache,
            pods,
            now,
            status.round or 0,
            trained=status.step is not None,
        )


async def _observe_job(operator: Operator, context: JobContext) -> Observation:
    cache, now = context.cache, operator.runtime.now()
    assert cache.desired is not None
    assert cache.job is not None
    job = cache.job
    cache.metrics = gather.collect_metrics(cache, operator.prometheus.get_metrics(job, now), now)
    with operator.passes.measure_compute():
        nodes = operator.stores.refresh_node_snapshot(now)
        cluster_view = replace(
            gather.collect_cluster_view(operator.jobs, job, cache.desired, nodes, now),
            levels=tuple(operator.stores.levels),
            network=operator.network,
            unreliable_nodes=operator.node_histories.unreliable_nodes,
        )
        observation = gather.build_observation(
            operator.jobs.started_at,
            cache,
            gather.select_job_pods(operator.stores.pods, job),
            cluster_view,
            now,
            operator.runtime.create_identifier(),
            clock_agrees=operator.clock.agrees,
        )
    if node_lost.needs_reachability_probe(observation):
        observation = await gather.probe_suspected_workers(observation)
    if observation.evidence:
        await operator.runtime.compute_in_thread(lambda: prefetch_analysis(observation))
    return observation.with_desired(drop_closed_incidents(context, observation.desired))


async def estimate_stragglers(
    operator: Operator, context: JobContext, observation: Observation, policy: Policy
) -> Observation:
    """Return the Observation with what the estimator knows. It decides nothing, so an error costs only its state."""
    cache = context.cache
    advance = partial(shadow.advance_estimate, cache.estimator, observation, policy, cache.means)
    try:
        large = observation.plan.world_size > MAX_ESTIMATED_INLINE_RANKS or bool(observation.evidence)
        cache.estimator = await operator.runtime.compute_in_thread(advance) if large else advance()
    except Exception:
        log.exception("job %s/%s: the estimator failed, and begins again", context.job.namespace, context.job.name)
        metrics.STEP_FAILURES.inc()
        cache.estimator = None
    return replace(observation, estimate=None if cache.estimator is None else cache.estimator.estimate)


def prefetch_analysis(observation: Observation) -> None:
    """Compute the expensive analyses in a thread, so that polls are answered and the Lease is renewed.

    An error here is raised again in the step that uses the result.
    """
    with suppress(Exception):
        collective_waits.prefetch_collective_waits(observation)
        slow_communication.prefetch_delay_matrix(observation)


async def _write_state(operator: Operator, context: JobContext, desired: DesiredState) -> None:
    """Write plan and state; no other code does. Raises Conflict if another writer was faster.

    If only the requests have changed, nothing is written. The workers concerned receive them.
    """
    cache, before = context.cache, context.cache.desired
    if desired == before:
        return
    if before is not None and desired.is_stored_as(before):
        cache.publish_requests(desired.requests)
        return
    try:
        await job_state.write_state(operator.cluster, context.job, cache, desired)
    except (Conflict, NotFound):  # another writer changed or deleted it
        cache.resource_version = ""  # forces a reload
        raise
    update_traffic(operator, context.job)
    if before is not None and before.plan.sync_mode is not desired.plan.sync_mode:
        note = f"{before.plan.sync_mode} → {desired.plan.sync_mode}: {desired.state.adaptation.mode_reason}"
        await events.emit_job_event(operator, context.job, "SyncModeChanged", note, "ChangeSyncMode")
    if before is not None and (note := describe_resize(before.plan, desired.plan)):
        await events.emit_job_event(
            operator, context.job, "Resized", f"{note} of {context.job.spec.replicas} workers", "Resize"
        )


def describe_resize(before: Plan, after: Plan) -> str:
    """Return the change in the number of members as text. Empty: there is none, or the job starts or ends."""
    old_size, new_size = len(before.members), len(after.members)
    return f"{old_size} → {new_size}" if old_size and new_size and old_size != new_size else ""


def count_step_failures(result: PassResult) -> tuple[BlockedAction, ...]:
    for _ in result.failed_steps:
        metrics.STEP_FAILURES.inc()
    return tuple(BlockedAction("reconcile step", message) for message in result.failed_steps)


def drop_closed_incidents(context: JobContext, desired: DesiredState) -> DesiredState:
    """Drop Incidents that ended and whose end is stored in the cluster."""
    closed = frozenset(name for name, incident in context.written_incidents.items() if incident.outcome is not None)
    window = desired.requests.profile_window
    closed -= {"" if window is None else window.incident}  # its profile is still in progress
    remaining = desired.state.incidents.sweep(closed)
    if remaining is desired.state.incidents:
        return desired
    retained = {incident.name for incident in remaining.current}
    context.written_incidents = {
        name: incident for name, incident in context.written_incidents.items() if name in retained or name not in closed
    }
    return desired.with_incidents(current=remaining.current)


async def _report_status(operator: Operator, context: JobContext, observation: Observation) -> None:
    """Patch the status: at once if phase or conditions change, rarely for metrics."""
    policy = build_policy(operator, context.job)
    status = statuses.build_job_status(observation, policy, _get_status(context))
    context.cache.update(phase=status.phase)
    context.cache.reporting_members = sum(
        view.silent_seconds <= FRESH_WORKER_SECONDS for view in observation.members if view.heartbeat
    )
    used = observation.state.budget.count_restarts_within(observation.now, policy.restart_window)
    restarts_left = max(0, policy.max_restarts - used)
    metrics.publish_job_metrics(context.job.namespace, context.job.name, status, restarts_left, policy.max_restarts)
    show_link_metrics(context.job, observation.requests.link_check)
    metrics.publish_estimate(context.job.namespace, context.job.name, observation.estimate)
    await _patch_status(operator, context, status)


def hide_job_metrics(job: TrainingJob) -> None:
    """Remove the metrics of a job that is no longer reconciled."""
    metrics.publish_job_metrics(job.namespace, job.name, None)
    metrics.publish_link_metrics(job.namespace, job.name, None)
    metrics.publish_estimate(job.namespace, job.name, None)


def show_link_metrics(job: TrainingJob, link_check: LinkCheck | None) -> None:
    conclusive = link_check if link_check is not None and link_check.conclusive else None
    sides = (
        [(side.rank, "sends" if side.sends else "receives", side.ratio) for side in conclusive.sides]
        if conclusive
        else ()
    )
    metrics.publish_link_metrics(
        job.namespace, job.name, None if conclusive is None else len(conclusive.hot_places), sides
    )


async def _report_unreadable_state(operator: Operator, context: JobContext, reason: str) -> None:
    """Report why the job's state cannot be read or created."""
    status = statuses.build_unreadable_status(
        _get_status(context), context.job.generation, reason, operator.runtime.now()
    )
    metrics.publish_job_metrics(context.job.namespace, context.job.name, status)
    await _patch_status(operator, context, status)


def _get_status(context: JobContext) -> JobStatus:
    if context.status is None:
        try:
            context.status = JobStatus.parse(context.body.get("status") or {})
        except InputError:
            context.status = JobStatus()
    return context.status


async def _patch_status(operator: Operator, context: JobContext, status: JobStatus) -> None:
    if context.status_writer.defer_if_busy():
        return
    before, now = _get_status(context), operator.runtime.monotonic()
    status_known = not context.status_writer.has_failed  # else the stored status is unknown
    if status_known and status == before:
        return
    pause = (1 + context.status_jitter) * operator.passes.get_interval_seconds(
        MAX_STATUSES_PER_SECOND, MIN_STATUS_INTERVAL_SECONDS
    )
    metrics_only = status_known and _select_urgent_fields(status) == _select_urgent_fields(before)
    written_at = context.status_written_at
    if metrics_only and written_at is not None and now - written_at < pause:
        return

    async def write() -> None:
        patch = {"status": status.to_patch()}
        await operator.cluster.patch(
            TRAINING_JOBS, context.job.name, patch, context.job.namespace, subresource="status"
        )
        if status.phase != before.phase:
            log.info("job %s/%s is %s", context.job.namespace, context.job.name, status.phase)
        context.status, context.status_written_at = status, now

    await context.status_writer.write(write, waits=not metrics_only)


def _select_urgent_fields(status: JobStatus) -> object:
    return (
        status.phase,
        [(c.type, c.status, c.reason) for c in status.conditions],
        status.round,
        status.workers,
        status.restarts,
        status.sync_mode,
        status.observed_generation,
    )


def _get_pass_delay(operator: Operator, context: JobContext, observation: Observation) -> float:
    """Return the seconds until the next pass, if nothing wakes it earlier."""
    return max(0.05, min(_get_pass_interval(operator, context, observation), context.effect_runner.get_retry_delay()))


def _get_pass_interval(operator: Operator, context: JobContext, observation: Observation) -> float:
    if observation.job.queue_hold_reason:
        return QUEUE_POLL_SECONDS
    if observation.state.lifecycle.is_over:
        ttl, stopped_at = (
            observation.job.spec.run_policy.ttl_seconds_after_finished,
            observation.state.lifecycle.stopped_at,
        )
        remaining = (
            IDLE_PASS_INTERVAL_SECONDS if ttl is None or stopped_at is None else stopped_at + ttl - observation.now
        )
        busy = any(view.pod is not None and not view.pod.ended for view in observation.workers)
        return max(0.5, min(remaining, 5.0 if busy else IDLE_PASS_INTERVAL_SECONDS))
    if observation.faults or context.cache.phase in (JobPhase.RECOVERING, JobPhase.STARTING):
        return 0.5
    if observation.state.adaptation.investigation is not None:
        return min(INVESTIGATION_POLL_SECONDS, operator.settings.sample_seconds)
    if context.cache.phase in MONITORED_PHASES:
        return _get_idle_interval(operator, context, observation)
    return 5.0 if any(view.pod is not None for view in observation.workers) else IDLE_PASS_INTERVAL_SECONDS


def _get_idle_interval(operator: Operator, context: JobContext, observation: Observation) -> float:
    """Return the interval of passes over a job that trains.

    If many jobs train, or one has thousands of workers, unchanged jobs are evaluated less often. Faults, silent
    workers, pods, and metrics that leave their band wake them. A job with work in progress is evaluated as often as
    usual.
    """
    sample_seconds = operator.settings.sample_seconds
    idle_seconds = operator.passes.get_interval_seconds(
        MAX_IDLE_PASSES_PER_SECOND, max(sample_seconds, len(observation.members) / MAX_CHECKED_WORKERS_PER_SECOND)
    )
    if idle_seconds == sample_seconds or _has_timed_work(context, observation, sample_seconds):
        return sample_seconds
    interval = idle_seconds * (1 + PASS_INTERVAL_JITTER * (2 * operator.runtime.random() - 1))
    if any(view.heartbeat is None for view in observation.members):
        interval = min(interval, max(sample_seconds, operator.settings.grace_after_start - observation.operator_age))
    return interval


def _has_timed_work(context: JobContext, observation: Observation, sample_seconds: float) -> bool:
    """Return whether work is in progress whose end only the clock determines."""
    state = observation.state
    contacts = context.cache.contacts.values()
    return (
        context.cache.phase is not JobPhase.RUNNING
        or any(contact.is_cut_off or not contact.is_reporting(observation.now, sample_seconds) for contact in contacts)
        or not all(map(verify.awaits_worker, state.incidents.open))
        or state.adaptation.local_sgd is not None
        or state.adaptation.route_trial is not None
        or observation.requests.profile is not None
        or state.placement.vacant_since is not None
        or observation.job.spec.run_policy.active_deadline_seconds is not None
        or observation.progress.steps_in_round < get_window_steps(observation)
    )


def create_job_context(operator: Operator, job: TrainingJob, body: Object) -> JobContext:
    """Create the context in which this operator reconciles the job."""
    cache = operator.jobs.get_or_create(job)

    async def do(effect: Effect) -> float:
        operator.require_leadership()
        return await handle_effect(operator, context, effect)

    async def ready(effect: Effect) -> None:
        if not isinstance(effect, RequestQuarantine):
            await operator.node_registry.priority_gate.wait_for_turn()

    name = f"job {job.namespace}/{job.name}"
    effect_runner = EffectRunner(operator.runtime, do, cache.wake.set, name, ready)
    now, jitter = operator.runtime.monotonic(), STATUS_INTERVAL_JITTER * operator.runtime.random()
    status_writer = StatusWriter(operator.runtime, cache.wake.set, name)
    context = JobContext(job, body, cache, effect_runner, status_writer, status_written_at=now, status_jitter=jitter)
    return context
