"""The job's TrainingJobState: one compare-and-swap write changes plan and state. No tenant may write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import kopf

from pacekeeper_analysis.protocol.plan import Plan

from ..api.training_job import JobKind, TrainingJob
from ..kube.client import TRAINING_JOB_STATES, TRAINING_JOBS, WATCHED_JOBS, Cluster, Object
from ..observe.job_cache import JobCache
from ..pods.manifests import build_state_object
from ..services import incidents
from ..state import state_codec
from ..state.cluster_view import PodView
from ..state.desired_state import DesiredState, Placement, State, WorkerRecord

JOB_OBJECTS = {JobKind.TRAINING_JOB: TRAINING_JOBS, JobKind.WATCHED_JOB: WATCHED_JOBS}


async def load_state(
    cluster: Cluster, job: TrainingJob, cache: JobCache, listed: Object | None = None
) -> DesiredState | None:
    """Load the stored desired state into `cache` and return it; None: none is stored.

    It has no open requests: those in the cache may not fit what another writer has changed.
    `listed`: the object as a list has just returned it. Raises InputError if the object cannot be read.
    """
    cache.needs_reload = False  # first: a list that arrives during the read must be able to set it
    try:
        return await _load_state(cluster, job, cache, listed)
    except Exception:
        cache.needs_reload = True
        raise


async def _load_state(
    cluster: Cluster, job: TrainingJob, cache: JobCache, listed: Object | None
) -> DesiredState | None:
    body = listed or await cluster.find(TRAINING_JOB_STATES, job.name, job.namespace)
    if body is not None and not _belongs_to(body, job):
        await _require_same_job(cluster, job)
        await cluster.delete(
            TRAINING_JOB_STATES, job.name, job.namespace, uid=body["metadata"]["uid"]
        )  # an earlier job's
        body = None
    if body is None:
        cache.resource_version = ""
        return None
    version = body["metadata"]["resourceVersion"]
    if cache.desired is None or cache.resource_version != version:
        stored = state_codec.decode_state(body, job.name)
        cache.unknown_fields = stored.unknown
        cache.publish(stored.desired, version)
    return cache.desired


async def write_state(cluster: Cluster, job: TrainingJob, cache: JobCache, desired: DesiredState) -> None:
    """Store `desired`. Raises Conflict if another writer was faster; the caller must then reload the `cache`."""
    body = build_state_object(
        job, state_codec.encode_state(desired, job.name, cache.unknown_fields), cache.resource_version
    )
    write = cluster.replace if cache.resource_version else cluster.create
    stored = await write(TRAINING_JOB_STATES, body)
    cache.publish(desired, stored["metadata"]["resourceVersion"])


async def create_state(
    cluster: Cluster,
    job: TrainingJob,
    cache: JobCache,
    pods: Sequence[PodView],
    now: float,
    reported_round: int = 0,
    *,
    trained: bool = False,
) -> None:
    """Create the first TrainingJobState of a job.

    The job is new, or its state was deleted by hand: then it adopts its pods.

    `reported_round`: the last round in the job's status. `trained`: whether the job's status reports a completed step.
    """
    if cache.desired is not None:
        await _require_same_job(cluster, job)  # else the state was deleted with its job
        desired = cache.desired.with_plan()  # the state was deleted while this operator runs
    else:
        desired = build_initial_state(job, pods, now, reported_round).with_lifecycle(
            training_since=now if trained else None
        )
    await incidents.supersede_unknown(cluster, job, desired.state.incidents.list_names())
    await write_state(cluster, job, cache, desired)


def build_initial_state(job: TrainingJob, pods: Sequence[PodView], now: float, reported_round: int = 0) -> DesiredState:
    """Build the desired state of a job without stored state: its existing workers are replaced.

    The version starts with the current time, so that it exceeds each version that the job's workers may have seen.
    Rounds continue after the round in the job's status.
    """
    workers = []
    for pod in pods:
        match = re.fullmatch(rf"{re.escape(job.name)}-w(\d+)-(\d+)", pod.name)
        if match is not None:
            worker = WorkerRecord(pod.name, int(match[1]), int(match[2]), pod.uid, pod.node)
            workers.append(replace(worker, leaving="the plan was lost", dead=True))
    incarnations: dict[str, int] = {}
    for worker in workers:
        key = str(worker.ordinal)
        incarnations[key] = max(worker.incarnation, incarnations.get(key, -1))
    placement = Placement(workers=tuple(workers), incarnations=incarnations, highest_round=max(0, reported_round))
    return DesiredState(Plan(version=int(now)), State(placement=placement))


async def _require_same_job(cluster: Cluster, job: TrainingJob) -> None:
    """Raise kopf.TemporaryError if the job is gone, or was recreated: the stored state may belong to the new job."""
    existing = await cluster.find(JOB_OBJECTS[job.kind], job.name, job.namespace)
    if existing is None:
        raise kopf.TemporaryError(f"job {job.namespace}/{job.name} is gone")
    if existing["metadata"]["uid"] != job.uid:
        raise kopf.TemporaryError(f"job {job.namespace}/{job.name} was recreated")


def _belongs_to(body: Object, job: TrainingJob) -> bool:
    return any(owner["uid"] == job.uid for owner in body["metadata"].get("ownerReferences", ()))
