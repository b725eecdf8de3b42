"""One pass over one job: look, think, write, send off what was written, report.

Level-triggered: every step may be the last one before the operator dies, and the next pass, of whichever operator, goes
on from what is written. Nothing is done that is not written first; nothing that is done keeps a pass waiting; the job's
status is said last, whatever went wrong before.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Plan

from .. import metrics
from ..api import DEFAULT_MANAGER, TrainingJob, JobPhase, JobStatus, RemediationMode, IncidentOutcome
from ..cluster import TRAINING_JOBS, PODS, Conflict, NotFound, Object
from ..decide import links, node_lost, verify, waits, workforce
from ..decide import status as statuses
from ..decide.straggler import get_window_steps
from ..decide.think import PassResult, list_effects, evaluate_job
from ..effects import RequestQuarantine, Effect
from ..observation import FRESH_WORKER_SECONDS, BlockedAction, Observation, Policy
from ..observe import gather
from ..queues import read_remote_progress, apply_queue_decision
from ..state import DesiredState, LinkCheck
from . import bookkeeping, events, incidents, node_history, queues
from .desk import JobContext
from .doing import QUEUE_POLL_SECONDS, handle_effect
from .errands import EffectRunner
from .operator import MONITORED_PHASES, Operator
from .status_writer import StatusWriter

MAX_IDLE_PASSES_PER_SECOND = 50.0
"""At jobs that train and of which there is no news, of all of them together: a look takes two milliseconds, so that
they take a tenth of a core. Up to a hundred jobs are looked at as often as Prometheus is asked."""
MAX_CHECKED_WORKERS_PER_SECOND = 1000.0
"""The same for the workers of one job, at which a look takes 20 µs each: of up to two thousand as often."""
PASS_INTERVAL_JITTER = 0.25
"""By so much of its time such a look comes sooner or later: jobs that something has woken together part again."""
MIN_STATUS_INTERVAL_SECONDS, MAX_STATUSES_PER_SECOND = 15.0, 20.0
"""A job's figures are said as seldom as the first, and more seldom where all jobs would be more than the second."""
STATUS_INTERVAL_JITTER = 0.5
"""By up to so much of that time later: else all jobs would say theirs at once after a restart, for ever."""
IDLE_PASS_INTERVAL_SECONDS = 30.0
INVESTIGATION_POLL_SECONDS = 0.5
"""Between two looks at a job that is asked what slows it down."""
log = logging.getLogger(__name__)


async def reconcile_job(operator: Operator, desk: JobContext) -> float:
    """One pass; seconds until the next one is wanted, if nothing wakes it before. Raises what keeps it from looking."""
    desk.cache.wake.clear()  # first of all: a pass that fails must not be its own news
    operator.require_leadership()
    desk.cache.job = desk.job
    if desk.job.spec.managed_by != DEFAULT_MANAGER:
        return await _sync_managed_elsewhere(operator, desk)
    try:
        if not desk.cache.is_loaded:
            await _load_state(operator, desk)
        await _refresh_queue_decision(operator, desk)
    except Exception as error:
        await _report_unreadable_state(operator, desk, str(error))
        raise
    observation = await _observe_job(operator, desk)
    rules = build_policy(operator, desk.job)
    with operator.measure_compute():
        thought = evaluate_job(observation, rules)
    hindrances = _collect_step_failures(thought)
    failure: Exception | None = None
    try:
        await _write_state(operator, desk, thought.desired)
        await desk.effect_runner.submit(list_effects(thought.observation, rules, desk.written_incidents))
    except Exception as caught:
        hindrances, failure = (*hindrances, BlockedAction("bookkeeping", str(caught))), caught
    written = desk.cache.desired or thought.desired  # what is not written is not so
    said = thought.observation.with_desired(written).with_blocked_actions(hindrances + desk.effect_runner.blocked_actions)
    await _report_status(operator, desk, said)
    if failure is not None:
        raise failure
    return _get_pass_delay(operator, desk, thought.observation)


async def _sync_managed_elsewhere(operator: Operator, desk: JobContext) -> float:
    """Another controller runs the job, and writes its status. It stands in its queue as any other: MultiKueue runs it
    in another cluster when that has admitted it."""
    if not desk.job.queue:
        return IDLE_PASS_INTERVAL_SECONDS
    stage = read_remote_progress(JobStatus.parse(desk.body.get("status") or {}))
    desk.cache.queue_decision = await queues.sync_workload(operator, desk.job, desk.cache.queue_decision, stage)
    return QUEUE_POLL_SECONDS


