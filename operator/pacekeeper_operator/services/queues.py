"""A job's Workload: made, looked at, and told how far the job is."""

from __future__ import annotations

from collections.abc import Mapping

from .. import queues
from ..api import Job, Object
from ..cluster import FLAVORS, WORKLOADS, Cluster, Kind
from ..manifests import Installation, worker_pod
from ..queues import Placing, Stage, Turn
from .operator import Operator


async def look(operator: Operator, job: Job) -> Turn:
    """What the queue says, without changing anything."""
    for version in queues.VERSIONS:
        found = await operator.cluster.find(_of(WORKLOADS, version), queues.workload_name(job), job.namespace)
        if found is not None:
            return await _turn(operator.cluster, version, found, None)
    return Turn(False, queues.NOT_MADE)


async def attend(operator: Operator, job: Job, known: Turn | None, stage: Stage) -> Turn:
    """Has the job's Workload be as it should, and says what the queue says of it. Raises what the cluster does."""
    cluster = operator.cluster
    served = await cluster.versions(queues.KUEUE)
    version = next((version for version in queues.VERSIONS if version in served), "")
    if not version:
        return Turn(False, queues.NOT_SERVED)
    kind = _of(WORKLOADS, version)
    wanted = queues.workload(job, version, _templates(job, operator.installation))
    found = await cluster.find(kind, wanted["metadata"]["name"], job.namespace)
    if found is None:
        if stage.finished:
            return Turn(False, "the job has ended")
        found = await cluster.create(kind, wanted)
    elif not queues.asks_for_the_same(found, wanted) and not stage.finished:
        if queues.has_quota(found):
            if not stage.pods_left:
                await cluster.delete(kind, wanted["metadata"]["name"], job.namespace, uid=found["metadata"]["uid"])
            return Turn(False, queues.OTHER_PODS)
        found = await _replaced(cluster, kind, found, wanted)
    elif found["spec"].get("active", True) != wanted["spec"]["active"]:
        found = await _patched(cluster, kind, found, {"spec": {"active": wanted["spec"]["active"]}})
    status = queues.status_due(found, stage, operator.runtime.now())
    if status is not None:
        found = await _patched(cluster, kind, found, {"status": status}, "status")
    return await _turn(cluster, version, found, known)


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
    body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, **change}
    return await cluster.patch(kind, metadata["name"], body, metadata["namespace"], subresource=subresource)


async def _turn(cluster: Cluster, version: str, found: Object, known: Turn | None) -> Turn:
    """Flavours are read once for an admission."""
    placing: dict[str, Placing] = dict(known.placing) if known is not None else {}
    for name in queues.flavors_of(found) - placing.keys():
        placing[name] = queues.placing_by(await cluster.get(_of(FLAVORS, version), name))
    return queues.turn(found, placing)


def _of(kind: Kind, version: str) -> Kind:
    return Kind(f"/apis/{queues.KUEUE}/{version}", kind.plural, kind.namespaced)
