"""One Observation of a job: the pods that there are, what workers have said, a probe where one is called for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from ..api import LABEL_JOB, TrainingJob
from ..cluster import PODS, Cluster
from ..manifests import compute_metrics_port
from ..network import NetworkState
from ..observation import FRESH_WORKER_SECONDS, RECENT_POLL_SECONDS, JobMetrics, Observation, PodView, ClusterView, WorkerView
from ..state import DesiredState, WorkerRecord
from . import figures, lasting, reachability
from .memory import JobCache, JobRegistry
from .neighbourhood import NodeSnapshot
from .store import ResourceStore
from .views import view_pod

MAX_PROBED_OTHER_NODES = 8
"""So many nodes without a worker of the job are asked at most, where none of its own answers."""


def select_job_pods(store: ResourceStore[PodView], job: TrainingJob) -> tuple[PodView, ...]:
    """The job's pods as they are known; those of an earlier job of the same name are somebody else's."""
    return tuple(pod for pod in store.get_group((job.namespace, job.name)) if pod.owner == job.uid)


async def list_job_pods(cluster: Cluster, job: TrainingJob) -> tuple[PodView, ...]:
    """The same, asked of the API server now."""
    found = await cluster.collect(PODS, view_pod, job.namespace, labels=f"{LABEL_JOB}={job.name}")
    return tuple(view for view in found if view.owner == job.uid)


def collect_metrics(cache: JobCache, prometheus: JobMetrics, now: float) -> JobMetrics:
    """What the ranks say that are heard, and have said before, beside what Prometheus says."""
    assert cache.job is not None
    assert cache.desired is not None
    plan = cache.desired.plan
    heard = {name: one.rank_rows for name, one in cache.contacts.items() if one.is_reporting(now, FRESH_WORKER_SECONDS)}
    told = figures.select_plan_rows(heard, plan)
    if not told.missing_workers:
        threshold = cache.job.spec.detection.straggler_slowdown
        cache.relative_times = lasting.add_window(cache.relative_times, told.rows, plan.membership, threshold, now)
    known = cache.relative_times if cache.relative_times.membership == plan.membership else lasting.RelativeTimeHistory()
    return known.add_to_metrics(figures.summarize_ranks(told, plan, prometheus))


def build_observation(
    operator_started_at: float,
    cache: JobCache,
    found: Sequence[PodView],
    metrics: JobMetrics,
    surroundings: ClusterView,
    now: float,
    nonce: str = "",
    *,
    clock_agrees: bool = True,
) -> Observation:
    """Put together what is known; no I/O. The job has been taken up: `memory` knows it, and what is written of it."""
    assert cache.job is not None
    assert cache.desired is not None
    draft = cache.desired
    by_name = {pod.name: pod for pod in found}
    faults = tuple(cache.faults.values())
    if faults:
        faults = tuple(fault for fault in faults if fault.name not in draft.state.incidents.settled_names)
    return Observation(
        now=now,
        operator_age=now - operator_started_at,
        job=cache.job,
        desired=draft,
        workers=tuple(
            _build_worker_view(record, by_name.pop(record.name, None), cache, operator_started_at, now)
            for record in draft.state.placement.workers
        ),
        faults=faults,
        evidence=tuple(e for e in cache.evidence.values() if e.request == draft.plan.evidence_request),
        probes=tuple(e for e in cache.probes.values() if draft.plan.probe and e.request == draft.plan.probe.name),
        metrics=metrics,
        cluster_view=surroundings,
        template=cache.template,
        quarantine_decisions=cache.quarantine_decisions,
        profile_answers=len(cache.profile_answers),
        last_profile_answer_at=cache.last_profile_answer_at,
        localized_profile=cache.localized_profile,
        node_checks=cache.node_checks,
        stray_pods=tuple(pod for pod in by_name.values() if not pod.deleting),
        clock_agrees=clock_agrees,
        nonce=nonce,
    )


def _build_worker_view(record: WorkerRecord, pod: PodView | None, memory: JobCache, operator_started_at: float, now: float) -> WorkerView:
    contact = memory.contacts.get(record.name)
    if contact is None:
        return WorkerView(record, pod, silent_seconds=now - max(0.0, operator_started_at), state_seconds=0.0)
    return WorkerView(
        record,
        pod,
        contact.heartbeat,
        silent_seconds=0.0 if contact.open_polls else now - max(contact.last_seen_at, operator_started_at),
        state_seconds=now - contact.state_since,
        seconds_since_step=now - contact.stepped_at if contact.stepped_at else math.inf,
    )


async def probe_suspected_workers(observation: Observation) -> Observation:
    """The same with the operator's own probes of all workers that may be lost, and of their nodes, all at once; of
    other nodes, too, where nobody answers: it may be the operator that reaches nobody.

    Who is heard, and whom its peers reach, is not lost, whatever a probe says (`node_lost`): where thousands stall
    because of one, that one is looked at.
    """
    named = {address for fault in observation.faults for address in fault.unreachable}

    async def probed(view: WorkerView) -> WorkerView:
        assert view.pod is not None
        node = observation.cluster_view.nodes.get(view.pod.node)
        reachable, node_reachable = await asyncio.gather(
            reachability.can_reach_worker(view.pod.address, compute_metrics_port(observation.job, view.name)),
            reachability.can_reach_node(node.address) if node is not None and node.address else _return_unknown(),
        )
        return replace(view, reachable=reachable, node_reachable=node_reachable)

    def is_in_doubt(view: WorkerView) -> bool:
        there = view.pod is not None and bool(view.pod.address) and not view.pod.ended
        return there and not (_is_reporting(view) and view.pod is not None and view.pod.address not in named)

    found = await asyncio.gather(*(probed(view) for view in observation.workers if is_in_doubt(view)))
    by_name = {view.name: view for view in found}
    looked = replace(observation, workers=tuple(by_name.get(view.name, view) for view in observation.workers))
    if any(view.reachable or view.node_reachable or _is_reporting(view) for view in looked.workers):
        return looked
    around = looked.cluster_view
    answers = await asyncio.gather(*map(reachability.can_reach_node, _select_other_nodes(looked)))
    return replace(looked, surroundings=replace(around, reached_elsewhere=around.reached_elsewhere or any(answers)))


def _is_reporting(view: WorkerView) -> bool:
    return view.heartbeat is not None and view.silent_seconds < RECENT_POLL_SECONDS


def _select_other_nodes(observation: Observation) -> Sequence[str]:
    """Addresses of some nodes without a worker of the job, from all over the cluster."""
    own = {view.node for view in observation.workers}
    others = [node.address for name, node in sorted(observation.cluster_view.nodes.items()) if name not in own]
    known = [address for address in others if address]
    return known[:: max(1, math.ceil(len(known) / MAX_PROBED_OTHER_NODES))]


async def _return_unknown() -> None:
    return None


def collect_cluster_view(
    jobs: JobRegistry,
    job: TrainingJob,
    desired: DesiredState,
    nodes: NodeSnapshot,
    now: float,
    levels: Sequence[str] = (),
    network: NetworkState | None = None,
    unreliable_nodes: tuple[str, ...] = (),
) -> ClusterView:
    """What other jobs and the nodes say that concerns this one."""
    return replace(
        jobs.build_cluster_view(job, desired, now),
        nodes=nodes.views,
        leaving_since=nodes.leaving_since,
        levels=tuple(levels),
        network=network,
        unreliable_nodes=unreliable_nodes,
    )