async def _refresh_queue_decision(operator: Operator, desk: JobContext) -> None:
    """The job as its queue lets it be. What that says is known before anything is decided: whoever has just begun must
    neither hold a job that trains, nor let one go that waits."""
    memory, job = desk.cache, desk.job
    if job.queue and memory.queue_decision is None:
        memory.queue_decision = await queues.read_decision(operator, job, memory.desired)
    memory.job = apply_queue_decision(job, memory.queue_decision)


def build_policy(operator: Operator, job: TrainingJob) -> Policy:
    """The job's own wishes under the platform's caps."""
    wish, settings = job.spec.remediation, operator.settings
    return Policy(
        mode=RemediationMode.ACT if wish.mode is RemediationMode.ACT and settings.mode is RemediationMode.ACT else RemediationMode.RECOMMEND,
        allow=frozenset(wish.allow),
        max_restarts=wish.max_restarts,
        restart_window=wish.restart_window,
        rounds_without_progress=wish.max_rounds_without_progress,
        exit_codes=wish.exit_codes,
        paused=operator.paused,
        grace_after_start=settings.grace_after_start,
        applies_network_policy=settings.network_policies,
        link_probes_per_hour=settings.link_probes_an_hour,
        profiles_per_hour=settings.profiles_an_hour,
    )


async def clean_up(operator: Operator, desk: JobContext) -> bool:
    """The job is deleted: what its owner references do not take with them in time goes now; True: nothing is left.

    A pod whose node does not confirm its end is struck off without it. The job's incidents stay.
    """
    now, left = operator.runtime.now(), await gather.list_job_pods(operator.cluster, desk.job)
    for pod in left:
        node = operator.nodes.get(("", pod.node))
        record = desk.cache.desired.state.placement.find_worker(pod.name) if desk.cache.desired is not None else None
        lost = bool(pod.node) and (node is None or not node.ready)
        overdue = operator.clock.agrees and workforce.is_overdue(pod, now)
        force = lost or overdue or (record is not None and record.force)
        if not pod.deleting or force:
            grace = 0 if force else None
            await operator.cluster.delete(PODS, pod.name, desk.job.namespace, uid=pod.uid, grace=grace)
    return not left


async def close_incidents(operator: Operator, desk: JobContext) -> None:
    """The job is deleted: nobody will see what is open recover, and it shall not look open for ever."""
    draft = desk.cache.desired or await bookkeeping.load_state(operator.cluster, desk.job, desk.cache)
    current = draft.state.incidents.current if draft is not None else ()
    over = [one if one.outcome is not None else replace(one, outcome=IncidentOutcome.SUPERSEDED) for one in current]
    for ended in over:
        await incidents.write_incident(operator.cluster, desk.job, ended, operator.settings.incident_retention)
    for ended in over:  # afterwards: the histories of nodes keep no incident open
        await node_history.record_incident(operator, desk.job, ended)


async def _load_state(operator: Operator, desk: JobContext) -> None:
    """What is written of the job into memory; where nothing is, a beginning."""
    listed = operator.listed_states.pop((desk.job.namespace, desk.job.name), None) if desk.cache.desired is None else None
    if await bookkeeping.load_state(operator.cluster, desk.job, desk.cache, listed) is None:
        pods = gather.select_job_pods(operator.pods, desk.job)
        now, status = operator.runtime.now(), _get_status(desk)
        # A job that some operator has taken up, and whose folder it does not name, has its checkpoints in the claim's
        # root: that operator knew of no other place.
        apart = status.phase is None or status.checkpoint_sub_path is not None
        told, trained = status.round or 0, status.step is not None
        await bookkeeping.create_state(operator.cluster, desk.job, desk.cache, pods, now, told, apart=apart, trained=trained)


async def _observe_job(operator: Operator, desk: JobContext) -> Observation:
    memory, now = desk.cache, operator.runtime.now()
    assert memory.desired is not None
    assert memory.job is not None
    job = memory.job
    memory.metrics = gather.collect_metrics(memory, operator.get_prometheus_metrics(job, now), now)
    with operator.measure_compute():
        nodes = operator.node_snapshot = operator.node_snapshot.refresh(operator.nodes, now)
        observation = gather.build_observation(
            operator.jobs.started_at,
            memory,
            gather.select_job_pods(operator.pods, job),
            memory.metrics,
            gather.collect_cluster_view(
                operator.jobs,
                job,
                memory.desired,
                nodes,
                now,
                operator.levels,
                operator.network,
                operator.unreliable_nodes,
            ),
            now,
            operator.runtime.create_identifier(),
            clock_agrees=operator.clock.agrees,
        )
    if node_lost.needs_reachability_probe(observation):
        observation = await gather.probe_suspected_workers(observation)
    if observation.evidence:
        await operator.runtime.compute_in_thread(lambda: _prefetch_analysis(observation))
    return observation.with_desired(_drop_closed_incidents(desk, observation.desired))


