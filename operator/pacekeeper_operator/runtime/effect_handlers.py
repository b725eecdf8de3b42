"""How each effect is executed. All handlers are idempotent."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import kopf

from .. import metrics
from ..api.incident import IncidentOutcome, ObjectRef
from ..api.names import SIDECAR_CONTAINER
from ..api.training_job import JobKind
from ..decide.effects import (
    ApplyNetworkPolicy,
    CheckNodes,
    CreateCheckpointServer,
    CreatePod,
    DeleteJob,
    DeletePod,
    DeleteWatchedPod,
    Effect,
    LocalizeProfile,
    RequestQuarantine,
    SaveProfile,
    SyncWorkload,
    ValidateTemplate,
    WriteIncident,
)
from ..kube.client import NETWORK_POLICIES, PODS, TRAINING_JOBS, Conflict, Denied, Object, ObjectRejected
from ..observe.views import view_pod
from ..pods import network_policies
from ..pods.checkpoint_server import build_checkpoint_server_pod
from ..pods.gangs import Gang
from ..pods.manifests import SchedulingConstraints, build_worker_pod, find_template_refusal, uses_gpus
from ..pods.queues import QueueDecision, WorkloadProgress, add_pod_set
from ..pods.resources import explain_denial
from ..services import events, gangs, incidents, preflight, quarantine, queues
from ..services.operator import Operator
from ..state import state_codec
from ..state.desired_state import Incident
from ..state.effect_results import TemplateVerdict
from . import pod_restarts, profiling
from .job_context import JobContext

WATCH_SETTLE_SECONDS = 2.0
"""Within this time, the watch shows what was created or deleted."""
TEMPLATE_RETRY_SECONDS = 60.0
"""Seconds until a rejected template is validated again: what rejects it (such as a webhook) may have changed."""
NETWORK_POLICY_CHECK_SECONDS = 300.0
QUARANTINE_POLL_SECONDS = 5.0
QUEUE_POLL_SECONDS = 5.0


async def handle_effect(operator: Operator, context: JobContext, effect: Effect) -> float:
    """Execute `effect` and return the seconds for which it need not be repeated.

    Raises the errors of the cluster client.
    """
    match effect:
        case ValidateTemplate(generation):
            return await _validate_template(operator, context, generation)
        case CreatePod():
            return await _create_worker_pod(operator, context, effect)
        case CreateCheckpointServer(name):
            return await _create_checkpoint_server(operator, context, name)
        case DeletePod(name, uid, force):
            await operator.cluster.delete(PODS, name, context.job.namespace, uid=uid, grace=0 if force else None)
            return WATCH_SETTLE_SECONDS
        case DeleteWatchedPod():
            await pod_restarts.delete_watched_pod(operator, context, effect)
            return WATCH_SETTLE_SECONDS
        case RequestQuarantine():
            return await _request_quarantine(operator, context, effect)
        case CheckNodes(nodes, since):
            await _check_nodes(operator, context, dict(nodes), since)
            return 0.0
        case LocalizeProfile():
            await profiling.localize_profile(operator, context, effect)
            return 0.0
        case SaveProfile():
            await profiling.save_profile(operator, context, effect)
            return 0.0
        case WriteIncident(incident, before):
            await _write_incident(operator, context, incident, before)
            return 0.0
        case SyncWorkload(stage):
            return await _sync_workload(operator, context, stage)
        case ApplyNetworkPolicy():
            return await _apply_network_policy(operator, context)
        case DeleteJob(uid):
            await operator.cluster.delete(TRAINING_JOBS, context.job.name, context.job.namespace, uid=uid)
            return WATCH_SETTLE_SECONDS


async def _validate_template(operator: Operator, context: JobContext, generation: int) -> float:
    """Validate the pod template by a dry run, and store the verdict for the next pass.

    A temporary denial, such as an exhausted quota, is not a rejection.
    """
    if context.job.generation != generation:
        return 0.0
    rejection = find_template_refusal(context.job) or state_codec.explain_state_size_limit(context.job)
    if not rejection:
        try:
            await _create_pod(operator, build_worker_pod(context.job, 0, 0, operator.installation), dry_run=True)
        except Conflict:
            rejection = ""  # a pod of that name exists: a similar one was accepted
        except ObjectRejected as error:
            rejection = str(error)
    already_rejected = (
        context.cache.desired is not None and context.cache.desired.state.placement.template_rejected == generation
    )
    context.cache.results.template = TemplateVerdict(generation, rejection)
    if rejection and not already_rejected:
        await events.emit_job_event(
            operator, context.job, "InvalidTemplate", rejection, "ValidateTemplate", warning=True
        )
    return TEMPLATE_RETRY_SECONDS


async def _create_worker_pod(operator: Operator, context: JobContext, effect: CreatePod) -> float:
    worker = effect.worker
    pod_group = await _ensure_pod_group(operator, context, effect.gang) if effect.gang else ""
    decision = context.cache.results.queue_decision or QueueDecision(admitted=False)
    placement = decision.find_placement(effect.pod_set)
    has_assigned_node = decision.assigns_nodes(effect.pod_set)  # no other constraint may exclude it
    body = build_worker_pod(
        context.job,
        worker.ordinal,
        worker.incarnation,
        operator.installation,
        spare=effect.spare and not has_assigned_node,
        scheduling=SchedulingConstraints(
            avoid_nodes=() if has_assigned_node else effect.avoid,
            unreliable_nodes=effect.unreliable,
            node_labels=placement.labels,
            tolerations=placement.tolerations,
            pod_group=pod_group,
        ),
    )
    if effect.pod_set:
        add_pod_set(body, context.job, decision, effect.pod_set)
    try:
        async with operator.passes.creation_slots:
            await _create_pod(operator, body)
    except Conflict:  # an earlier operator created it, and the watch will show it
        await _require_own_pod(operator, context, worker.name)
    return WATCH_SETTLE_SECONDS


async def _create_checkpoint_server(operator: Operator, context: JobContext, name: str) -> float:
    try:
        await _create_pod(operator, build_checkpoint_server_pod(context.job, operator.installation, name))
    except Conflict:
        await _require_own_pod(operator, context, name)
    return WATCH_SETTLE_SECONDS


async def _require_own_pod(operator: Operator, context: JobContext, name: str) -> None:
    """Raise kopf.TemporaryError if the pod of this name is not the job's."""
    existing = view_pod(await operator.cluster.get(PODS, name, context.job.namespace))
    if existing.owner != context.job.uid:
        raise kopf.TemporaryError(f"the name {name} is taken by a pod that is not this job's")


