"""Building of the Observation of a job: its pods, the reports of its workers, and probes of suspected workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from ..api.names import LABEL_JOB
from ..api.training_job import TrainingJob
from ..kube.client import PODS, Cluster
from ..kube.store import ResourceStore
from ..pods.checkpoint_server import build_checkpoint_server_name
from ..pods.manifests import compute_metrics_port
from ..state.cluster_view import FRESH_WORKER_SECONDS, RECENT_POLL_SECONDS, ClusterView, PodView, WorkerView
from ..state.desired_state import DesiredState, WorkerRecord
from ..state.job_metrics import JobMetrics
from ..state.observation import Observation
from . import persistent_slowness, rank_metrics, reachability
from .job_cache import JobCache, JobRegistry
from .peer_jobs import NodeSnapshot
from .views import view_pod

MAX_PROBED_OTHER_NODES = 8
"""Nodes without a worker of the job that are probed, at most, if none of its own nodes answers."""


def select_job_pods(store: ResourceStore[PodView], job: TrainingJob) -> tuple[PodView, ...]:
    """Return the job's pods from the store. Pods of an earlier job of the same name are excluded."""
    return tuple(pod for pod in store.get_group((job.namespace, job.name)) if pod.owner == job.uid)


async def list_job_pods(cluster: Cluster, job: TrainingJob) -> tuple[PodView, ...]:
    """List the job's pods from the API server."""
    views = await cluster.collect(PODS, view_pod, job.namespace, labels=f"{LABEL_JOB}={job.name}")
    return tuple(view for view in views if view.owner == job.uid)


def collect_metrics(cache: JobCache, prometheus: JobMetrics, now: float) -> JobMetrics:
    """Return the job's metrics: from the reports of its ranks, their history, and Prometheus."""
    assert cache.job is not None
    assert cache.desired is not None
    plan = cache.desired.plan
    reported_rows = {
        name: contact.rank_rows
        for name, contact in cache.contacts.items()
        if contact.is_reporting(now, FRESH_WORKER_SECONDS)
    }
    plan_rows = rank_metrics.select_plan_rows(reported_rows, plan)
    cache.means = rank_metrics.build_means(plan_rows, plan)
    if not plan_rows.missing_workers:
        threshold = cache.job.spec.detection.straggler_slowdown
        cache.relative_times = persistent_slowness.add_window(
            cache.relative_times, plan_rows.rows, plan.membership, threshold, now
        )
    history = (
        cache.relative_times
        if cache.relative_times.membership == plan.membership
        else persistent_slowness.RelativeTimeHistory()
    )
    return history.add_to_metrics(rank_metrics.summarize_ranks(plan_rows, plan, prometheus))


def build_observation(
    operator_started_at: float,
    cache: JobCache,
    pods: Sequence[PodView],
    cluster_view: ClusterView,
    now: float,
    nonce: str = "",
    *,
    clock_agrees: bool = True,
) -> Observation:
    """Build the Observation from what is known, without I/O.

    `cache` must have the job, its desired state, and its metrics as of now.
    """
    assert cache.job is not None
    assert cache.desired is not None
    desired = cache.desired
    by_name = {pod.name: pod for pod in pods}
    server = desired.plan.checkpoint_server
    server_name = build_checkpoint_server_name(cache.job, server.secret) if server is not None else ""
    checkpoint_server = by_name.pop(server_name, None)
    faults = tuple(cache.faults.values())
    if faults:
        faults = tuple(fault for fault in faults if fault.name not in desired.state.incidents.settled_names)
    return Observation(
        now=now,
        operator_age=now - operator_started_at,
        job=cache.job,
        desired=desired,
        workers=tuple(
            _build_worker_view(record, by_name.pop(record.name, None), cache, operator_started_at, now)
            for record in desired.state.placement.workers
        ),
        faults=faults,
        evidence=tuple(e for e in cache.evidence.values() if e.request == desired.requests.evidence_name),
        probes=tuple(
            e for e in cache.probes.values() if desired.requests.probe and e.request == desired.requests.probe.name
        ),
        metrics=cache.metrics,
        cluster_view=cluster_view,
        template=cache.results.template,
        quarantine_decisions=cache.results.quarantine_decisions,
        profile_answers=len(cache.profile.by_rank),
        last_profile_answer_at=cache.profile.newest_at,
        localized_profile=cache.profile.localized,
        node_checks=cache.results.node_checks,
        pod_restart_refusal=cache.results.pod_restart_refusal,
        checkpoint_server=checkpoint_server,
        stray_pods=tuple(pod for pod in by_name.values() if not pod.deleting),
        clock_agrees=clock_agrees,
        nonce=nonce,
    )