def _prefetch_analysis(observation: Observation) -> None:
    """Beside the loop, so that polls are answered and the Lease is renewed: what fails here fails in its own step."""
    with suppress(Exception):
        waits.prefetch_collective_waits(observation)
        links.prefetch_delay_matrix(observation)


async def _write_state(operator: Operator, desk: JobContext, draft: DesiredState) -> None:
    """The one place where plan and bookkeeping are written. Raises Conflict where somebody else has."""
    memory, before = desk.cache, desk.cache.desired
    if draft == before:
        return
    try:
        await bookkeeping.write_state(operator.cluster, desk.job, memory, draft)
    except (Conflict, NotFound):  # somebody else has written, or deleted it
        memory.resource_version = ""  # to be read anew
        raise
    operator.update_traffic(desk.job)
    if before is not None and before.plan.sync_mode is not draft.plan.sync_mode:
        note = f"{before.plan.sync_mode} → {draft.plan.sync_mode}: {draft.state.adaptation.mode_reason}"
        await events.emit_job_event(operator, desk.job, "SyncModeChanged", note, "ChangeSyncMode")
    if before is not None and (note := describe_resize(before.plan, draft.plan)):
        await events.emit_job_event(operator, desk.job, "Resized", f"{note} of {desk.job.spec.replicas} workers", "Resize")


def describe_resize(before: Plan, after: Plan) -> str:
    """From how many workers that train to how many, in words; "": the same, or they begin or end."""
    was, now = len(before.members), len(after.members)
    return f"{was} → {now}" if was and now and was != now else ""


def _collect_step_failures(thought: PassResult) -> tuple[BlockedAction, ...]:
    for _ in thought.failed_steps:
        metrics.STEP_FAILURES.inc()
    return tuple(BlockedAction("a step of the operator's own", words) for words in thought.failed_steps)


def _drop_closed_incidents(desk: JobContext, draft: DesiredState) -> DesiredState:
    """Incidents that are over, and whose end is written in the cluster, need no bookkeeping any more."""
    over = frozenset(name for name, incident in desk.written_incidents.items() if incident.outcome is not None)
    over -= {draft.state.profiling.incident}  # somebody still looks into it
    left = draft.state.incidents.sweep(over)
    if left is draft.state.incidents:
        return draft
    kept = {incident.name for incident in left.current}
    desk.written_incidents = {name: incident for name, incident in desk.written_incidents.items() if name in kept or name not in over}
    return draft.with_incidents(current=left.current)


async def _report_status(operator: Operator, desk: JobContext, observation: Observation) -> None:
    """Patch the status: at once where phase or conditions change, seldom for figures."""
    rules = build_policy(operator, desk.job)
    status = statuses.build_job_status(observation, rules, _get_status(desk))
    desk.cache.phase = status.phase
    desk.cache.reporting_members = sum(view.silent_seconds <= FRESH_WORKER_SECONDS for view in observation.members if view.heartbeat)
    used = observation.state.budget.count_restarts_within(observation.now, rules.restart_window)
    left = max(0, rules.max_restarts - used)
    metrics.publish_job_metrics(desk.job.namespace, desk.job.name, status, left, rules.max_restarts)
    show_link_metrics(desk.job, observation.state.adaptation.link)
    await _patch_status(operator, desk, status)


def hide_job_metrics(job: TrainingJob) -> None:
    """Nobody looks at it any more: no figure of its outlives it."""
    metrics.publish_job_metrics(job.namespace, job.name, None)
    metrics.publish_link_metrics(job.namespace, job.name, None)


def show_link_metrics(job: TrainingJob, seen: LinkCheck | None) -> None:
    known = seen if seen is not None and seen.known else None
    sides = [(side.rank, "sends" if side.sends else "receives", side.ratio) for side in known.sides] if known else ()
    metrics.publish_link_metrics(job.namespace, job.name, None if known is None else len(known.hot), sides)


async def _report_unreadable_state(operator: Operator, desk: JobContext, words: str) -> None:
    """The job's bookkeeping cannot be read, or begun: all that can be said of it is why."""
    status = statuses.build_unreadable_status(_get_status(desk), desk.job.generation, words, operator.runtime.now())
    metrics.publish_job_metrics(desk.job.namespace, desk.job.name, status)
    await _patch_status(operator, desk, status)


def _get_status(desk: JobContext) -> JobStatus:
    if desk.status is None:
        try:
            desk.status = JobStatus.parse(desk.body.get("status") or {})
        except InputError:
            desk.status = JobStatus()
    return desk.status


