"""The plan's ConfigMap: one write changes plan and bookkeeping, by compare-and-swap."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import Plan

from ..api import Job
from ..cluster import CONFIG_MAPS, Cluster
from ..manifests import plan_config_map
from ..observation import PodView
from ..observe.memory import JobMemory
from ..state import Draft, State, Worker


async def load(cluster: Cluster, job: Job, memory: JobMemory, now: float) -> Draft | None:
    """What is written, also into `memory`; None: there is no plan (any more).

    A plan that somebody has edited by hand is taken over, under a version that workers hear of; one that cannot be read
    is written anew as `memory` knows it. Raises InputError where that does not help.
    """
    body = await cluster.find(CONFIG_MAPS, job.plan_name, job.namespace)
    if body is None or all(o["uid"] != job.uid for o in body["metadata"].get("ownerReferences", ())):
        memory.resource_version = ""
        return None
    version, data = body["metadata"]["resourceVersion"], body.get("data", {})
    if memory.draft is not None and memory.resource_version == version:
        return memory.draft
    draft, readable = _read(data, memory.draft, now)
    if readable:
        await memory.publish(draft, version)
    else:
        memory.resource_version = version
        await write(cluster, job, memory, draft)
    return draft


def _read(data: Mapping[str, str], last: Draft | None, now: float) -> tuple[Draft, bool]:
    """What is to be followed, and whether just that is written. `last`: the draft that was followed until now."""
    try:
        written = Draft.from_data(data)
    except InputError as error:
        mended = last or Draft.without_steering(data)
        words = f"the plan in the ConfigMap cannot be followed ({error.__cause__ or error}), the last good one goes on"
        return mended.with_plan(), False
    if last is not None and written.plan != last.plan and written.plan.version <= last.plan.version:
        newest = replace(last, plan=written.plan).with_plan(version=last.plan.version + 1)
        return replace(newest, state=written.state), False
    return written, True


async def write(cluster: Cluster, job: Job, memory: JobMemory, draft: Draft) -> None:
    """Raises cluster.Conflict where somebody else has written since; `memory` is then to be read anew."""
    body = plan_config_map(job, draft.plan, memory.resource_version)
    body["data"] = draft.to_data()
    call = cluster.replace if memory.resource_version else cluster.create
    written = await call(CONFIG_MAPS, body)
    await memory.publish(draft, written["metadata"]["resourceVersion"])


def first(job: Job, pods: tuple[PodView, ...], now: float) -> Draft:
    """The draft of a job that has no plan: of a new one, or of one whose plan was deleted by hand: it adopts its pods.

    The version begins with the time, so that it lies above every one that such a job's workers may have seen.
    """
    workers = []
    for pod in pods:
        match = re.fullmatch(rf"{re.escape(job.name)}-w(\d+)-(\d+)", pod.name)
        if match is not None:
            workers.append(Worker(pod.name, int(match[1]), int(match[2]), pod.uid, pod.node, "the plan was lost", True))
    incarnations: dict[str, int] = {}
    for worker in workers:
        key = str(worker.ordinal)
        incarnations[key] = max(worker.incarnation, incarnations.get(key, -1))
    return Draft(Plan(version=int(now)), State(placement=Placement(workers=tuple(workers), incarnations=incarnations)))
