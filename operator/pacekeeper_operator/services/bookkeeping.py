"""The job's TrainingJobState: one write changes plan and bookkeeping, by compare-and-swap. No tenant may write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import kopf

from pacekeeper_analysis.plan import Plan

from .. import ledger, legacy
from ..api import TrainingJob
from ..cluster import CONFIG_MAPS, TRAINING_JOBS, TRAINING_JOB_STATES, Cluster, Object
from ..manifests import build_state_object
from ..observation import PodView
from ..observe.memory import JobCache
from ..state import DesiredState, Placement, State, WorkerRecord
from . import incidents


async def load_state(cluster: Cluster, job: TrainingJob, cache: JobCache, listed: Object | None = None) -> DesiredState | None:
    """What is written, also into `memory`; None: there is nothing (any more). `listed`: as a list has just shown it.
    Raises InputError where it cannot be read."""
    cache.needs_reload = False  # first: a list that comes meanwhile counts
    try:
        return await _load_state(cluster, job, cache, listed)
    except Exception:
        cache.needs_reload = True
        raise


async def _load_state(cluster: Cluster, job: TrainingJob, memory: JobCache, listed: Object | None) -> DesiredState | None:
    body = listed or await cluster.find(TRAINING_JOB_STATES, job.name, job.namespace)
    if body is not None and not _belongs_to(body, job):
        await _require_same_job(cluster, job)
        await cluster.delete(TRAINING_JOB_STATES, job.name, job.namespace, uid=body["metadata"]["uid"])  # an earlier job's
        body = None
    if body is None:
        memory.resource_version = ""
        return None
    version = body["metadata"]["resourceVersion"]
    if memory.desired is None or memory.resource_version != version:
        written = ledger.decode_state(body, job.name)
        memory.unknown_fields = written.unknown
        memory.publish(written.desired, version)
    return memory.desired


async def write_state(cluster: Cluster, job: TrainingJob, cache: JobCache, desired: DesiredState) -> None:
    """Raises cluster.Conflict where somebody else has written since; `memory` is then to be read anew."""
    body = build_state_object(job, ledger.encode_state(desired, job.name, cache.unknown_fields), cache.resource_version)
    call = cluster.replace if cache.resource_version else cluster.create
    written = await call(TRAINING_JOB_STATES, body)
    cache.publish(desired, written["metadata"]["resourceVersion"])


async def create_state(
    cluster: Cluster,
    job: TrainingJob,
    cache: JobCache,
    pods: Sequence[PodView],
    now: float,
    reported_round: int = 0,
    *,
    apart: bool = True,
    trained: bool = False,
) -> None:
    """The first bookkeeping of a job: of a new one, of one that an operator before this resource kept (its ConfigMap is
    read once, then deleted), or of one whose state was deleted by hand (it adopts its pods).

    round_told: the last one that the job's status tells of. apart: whether it has a folder of its own on its claim.
    trained: whether its status says that it has completed a step.
    """
    name = f"{job.name}-plan"
    found = await cluster.find(CONFIG_MAPS, name, job.namespace)
    old = found if found is not None and _belongs_to(found, job) else None
    if cache.desired is not None:
        await _require_same_job(cluster, job)  # else it has gone with its job, and nobody has told of that
        draft = cache.desired.with_plan()  # it was deleted under our hands
    elif old is not None:
        draft = legacy.convert_legacy_state(old.get("data", {}), job.name, now)
    else:
        draft = build_initial_state(job, pods, now, reported_round).with_lifecycle(apart=apart, training_since=now if trained else 0.0)
    await incidents.supersede_unknown(cluster, job, draft.state.incidents.list_names())
    await write_state(cluster, job, cache, draft)
    if old is not None:
        await cluster.delete(CONFIG_MAPS, name, job.namespace, uid=old["metadata"]["uid"])


def build_initial_state(job: TrainingJob, pods: Sequence[PodView], now: float, reported_round: int = 0) -> DesiredState:
    """The draft of a job of which nothing is written: workers that it has are replaced.

    The version begins with the time, so that it lies above every one that such a job's workers may have seen; rounds go
    on above the one that its status tells of.
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
    placement = Placement(workers=tuple(workers), incarnations=incarnations, round_seen=max(0, reported_round))
    return DesiredState(Plan(version=int(now)), State(placement=placement))


async def _require_same_job(cluster: Cluster, job: TrainingJob) -> None:
    """Raises kopf.TemporaryError where the job is gone, or another one by now: what is written may be its own."""
    found = await cluster.find(TRAINING_JOBS, job.name, job.namespace)
    if found is None:
        raise kopf.TemporaryError(f"job {job.namespace}/{job.name} is gone")
    if found["metadata"]["uid"] != job.uid:
        raise kopf.TemporaryError(f"job {job.namespace}/{job.name} is another one by now")


def _belongs_to(body: Object, job: TrainingJob) -> bool:
    return any(owner["uid"] == job.uid for owner in body["metadata"].get("ownerReferences", ()))