async def _patch_status(operator: Operator, desk: JobContext, status: JobStatus) -> None:
    if desk.status_writer.defer_if_busy():
        return
    before, now = _get_status(desk), operator.runtime.monotonic()
    known = not desk.status_writer.has_failed  # else nobody knows what is written
    if known and status == before:
        return
    pause = (1 + desk.status_jitter) * operator.get_interval_seconds(MAX_STATUSES_PER_SECOND, MIN_STATUS_INTERVAL_SECONDS)
    figures_only = known and _select_urgent_fields(status) == _select_urgent_fields(before)
    if figures_only and now - desk.status_written_at < pause:
        return

    async def write() -> None:
        patch = {"status": status.to_patch()}
        await operator.cluster.patch(TRAINING_JOBS, desk.job.name, patch, desk.job.namespace, subresource="status")
        if status.phase != before.phase:
            log.info("job %s/%s is %s", desk.job.namespace, desk.job.name, status.phase)
        desk.status, desk.status_written_at = status, now

    await desk.status_writer.write(write, waits=not figures_only)


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


def _get_pass_delay(operator: Operator, desk: JobContext, observation: Observation) -> float:
    """When to look again, if nothing happens."""
    return max(0.05, min(_get_pass_interval(operator, desk, observation), desk.effect_runner.get_retry_delay()))


def _get_pass_interval(operator: Operator, desk: JobContext, observation: Observation) -> float:
    if observation.job.queued:
        return QUEUE_POLL_SECONDS
    if observation.state.life.is_over:
        ttl = observation.job.spec.run_policy.ttl_seconds_after_finished
        left = IDLE_PASS_INTERVAL_SECONDS if ttl is None else observation.state.life.stopped_at + ttl - observation.now
        busy = any(view.pod is not None and not view.pod.ended for view in observation.workers)
        return max(0.5, min(left, 5.0 if busy else IDLE_PASS_INTERVAL_SECONDS))
    if observation.faults or desk.cache.phase in (JobPhase.RECOVERING, JobPhase.STARTING):
        return 0.5
    if observation.state.adaptation.suspicion is not None:
        return min(INVESTIGATION_POLL_SECONDS, operator.settings.sample_seconds)
    if desk.cache.phase in MONITORED_PHASES:
        return _get_idle_interval(operator, desk, observation)
    return 5.0 if any(view.pod is not None for view in observation.workers) else IDLE_PASS_INTERVAL_SECONDS


def _get_idle_interval(operator: Operator, desk: JobContext, observation: Observation) -> float:
    """Where many jobs train, or one has thousands of workers, those of which there is no news have time: faults,
    workers that fall silent, pods and figures that leave their band wake them. A job in which something is under way is
    looked at as ever."""
    often = operator.settings.sample_seconds
    seldom = operator.get_interval_seconds(MAX_IDLE_PASSES_PER_SECOND, max(often, len(observation.members) / MAX_CHECKED_WORKERS_PER_SECOND))
    if seldom == often or _has_timed_work(desk, observation, often):
        return often
    pause = seldom * (1 + PASS_INTERVAL_JITTER * (2 * operator.runtime.random() - 1))
    if any(view.heartbeat is None for view in observation.members):
        pause = min(pause, max(often, operator.settings.grace_after_start - observation.operator_age))
    return pause


def _has_timed_work(desk: JobContext, observation: Observation, often: float) -> bool:
    """Whether something goes on that time alone decides upon."""
    state, plan = observation.state, observation.plan
    contacts = desk.cache.contacts.values()
    return (
        desk.cache.phase is not JobPhase.RUNNING
        or any(contact.is_cut_off or not contact.is_reporting(observation.now, often) for contact in contacts)
        or not all(map(verify.awaits_worker, state.incidents.open))
        or state.adaptation.local_sgd is not None
        or state.adaptation.way_trial is not None
        or plan.profile is not None
        or bool(state.placement.vacant_since)
        or observation.job.spec.run_policy.active_deadline_seconds is not None
        or observation.steps_in_round < get_window_steps(observation)
    )


def create_job_context(operator: Operator, job: TrainingJob, body: Object) -> JobContext:
    """A place to work at this job."""
    memory = operator.jobs.get_or_create(job)

    async def do(effect: Effect) -> float:
        operator.require_leadership()
        return await handle_effect(operator, desk, effect)

    async def ready(effect: Effect) -> None:
        if not isinstance(effect, RequestQuarantine):
            await operator.node_registry.priority_gate.wait_for_turn()

    where = f"job {job.namespace}/{job.name}"
    errands = EffectRunner(operator.runtime, do, memory.wake.set, where, ready)
    now, turn = operator.runtime.monotonic(), STATUS_INTERVAL_JITTER * operator.runtime.random()
    writer = StatusWriter(operator.runtime, memory.wake.set, where)
    desk = JobContext(job, body, memory, errands, writer, status_written_at=now, status_jitter=turn)
    return desk
