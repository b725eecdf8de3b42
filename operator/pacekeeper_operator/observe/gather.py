"""One Observation of a job: the pods that there are, what workers have said, a probe where one is called for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from ..api import LABEL_JOB, Job
from ..cluster import PODS, Cluster
from ..manifests import metrics_port
from ..network import Network
from ..observation import FRESH_SECONDS, HEARD_SECONDS, Metrics, Observation, PodView, Surroundings, WorkerView
from ..state import Draft, Worker
from . import figures, lasting, reachability
from .memory import JobMemory, Memory
from .neighbourhood import KnownNodes
from .store import Shelf
from .views import view_pod

NODES_ELSEWHERE = 8
"""So many nodes without a worker of the job are asked at most, where none of its own answers."""


def of(shelf: Shelf[PodView], job: Job) -> tuple[PodView, ...]:
    """The job's pods as they are known; those of an earlier job of the same name are somebody else's."""
    return tuple(pod for pod in shelf.of((job.namespace, job.name)) if pod.owner == job.uid)


async def pods(cluster: Cluster, job: Job) -> tuple[PodView, ...]:
    """The same, asked of the API server now."""
    found = await cluster.collect(PODS, view_pod, job.namespace, labels=f"{LABEL_JOB}={job.name}")
    return tuple(view for view in found if view.owner == job.uid)


def metrics(memory: JobMemory, prometheus: Metrics, now: float) -> Metrics:
    """What the ranks say that are heard, and have said before, beside what Prometheus says."""
    assert memory.job is not None
    assert memory.draft is not None
    plan = memory.draft.plan
    heard = {name: one.figures for name, one in memory.contacts.items() if one.heard(now, FRESH_SECONDS)}
    told = figures.of_plan(heard, plan)
    if not told.untold:
        threshold = memory.job.spec.detection.straggler_slowdown
        memory.paces = lasting.seen(memory.paces, told.rows, plan.membership, threshold, now)
    known = memory.paces if memory.paces.membership == plan.membership else lasting.Paces()
    return known.beside(figures.metrics(told, plan, prometheus))


def observe(
    operator_started_at: float,
    memory: JobMemory,
    found: Sequence[PodView],
    metrics: Metrics,
    surroundings: Surroundings,
    now: float,
    dice: str = "",
    *,
    clock_agrees: bool = True,
) -> Observation:
    """Put together what is known; no I/O. The job has been taken up: `memory` knows it, and what is written of it."""
    assert memory.job is not None
    assert memory.draft is not None
    draft = memory.draft
    by_name = {pod.name: pod for pod in found}
    faults = tuple(memory.faults.values())
    if faults:
        faults = tuple(fault for fault in faults if fault.name not in draft.state.incidents.names_settled)
    return Observation(
        now=now,
        operator_age=now - operator_started_at,
        job=memory.job,
        draft=draft,
        workers=tuple(
            _view(record, by_name.pop(record.name, None), memory, operator_started_at, now)
            for record in draft.state.placement.workers
        ),
        faults=faults,
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
        clock_agrees=clock_agrees,
        dice=dice,
    )


def _view(record: Worker, pod: PodView | None, memory: JobMemory, operator_started_at: float, now: float) -> WorkerView:
    contact = memory.contacts.get(record.name)
    if contact is None:
        return WorkerView(record, pod, silent_seconds=now - max(0.0, operator_started_at), state_seconds=0.0)
    return WorkerView(
        record,
        pod,
        contact.heartbeat,
        silent_seconds=0.0 if contact.polling else now - max(contact.at, operator_started_at),
        state_seconds=now - contact.state_since,
        stepped_seconds=now - contact.stepped_at if contact.stepped_at else math.inf,
    )


async def look_closely(observation: Observation) -> Observation:
    """The same with the operator's own probes of all workers that may be lost, and of their nodes, all at once; of
    other nodes, too, where nobody answers: it may be the operator that reaches nobody.

    Who is heard, and whom its peers reach, is not lost, whatever a probe says (`node_lost`): where thousands stall
    because of one, that one is looked at.
    """
    named = {address for fault in observation.faults for address in fault.unreachable}

    async def probed(view: WorkerView) -> WorkerView:
        assert view.pod is not None
        node = observation.surroundings.nodes.get(view.pod.node)
        reachable, node_reachable = await asyncio.gather(
            reachability.reaches_worker(view.pod.address, metrics_port(observation.job, view.name)),
            reachability.reaches_node(node.address) if node is not None and node.address else _unknown(),
        )
        return replace(view, reachable=reachable, node_reachable=node_reachable)

    def is_in_doubt(view: WorkerView) -> bool:
        there = view.pod is not None and bool(view.pod.address) and not view.pod.ended
        return there and not (_is_heard(view) and view.pod is not None and view.pod.address not in named)

    found = await asyncio.gather(*(probed(view) for view in observation.workers if is_in_doubt(view)))
    by_name = {view.name: view for view in found}
    looked = replace(observation, workers=tuple(by_name.get(view.name, view) for view in observation.workers))
    if any(view.reachable or view.node_reachable or _is_heard(view) for view in looked.workers):
        return looked
    around = looked.surroundings
    answers = await asyncio.gather(*map(reachability.reaches_node, _elsewhere(looked)))
    return replace(looked, surroundings=replace(around, reached_elsewhere=around.reached_elsewhere or any(answers)))


def _is_heard(view: WorkerView) -> bool:
    return view.heartbeat is not None and view.silent_seconds < HEARD_SECONDS


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
    nodes: KnownNodes,
    now: float,
    levels: Sequence[str] = (),
    network: Network | None = None,
    unreliable_nodes: tuple[str, ...] = (),
) -> Surroundings:
    """What other jobs and the nodes say that concerns this one."""
    return replace(
        memory.around(job, draft, now),
        nodes=nodes.views,
        leaving_since=nodes.leaving_since,
        levels=tuple(levels),
        network=network,
        unreliable_nodes=unreliable_nodes,
    )
