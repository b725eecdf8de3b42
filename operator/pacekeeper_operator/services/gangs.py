"""A job's PodGroup: created, and recreated when the number of pods that are placed together changes."""

from __future__ import annotations

import kopf

from ..api.training_job import TrainingJob
from ..kube.client import Cluster, ResourceKind
from ..pods import gangs
from ..pods.gangs import Gang


async def ensure_pod_group(cluster: Cluster, job: TrainingJob, gang: Gang) -> str:
    """Return the name of the PodGroup for the gang's pods. Empty: this cluster's scheduler places pods one by one.

    Raises TemporaryError while the PodGroup of an earlier gang is deleted, or if the name is taken, and the errors of
    the cluster client.
    """
    version = await cluster.find_served_version(gangs.SCHEDULING_API_GROUP, gangs.POD_GROUP_VERSIONS)
    if not version:
        return ""
    kind = ResourceKind(f"/apis/{gangs.SCHEDULING_API_GROUP}/{version}", "podgroups")
    pod_group = await cluster.find(kind, job.name, job.namespace)
    if pod_group is None:
        pod_group = await cluster.create(kind, gangs.build_pod_group(job, gang, version))
    if not gangs.is_owned_by(pod_group, job):
        raise kopf.TemporaryError(f"PodGroup {job.name} is not the job's: delete it, or rename the job", delay=5)
    if not gangs.is_current_pod_group(pod_group, gang):
        await cluster.delete(kind, job.name, job.namespace, uid=pod_group["metadata"]["uid"])
        raise kopf.TemporaryError(f"PodGroup {job.name} belongs to an earlier gang, and is deleted first", delay=1)
    return str(pod_group["metadata"]["name"])
