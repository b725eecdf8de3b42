"""A job's Kueue Workload: created, read, and updated with the job's progress."""

from __future__ import annotations

from collections.abc import Mapping

import kopf

from ..api.names import LABEL_PRIORITY, Object
from ..api.training_job import TrainingJob
from ..kube.client import Cluster, ResourceKind
from ..pods import queues
from ..pods.manifests import Installation, build_worker_pod
from ..pods.queues import NodePlacement, QueueDecision, WorkloadProgress
from ..state.desired_state import DesiredState
from .operator import Operator

PRIORITY_CLASS_KIND = ResourceKind("/apis/scheduling.k8s.io/v1", "priorityclasses", namespaced=False)


async def read_decision(operator: Operator, job: TrainingJob, desired: DesiredState | None = None) -> QueueDecision:
    """Return the queue's decision without changing anything.

    `desired`: the job's stored state, which shows whether it was admitted if Kueue is not available.
    """
    cluster = operator.cluster
    version = await cluster.find_served_version(queues.KUEUE, queues.KUEUE_VERSIONS)
    if not version:
        return QueueDecision(False, queues.NOT_SERVED) if desired is None else queues.restore_queue_decision(desired)
    workload = await cluster.find(_get_workload_kind(version), queues.workload_name(job), job.namespace)
    return (
        QueueDecision(False, queues.NOT_MADE)
        if workload is None
        else await _build_decision(cluster, version, workload, job, None)
    )


async def sync_workload(
    operator: Operator, job: TrainingJob, previous: QueueDecision | None, stage: WorkloadProgress
) -> QueueDecision:
    """Bring the job's Workload to its desired state, and return the queue's decision.

    Raises the errors of the cluster client, and TemporaryError if the job was admitted and Kueue is not available.
    Kueue may be in an upgrade, and the job keeps its quota during that.
    """
    cluster = operator.cluster
    version = await cluster.find_served_version(queues.KUEUE, queues.KUEUE_VERSIONS)
    if not version and previous is not None and previous.admitted and not stage.finished:
        raise kopf.TemporaryError(queues.NOT_SERVED_NOW, delay=5)
    if not version:
        return QueueDecision(False, queues.NOT_SERVED)
    kind, name, active = _get_workload_kind(version), queues.workload_name(job), not job.spec.suspend
    workload = await cluster.find(kind, name, job.namespace)
    if workload is None and job.prebuilt_workload:
        return QueueDecision(False, queues.NOT_SENT)
    if workload is None:
        if stage.finished:
            return QueueDecision(False, "the job has ended")
        workload = await cluster.create(kind, await _build_workload(operator, job, version))
    elif queues.is_owned_by_other_job(workload, job):
        return QueueDecision(False, queues.NOT_ITS_OWN)
    elif (metadata := queues.build_adoption_patch(workload, job)) is not None:
        workload = await _patch_workload(cluster, kind, workload, {"metadata": metadata})
    elif not queues.has_requested_pods(workload, job) and not stage.finished:
        if queues.has_quota(workload):
            if not stage.pods_left:
                await cluster.delete(kind, name, job.namespace, uid=workload["metadata"]["uid"])
            return QueueDecision(False, queues.OTHER_PODS)
        workload = await _replace_workload(cluster, kind, workload, await _build_workload(operator, job, version))
    elif workload["spec"].get("active", True) != active:
        workload = await _patch_workload(cluster, kind, workload, {"spec": {"active": active}})
    elif queues.read_priority_class(workload) != queues.find_priority_class(job) and not stage.finished:
        value = await _find_priority(cluster, job, version)
        priority = queues.build_priority_fields(queues.find_priority_class(job), version, value)
        workload = await _patch_workload(cluster, kind, workload, {"spec": priority})
    status = queues.build_status_update(workload, stage, operator.runtime.now())
    if status is not None:
        workload = await _patch_workload(cluster, kind, workload, {"status": status}, "status")
    return await _build_decision(cluster, version, workload, job, previous)


async def _build_workload(operator: Operator, job: TrainingJob, version: str) -> Object:
    value = await _find_priority(operator.cluster, job, version)
    return queues.build_workload(job, version, _build_templates(job, operator.installation), value)


async def _find_priority(cluster: Cluster, job: TrainingJob, version: str) -> int:
    """Return the value of the job's priority class, 0 without one. Raises TemporaryError for an unknown class."""
    requested = queues.find_priority_class(job)
    if requested is None:
        return 0
    kind = PRIORITY_CLASS_KIND if requested.is_pod_class else _get_cluster_kind(version, "workloadpriorityclasses")
    stored = await cluster.find(kind, requested.name)
    if stored is None:
        source = "priorityClassName of its template" if requested.is_pod_class else f"label {LABEL_PRIORITY}"
        raise kopf.TemporaryError(
            f"its priority class {requested.name} ({source}) is not among the {kind.plural}: make it, or name another",
            delay=5,
        )
    return int(stored["value"])


def _build_templates(job: TrainingJob, installation: Installation) -> Mapping[str, Object]:
    return {
        name: _build_template(build_worker_pod(job, 0, 0, installation, spare=name == queues.SPARES_POD_SET))
        for name in (queues.WORKERS_POD_SET, queues.SPARES_POD_SET)
    }


def _build_template(pod: Object) -> Object:
    metadata = {"labels": pod["metadata"]["labels"], "annotations": pod["metadata"]["annotations"]}
    return {"metadata": metadata, "spec": pod["spec"]}


async def _replace_workload(cluster: Cluster, kind: ResourceKind, workload: Object, desired: Object) -> Object:
    metadata = {**workload["metadata"], "annotations": desired["metadata"]["annotations"]}
    return await cluster.replace(kind, {**workload, "metadata": metadata, "spec": desired["spec"]})


async def _patch_workload(
    cluster: Cluster, kind: ResourceKind, workload: Object, change: Object, subresource: str = ""
) -> Object:
    """Patch by compare-and-swap: Kueue writes it, too."""
    metadata = workload["metadata"]
    body = {**change, "metadata": {**change.get("metadata", {}), "resourceVersion": metadata["resourceVersion"]}}
    return await cluster.patch(kind, metadata["name"], body, metadata["namespace"], subresource=subresource)


async def _build_decision(
    cluster: Cluster, version: str, workload: Object, job: TrainingJob, previous: QueueDecision | None
) -> QueueDecision:
    """Build the decision. Each flavor of an admission is read once."""
    if queues.is_owned_by_other_job(workload, job):
        return QueueDecision(False, queues.NOT_ITS_OWN)
    placements: dict[str, NodePlacement] = dict(previous.placements) if previous is not None else {}
    for name in queues.read_flavors(workload) - placements.keys():
        placements[name] = queues.read_node_placement(
            await cluster.get(_get_cluster_kind(version, "resourceflavors"), name)
        )
    return queues.read_queue_decision(workload, placements)


def _get_workload_kind(version: str) -> ResourceKind:
    return ResourceKind(f"/apis/{queues.KUEUE}/{version}", "workloads")


def _get_cluster_kind(version: str, plural: str) -> ResourceKind:
    """Return a cluster-scoped kind of Kueue."""
    return ResourceKind(f"/apis/{queues.KUEUE}/{version}", plural, namespaced=False)
