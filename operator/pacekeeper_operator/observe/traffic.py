"""What all jobs send through the network: from their plans, and from what their workers have told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from pacekeeper_analysis.diagnose import links
from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import Evidence

from ..api import IncidentCause, TrainingJob, JobPhase, RemediationMode, Remedy
from ..decide.paths import get_route_fingerprints, get_port_range, get_planned_routes
from ..decide.verify_ways import TRIED_ROUTE_TTL_SECONDS
from ..manifests import uses_gpus
from ..network import JobName, JobTraffic, RankPair, NodeRanks
from ..state import State, RouteObservation
from .memory import JobCache, JobRegistry

REROUTE_HOLD_SECONDS, REROUTE_HISTORY_SECONDS = 30.0, 3600.0
EvidenceAnswers = tuple[Evidence, ...]
DEFAULT_ROUND_SECONDS = 5.0
"""What a new round takes of a job of which none was measured."""


def collect_traffic(memory: JobRegistry, now: float, *, acts: bool = True) -> dict[JobName, JobTraffic]:
    """Of those that have members, by name. `acts`: whether the platform lets anything be done."""
    return {name: found for name, job in memory if (found := build_job_traffic(name, job, now, acts=acts)) is not None}


def build_job_traffic(name: JobName, memory: JobCache, now: float, *, acts: bool = True) -> JobTraffic | None:
    """None: it sends nothing."""
    job, draft = memory.job, memory.desired
    if (
        job is None
        or draft is None
        or not draft.plan.members
        or draft.plan.stop is not Stop.NO
        or draft.state.life.is_over
    ):
        return None
    node = {worker.name: worker.node for worker in draft.state.placement.workers}
    trains = memory.phase is JobPhase.RUNNING
    return JobTraffic(
        name,
        tuple(NodeRanks(node.get(member.worker, ""), member.ranks) for member in draft.plan.members),
        membership=draft.plan.membership,
        ways=get_planned_routes(draft.plan),
        among=get_route_fingerprints(draft.plan),
        by_nccl=uses_gpus(job),
        ports=get_port_range(draft.plan),
        # Coarsely: each change of it is a reason to plan anew.
        waiting=round(memory.metrics.waiting or 0.0, 1) if trains else 0.0,
        round_seconds=_estimate_round_seconds(job, draft.state, now, trains=trains),
        held=any(now - tried.at < TRIED_ROUTE_TTL_SECONDS for tried in draft.state.adaptation.ways_tried),
        acts=acts and job.spec.remediation.mode is RemediationMode.ACT,
        seen=draft.state.adaptation.ways_seen,
    )


def _estimate_round_seconds(job: TrainingJob, state: State, now: float, *, trains: bool) -> float:
    """Endless while other ways are being tried; where its user forbids it; and for a while after a round that slow
    communication has called for, twice as long after each further one: what others say of their waits does not keep a
    job restarting."""
    if not trains:
        return 0.0
    if state.adaptation.way_trial is not None or Remedy.PLAN_TRAFFIC not in job.spec.remediation.allow:
        return math.inf
    since = now - REROUTE_HISTORY_SECONDS
    times = [past.at for past in state.incidents.past if past.cause is IncidentCause.SLOW_COMMUNICATION and past.at > since]
    if times and now - max(times) < REROUTE_HOLD_SECONDS * 2.0 ** (len(times) - 1):
        return math.inf
    return state.budget.round_seconds or DEFAULT_ROUND_SECONDS


def collect_route_observations(jobs: Mapping[JobName, JobTraffic]) -> dict[str, tuple[RouteObservation, ...]]:
    """What all flows have shown of their ways, by namespace; of those, too, whose flows have shown nothing."""
    words: dict[str, tuple[RouteObservation, ...]] = {}
    for (namespace, _), job in sorted(jobs.items()):
        words[namespace] = (*words.get(namespace, ()), *job.seen)
    return words


def collect_link_answers(memory: JobRegistry) -> dict[JobName, EvidenceAnswers]:
    """What workers have answered to a question for their connections, by job, where one is out."""
    found: dict[JobName, EvidenceAnswers] = {}
    for name, job in memory:
        request = "" if job.plan is None else job.plan.evidence_request
        told = tuple(one for one in job.evidence.values() if one.request == request and (one.links or one.flows))
        found |= {name: told} if told else {}
    return found


def add_sent_bytes(job: JobTraffic, answers: EvidenceAnswers) -> JobTraffic:
    """With what it has sent between nodes by these answers. Of a large job that takes seconds."""
    node = {rank: seat.node for seat in job.seats for rank in seat.ranks}
    sent = Counter[RankPair]()
    for cell in links.join_link_ends(answers)[0] if answers else ():
        if node.get(cell.source) != node.get(cell.destination):
            sent[cell.source, cell.destination] += cell.acked_bytes
    return replace(job, sent=sent)
