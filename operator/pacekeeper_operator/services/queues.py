"""A job's Workload: made, looked at, and told how far the job is."""

from __future__ import annotations

from collections.abc import Mapping

import kopf

from .. import queues
from ..api import LABEL_PRIORITY, TrainingJob, Object
from ..cluster import Cluster, ResourceKind
from ..manifests import Installation, build_worker_pod
from ..queues import NodePlacement, WorkloadProgress, QueueDecision
from ..state import DesiredState
from .operator import Operator

PRIORITY_CLASS_KIND = ResourceKind("/apis/scheduling.k8s.io/v1", "priorityclasses", namespaced=False)


async def read_decision(operator: Operator, job: TrainingJob, desired: DesiredState | None = None) -> QueueDecision:
    """What the queue says, without changing anything. `draft`: what is written of the job, which says whether it was
    admitted where Kueue is not there."""
    cluster = operator.cluster
    version = await cluster.find_served_version(queues.KUEUE, queues.KUEUE_VERSIONS)
    if not version:
        return QueueDecision(False, queues.NOT_SERVED) if desired is None else queues.restore_queue_decision(desired)
    found = await cluster.find(_get_workload_kind(version), queues.workload_name(job), job.namespace)
    return QueueDecision(False, queues.NOT_MADE) if found is None else await _build_decision(cluster, version, found, job, None)


async def sync_workload(operator: Operator, job: TrainingJob, known: QueueDecision | None, stage: WorkloadProgress) -> QueueDecision:
    """Has the job's Workload be as it should, and says what the queue says of it.

    Raises what the cluster does, and TemporaryError where a job was admitted and Kueue is not there: it may be
    upgraded, and its quota is not taken away by that.
    """
    cluster = operator.cluster
    version = await cluster.find_served_version(queues.KUEUE, queues.KUEUE_VERSIONS)
    if not version and known is not None and known.admitted and not stage.finished:
        raise kopf.TemporaryError(queues.NOT_SERVED_NOW, delay=5)
    if not version:
        return QueueDecision(False, queues.NOT_SERVED)
    kind, name, active = _get_workload_kind(version), queues.workload_name(job), not job.spec.suspend
    found = await cluster.find(kind, name, job.namespace)
    if found is None and job.prebuilt:
        return QueueDecision(False, queues.NOT_SENT)
    if found is None:
        if stage.finished:
            return QueueDecision(False, "the job has ended")
        found = await cluster.create(kind, await _build_workload(operator, job, version))
    elif queues.is_owned_by_other_job(found, job):
        return QueueDecision(False, queues.NOT_ITS_OWN)
    elif (metadata := queues.build_adoption_patch(found, job)) is not None:
        found = await _patch_workload(cluster, kind, found, {"metadata": metadata})
    elif not queues.has_requested_pods(found, job) and not stage.finished:
        if queues.has_quota(found):
            if not stage.pods_left:
                await cluster.delete(kind, name, job.namespace, uid=found["metadata"]["uid"])
            return QueueDecision(False, queues.OTHER_PODS)
        found = await _replace_workload(cluster, kind, found, await _build_workload(operator, job, version))
    elif found["spec"].get("active", True) != active:
        found = await _patch_workload(cluster, kind, found, {"spec": {"active": active}})
    elif queues.read_priority_class(found) != queues.find_priority_class(job) and not stage.finished:
        value = await _find_priority(cluster, job, version)
        priority = queues.build_priority_fields(queues.find_priority_class(job), version, value)
        found = await _patch_workload(cluster, kind, found, {"spec": priority})
    status = queues.build_status_update(found, stage, operator.runtime.now())
    if status is not None:
        found = await _patch_workload(cluster, kind, found, {"status": status}, "status")
    return await _build_decision(cluster, version, found, job, known)


async def _build_workload(operator: Operator, job: TrainingJob, version: str) -> Object:
    value = await _find_priority(operator.cluster, job, version)
    return queues.build_workload(job, version, _build_templates(job, operator.installation), value)


async def _find_priority(cluster: Cluster, job: TrainingJob, version: str) -> int:
    """Raises TemporaryError where there is no such class."""
    wanted = queues.find_priority_class(job)
    if wanted is None:
        return 0
    kind = PRIORITY_CLASS_KIND if wanted.is_pod_class else _get_cluster_kind(version, "workloadpriorityclasses")
    found = await cluster.find(kind, wanted.name)
    if found is None:
        where = "priorityClassName of its template" if wanted.is_pod_class else f"label {LABEL_PRIORITY}"
        raise kopf.TemporaryError(
            f"its priority class {wanted.name} ({where}) is not among the {kind.plural}: make it, or name another",
            delay=5,
        )
    return int(found["value"])


def _build_templates(job: TrainingJob, installation: Installation) -> Mapping[str, Object]:
    return {
        name: _build_template(build_worker_pod(job, 0, 0, installation, spare=name == queues.SPARES_POD_SET))
        for name in (queues.WORKERS_POD_SET, queues.SPARES_POD_SET)
    }


def _build_template(pod: Object) -> Object:
    metadata = {"labels": pod["metadata"]["labels"], "annotations": pod["metadata"]["annotations"]}
    return {"metadata": metadata, "spec": pod["spec"]}


async def _replace_workload(cluster: Cluster, kind: ResourceKind, found: Object, wanted: Object) -> Object:
    metadata = {**found["metadata"], "annotations": wanted["metadata"]["annotations"]}
    return await cluster.replace(kind, {**found, "metadata": metadata, "spec": wanted["spec"]})


async def _patch_workload(cluster: Cluster, kind: ResourceKind, found: Object, change: Object, subresource: str = "") -> Object:
    """Compare-and-swap: Kueue writes, too."""
    metadata = found["metadata"]
    body = {**change, "metadata": {**change.get("metadata", {}), "resourceVersion": metadata["resourceVersion"]}}
    return await cluster.patch(kind, metadata["name"], body, metadata["namespace"], subresource=subresource)


async def _build_decision(cluster: Cluster, version: str, found: Object, job: TrainingJob, known: QueueDecision | None) -> QueueDecision:
    """Flavours are read once for an admission."""
    if queues.is_owned_by_other_job(found, job):
        return QueueDecision(False, queues.NOT_ITS_OWN)
    placing: dict[str, NodePlacement] = dict(known.placements) if known is not None else {}
    for name in queues.read_flavors(found) - placing.keys():
        placing[name] = queues.read_node_placement(await cluster.get(_get_cluster_kind(version, "resourceflavors"), name))
    return queues.read_queue_decision(found, placing)


def _get_workload_kind(version: str) -> ResourceKind:
    return ResourceKind(f"/apis/{queues.KUEUE}/{version}", "workloads")


def _get_cluster_kind(version: str, plural: str) -> ResourceKind:
    """What the whole cluster has."""
    return ResourceKind(f"/apis/{queues.KUEUE}/{version}", plural, namespaced=False)
