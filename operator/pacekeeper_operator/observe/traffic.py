"""The traffic of all jobs through the network: from their plans, and from the reports of their workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from pacekeeper_analysis.network import delay_matrix
from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import Evidence

from ..api.incident import IncidentCause
from ..api.training_job import JobPhase, RemediationMode, Remedy, TrainingJob
from ..pods.manifests import uses_gpus
from ..state.desired_state import RouteObservation, State
from ..state.network import JobName, JobTraffic, NodeRanks, RankPair
from ..state.routes import TRIED_ROUTE_TTL_SECONDS, get_planned_routes, get_port_range, get_route_fingerprints
from .job_cache import JobCache, JobRegistry

REROUTE_HOLD_SECONDS, REROUTE_HISTORY_SECONDS = 30.0, 3600.0
EvidenceAnswers = tuple[Evidence, ...]
DEFAULT_ROUND_SECONDS = 5.0
"""Duration of a new round of a job of which none was measured."""


def collect_traffic(registry: JobRegistry, now: float, *, acts: bool = True) -> dict[JobName, JobTraffic]:
    """Return the traffic of all jobs that have members, by name.

    `acts`: whether the platform's policy allows actions.
    """
    return {
        name: traffic
        for name, cache in registry
        if (traffic := build_job_traffic(name, cache, now, acts=acts)) is not None
    }


def build_job_traffic(name: JobName, cache: JobCache, now: float, *, acts: bool = True) -> JobTraffic | None:
    """Return the traffic of a job; None: it sends nothing."""
    job, desired = cache.job, cache.desired
    if (
        job is None
        or desired is None
        or not desired.plan.members
        or desired.plan.stop is not Stop.NO
        or desired.state.lifecycle.is_over
    ):
        return None
    node_of = {worker.name: worker.node for worker in desired.state.placement.workers}
    trains = cache.phase is JobPhase.RUNNING
    return JobTraffic(
        name,
        tuple(NodeRanks(node_of.get(member.worker, ""), member.ranks) for member in desired.plan.members),
        membership=desired.plan.membership,
        routes=get_planned_routes(desired.plan),
        route_choices=get_route_fingerprints(desired.plan),
        uses_nccl=uses_gpus(job),
        ports=get_port_range(desired.plan),
        # Coarse, as each change causes a new plan.
        wait_share=round(cache.metrics.wait_share or 0.0, 1) if trains else 0.0,
        round_seconds=_estimate_round_seconds(job, desired.state, now, trains=trains),
        keeps_routes=any(now - tried.at < TRIED_ROUTE_TTL_SECONDS for tried in desired.state.adaptation.failed_routes),
        can_move=acts and job.spec.remediation.mode is RemediationMode.ACT,
        route_observations=desired.state.adaptation.route_observations,
    )


def _estimate_round_seconds(job: TrainingJob, state: State, now: float, *, trains: bool) -> float | None:
    """Return the seconds that a new round costs; None if the job does not train.

    It is infinite while other routes are tried, and if the user forbids traffic planning. It is also infinite for a
    while after a round due to slow communication, twice as long after each further one: waits that others report do not
    keep a job restarting.
    """
    if not trains:
        return None
    if state.adaptation.route_trial is not None or Remedy.PLAN_TRAFFIC not in job.spec.remediation.allow:
        return math.inf
    since = now - REROUTE_HISTORY_SECONDS
    times = [
        past.at for past in state.incidents.past if past.cause is IncidentCause.SLOW_COMMUNICATION and past.at > since
    ]
    if times and now - max(times) < REROUTE_HOLD_SECONDS * 2.0 ** (len(times) - 1):
        return math.inf
    measured = state.budget.measurements.round_seconds
    return DEFAULT_ROUND_SECONDS if measured is None else measured


def collect_route_observations(jobs: Mapping[JobName, JobTraffic]) -> dict[str, tuple[RouteObservation, ...]]:
    """Return the observations of routes by all flows, by namespace, including jobs whose flows have shown nothing."""
    observations: dict[str, tuple[RouteObservation, ...]] = {}
    for (namespace, _), job in sorted(jobs.items()):
        observations[namespace] = (*observations.get(namespace, ()), *job.route_observations)
    return observations


def collect_link_answers(registry: JobRegistry) -> dict[JobName, EvidenceAnswers]:
    """Return the workers' answers to an open request for their connections, by job."""
    answers: dict[JobName, EvidenceAnswers] = {}
    for name, cache in registry:
        request = cache.requests.evidence_name
        evidence = tuple(
            answer for answer in cache.evidence.values() if answer.request == request and (answer.links or answer.flows)
        )
        answers |= {name: evidence} if evidence else {}
    return answers


def add_sent_bytes(job: JobTraffic, answers: EvidenceAnswers) -> JobTraffic:
    """Return the traffic with the bytes sent between nodes by these answers. It takes seconds for a large job."""
    node_of = {rank: node_ranks.node for node_ranks in job.node_ranks for rank in node_ranks.ranks}
    sent = Counter[RankPair]()
    for cell in delay_matrix.join_link_ends(answers)[0] if answers else ():
        if node_of.get(cell.source) != node_of.get(cell.destination):
            sent[cell.source, cell.destination] += cell.acked_bytes
    return replace(job, bytes_sent=sent)
