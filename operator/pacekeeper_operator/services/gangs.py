"""A job's PodGroup: made, and made anew when another number of pods is to be placed together."""

from __future__ import annotations

import kopf

from .. import gangs
from ..api import TrainingJob
from ..cluster import Cluster, ResourceKind
from ..gangs import Gang


async def ensure_pod_group(cluster: Cluster, job: TrainingJob, gang: Gang) -> str:
    """Name of the PodGroup that the gang's pods are to name; "": this cluster's scheduler places pods one by one.

    Raises TemporaryError while the PodGroup of an earlier gang goes, or where the name is taken, and what the cluster
    does.
    """
    version = await cluster.find_served_version(gangs.SCHEDULING_API_GROUP, gangs.POD_GROUP_VERSIONS)
    if not version:
        return ""
    kind = ResourceKind(f"/apis/{gangs.SCHEDULING_API_GROUP}/{version}", "podgroups")
    found = await cluster.find(kind, job.name, job.namespace)
    if found is None:
        found = await cluster.create(kind, gangs.build_pod_group(job, gang, version))
    if not gangs.is_owned_by(found, job):
        raise kopf.TemporaryError(f"PodGroup {job.name} is not the job's: delete it, or rename the job", delay=5)
    if not gangs.is_current_pod_group(found, gang):
        await cluster.delete(kind, job.name, job.namespace, uid=found["metadata"]["uid"])
        raise kopf.TemporaryError(f"PodGroup {job.name} is of another gang, and goes first", delay=1)
    return str(found["metadata"]["name"])
