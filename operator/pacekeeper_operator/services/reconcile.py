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
from ..api import MANAGER, Job, JobPhase, JobStatus, Mode, Outcome
from ..cluster import JOBS, PODS, Conflict, NotFound, Object
from ..decide import links, node_lost, verify, waits, workforce
from ..decide import status as statuses
from ..decide.straggler import window_steps
from ..decide.think import Thought, effects, think
from ..effects import AskForQuarantine, Effect
from ..observation import FRESH_SECONDS, Hindrance, Observation, Policy
from ..observe import gather
from ..queues import stage_elsewhere, under
from ..state import Draft, LinkLook
from . import bookkeeping, events, incidents, node_history, queues
from .desk import Desk
from .doing import QUEUE_SECONDS, carry_out
from .errands import Errands
from .operator import ACTIVE, Operator
from .status_writer import StatusWriter

LOOKS_A_SECOND = 50.0
"""At jobs that train and of which there is no news, of all of them together: a look takes two milliseconds, so that
they take a tenth of a core. Up to a hundred jobs are looked at as often as Prometheus is asked."""
WORKERS_A_SECOND = 1000.0
"""The same for the workers of one job, at which a look takes 20 µs each: of up to two thousand as often."""
SPREAD = 0.25
"""By so much of its time such a look comes sooner or later: jobs that something has woken together part again."""
STATUS_SECONDS, STATUSES_A_SECOND = 15.0, 20.0
"""A job's figures are said as seldom as the first, and more seldom where all jobs would be more than the second."""
STATUS_SPREAD = 0.5
"""By up to so much of that time later: else all jobs would say theirs at once after a restart, for ever."""
IDLE_SECONDS = 30.0
SUSPECT_SECONDS = 0.5
"""Between two looks at a job that is asked what slows it down."""
log = logging.getLogger(__name__)


async def reconcile(operator: Operator, desk: Desk) -> float:
    """One pass; seconds until the next one is wanted, if nothing wakes it before. Raises what keeps it from looking."""
    desk.memory.wake.clear()  # first of all: a pass that fails must not be its own news
    operator.must_lead()
    desk.memory.job = desk.job
    if desk.job.spec.managed_by != MANAGER:
        return await _leave_alone(operator, desk)
    try:
        if not desk.memory.read:
            await _read(operator, desk)
        await _see_queue(operator, desk)
    except Exception as error:
        await _report_blind(operator, desk, str(error))
        raise
    observation = await _observe(operator, desk)
    rules = policy(operator, desk.job)
    with operator.computing():
        thought = think(observation, rules)
    hindrances = _failures(thought)
    failure: Exception | None = None
    try:
        await _write(operator, desk, thought.draft)
        await desk.errands.send(effects(thought.observation, rules, desk.told))
    except Exception as caught:
        hindrances, failure = (*hindrances, Hindrance("bookkeeping", str(caught))), caught
    written = desk.memory.draft or thought.draft  # what is not written is not so
    said = thought.observation.with_draft(written).hindered_by(hindrances + desk.errands.hindrances)
    await _report(operator, desk, said)
    if failure is not None:
        raise failure
    return _pause(operator, desk, thought.observation)


async def _leave_alone(operator: Operator, desk: Desk) -> float:
    """Another controller runs the job, and writes its status. It stands in its queue as any other: MultiKueue runs it
    in another cluster when that has admitted it."""
    if not desk.job.queue:
        return IDLE_SECONDS
    stage = stage_elsewhere(JobStatus.parse(desk.body.get("status") or {}))
    desk.memory.turn = await queues.attend(operator, desk.job, desk.memory.turn, stage)
    return QUEUE_SECONDS


async def _see_queue(operator: Operator, desk: Desk) -> None:
    """The job as its queue lets it be. What that says is known before anything is decided: whoever has just begun must
    neither hold a job that trains, nor let one go that waits."""
    memory, job = desk.memory, desk.job
    if job.queue and memory.turn is None:
        memory.turn = await queues.look(operator, job, memory.draft)
    memory.job = under(job, memory.turn)


