"""How each effect is carried out. All of them may be repeated: what is done already is fine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import kopf

from .. import ledger, metrics, policies
from ..api import SIDECAR, ObjectRef, Outcome
from ..cluster import JOBS, PODS, POLICIES, Conflict, Denied, Object, Refused
from ..effects import (
    AskForQuarantine,
    AttendQueue,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    GuardNetwork,
    KeepBehaviour,
    Localise,
    LookAtNodes,
    TryTemplate,
    WriteIncident,
)
from ..gangs import Gang
from ..manifests import refused_template, uses_gpus, worker_pod
from ..observation import TemplateVerdict
from ..observe.views import view_pod
from ..queues import Stage, Turn
from ..resources import explain_denial
from ..state import Incident
from . import behaviour, events, gangs, incidents, node_history, preflight, quarantine, queues
from .desk import Desk
from .operator import Operator

SHOWS_SECONDS = 2.0
"""What has been created or deleted shows in the watch by then."""
TEMPLATE_SECONDS = 60.0
"""A template that was refused is tried again: what refuses it (a webhook, say) may have changed."""
GUARD_SECONDS = 300.0
RULING_SECONDS = 5.0
QUEUE_SECONDS = 5.0


async def carry_out(operator: Operator, desk: Desk, effect: Effect) -> float:
    """Seconds for which it need not be done again. Raises what the cluster does."""
    match effect:
        case TryTemplate(generation):
            return await _try_template(operator, desk, generation)
        case CreatePod():
            return await _create(operator, desk, effect)
        case DeletePod(name, uid, force):
            await operator.cluster.delete(PODS, name, desk.job.namespace, uid=uid, grace=0 if force else None)
            return SHOWS_SECONDS
        case AskForQuarantine():
            return await _ask_for_quarantine(operator, desk, effect)
        case LookAtNodes(nodes, since):
            await _look_at_nodes(operator, desk, dict(nodes), since)
            return 0.0
        case Localise():
            await behaviour.localise(operator, desk, effect)
            return 0.0
        case KeepBehaviour():
            await behaviour.keep(operator, desk, effect)
            return 0.0
        case WriteIncident(incident, before):
            await _write_incident(operator, desk, incident, before)
            return 0.0
        case AttendQueue(stage):
            return await _attend_queue(operator, desk, stage)
        case GuardNetwork():
            return await _guard_network(operator, desk)
        case DeleteJob(uid):
            await operator.cluster.delete(JOBS, desk.job.name, desk.job.namespace, uid=uid)
            return SHOWS_SECONDS


async def _try_template(operator: Operator, desk: Desk, generation: int) -> float:
    """What it brings back is news for the next pass. A denial that is about the moment (quota, say) is no rejection."""
    if desk.job.generation != generation:
        return 0.0
    rejection = refused_template(desk.job) or ledger.refused(desk.job)
    if not rejection:
        try:
            await _create_pod(operator, worker_pod(desk.job, 0, 0, operator.installation), dry_run=True)
        except Conflict:
            rejection = ""  # a pod of that name is there: one like it was accepted
        except Refused as error:
            rejection = str(error)
    known = desk.memory.draft is not None and desk.memory.draft.state.placement.template_rejected == generation
    desk.memory.template = TemplateVerdict(generation, rejection)
    if rejection and not known:
        await events.tell(operator, desk.job, "InvalidTemplate", rejection, "ValidateTemplate", warning=True)
    return TEMPLATE_SECONDS


async def _create(operator: Operator, desk: Desk, effect: CreatePod) -> float:
    worker = effect.worker
    group = await _gather(operator, desk, effect.gang) if effect.gang else ""
    placing = (desk.memory.turn or Turn(admitted=False)).placing_of(spare=effect.spare)
    body = worker_pod(
        desk.job,
        worker.ordinal,
        worker.incarnation,
        operator.installation,
        spare=effect.spare,
        avoid_nodes=effect.avoid,
        unreliable_nodes=effect.unreliable,
        checkpoints_apart=desk.memory.draft is not None and desk.memory.draft.state.life.apart,
        node_labels=placing.labels,
        tolerations=placing.tolerations,
        pod_group=group,
    )
    try:
        async with operator.creations:
            await _create_pod(operator, body)
    except Conflict:  # an operator before this one has made it, and the watch shows it
        found = view_pod(await operator.cluster.get(PODS, worker.name, desk.job.namespace))
        if found.owner != desk.job.uid:
            raise kopf.TemporaryError(f"the name {worker.name} is taken by a pod that is not this job's") from None
    return SHOWS_SECONDS


async def _create_pod(operator: Operator, body: Object, *, dry_run: bool = False) -> None:
    """Raises what the cluster does; a denial for resources says where the sidecar's are set."""
    try:
        await operator.cluster.create(PODS, body, dry_run=dry_run)
    except Denied as error:
        words = explain_denial(str(error), operator.installation.sidecar_resources, SIDECAR)
        raise Denied(f"{error}{words}", delay=error.delay) from error


