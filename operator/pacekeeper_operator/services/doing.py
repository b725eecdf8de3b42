"""How each effect is carried out. All of them may be repeated: what is done already is fine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import kopf

from .. import ledger, metrics, policies
from ..api import SIDECAR_CONTAINER, ObjectRef, IncidentOutcome
from ..cluster import TRAINING_JOBS, PODS, NETWORK_POLICIES, Conflict, Denied, Object, ObjectRejected
from ..effects import (
    RequestQuarantine,
    SyncWorkload,
    CreatePod,
    DeleteJob,
    DeletePod,
    Effect,
    ApplyNetworkPolicy,
    SaveProfile,
    LocalizeProfile,
    CheckNodes,
    ValidateTemplate,
    WriteIncident,
)
from ..gangs import Gang
from ..manifests import find_template_refusal, uses_gpus, build_worker_pod
from ..observation import TemplateVerdict
from ..observe.views import view_pod
from ..queues import WorkloadProgress, QueueDecision
from ..resources import explain_denial
from ..state import Incident
from . import behaviour, events, gangs, incidents, node_history, preflight, quarantine, queues
from .desk import JobContext
from .operator import Operator

WATCH_SETTLE_SECONDS = 2.0
"""What has been created or deleted shows in the watch by then."""
TEMPLATE_RETRY_SECONDS = 60.0
"""A template that was refused is tried again: what refuses it (a webhook, say) may have changed."""
NETWORK_POLICY_CHECK_SECONDS = 300.0
QUARANTINE_POLL_SECONDS = 5.0
QUEUE_POLL_SECONDS = 5.0


async def handle_effect(operator: Operator, desk: JobContext, effect: Effect) -> float:
    """Seconds for which it need not be done again. Raises what the cluster does."""
    match effect:
        case ValidateTemplate(generation):
            return await _validate_template(operator, desk, generation)
        case CreatePod():
            return await _create_pod(operator, desk, effect)
        case DeletePod(name, uid, force):
            await operator.cluster.delete(PODS, name, desk.job.namespace, uid=uid, grace=0 if force else None)
            return WATCH_SETTLE_SECONDS
        case RequestQuarantine():
            return await _request_quarantine(operator, desk, effect)
        case CheckNodes(nodes, since):
            await _check_nodes(operator, desk, dict(nodes), since)
            return 0.0
        case LocalizeProfile():
            await behaviour.localize_profile(operator, desk, effect)
            return 0.0
        case SaveProfile():
            await behaviour.save_profile(operator, desk, effect)
            return 0.0
        case WriteIncident(incident, before):
            await _write_incident(operator, desk, incident, before)
            return 0.0
        case SyncWorkload(stage):
            return await _sync_workload(operator, desk, stage)
        case ApplyNetworkPolicy():
            return await _apply_network_policy(operator, desk)
        case DeleteJob(uid):
            await operator.cluster.delete(TRAINING_JOBS, desk.job.name, desk.job.namespace, uid=uid)
            return WATCH_SETTLE_SECONDS


async def _validate_template(operator: Operator, desk: JobContext, generation: int) -> float:
    """What it brings back is news for the next pass. A denial that is about the moment (quota, say) is no rejection."""
    if desk.job.generation != generation:
        return 0.0
    rejection = find_template_refusal(desk.job) or ledger.explain_state_size_limit(desk.job)
    if not rejection:
        try:
            await _create_pod(operator, build_worker_pod(desk.job, 0, 0, operator.installation), dry_run=True)
        except Conflict:
            rejection = ""  # a pod of that name is there: one like it was accepted
        except ObjectRejected as error:
            rejection = str(error)
    known = desk.cache.desired is not None and desk.cache.desired.state.placement.template_rejected == generation
    desk.cache.template = TemplateVerdict(generation, rejection)
    if rejection and not known:
        await events.emit_job_event(operator, desk.job, "InvalidTemplate", rejection, "ValidateTemplate", warning=True)
    return TEMPLATE_RETRY_SECONDS


async def _create_pod(operator: Operator, desk: JobContext, effect: CreatePod) -> float:
    worker = effect.worker
    group = await _ensure_pod_group(operator, desk, effect.gang) if effect.gang else ""
    placing = (desk.cache.queue_decision or QueueDecision(admitted=False)).find_placement(spare=effect.spare)
    body = build_worker_pod(
        desk.job,
        worker.ordinal,
        worker.incarnation,
        operator.installation,
        spare=effect.spare,
        avoid_nodes=effect.avoid,
        unreliable_nodes=effect.unreliable,
        separate_checkpoints=desk.cache.desired is not None and desk.cache.desired.state.life.apart,
        node_labels=placing.labels,
        tolerations=placing.tolerations,
        pod_group=group,
    )
    try:
        async with operator.creation_slots:
            await _create_pod(operator, body)
    except Conflict:  # an operator before this one has made it, and the watch shows it
        found = view_pod(await operator.cluster.get(PODS, worker.name, desk.job.namespace))
        if found.owner != desk.job.uid:
            raise kopf.TemporaryError(f"the name {worker.name} is taken by a pod that is not this job's") from None
    return WATCH_SETTLE_SECONDS


async def _create_pod(operator: Operator, body: Object, *, dry_run: bool = False) -> None:
    """Raises what the cluster does; a denial for resources says where the sidecar's are set."""
    try:
        await operator.cluster.create(PODS, body, dry_run=dry_run)
    except Denied as error:
        words = explain_denial(str(error), operator.installation.sidecar_resources, SIDECAR_CONTAINER)
        raise Denied(f"{error}{words}", delay=error.delay) from error


