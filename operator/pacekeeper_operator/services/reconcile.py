"""One pass over one job: look, think, write, and do what was written.

Level-triggered: every step may be the last one before the operator dies, and the next pass, of whichever operator, goes
on from what is written. Nothing is done that is not written first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from pacekeeper_analysis.errors import InputError

from .. import metrics
from ..api import Job, JobStatus, Mode, ObjectRef, Outcome, Phase
from ..cluster import JOBS, PODS, Conflict, Object, Refused
from ..decide import node_lost
from ..decide import status as statuses
from ..manifests import worker_pod
from ..observation import Observation, PodView, Policy
from ..observe import gather
from ..observe.memory import JobMemory
from ..state import Draft, Incident, Worker
from . import events, incidents, plans, quarantine
from .operator import ACTIVE, Operator
from .think import Thought, think

PODS_SECONDS = 30.0
"""A list of pods older than this is read anew, whatever the watch has said."""
PLAN_SECONDS = 30.0
"""A plan older than this is read anew: somebody may have edited it by hand."""
STATUS_SECONDS = 15.0
OVERDUE_SECONDS = 15.0
"""So long after its grace period a pod may still be there before nobody waits for its node any more."""
CREATE_AT_ONCE = 16
log = logging.getLogger(__name__)


@dataclass
class Desk:
    """What one operator remembers between passes over a job, only to save work: all of it may be lost at any time."""

    job: Job
    body: Object
    memory: JobMemory
    pods: tuple[PodView, ...] = ()
    pods_at: float = 0.0
    plan_at: float = 0.0
    told: dict[str, Incident] | None = None  # incidents as they are written in the cluster
    status: JobStatus | None = None  # as it is written
    status_at: float = 0.0


async def reconcile(operator: Operator, desk: Desk) -> float:
    """One pass; seconds until the next one is wanted, if nothing wakes it before."""
    job, memory = desk.job, desk.memory
    memory.job = job
    memory.wake.clear()
    if memory.draft is None or not memory.resource_version or time.time() - desk.plan_at > PLAN_SECONDS:
        await _read_plan(operator, desk)
    if not await _template_is_good(operator, desk):
        await _report(operator, desk, _observe(operator, desk))
        return 60.0

    thought = await _think(operator, desk)
    written = memory.draft
    if thought.draft != written:
        if not desk.pods_at or memory.pods_changed or time.time() - desk.pods_at > 1.0:
            await _read_pods(operator, desk)  # never act upon old news
            thought = await _think(operator, desk)
        try:
            if thought.draft != memory.draft:
                before = memory.draft
                await plans.write(operator.cluster, job, memory, thought.draft)
                await _announce_mode(operator, job, before, thought.draft)
        except Conflict:
            memory.resource_version = ""  # somebody else has written: to be read anew
            raise
    await _carry_out(operator, desk, thought)
    await _report(operator, desk, thought.observation)
    return await _expire(operator, desk, thought.observation)


async def clean_up(operator: Operator, desk: Desk) -> None:
    """The job is deleted: what its owner references do not take with them in time goes now. Its incidents stay.

    A pod whose node does not confirm its end is struck off without it.
    """
    nodes = await operator.known_nodes(fresh=True)
    for pod in await gather.pods(operator.cluster, desk.job):
        node = nodes.get(pod.node)
        record = desk.memory.draft.state.placement.worker(pod.name) if desk.memory.draft is not None else None
        lost = bool(pod.node) and (node is None or not node.ready)
        overdue = pod.deleting and time.time() > pod.delete_by + OVERDUE_SECONDS
        force = lost or overdue or (record is not None and record.force)
        if not pod.deleting or force:
            grace = 0 if force else None
            await operator.cluster.delete(PODS, pod.name, desk.job.namespace, uid=pod.uid, grace=grace)


async def close_incidents(operator: Operator, desk: Desk) -> None:
    """The job is deleted: nobody will see what is open recover, and it shall not look open for ever."""
    draft = desk.memory.draft or await plans.load(operator.cluster, desk.job, desk.memory, time.time())
    for incident in draft.state.incidents.open if draft is not None else ():
        ended = replace(incident, outcome=Outcome.SUPERSEDED)
        await incidents.write(operator.cluster, desk.job, ended, operator.settings.incident_retention)


async def gone(operator: Operator, desk: Desk) -> bool:
    """Whether no pod of the job is left."""
    return not await gather.pods(operator.cluster, desk.job)


async def _think(operator: Operator, desk: Desk) -> Thought:
    job, memory = desk.job, desk.memory
    now = time.time()
    if memory.pods_changed or now - desk.pods_at > PODS_SECONDS:
        await _read_pods(operator, desk)
    await operator.known_nodes()
    observation = _observe(operator, desk)
    if node_lost.suspected(observation):
        observation = await gather.look_closely(observation)
    observation = observation.with_draft(_sweep(desk, observation.draft))
    return think(observation, policy(operator, job))


def _observe(operator: Operator, desk: Desk) -> Observation:
    job, memory, now = desk.job, desk.memory, time.time()
    assert memory.draft is not None
    return gather.observe(
        job,
        memory.draft,
        desk.pods,
        memory,
        operator.memory.started_at,
        operator.figures(job, now),
        gather.surroundings(operator.memory, job, memory.draft, operator.nodes, now),
        now,
    )


def policy(operator: Operator, job: Job) -> Policy:
    """The job's own wishes under the platform's caps."""
    wish, settings = job.spec.remediation, operator.settings
    return Policy(
        mode=Mode.ACT if wish.mode is Mode.ACT and settings.mode is Mode.ACT else Mode.RECOMMEND,
        allow=frozenset(wish.allow),
        max_restarts=wish.max_restarts,
        restart_window=wish.restart_window,
        paused=operator.paused,
        breaker_nodes=settings.breaker_nodes,
        grace_after_start=settings.grace_after_start,
    )


async def _read_plan(operator: Operator, desk: Desk) -> None:
    """The plan as it is written; where there is none, a first one is, or the one that was deleted is again."""
    job, memory, now = desk.job, desk.memory, time.time()
    before = memory.draft.state.plan_refused_at if memory.draft is not None else 0.0
    draft = await plans.load(operator.cluster, job, memory, now)
    if draft is None:
        await _read_pods(operator, desk)
        anew = plans.first(job, desk.pods, now) if memory.draft is None else memory.draft.with_plan()
        await plans.write(operator.cluster, job, memory, anew)
    elif draft.state.plan_refused_at > before:
        await events.tell(operator.cluster, job, "PlanRefused", draft.state.plan_refused, "RestorePlan", warning=True)
    desk.plan_at = now


async def _read_pods(operator: Operator, desk: Desk) -> None:
    """A list that fails is no news: what was known before stays, and the next pass asks anew."""
    told, before, asked_at = desk.memory.pods_changed, desk.pods, time.time()
    desk.memory.pods_changed = False  # before the list: what changes meanwhile is read again
    try:
        desk.pods = await gather.pods(operator.cluster, desk.job)
    except BaseException:
        desk.memory.pods_changed = True
        raise
    desk.pods_at = asked_at
    if not told and before and desk.pods != before:
        operator.missed_events += 1  # the watch's next word takes it back


async def _template_is_good(operator: Operator, desk: Desk) -> bool:
    """Whether the API server accepts the job's pods: asked once for every generation, by a dry run."""
    job, memory = desk.job, desk.memory
    assert memory.draft is not None
    state = memory.draft.state
    if state.placement.template_accepted == job.generation or memory.draft.plan.members:
        return True
    if state.placement.template_rejected == job.generation:
        return False
    probe = worker_pod(job, 0, state.placement.incarnations.get("0", -1) + 1, operator.installation)
    refused = ""
    try:
        await operator.cluster.create(PODS, probe, dry_run=True)
    except Refused as error:
        refused = str(error)
    except (StopIteration, KeyError, TypeError) as error:
        refused = f"spec.template is not a pod template with a container `trainer`: {error!r}"
    changed = (
        {"template_refused": job.generation, "refused": refused}
        if refused
        else {"template_accepted": job.generation, "template_refused": -1, "refused": ""}
    )
    await plans.write(operator.cluster, job, memory, memory.draft.with_state(**changed))
    if refused:
        await events.tell(operator.cluster, job, "InvalidTemplate", refused, "ValidateTemplate", warning=True)
    return not refused


