"""The deletion of a watched job's pod: what decides about it is read from the API server, right before as well."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import kopf

from .. import metrics
from ..api.names import LABEL_JOB, LABEL_WATCH_RESTART, LABEL_WATCHED, WATCH_CONFIG_MAP, Object
from ..api.training_job import RemediationMode, Remedy, TrainingJob
from ..api.watched_job import RootRef
from ..decide.effects import DeleteWatchedPod
from ..decide.watched.pod_restart import find_blocking_pod, find_controller_refusal
from ..kube.client import CONFIG_MAPS, JOBS, NAMESPACES, PODS, ResourceKind
from ..observe.owners import READABLE_KINDS, parse_owned_metadata
from ..observe.pod_controllers import JOB_SET_GROUP, JOB_SET_LABEL, read_job_policy, read_job_set_policy
from ..observe.views import view_pod
from ..services import events
from ..services.operator import Operator
from ..services.watch_injection import WatchState
from ..state.effect_results import PodController, PodRestartFacts, PodRestartRefusal
from ..state.observation import Observation
from .job_context import JobContext

log = logging.getLogger(__name__)


async def read_restart_facts(operator: Operator, job: TrainingJob, observation: Observation) -> PodRestartFacts | None:
    """Read what decides about the pod that blocks the job; None: no pod may be deleted, or none blocks it.

    An error is logged: the job is observed without it.
    """
    hang = find_blocking_pod(observation) if operator.settings.watch_restart else None
    if hang is None:
        return None
    try:
        pod = await operator.cluster.find(PODS, hang.view.name, job.namespace)
        if pod is None or not await _allows_restarts(operator, job.namespace):
            return None
        return await _read_pod_facts(operator, job, pod)
    except (kopf.TemporaryError, kopf.PermanentError) as error:
        log.warning("%s/%s: whether a restart helps cannot be read: %s", job.namespace, job.name, error)
        return None


async def delete_watched_pod(operator: Operator, context: JobContext, effect: DeleteWatchedPod) -> None:
    """Delete the pod if what decided that still holds; else store why not, for the next pass.

    Raises the errors of the cluster client.
    """
    job = context.job
    pod = await operator.cluster.find(PODS, effect.name, job.namespace)
    if pod is None or pod["metadata"]["uid"] != effect.uid or "deletionTimestamp" in pod["metadata"]:
        return
    refusal = await _find_refusal(operator, context, pod)
    if refusal:
        context.cache.results.pod_restart_refusal = PodRestartRefusal(effect.incident, refusal)
        return
    note = (
        f"{effect.incident}: pod {effect.name} blocks all other ranks and is deleted, so that its controller restarts"
    )
    await events.emit_job_event(operator, job, "PodRestarted", note, "DeletePod", warning=True)
    version = pod["metadata"]["resourceVersion"]  # a pod that has ended since then stays
    await operator.cluster.delete(PODS, effect.name, job.namespace, uid=effect.uid, version=version)
    metrics.REMEDIES_APPLIED.labels(Remedy.RESTART_RANKS).inc()


async def _find_refusal(operator: Operator, context: JobContext, pod: Object) -> str:
    """Return why the pod, as it is now, may not be deleted; "": it may. Raises TemporaryError if it may later."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get(LABEL_WATCHED) != "true" or LABEL_JOB in labels:
        return "its pod is not watched"
    if view_pod(pod).ended:
        return "its pod has ended already"
    if not operator.settings.watch_restart or not await _allows_restarts(operator, context.job.namespace):
        return "restarts are not enabled any more"
    facts = await _read_pod_facts(operator, context.job, pod)
    desired = context.cache.desired
    holds_all = desired is not None and all(m.worker == pod["metadata"]["name"] for m in desired.plan.members)
    refusal = find_controller_refusal(facts, holds_all_ranks=holds_all)
    if facts.hold_reason and not refusal:  # it may end, and a new leader does not know at once whether there is a pause
        raise kopf.TemporaryError(f"pod {pod['metadata']['name']} is not deleted now: {facts.hold_reason}")
    return refusal


async def _allows_restarts(operator: Operator, namespace: str) -> bool:
    """Return whether the namespace has opted in."""
    found = await operator.cluster.collect(
        NAMESPACES,
        lambda body: body["metadata"]["name"],
        labels=f"{LABEL_WATCH_RESTART}=enabled",
        fields=f"metadata.name={namespace}",
    )
    return bool(list(found))


async def _read_pod_facts(operator: Operator, job: TrainingJob, pod: Object) -> PodRestartFacts:
    controller = await _read_controller(operator, pod)
    job_sets = {
        dict(watched.metadata.owner_labels).get(JOB_SET_LABEL, "")
        for watched in operator.watched.select_pods(job)
        if not watched.view.ended
    }
    job_set = None if controller is None else controller.job_set
    return PodRestartFacts(
        uid=pod["metadata"]["uid"],
        hold_reason=await _find_hold_reason(operator),
        controller=controller,
        has_other_trainings=operator.watched.has_other_trainings(job),
        is_in_one_job_set=job_set is not None and job_sets == {job_set.name},
    )


async def _find_hold_reason(operator: Operator) -> str:
    """Return why no remedy is applied now; "": some may be."""
    if operator.paused:
        return f"remedies are paused: {operator.paused}"
    if operator.settings.mode is not RemediationMode.ACT:
        return "the installation only recommends remedies (policy.mode)"
    config_map = await operator.cluster.find(CONFIG_MAPS, WATCH_CONFIG_MAP, operator.settings.namespace)
    return "" if WatchState.from_config_map(config_map or {}).is_on else "the watch is switched off"


async def _read_controller(operator: Operator, pod: Object) -> PodController | None:
    """Return what controls the pod; None: nothing, or it is gone."""
    owner = parse_owned_metadata(pod["metadata"]).controller
    if owner is None:
        return None
    description, namespace = f"{owner.kind} {owner.name}", pod["metadata"]["namespace"]
    if (owner.api_version, owner.kind) != ("batch/v1", "Job"):
        return PodController(description)
    job = await operator.cluster.find(JOBS, owner.name, namespace)
    if job is None or job["metadata"].get("uid") != owner.uid:
        return None
    above = parse_owned_metadata(job["metadata"]).controller
    job_set = None if above is None else await _read_job_set(operator, above, namespace)
    try:
        job_set_policy = None if job_set is None else read_job_set_policy(job_set)
        return PodController(description, read_job_policy(job), job_set_policy)
    except (KeyError, TypeError, AttributeError) as error:  # a version of the API that is not known
        log.warning("%s in %s cannot be read: %r", description, namespace, error)
        return PodController(description)


async def _read_job_set(operator: Operator, owner: RootRef, namespace: str) -> Mapping[str, Any] | None:
    """Return the JobSet that controls a Job; None: another kind does, or it is gone."""
    group = owner.api_version.partition("/")[0]
    if (group, owner.kind) != (JOB_SET_GROUP, "JobSet"):
        return None
    kind = ResourceKind(f"/apis/{owner.api_version}", READABLE_KINDS[group, owner.kind])
    job_set = await operator.cluster.find(kind, owner.name, namespace)
    return job_set if job_set is not None and job_set["metadata"].get("uid") == owner.uid else None