async def _create_pod(operator: Operator, body: Object, *, dry_run: bool = False) -> None:
    """Create a pod. Raises the errors of the cluster client; a denial for resources names the sidecar's settings."""
    try:
        await operator.cluster.create(PODS, body, dry_run=dry_run)
    except Denied as error:
        explanation = explain_denial(str(error), operator.installation.sidecar_resources, SIDECAR_CONTAINER)
        raise Denied(f"{error}{explanation}", delay=error.delay) from error


async def _ensure_pod_group(operator: Operator, context: JobContext, gang: Gang) -> str:
    """Return the name of the PodGroup of the pods that are placed together.

    Empty: the cluster does not serve PodGroups.
    """
    cache = context.cache
    async with cache.results.pod_group_lock:
        if cache.results.pod_group is None or cache.results.pod_group[0] != gang:
            cache.results.pod_group = (gang, await gangs.ensure_pod_group(operator.cluster, context.job, gang))
        return cache.results.pod_group[1]


async def _request_quarantine(operator: Operator, context: JobContext, effect: RequestQuarantine) -> float:
    """Raise the suspicion against the node, and store the decision for the next pass.

    The request is repeated until the decision is final: a suspicion may wait for its witness, or for a person.
    """
    request = effect.request
    accusation = quarantine.NodeAccusation(
        request.node,
        request.uid,
        request.reason,
        ObjectRef(request.incident, context.job.namespace),
        request.at,
        request.witness,
        request.weak,
        request.recorded,
    )
    with operator.node_registry.priority_gate.count_request():
        decision = await quarantine.raise_suspicion(operator.node_registry, accusation)
    before = context.cache.results.quarantine_decisions.get(request.node_key)
    context.cache.results.quarantine_decisions[request.node_key] = (
        decision  # first: a user who deletes the NodeQuarantine from now on has ended it
    )
    await operator.node_registry.priority_gate.wait_for_turn()
    if before != decision:
        note = f"{request.node}: {decision.message}"
        await events.emit_job_event(operator, context.job, "QuarantineNode", note, "QuarantineNode")
    return QUARANTINE_POLL_SECONDS