async def _carry_out(operator: Operator, desk: Desk, thought: Thought) -> None:
    """What the written plan asks for. Each step is repeated by the next pass until it is seen to be done."""
    job, cluster = desk.job, operator.cluster
    for view in thought.staffing.delete:
        assert view.pod is not None
        grace = 0 if view.record.force else None
        await cluster.delete(PODS, view.name, job.namespace, uid=view.pod.uid, grace=grace)
    if thought.staffing.create:
        limit = asyncio.Semaphore(CREATE_AT_ONCE)
        await asyncio.gather(*(_create(operator, desk, worker, thought, limit) for worker in thought.staffing.create))
    if thought.staffing.create or thought.staffing.delete:
        desk.memory.pods_changed = True
    await _ask_for_quarantines(operator, desk)
    await _tell_incidents(operator, desk)
    for decision in thought.decisions:
        metrics.INCIDENTS.labels(decision.cause, decision.class_, thought.observation.job.spec.remediation.mode).inc()
        if decision.remedy is not None:
            metrics.REMEDIES.labels(decision.remedy).inc()


async def _create(operator: Operator, desk: Desk, worker: Worker, thought: Thought, limit: asyncio.Semaphore) -> None:
    seats = {member.worker for member in thought.draft.plan.members}
    spare = bool(seats) or worker.ordinal >= desk.job.spec.replicas
    avoid = sorted(thought.observation.surroundings.suspects)
    body = worker_pod(
        desk.job, worker.ordinal, worker.incarnation, operator.installation, spare=spare, avoid_nodes=avoid
    )
    async with limit:
        try:
            await operator.cluster.create(PODS, body)
        except Conflict:
            return  # an operator before this one has made it; the next list shows it