def policy(operator: Operator, job: Job) -> Policy:
    """The job's own wishes under the platform's caps."""
    wish, settings = job.spec.remediation, operator.settings
    return Policy(
        mode=Mode.ACT if wish.mode is Mode.ACT and settings.mode is Mode.ACT else Mode.RECOMMEND,
        allow=frozenset(wish.allow),
        max_restarts=wish.max_restarts,
        restart_window=wish.restart_window,
        rounds_without_progress=wish.max_rounds_without_progress,
        exit_codes=wish.exit_codes,
        paused=operator.paused,
        grace_after_start=settings.grace_after_start,
        guards_network=settings.network_policies,
        link_probes_an_hour=settings.link_probes_an_hour,
        profiles_an_hour=settings.profiles_an_hour,
    )


async def clean_up(operator: Operator, desk: Desk) -> bool:
    """The job is deleted: what its owner references do not take with them in time goes now; True: nothing is left.

    A pod whose node does not confirm its end is struck off without it. The job's incidents stay.
    """
    now, left = operator.runtime.now(), await gather.pods(operator.cluster, desk.job)
    for pod in left:
        node = operator.nodes.get(("", pod.node))
        record = desk.memory.draft.state.placement.worker(pod.name) if desk.memory.draft is not None else None
        lost = bool(pod.node) and (node is None or not node.ready)
        overdue = operator.clock.agrees and workforce.is_overdue(pod, now)
        force = lost or overdue or (record is not None and record.force)
        if not pod.deleting or force:
            grace = 0 if force else None
            await operator.cluster.delete(PODS, pod.name, desk.job.namespace, uid=pod.uid, grace=grace)
    return not left


async def close_incidents(operator: Operator, desk: Desk) -> None:
    """The job is deleted: nobody will see what is open recover, and it shall not look open for ever."""
    draft = desk.memory.draft or await bookkeeping.load(operator.cluster, desk.job, desk.memory)
    current = draft.state.incidents.current if draft is not None else ()
    over = [one if one.outcome is not None else replace(one, outcome=Outcome.SUPERSEDED) for one in current]
    for ended in over:
        await incidents.write(operator.cluster, desk.job, ended, operator.settings.incident_retention)
    for ended in over:  # afterwards: the histories of nodes keep no incident open
        await node_history.record(operator, desk.job, ended)


async def _read(operator: Operator, desk: Desk) -> None:
    """What is written of the job into memory; where nothing is, a beginning."""
    listed = operator.states.pop((desk.job.namespace, desk.job.name), None) if desk.memory.draft is None else None
    if await bookkeeping.load(operator.cluster, desk.job, desk.memory, listed) is None:
        pods = gather.of(operator.pods, desk.job)
        now, status = operator.runtime.now(), _status(desk)
        # A job that some operator has taken up, and whose folder it does not name, has its checkpoints in the claim's
        # root: that operator knew of no other place.
        apart = status.phase is None or status.checkpoint_sub_path is not None
        told, trained = status.round or 0, status.step is not None
        await bookkeeping.begin(operator.cluster, desk.job, desk.memory, pods, now, told, apart=apart, trained=trained)


async def _observe(operator: Operator, desk: Desk) -> Observation:
    memory, now = desk.memory, operator.runtime.now()
    assert memory.draft is not None
    assert memory.job is not None
    job = memory.job
    memory.metrics = gather.metrics(memory, operator.scraped(job, now), now)
    with operator.computing():
        nodes = operator.known_nodes = operator.known_nodes.seen(operator.nodes, now)
        observation = gather.observe(
            operator.memory.started_at,
            memory,
            gather.of(operator.pods, job),
            memory.metrics,
            gather.surroundings(
                operator.memory,
                job,
                memory.draft,
                nodes,
                now,
                operator.levels,
                operator.network,
                operator.unreliable_nodes,
            ),
            now,
            operator.runtime.identifier(),
            clock_agrees=operator.clock.agrees,
        )
    if node_lost.suspected(observation):
        observation = await gather.look_closely(observation)
    if observation.evidence:
        await operator.runtime.compute(lambda: _look_ahead(observation))
    return observation.with_draft(_swept(desk, observation.draft))


def _look_ahead(observation: Observation) -> None:
    """Beside the loop, so that polls are answered and the Lease is renewed: what fails here fails in its own step."""
    with suppress(Exception):
        waits.look_ahead(observation)
        links.look_ahead(observation)