async def _ensure_pod_group(operator: Operator, desk: JobContext, gang: Gang) -> str:
    """Name of the PodGroup of the pods that are placed together; "": the cluster knows none."""
    memory = desk.cache
    async with memory.pod_group_lock:
        if memory.pod_group is None or memory.pod_group[0] != gang:
            memory.pod_group = (gang, await gangs.ensure_pod_group(operator.cluster, desk.job, gang))
        return memory.pod_group[1]


async def _request_quarantine(operator: Operator, desk: JobContext, effect: RequestQuarantine) -> float:
    """Asked until the answer is final: a suspicion may wait for its witness, or for a person."""
    wanted = effect.request
    blame = quarantine.NodeAccusation(
        wanted.node,
        wanted.uid,
        wanted.reason,
        ObjectRef(wanted.incident, desk.job.namespace),
        wanted.at,
        wanted.witness,
        wanted.weak,
        wanted.raised,
    )
    with operator.node_registry.priority_gate.count_request():
        ruling = await quarantine.raise_suspicion(operator.node_registry, blame)
    before = desk.cache.quarantine_decisions.get(wanted.node_key)
    desk.cache.quarantine_decisions[wanted.node_key] = ruling  # first: whoever deletes the NodeQuarantine now has ended it
    await operator.node_registry.priority_gate.wait_for_turn()
    if before != ruling:
        note = f"{wanted.node}: {ruling.message}"
        await events.emit_job_event(operator, desk.job, "QuarantineNode", note, "QuarantineNode")
    return QUARANTINE_POLL_SECONDS


async def _check_nodes(operator: Operator, desk: JobContext, nodes: Mapping[str, str], since: float) -> None:
    """What it brings back is news for the next pass."""
    found = await preflight.check_nodes(operator, nodes, desk.job.spec.preflight, since, gpus=uses_gpus(desk.job))
    for name, uid in nodes.items():
        check = found.get(uid)
        if check is not None and check.passed is not True:
            verb = "failed" if check.passed is False else "could not be looked at"
            note = f"{name} {verb}: {check.message}"
            await events.emit_job_event(operator, desk.job, "Preflight", note, "CheckNodes", warning=True)
    desk.cache.node_checks |= found


async def _sync_workload(operator: Operator, desk: JobContext, stage: WorkloadProgress) -> float:
    """What the queue says is news for the next pass."""
    known = desk.cache.queue_decision
    turn = desk.cache.queue_decision = await queues.sync_workload(operator, desk.job, known, stage)
    if known is None or turn.admitted != known.admitted:
        note = f"queue {desk.job.queue} has admitted it" if turn.admitted else turn.message
        await events.emit_job_event(operator, desk.job, "Admitted" if turn.admitted else "Queued", note, "SyncWorkload")
    return QUEUE_POLL_SECONDS


async def _apply_network_policy(operator: Operator, desk: JobContext) -> float:
    wanted = policies.build_network_policy(desk.job, operator.settings.namespace, operator.settings.scrapers)
    found = await operator.cluster.find(NETWORK_POLICIES, wanted["metadata"]["name"], desk.job.namespace)
    if found is None:
        with contextlib.suppress(Conflict):
            await operator.cluster.create(NETWORK_POLICIES, wanted)
    elif not policies.is_same_policy(found, wanted):
        wanted["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
        await operator.cluster.replace(NETWORK_POLICIES, wanted)
    return NETWORK_POLICY_CHECK_SECONDS


async def _write_incident(operator: Operator, desk: JobContext, incident: Incident, before: Incident | None) -> None:
    retention, known = operator.settings.incident_retention, before is not None
    fresh = await incidents.write_incident(operator.cluster, desk.job, incident, retention, known=known)
    ended = incident.outcome is not None and (before is None or before.outcome is None)
    if operator.webhook is not None and (fresh or ended):
        operator.webhook.enqueue(desk.job, incident)
    if fresh:
        await _announce_beginning(operator, desk, incident)
    if ended:
        await node_history.record_incident(operator, desk.job, incident)
    desk.written_incidents[incident.name] = incident  # last: what fails before is repeated, by the next operator, too
    if ended:
        await _announce_end(operator, desk, incident)


async def _announce_beginning(operator: Operator, desk: JobContext, incident: Incident) -> None:
    metrics.INCIDENTS_OPENED.labels(incident.cause, incident.class_, incident.mode).inc()
    remedy = incident.remedy or "nothing"
    if incident.applied is not None and incident.remedy is not None:
        metrics.REMEDIES_APPLIED.labels(incident.remedy).inc()
    if incident.outcome is None:
        verb = "applied" if incident.applied else "recommended"
        note = f"{incident.message}; {verb}: {remedy} ({incident.name})"
        await events.emit_job_event(operator, desk.job, "IncidentOpened", note, remedy, warning=True)


async def _announce_end(operator: Operator, desk: JobContext, incident: Incident) -> None:
    assert incident.outcome is not None
    metrics.INCIDENT_OUTCOMES.labels(incident.cause, incident.outcome).inc()
    after = ""
    if incident.recovered is not None:
        seconds = incident.recovered - incident.first_sign
        metrics.RECOVERY_SECONDS.labels(incident.cause).observe(seconds)
        after = f" {seconds:.1f} s after the first sign"
    for part in incident.restart.parts if incident.restart is not None else ():
        metrics.RESTART_PART_SECONDS.labels(part.name).observe(part.seconds)
    warning = incident.outcome in (IncidentOutcome.FAILED, IncidentOutcome.NOT_HELPED)
    note = f"{incident.name}: {incident.outcome}{after}; {incident.message}"
    await events.emit_job_event(operator, desk.job, "IncidentClosed", note, str(incident.outcome), warning=warning)