def _build_worker_view(
    record: WorkerRecord, pod: PodView | None, cache: JobCache, operator_started_at: float, now: float
) -> WorkerView:
    contact = cache.contacts.get(record.name)
    if contact is None:
        return WorkerView(record, pod, silent_seconds=now - max(0.0, operator_started_at), state_seconds=0.0)
    return WorkerView(
        record,
        pod,
        contact.heartbeat,
        silent_seconds=0.0 if contact.open_polls else now - max(contact.last_seen_at, operator_started_at),
        state_seconds=now - contact.state_since,
        seconds_since_step=None if contact.stepped_at is None else now - contact.stepped_at,
    )


async def probe_suspected_workers(observation: Observation) -> Observation:
    """Return the Observation with the operator's own probes of workers that may be lost, and of their nodes.

    The probes run concurrently. If none of them succeeds, other nodes are probed, too: it may be the operator that is
    cut off. A worker that reports, and that its peers reach, is not probed: no probe could make it lost (`node_lost`).
    If thousands stall because of one worker, only that one is probed.
    """
    unreachable = {address for fault in observation.faults for address in fault.unreachable}

    async def probed(view: WorkerView) -> WorkerView:
        assert view.pod is not None
        node = observation.cluster_view.nodes.get(view.pod.node)
        reachable, node_reachable = await asyncio.gather(
            reachability.can_reach_worker(view.pod.address, compute_metrics_port(observation.job, view.name)),
            reachability.can_reach_node(node.address) if node is not None and node.address else _return_unknown(),
        )
        return replace(view, reachable=reachable, node_reachable=node_reachable)

    def is_in_doubt(view: WorkerView) -> bool:
        is_running = view.pod is not None and bool(view.pod.address) and not view.pod.ended
        return is_running and not (_is_reporting(view) and view.pod is not None and view.pod.address not in unreachable)

    views = await asyncio.gather(*(probed(view) for view in observation.workers if is_in_doubt(view)))
    by_name = {view.name: view for view in views}
    updated = replace(observation, workers=tuple(by_name.get(view.name, view) for view in observation.workers))
    if any(view.reachable or view.node_reachable or _is_reporting(view) for view in updated.workers):
        return updated
    cluster_view = updated.cluster_view
    reached = await asyncio.gather(*map(reachability.can_reach_node, _select_other_nodes(updated)))
    return replace(
        updated, cluster_view=replace(cluster_view, reached_elsewhere=cluster_view.reached_elsewhere or any(reached))
    )


def _is_reporting(view: WorkerView) -> bool:
    return view.heartbeat is not None and view.silent_seconds < RECENT_POLL_SECONDS


def _select_other_nodes(observation: Observation) -> Sequence[str]:
    """Return the addresses of some nodes without a worker of the job, spread over the cluster."""
    own = {view.node for view in observation.workers}
    others = [node.address for name, node in sorted(observation.cluster_view.nodes.items()) if name not in own]
    addresses = [address for address in others if address]
    return addresses[:: max(1, math.ceil(len(addresses) / MAX_PROBED_OTHER_NODES))]


async def _return_unknown() -> None:
    return None


def collect_cluster_view(
    jobs: JobRegistry,
    job: TrainingJob,
    desired: DesiredState,
    nodes: NodeSnapshot,
    now: float,
) -> ClusterView:
    """Return what other jobs and the nodes show that concerns this job."""
    return replace(
        jobs.build_cluster_view(job, desired, now),
        nodes=nodes.views,
        leaving_since=nodes.leaving_since,
    )