async def _write(operator: Operator, desk: Desk, draft: Draft) -> None:
    """The one place where plan and bookkeeping are written. Raises Conflict where somebody else has."""
    memory, before = desk.memory, desk.memory.draft
    if draft == before:
        return
    try:
        await bookkeeping.write(operator.cluster, desk.job, memory, draft)
    except (Conflict, NotFound):  # somebody else has written, or deleted it
        memory.resource_version = ""  # to be read anew
        raise
    operator.hear_of_traffic(desk.job)
    if before is not None and before.plan.sync_mode is not draft.plan.sync_mode:
        note = f"{before.plan.sync_mode} → {draft.plan.sync_mode}: {draft.state.adaptation.mode_reason}"
        await events.tell(operator, desk.job, "SyncModeChanged", note, "ChangeSyncMode")
    if before is not None and (note := resized(before.plan, draft.plan)):
        await events.tell(operator, desk.job, "Resized", f"{note} of {desk.job.spec.replicas} workers", "Resize")


def resized(before: Plan, after: Plan) -> str:
    """From how many workers that train to how many, in words; "": the same, or they begin or end."""
    was, now = len(before.members), len(after.members)
    return f"{was} → {now}" if was and now and was != now else ""


def _failures(thought: Thought) -> tuple[Hindrance, ...]:
    for _ in thought.failures:
        metrics.STEP_FAILURES.inc()
    return tuple(Hindrance("a step of the operator's own", words) for words in thought.failures)


def _swept(desk: Desk, draft: Draft) -> Draft:
    """Incidents that are over, and whose end is written in the cluster, need no bookkeeping any more."""
    over = frozenset(name for name, incident in desk.told.items() if incident.outcome is not None)
    over -= {draft.state.profiling.incident}  # somebody still looks into it
    left = draft.state.incidents.sweep(over)
    if left is draft.state.incidents:
        return draft
    kept = {incident.name for incident in left.current}
    desk.told = {name: incident for name, incident in desk.told.items() if name in kept or name not in over}
    return draft.with_incidents(current=left.current)


async def _report(operator: Operator, desk: Desk, observation: Observation) -> None:
    """Patch the status: at once where phase or conditions change, seldom for figures."""
    rules = policy(operator, desk.job)
    status = statuses.report(observation, rules, _status(desk))
    desk.memory.phase = status.phase
    desk.memory.heard = sum(view.silent_seconds <= FRESH_SECONDS for view in observation.members if view.heartbeat)
    used = observation.state.budget.within(observation.now, rules.restart_window)
    left = max(0, rules.max_restarts - used)
    metrics.show_job(desk.job.namespace, desk.job.name, status, left, rules.max_restarts)
    show_links(desk.job, observation.state.adaptation.link)
    await _patch_status(operator, desk, status)


def hide(job: Job) -> None:
    """Nobody looks at it any more: no figure of its outlives it."""
    metrics.show_job(job.namespace, job.name, None)
    metrics.show_links(job.namespace, job.name, None)


def show_links(job: Job, seen: LinkLook | None) -> None:
    known = seen if seen is not None and seen.known else None
    sides = [(side.rank, "sends" if side.sends else "receives", side.ratio) for side in known.sides] if known else ()
    metrics.show_links(job.namespace, job.name, None if known is None else len(known.hot), sides)


async def _report_blind(operator: Operator, desk: Desk, words: str) -> None:
    """The job's bookkeeping cannot be read, or begun: all that can be said of it is why."""
    status = statuses.blind(_status(desk), desk.job.generation, words, operator.runtime.now())
    metrics.show_job(desk.job.namespace, desk.job.name, status)
    await _patch_status(operator, desk, status)


def _status(desk: Desk) -> JobStatus:
    if desk.status is None:
        try:
            desk.status = JobStatus.parse(desk.body.get("status") or {})
        except InputError:
            desk.status = JobStatus()
    return desk.status