async def _check_nodes(operator: Operator, context: JobContext, nodes: Mapping[str, str], since: float) -> None:
    """Check the nodes by preflight probes, and store the results for the next pass."""
    checks = await preflight.check_nodes(
        operator, nodes, context.job.spec.preflight, since, gpus=uses_gpus(context.job)
    )
    for name, uid in nodes.items():
        check = checks.get(uid)
        if check is not None and check.passed is not True:
            verb = "failed" if check.passed is False else "could not be checked"
            note = f"{name} {verb}: {check.message}"
            await events.emit_job_event(operator, context.job, "Preflight", note, "CheckNodes", warning=True)
    context.cache.results.node_checks |= checks


async def _sync_workload(operator: Operator, context: JobContext, stage: WorkloadProgress) -> float:
    """Synchronize the Kueue Workload, and store the queue's decision for the next pass."""
    previous = context.cache.results.queue_decision
    decision = context.cache.results.queue_decision = await queues.sync_workload(operator, context.job, previous, stage)
    if previous is None or decision.admitted != previous.admitted:
        note = f"queue {context.job.queue} has admitted it" if decision.admitted else decision.message
        await events.emit_job_event(
            operator, context.job, "Admitted" if decision.admitted else "Queued", note, "SyncWorkload"
        )
    return QUEUE_POLL_SECONDS


async def _apply_network_policy(operator: Operator, context: JobContext) -> float:
    policy = network_policies.build_network_policy(context.job, operator.settings.namespace, operator.settings.scrapers)
    existing = await operator.cluster.find(NETWORK_POLICIES, policy["metadata"]["name"], context.job.namespace)
    if existing is None:
        with contextlib.suppress(Conflict):
            await operator.cluster.create(NETWORK_POLICIES, policy)
    elif not network_policies.is_same_policy(existing, policy):
        policy["metadata"]["resourceVersion"] = existing["metadata"]["resourceVersion"]
        await operator.cluster.replace(NETWORK_POLICIES, policy)
    return NETWORK_POLICY_CHECK_SECONDS


async def _write_incident(operator: Operator, context: JobContext, incident: Incident, before: Incident | None) -> None:
    retention, known = operator.settings.incident_retention, before is not None
    created = await incidents.write_incident(operator.cluster, context.job, incident, retention, known=known)
    ended = incident.outcome is not None and (before is None or before.outcome is None)
    if operator.webhook is not None and (created or ended):
        operator.webhook.enqueue(context.job, incident)
    if created:
        await _announce_beginning(operator, context, incident)
    if ended and context.job.kind is JobKind.TRAINING_JOB:  # watched jobs blame no node
        await operator.node_histories.record_incident(context.job, incident)
    context.written_incidents[incident.name] = incident  # last: what fails before is retried, also by the next operator
    if ended:
        await _announce_end(operator, context, incident)


async def _announce_beginning(operator: Operator, context: JobContext, incident: Incident) -> None:
    metrics.INCIDENTS_OPENED.labels(incident.cause, incident.class_, incident.mode).inc()
    remedy = incident.remedy or "nothing"
    if incident.applied is not None and incident.remedy is not None:
        metrics.REMEDIES_APPLIED.labels(incident.remedy).inc()
    if incident.outcome is None:
        watched = context.job.kind is JobKind.WATCHED_JOB
        verb = "applied" if incident.applied else "only watched; worth it" if watched else "recommended"
        note = f"{incident.message}; {verb}: {remedy} ({incident.name})"
        await events.emit_job_event(operator, context.job, "IncidentOpened", note, remedy, warning=True)


async def _announce_end(operator: Operator, context: JobContext, incident: Incident) -> None:
    assert incident.outcome is not None
    metrics.INCIDENT_OUTCOMES.labels(incident.cause, incident.outcome).inc()
    recovered_after = ""
    if incident.recovered is not None:
        seconds = incident.recovered - incident.first_sign
        metrics.RECOVERY_SECONDS.labels(incident.cause).observe(seconds)
        recovered_after = f" {seconds:.1f} s after the first sign"
    for part in incident.restart.parts if incident.restart is not None else ():
        metrics.RESTART_PART_SECONDS.labels(part.name).observe(part.seconds)
    warning = incident.outcome in (IncidentOutcome.FAILED, IncidentOutcome.INEFFECTIVE)
    note = f"{incident.name}: {incident.outcome}{recovered_after}; {incident.message}"
    await events.emit_job_event(operator, context.job, "IncidentClosed", note, str(incident.outcome), warning=warning)
