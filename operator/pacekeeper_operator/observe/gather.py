"""One Observation of a job: the pods that there are, what workers have said, a probe where one is called for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..api import LABEL_JOB, Cause, Class, Job, Phase
from ..cluster import PODS, Cluster
from ..observation import Metrics, NodeView, Observation, PodView, Surroundings, WorkerView
from ..state import Draft, Incident, Past, Worker
from . import probe
from .memory import JobMemory, Memory
from .pods import view_pod
from .store import Shelf

SUSPECT_SECONDS = 60.0
"""Nodes that were found failing within so many seconds of one another fail at once."""
HUNG_SECONDS = 3600.0
"""A hang that is older says nothing about its node any more."""


def of(shelf: Shelf[PodView], job: Job) -> tuple[PodView, ...]:
    """The job's pods as they are known; those of an earlier job of the same name are somebody else's."""
    return tuple(pod for pod in shelf.of((job.namespace, job.name)) if pod.owner == job.uid)


async def pods(cluster: Cluster, job: Job) -> tuple[PodView, ...]:
    """The same, asked of the API server now."""
    found = await cluster.list(PODS, job.namespace, labels=f"{LABEL_JOB}={job.name}")
    return tuple(view for view in map(view_pod, found) if view.owner == job.uid)


def observe(
    operator_started_at: float,
    memory: JobMemory,
    found: Sequence[PodView],
    metrics: Metrics,
    surroundings: Surroundings,
    now: float,
) -> Observation:
    """Put together what is known; no I/O. The job has been taken up: `memory` knows it, and what is written of it."""
    assert memory.job is not None
    assert memory.draft is not None
    draft = memory.draft
    by_name = {pod.name: pod for pod in found}
    settled = frozenset(draft.state.incidents.settled)
    return Observation(
        now=now,
        operator_age=now - operator_started_at,
        job=memory.job,
        draft=draft,
        workers=tuple(
            _view(record, by_name.pop(record.name, None), memory, operator_started_at, now)
            for record in draft.state.placement.workers
        ),
        faults=tuple(fault for fault in memory.faults.values() if fault.name not in settled),
        evidence=tuple(e for e in memory.evidence.values() if e.request == draft.plan.evidence_request),
        metrics=metrics,
        surroundings=surroundings,
        template=memory.template,
        rulings=memory.rulings,
        strays=tuple(pod for pod in by_name.values() if not pod.deleting),
    )


def _view(record: Worker, pod: PodView | None, memory: JobMemory, operator_started_at: float, now: float) -> WorkerView:
    contact = memory.contacts.get(record.name)
    last_sign = max(contact.at if contact else 0.0, operator_started_at)
    return WorkerView(
        record,
        pod,
        contact.heartbeat if contact else None,
        silent_seconds=0.0 if contact and contact.polling else now - last_sign,
        state_seconds=now - contact.state_since if contact else 0.0,
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


def surroundings(memory: Memory, job: Job, draft: Draft, nodes: Iterable[NodeView], now: float) -> Surroundings:
    """What other jobs and the nodes say that concerns this one. A job of another namespace is not believed, and not
    waited for: that ranks of its have hung on a node is asked about, no more."""
    suspects: set[str] = set()
    hung: dict[str, int] = {}
    durations: dict[Cause, tuple[float, ...]] = {}
    older = ""
    for (namespace, name), other in memory:
        if other.draft is None or other.job is None:
            continue
        incidents = other.draft.state.incidents
        if other.job.uid != job.uid:
            for past in incidents.past:
                if past.cause is Cause.HANG and past.node and now - past.at < HUNG_SECONDS:
                    hung[past.node] = hung.get(past.node, 0) + 1
        if namespace != job.namespace:
            continue
        blamed = [(i.node, i.detected) for i in incidents.current if _blames_the_node(i)]
        blamed += [(past.node, past.at) for past in incidents.past if _blames_the_node(past)]
        suspects |= {node or "" for node, at in blamed if now - at < SUSPECT_SECONDS}
        for past in incidents.past:
            durations[past.cause] = (*durations.get(past.cause, ()), past.seconds)
        if _goes_first(other, job, draft):
            older = name
    return Surroundings(
        nodes={node.name: node for node in nodes},
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
    mine, its = draft.state.placement, other.draft.state.placement
    if mine.attempts == 0 or other.phase is not Phase.PENDING or other.job.spec.suspend:
        return False
    if its.template_accepted != other.job.generation:
        return False  # it cannot have pods at all
    older = (other.job.created_at, other.job.uid) < (job.created_at, job.uid)
    return older and not other.draft.plan.members and 0 < its.attempts <= mine.attempts