async def _patch_status(operator: Operator, desk: Desk, status: JobStatus) -> None:
    if desk.status_writer.withholds():
        return
    before, now = _status(desk), operator.runtime.monotonic()
    known = not desk.status_writer.failed  # else nobody knows what is written
    if known and status == before:
        return
    pause = (1 + desk.status_turn) * operator.pace(STATUSES_A_SECOND, STATUS_SECONDS)
    figures_only = known and _urgent(status) == _urgent(before)
    if figures_only and now - desk.status_at < pause:
        return

    async def write() -> None:
        patch = {"status": status.to_patch()}
        await operator.cluster.patch(JOBS, desk.job.name, patch, desk.job.namespace, subresource="status")
        if status.phase != before.phase:
            log.info("job %s/%s is %s", desk.job.namespace, desk.job.name, status.phase)
        desk.status, desk.status_at = status, now

    await desk.status_writer.write(write, waits=not figures_only)


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


def _pause(operator: Operator, desk: Desk, observation: Observation) -> float:
    """When to look again, if nothing happens."""
    return max(0.05, min(_interval(operator, desk, observation), desk.errands.due_in()))


def _interval(operator: Operator, desk: Desk, observation: Observation) -> float:
    if observation.job.queued:
        return QUEUE_SECONDS
    if observation.state.life.over:
        ttl = observation.job.spec.run_policy.ttl_seconds_after_finished
        left = IDLE_SECONDS if ttl is None else observation.state.life.stopped_at + ttl - observation.now
        busy = any(view.pod is not None and not view.pod.ended for view in observation.workers)
        return max(0.5, min(left, 5.0 if busy else IDLE_SECONDS))
    if observation.faults or desk.memory.phase in (JobPhase.RECOVERING, JobPhase.STARTING):
        return 0.5
    if observation.state.adaptation.suspicion is not None:
        return min(SUSPECT_SECONDS, operator.settings.sample_seconds)
    if desk.memory.phase in ACTIVE:
        return _until_next_look(operator, desk, observation)
    return 5.0 if any(view.pod is not None for view in observation.workers) else IDLE_SECONDS


def _until_next_look(operator: Operator, desk: Desk, observation: Observation) -> float:
    """Where many jobs train, or one has thousands of workers, those of which there is no news have time: faults,
    workers that fall silent, pods and figures that leave their band wake them. A job in which something is under way is
    looked at as ever."""
    often = operator.settings.sample_seconds
    seldom = operator.pace(LOOKS_A_SECOND, max(often, len(observation.members) / WORKERS_A_SECOND))
    if seldom == often or _is_under_way(desk, observation, often):
        return often
    pause = seldom * (1 + SPREAD * (2 * operator.runtime.random() - 1))
    if any(view.heartbeat is None for view in observation.members):
        pause = min(pause, max(often, operator.settings.grace_after_start - observation.operator_age))
    return pause


def _is_under_way(desk: Desk, observation: Observation, often: float) -> bool:
    """Whether something goes on that time alone decides upon."""
    state, plan = observation.state, observation.plan
    contacts = desk.memory.contacts.values()
    return (
        desk.memory.phase is not JobPhase.RUNNING
        or any(contact.cut or not contact.heard(observation.now, often) for contact in contacts)
        or not all(map(verify.awaits_worker, state.incidents.open))
        or state.adaptation.local_sgd is not None
        or state.adaptation.way_trial is not None
        or plan.profile is not None
        or bool(state.placement.vacant_since)
        or observation.job.spec.run_policy.active_deadline_seconds is not None
        or observation.steps_in_round < window_steps(observation)
    )


def desk_for(operator: Operator, job: Job, body: Object) -> Desk:
    """A place to work at this job."""
    memory = operator.memory.of(job)

    async def do(effect: Effect) -> float:
        operator.must_lead()
        return await carry_out(operator, desk, effect)

    async def ready(effect: Effect) -> None:
        if not isinstance(effect, AskForQuarantine):
            await operator.fleet.first.calm()

    where = f"job {job.namespace}/{job.name}"
    errands = Errands(operator.runtime, do, memory.wake.set, where, ready)
    now, turn = operator.runtime.monotonic(), STATUS_SPREAD * operator.runtime.random()
    writer = StatusWriter(operator.runtime, memory.wake.set, where)
    desk = Desk(job, body, memory, errands, writer, status_at=now, status_turn=turn)
    return desk
