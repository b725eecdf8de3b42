"""One Observation of a job: the pods that there are, what workers have said, a probe where one is called for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..api import LABEL_JOB, Cause, Class, Job, Phase
from ..cluster import NODES, PODS, Cluster
from ..observation import Metrics, NodeView, Observation, PodView, Surroundings, WorkerView
from ..state import Draft, Incident, Past
from . import probe
from .memory import JobMemory, Memory
from .pods import view_node, view_pod

SUSPECT_SECONDS = 60.0
"""Nodes that were found failing within so many seconds of one another fail at once."""


async def pods(cluster: Cluster, job: Job) -> tuple[PodView, ...]:
    """The job's pods; those of an earlier job of the same name are somebody else's."""
    found = await cluster.list(PODS, job.namespace, labels=f"{LABEL_JOB}={job.name}")
    mine = [p for p in found if any(o["uid"] == job.uid for o in p["metadata"].get("ownerReferences", ()))]
    return tuple(view_pod(pod) for pod in mine)


async def nodes(cluster: Cluster) -> Mapping[str, NodeView]:
    return {view.name: view for view in map(view_node, await cluster.list(NODES))}


def observe(
    job: Job,
    draft: Draft,
    found: Sequence[PodView],
    memory: JobMemory,
    operator_started_at: float,
    metrics: Metrics,
    surroundings: Surroundings,
    now: float,
) -> Observation:
    """Put together what is known; no I/O."""
    by_name = {pod.name: pod for pod in found}
    workers = []
    for record in draft.state.placement.workers:
        contact = memory.contacts.get(record.name)
        last_sign = max(contact.at if contact else 0.0, operator_started_at)
        workers.append(
            WorkerView(
                record,
                by_name.get(record.name),
                contact.heartbeat if contact else None,
                silent_seconds=0.0 if contact and contact.polling else now - last_sign,
                state_seconds=now - contact.state_since if contact else 0.0,
            )
        )
    return Observation(
        now=now,
        operator_age=now - operator_started_at,
        job=job,
        draft=draft,
        workers=tuple(workers),
        faults=tuple(fault for name, fault in memory.faults.items() if name not in draft.state.incidents.settled),
        evidence=tuple(e for e in memory.evidence.values() if e.request == draft.plan.evidence_request),
        metrics=metrics,
        surroundings=surroundings,
    )


async def look_closely(observation: Observation) -> Observation:
    """The same with the operator's own probes of all members and their nodes, all at once."""

    async def probed(view: WorkerView) -> WorkerView:
        if view.pod is None or not view.pod.address or view.pod.ended:
            return view
        node = observation.surroundings.nodes.get(view.pod.node)
        reachable, node_reachable = await asyncio.gather(
            probe.reaches_worker(view.pod.address),
            probe.reaches_node(node.address) if node is not None and node.address else _unknown(),
        )
        return replace(view, reachable=reachable, node_reachable=node_reachable)

    return replace(observation, workers=tuple(await asyncio.gather(*map(probed, observation.workers))))


async def _unknown() -> None:
    return None


def surroundings(memory: Memory, job: Job, draft: Draft, known: Mapping[str, NodeView], now: float) -> Surroundings:
    """What other jobs and the nodes say that concerns this one."""
    suspects: set[str] = set()
    hung: dict[str, int] = {}
    durations: dict[Cause, tuple[float, ...]] = {}
    older = ""
    for (namespace, name), other in memory:
        if other.draft is None or other.job is None:
            continue
        for incident in other.draft.state.incidents.current:
            if _blames_the_node(incident) and now - incident.detected < SUSPECT_SECONDS:
                suspects.add(incident.node or "")
        for past in other.draft.state.incidents.past:
            if _blames_the_node(past) and now - past.at < SUSPECT_SECONDS:
                suspects.add(past.node or "")
            durations[past.cause] = (*durations.get(past.cause, ()), past.seconds)
            if past.cause is Cause.HANG and past.node and other.job.uid != job.uid:
                hung[past.node] = hung.get(past.node, 0) + 1
        if _goes_first(other, job, draft):
            older = f"{namespace}/{name}"
    return Surroundings(
        nodes=known,
        suspects=frozenset(suspects),
        older_job_waits=older,
        hung_nodes=hung,
        past_seconds=durations,
    )


def _blames_the_node(incident: Incident | Past) -> bool:
    lost = incident.cause in (Cause.NODE_LOST, Cause.GPU_ERROR)
    return lost and incident.class_ is Class.INFRASTRUCTURE and bool(incident.node)


def _goes_first(other: JobMemory, job: Job, draft: Draft) -> bool:
    """An older job that could not be placed as often as this one has its turn before."""
    if other.job is None or other.draft is None or other.job.uid == job.uid or draft.plan.members:
        return False
    if draft.state.placement.attempts == 0 or other.phase is not Phase.PENDING or other.job.spec.suspend:
        return False
    older = (other.job.created_at, other.job.uid) < (job.created_at, job.uid)
    return older and not other.draft.plan.members and 0 < other.draft.state.placement.attempts <= draft.state.placement.attempts
