"""One Observation of a job: the pods that there are, what workers have said, a probe where one is called for."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..api import LABEL_JOB, Cause, Class, Job, JobPhase
from ..cluster import PODS, Cluster
from ..manifests import metrics_port
from ..network import Network
from ..observation import (
    FRESH_SECONDS,
    HEARD_SECONDS,
    Metrics,
    NodeView,
    Observation,
    PodView,
    Surroundings,
    WorkerView,
)
from ..state import Draft, Incident, Past, Worker
from . import figures, reachability
from .memory import JobMemory, Memory
from .store import Shelf
from .views import view_pod

SUSPECT_SECONDS = 60.0
"""Nodes that were found failing within so many seconds of one another fail at once."""
HUNG_SECONDS = 3600.0
"""A hang that is older says nothing about its node any more."""
NODES_ELSEWHERE = 8
"""So many nodes without a worker of the job are asked at most, where none of its own answers."""


def of(shelf: Shelf[PodView], job: Job) -> tuple[PodView, ...]:
    """The job's pods as they are known; those of an earlier job of the same name are somebody else's."""
    return tuple(pod for pod in shelf.of((job.namespace, job.name)) if pod.owner == job.uid)


async def pods(cluster: Cluster, job: Job) -> tuple[PodView, ...]:
    """The same, asked of the API server now."""
    found = await cluster.list(PODS, job.namespace, labels=f"{LABEL_JOB}={job.name}")
    return tuple(view for view in map(view_pod, found) if view.owner == job.uid)


def metrics(memory: JobMemory, prometheus: Metrics, now: float) -> Metrics:
    """What the ranks say that are heard, beside what Prometheus says."""
    assert memory.draft is not None
    heard = {name: one.figures for name, one in memory.contacts.items() if one.heard(now, FRESH_SECONDS)}
    return figures.metrics(heard, memory.draft.plan, prometheus)


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
        probes=tuple(e for e in memory.probes.values() if draft.plan.probe and e.request == draft.plan.probe.name),
        metrics=metrics,
        surroundings=surroundings,
        template=memory.template,
        rulings=memory.rulings,
        patterns=len(memory.patterns),
        patterns_at=memory.patterns_at,
        localised=memory.localised,
        checks=memory.checks,
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
        stepped_seconds=now - contact.stepped_at if contact and contact.stepped_at else math.inf,
    )


async def look_closely(observation: Observation) -> Observation:
    """The same with the operator's own probes of all workers and their nodes, all at once; of other nodes, too, where
    none of these answers: it may be the operator that reaches nobody."""

    async def probed(view: WorkerView) -> WorkerView:
        if view.pod is None or not view.pod.address or view.pod.ended:
            return view
        node = observation.surroundings.nodes.get(view.pod.node)
        reachable, node_reachable = await asyncio.gather(
            reachability.reaches_worker(view.pod.address, metrics_port(observation.job, view.name)),
            reachability.reaches_node(node.address) if node is not None and node.address else _unknown(),
        )
        return replace(view, reachable=reachable, node_reachable=node_reachable)

    looked = replace(observation, workers=tuple(await asyncio.gather(*map(probed, observation.workers))))
    if any(view.reachable or view.node_reachable for view in looked.workers):
        return looked
    around = looked.surroundings
    answers = await asyncio.gather(*map(reachability.reaches_node, _elsewhere(looked)))
    return replace(looked, surroundings=replace(around, reached_elsewhere=around.reached_elsewhere or any(answers)))


def _elsewhere(observation: Observation) -> Sequence[str]:
    """Addresses of some nodes without a worker of the job, from all over the cluster."""
    own = {view.node for view in observation.workers}
    others = [node.address for name, node in sorted(observation.surroundings.nodes.items()) if name not in own]
    known = [address for address in others if address]
    return known[:: max(1, math.ceil(len(known) / NODES_ELSEWHERE))]


async def _unknown() -> None:
    return None


def surroundings(
    memory: Memory,
    job: Job,
    draft: Draft,
    nodes: Iterable[NodeView],
    now: float,
    levels: Sequence[str] = (),
    network: Network | None = None,
) -> Surroundings:
    """What other jobs and the nodes say that concerns this one. A job of another namespace is not believed, nor waited
    for: that it has hung on a node is a reason to ask about the node, no more. That it is heard at all shows that the
    operator is not cut off."""
    views = {node.name: node for node in nodes}
    suspects: set[str] = set()
    hung: Counter[str] = Counter()
    hung_elsewhere: set[str] = set()
    durations: dict[Cause, tuple[float, ...]] = {}
    older, heard = "", False
    for (namespace, name), other in memory:
        if other.draft is None or other.job is None:
            continue
        incidents = other.draft.state.incidents
        if other.job.uid != job.uid:
            heard = heard or _is_heard(other, now)
            if namespace != job.namespace:
                hung_elsewhere |= set(_hung_on(other, now))
                continue
            hung.update(_hung_on(other, now))
        blamed = [(i.node, i.detected) for i in incidents.current if _blames_the_node(i)]
        blamed += [(past.node, past.at) for past in incidents.past if _blames_the_node(past)]
        suspects |= {node or "" for node, at in blamed if now - at < SUSPECT_SECONDS}
        for past in incidents.past:
            durations[past.cause] = (*durations.get(past.cause, ()), past.seconds)
        if _goes_first(other, job, draft):
            older = name
    return Surroundings(
        nodes=views,
        leaving_since=memory.leaving_since(views.values(), now),
        levels=tuple(levels),
        network=network,
        suspects=frozenset(suspects),
        older_job_waits=older,
        hung_nodes=hung,
        hung_elsewhere=frozenset(hung_elsewhere),
        past_seconds=durations,
        reached_elsewhere=heard,
    )


def _is_heard(other: JobMemory, now: float) -> bool:
    return any(contact.heard(now, HEARD_SECONDS) for contact in other.contacts.values())


def _hung_on(other: JobMemory, now: float) -> Sequence[str]:
    """The nodes on which its ranks have hung lately."""
    assert other.draft is not None
    hangs = (past for past in other.draft.state.incidents.past if past.cause is Cause.HANG)
    return tuple(past.node for past in hangs if past.node and now - past.at < HUNG_SECONDS)


def _blames_the_node(incident: Incident | Past) -> bool:
    lost = incident.cause in (Cause.NODE_LOST, Cause.GPU_ERROR)
    return lost and incident.class_ is Class.INFRASTRUCTURE and bool(incident.node)


def _goes_first(other: JobMemory, job: Job, draft: Draft) -> bool:
    """An older job that could not be placed as often as this one has its turn before."""
    if other.job is None or other.draft is None or other.job.uid == job.uid or draft.plan.members:
        return False
    mine, its = draft.state.placement, other.draft.state.placement
    if mine.attempts == 0 or other.phase is not JobPhase.PENDING or other.job.spec.suspend:
        return False
    if its.template_accepted != other.job.generation:
        return False  # it cannot have pods at all
    older = (other.job.created_at, other.job.uid) < (job.created_at, job.uid)
    return older and not other.draft.plan.members and 0 < its.attempts <= mine.attempts