async def _ask_for_quarantines(operator: Operator, desk: Desk) -> None:
    draft = desk.memory.draft
    assert draft is not None
    if not draft.state.incidents.quarantines:
        return
    for wanted in draft.state.incidents.quarantines:
        words = await quarantine.quarantine(
            operator.cluster,
            wanted.node,
            wanted.uid,
            wanted.reason,
            ObjectRef(wanted.incident, desk.job.namespace),
            operator.settings,
            approved=operator.settings.quarantine_mode is Mode.ACT,
        )
        incident = draft.state.incidents.find(wanted.incident)
        if incident is not None:
            draft = draft.with_incident(replace(incident, quarantine=words))
        await events.tell(operator.cluster, desk.job, "QuarantineNode", f"{wanted.node}: {words}", "QuarantineNode")
    await plans.write(operator.cluster, desk.job, desk.memory, draft.with_incidents(quarantines=()))


async def _tell_incidents(operator: Operator, desk: Desk) -> None:
    """Write incidents into the cluster as far as they have changed."""
    assert desk.memory.draft is not None
    if desk.told is None:
        desk.told = {}
    for incident in desk.memory.draft.state.incidents.current:
        before = desk.told.get(incident.name)
        if before == incident:
            continue
        await incidents.write(operator.cluster, desk.job, incident, operator.settings.incident_retention)
        desk.told[incident.name] = incident
        await _announce(operator, desk.job, before, incident)


