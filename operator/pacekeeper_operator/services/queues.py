"""A job's Workload: made, looked at, and told how far the job is."""

from __future__ import annotations

from collections.abc import Mapping

import kopf

from .. import queues
from ..api import LABEL_PRIORITY, Job, Object
from ..cluster import Cluster, Kind
from ..manifests import Installation, worker_pod
from ..queues import Placing, Stage, Turn
from ..state import Draft
from .operator import Operator

PRIORITY_CLASSES = Kind("/apis/scheduling.k8s.io/v1", "priorityclasses", namespaced=False)


async def look(operator: Operator, job: Job, draft: Draft | None = None) -> Turn:
    """What the queue says, without changing anything. `draft`: what is written of the job, which says whether it was
    admitted where Kueue is not there."""
    cluster = operator.cluster
    version = await cluster.served(queues.KUEUE, queues.VERSIONS)
    if not version:
        return Turn(False, queues.NOT_SERVED) if draft is None else queues.turn_of(draft)
    found = await cluster.find(_workloads(version), queues.workload_name(job), job.namespace)
    return Turn(False, queues.NOT_MADE) if found is None else await _turn(cluster, version, found, job, None)


async def attend(operator: Operator, job: Job, known: Turn | None, stage: Stage) -> Turn:
    """Has the job's Workload be as it should, and says what the queue says of it.

    Raises what the cluster does, and TemporaryError where a job was admitted and Kueue is not there: it may be
    upgraded, and its quota is not taken away by that.
    """
    cluster = operator.cluster
    version = await cluster.served(queues.KUEUE, queues.VERSIONS)
    if not version and known is not None and known.admitted and not stage.finished:
        raise kopf.TemporaryError(queues.NOT_SERVED_NOW, delay=5)
    if not version:
        return Turn(False, queues.NOT_SERVED)
    kind, name, active = _workloads(version), queues.workload_name(job), not job.spec.suspend
    found = await cluster.find(kind, name, job.namespace)
    if found is None and job.prebuilt:
        return Turn(False, queues.NOT_SENT)
    if found is None:
        if stage.finished:
            return Turn(False, "the job has ended")
        found = await cluster.create(kind, await _workload(operator, job, version))
    elif queues.is_anothers(found, job):
        return Turn(False, queues.NOT_ITS_OWN)
    elif (metadata := queues.taking(found, job)) is not None:
        found = await _patched(cluster, kind, found, {"metadata": metadata})
    elif not queues.asks_for_pods_of(found, job) and not stage.finished:
        if queues.has_quota(found):
            if not stage.pods_left:
                await cluster.delete(kind, name, job.namespace, uid=found["metadata"]["uid"])
            return Turn(False, queues.OTHER_PODS)
        found = await _replaced(cluster, kind, found, await _workload(operator, job, version))
    elif found["spec"].get("active", True) != active:
        found = await _patched(cluster, kind, found, {"spec": {"active": active}})
    elif queues.priority_class_of(found) != queues.priority_class(job) and not stage.finished:
        value = await _priority(cluster, job, version)
        priority = queues.priority(queues.priority_class(job), version, value)
        found = await _patched(cluster, kind, found, {"spec": priority})
    status = queues.status_due(found, stage, operator.runtime.now())
    if status is not None:
        found = await _patched(cluster, kind, found, {"status": status}, "status")
    return await _turn(cluster, version, found, job, known)


async def _workload(operator: Operator, job: Job, version: str) -> Object:
    value = await _priority(operator.cluster, job, version)
    return queues.workload(job, version, _templates(job, operator.installation), value)


async def _priority(cluster: Cluster, job: Job, version: str) -> int:
    """Raises TemporaryError where there is no such class."""
    wanted = queues.priority_class(job)
    if wanted is None:
        return 0
    kind = PRIORITY_CLASSES if wanted.of_pods else _of_queues(version, "workloadpriorityclasses")
    found = await cluster.find(kind, wanted.name)
    if found is None:
        where = "priorityClassName of its template" if wanted.of_pods else f"label {LABEL_PRIORITY}"
        raise kopf.TemporaryError(
            f"its priority class {wanted.name} ({where}) is not among the {kind.plural}: make it, or name another",
            delay=5,
        )
    return int(found["value"])


def _templates(job: Job, installation: Installation) -> Mapping[str, Object]:
    return {
        name: _template(worker_pod(job, 0, 0, installation, spare=name == queues.SPARES))
        for name in (queues.WORKERS, queues.SPARES)
    }


def _template(pod: Object) -> Object:
    metadata = {"labels": pod["metadata"]["labels"], "annotations": pod["metadata"]["annotations"]}
    return {"metadata": metadata, "spec": pod["spec"]}


async def _replaced(cluster: Cluster, kind: Kind, found: Object, wanted: Object) -> Object:
    metadata = {**found["metadata"], "annotations": wanted["metadata"]["annotations"]}
    return await cluster.replace(kind, {**found, "metadata": metadata, "spec": wanted["spec"]})


async def _patched(cluster: Cluster, kind: Kind, found: Object, change: Object, subresource: str = "") -> Object:
    """Compare-and-swap: Kueue writes, too."""
    metadata = found["metadata"]
    body = {**change, "metadata": {**change.get("metadata", {}), "resourceVersion": metadata["resourceVersion"]}}
    return await cluster.patch(kind, metadata["name"], body, metadata["namespace"], subresource=subresource)


async def _turn(cluster: Cluster, version: str, found: Object, job: Job, known: Turn | None) -> Turn:
    """Flavours are read once for an admission."""
    if queues.is_anothers(found, job):
        return Turn(False, queues.NOT_ITS_OWN)
    placing: dict[str, Placing] = dict(known.placing) if known is not None else {}
    for name in queues.flavors_of(found) - placing.keys():
        placing[name] = queues.placing_by(await cluster.get(_of_queues(version, "resourceflavors"), name))
    return queues.turn(found, placing)


def _workloads(version: str) -> Kind:
    return Kind(f"/apis/{queues.KUEUE}/{version}", "workloads")


def _of_queues(version: str, plural: str) -> Kind:
    """What the whole cluster has."""
    return Kind(f"/apis/{queues.KUEUE}/{version}", plural, namespaced=False)