async def _gather(operator: Operator, desk: Desk, gang: Gang) -> str:
    """Name of the PodGroup of the pods that are placed together; "": the cluster knows none."""
    memory = desk.memory
    async with memory.gathering:
        if memory.gathered is None or memory.gathered[0] != gang:
            memory.gathered = (gang, await gangs.gather(operator.cluster, desk.job, gang))
        return memory.gathered[1]


async def _ask_for_quarantine(operator: Operator, desk: Desk, effect: AskForQuarantine) -> float:
    """Asked until the answer is final: a suspicion may wait for its witness, or for a person."""
    wanted = effect.wanted
    blame = quarantine.Blame(
        wanted.node,
        wanted.uid,
        wanted.reason,
        ObjectRef(wanted.incident, desk.job.namespace),
        wanted.at,
        wanted.witness,
        wanted.weak,
        wanted.raised,
    )
    with operator.fleet.first.asking():
        ruling = await quarantine.suspect(operator.fleet, blame)
    before = desk.memory.rulings.get(wanted.case)
    desk.memory.rulings[wanted.case] = ruling  # first: whoever deletes the NodeQuarantine now has ended it
    await operator.fleet.first.calm()
    if before != ruling:
        note = f"{wanted.node}: {ruling.words}"
        await events.tell(operator, desk.job, "QuarantineNode", note, "QuarantineNode")
    return RULING_SECONDS


async def _look_at_nodes(operator: Operator, desk: Desk, nodes: Mapping[str, str], since: float) -> None:
    """What it brings back is news for the next pass."""
    found = await preflight.look(operator, nodes, desk.job.spec.preflight, since, gpus=uses_gpus(desk.job))
    for name, uid in nodes.items():
        check = found.get(uid)
        if check is not None and check.passed is not True:
            verb = "failed" if check.passed is False else "could not be looked at"
            note = f"{name} {verb}: {check.words}"
            await events.tell(operator, desk.job, "Preflight", note, "LookAtNodes", warning=True)
    desk.memory.checks |= found


async def _attend_queue(operator: Operator, desk: Desk, stage: Stage) -> float:
    """What the queue says is news for the next pass."""
    known = desk.memory.turn
    turn = desk.memory.turn = await queues.attend(operator, desk.job, known, stage)
    if known is None or turn.admitted != known.admitted:
        note = f"queue {desk.job.queue} has admitted it" if turn.admitted else turn.words
        await events.tell(operator, desk.job, "Admitted" if turn.admitted else "Queued", note, "AttendQueue")
    return QUEUE_SECONDS


async def _guard_network(operator: Operator, desk: Desk) -> float:
    wanted = policies.network_policy(desk.job, operator.settings.namespace, operator.settings.scrapers)
    found = await operator.cluster.find(POLICIES, wanted["metadata"]["name"], desk.job.namespace)
    if found is None:
        with contextlib.suppress(Conflict):
            await operator.cluster.create(POLICIES, wanted)
    elif not policies.same(found, wanted):
        wanted["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
        await operator.cluster.replace(POLICIES, wanted)
    return GUARD_SECONDS


async def _write_incident(operator: Operator, desk: Desk, incident: Incident, before: Incident | None) -> None:
    retention, known = operator.settings.incident_retention, before is not None
    fresh = await incidents.write(operator.cluster, desk.job, incident, retention, known=known)
    ended = incident.outcome is not None and (before is None or before.outcome is None)
    if operator.webhook is not None and (fresh or ended):
        operator.webhook.tell(desk.job, incident)
    if fresh:
        await _announce_beginning(operator, desk, incident)
    if ended:
        await node_history.record(operator, desk.job, incident)
    desk.told[incident.name] = incident  # last: what fails before is repeated, by the next operator, too
    if ended:
        await _announce_end(operator, desk, incident)


async def _announce_beginning(operator: Operator, desk: Desk, incident: Incident) -> None:
    metrics.INCIDENTS.labels(incident.cause, incident.class_, incident.mode).inc()
    remedy = incident.remedy or "nothing"
    if incident.applied is not None and incident.remedy is not None:
        metrics.REMEDIES.labels(incident.remedy).inc()
    if incident.outcome is None:
        verb = "applied" if incident.applied else "recommended"
        note = f"{incident.message}; {verb}: {remedy} ({incident.name})"
        await events.tell(operator, desk.job, "IncidentOpened", note, remedy, warning=True)


async def _announce_end(operator: Operator, desk: Desk, incident: Incident) -> None:
    assert incident.outcome is not None
    metrics.OUTCOMES.labels(incident.cause, incident.outcome).inc()
    after = ""
    if incident.recovered is not None:
        seconds = incident.recovered - incident.first_sign
        metrics.RECOVERY_SECONDS.labels(incident.cause).observe(seconds)
        after = f" {seconds:.1f} s after the first sign"
    for part in incident.restart.parts if incident.restart is not None else ():
        metrics.RESTART_PART_SECONDS.labels(part.name).observe(part.seconds)
    warning = incident.outcome in (Outcome.FAILED, Outcome.NOT_HELPED)
    note = f"{incident.name}: {incident.outcome}{after}; {incident.message}"
    await events.tell(operator, desk.job, "IncidentClosed", note, str(incident.outcome), warning=warning)