async def _announce(operator: Operator, job: Job, before: Incident | None, incident: Incident) -> None:
    """Events at an incident's beginning and end."""
    if before is None and incident.outcome is None:
        remedy = incident.remedy or "nothing"
        verb = "applied" if incident.applied else "recommended"
        note = f"{incident.message}; {verb}: {remedy} ({incident.name})"
        await events.tell(operator.cluster, job, "IncidentOpened", note, remedy, warning=True)
    if incident.outcome is None or (before is not None and before.outcome is not None):
        return
    metrics.OUTCOMES.labels(incident.cause, incident.outcome).inc()
    after = ""
    if incident.recovered is not None:
        seconds = incident.recovered - incident.first_sign
        metrics.RECOVERY_SECONDS.labels(incident.cause).observe(seconds)
        after = f" {seconds:.1f} s after the first sign"
    warning = incident.outcome in (Outcome.FAILED, Outcome.NOT_HELPED)
    note = f"{incident.name}: {incident.outcome}{after}; {incident.message}"
    await events.tell(operator.cluster, job, "IncidentClosed", note, str(incident.outcome), warning=warning)


async def _announce_mode(operator: Operator, job: Job, before: Draft | None, after: Draft) -> None:
    if before is None or before.plan.sync_mode is after.plan.sync_mode:
        return
    note = f"{before.plan.sync_mode} → {after.plan.sync_mode}: {after.state.adaptation.mode_reason}"
    await events.tell(operator.cluster, job, "SyncModeChanged", note, "ChangeSyncMode")


def _sweep(desk: Desk, draft: Draft) -> Draft:
    """Incidents that are over, and whose end is written in the cluster, need no bookkeeping any more."""
    written = frozenset(name for name, incident in (desk.told or {}).items() if incident.outcome is not None)
    state = draft.state.sweep(written)
    if state is draft.state:
        return draft
    kept = {incident.name for incident in state.incidents.current}
    desk.told = {name: incident for name, incident in (desk.told or {}).items() if name in kept or name not in written}
    return replace(draft, state=state)


async def _report(operator: Operator, desk: Desk, observation: Observation) -> None:
    """Patch the status: at once where phase or conditions change, every 15 s for figures."""
    if desk.status is None:
        try:
            desk.status = JobStatus.parse(desk.body.get("status") or {})
        except InputError:
            desk.status = JobStatus()
    now = statuses.report(observation, policy(operator, desk.job), desk.status)
    desk.memory.phase = now.phase
    if now == desk.status:
        return
    urgent = _urgent(now) != _urgent(desk.status)
    if not urgent and observation.now - desk.status_at < STATUS_SECONDS:
        return
    await operator.cluster.patch(
        JOBS, desk.job.name, {"status": now.to_patch()}, desk.job.namespace, subresource="status"
    )
    if now.phase != desk.status.phase:
        log.info("job %s/%s is %s", desk.job.namespace, desk.job.name, now.phase)
    desk.status, desk.status_at = now, observation.now


def _urgent(status: JobStatus) -> object:
    return (
        status.phase,
        [(c.type, c.status, c.reason) for c in status.conditions],
        status.round,
        status.workers,
        status.restarts,
        status.sync_mode,
        status.observed_generation,
    )


async def _expire(operator: Operator, desk: Desk, observation: Observation) -> float:
    """Delete a job whose time after its end is over; otherwise when to look again."""
    state, spec = observation.state, desk.job.spec
    if state.life.over:
        ttl = spec.run_policy.ttl_seconds_after_finished
        left = PODS_SECONDS if ttl is None else state.life.stopped_at + ttl - observation.now
        if ttl is not None and left <= 0:
            await operator.cluster.delete(JOBS, desk.job.name, desk.job.namespace, uid=desk.job.uid)
            return PODS_SECONDS
        busy = any(view.pod is not None and not view.pod.ended for view in observation.workers)
        return max(0.5, min(left, 5.0 if busy else PODS_SECONDS))
    if observation.faults or desk.memory.phase in (Phase.RECOVERING, Phase.STARTING):
        return 0.5
    if desk.memory.phase in ACTIVE:
        return operator.settings.sample_seconds
    return 5.0 if any(view.pod is not None for view in observation.workers) else PODS_SECONDS
