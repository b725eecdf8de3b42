"""What all jobs send through the network: from their plans, and from what their workers have told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from pacekeeper_analysis.diagnose import links
from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import Evidence

from ..api import Cause, Job, JobPhase, Mode, Remedy
from ..decide.paths import among_of, ports_of, ways_of
from ..decide.verify_ways import TRY_AGAIN_SECONDS
from ..manifests import uses_gpus
from ..network import JobName, JobTraffic, Pair, Seat
from ..state import State, WaySeen
from .memory import JobMemory, Memory

HOLD_SECONDS, REMEMBERED_SECONDS = 30.0, 3600.0
Answers = tuple[Evidence, ...]
GUESSED_ROUND_SECONDS = 5.0
"""What a new round takes of a job of which none was measured."""


def of_jobs(memory: Memory, now: float, *, acts: bool = True) -> dict[JobName, JobTraffic]:
    """Of those that have members, by name. `acts`: whether the platform lets anything be done."""
    return {name: found for name, job in memory if (found := of_job(name, job, now, acts=acts)) is not None}


def of_job(name: JobName, memory: JobMemory, now: float, *, acts: bool = True) -> JobTraffic | None:
    """None: it sends nothing."""
    job, draft = memory.job, memory.draft
    if (
        job is None
        or draft is None
        or not draft.plan.members
        or draft.plan.stop is not Stop.NO
        or draft.state.life.over
    ):
        return None
    node = {worker.name: worker.node for worker in draft.state.placement.workers}
    trains = memory.phase is JobPhase.RUNNING
    return JobTraffic(
        name,
        tuple(Seat(node.get(member.worker, ""), member.ranks) for member in draft.plan.members),
        membership=draft.plan.membership,
        ways=ways_of(draft.plan),
        among=among_of(draft.plan),
        by_nccl=uses_gpus(job),
        ports=ports_of(draft.plan),
        # Coarsely: each change of it is a reason to plan anew.
        waiting=round(memory.metrics.waiting or 0.0, 1) if trains else 0.0,
        round_seconds=_round_seconds(job, draft.state, now, trains=trains),
        held=any(now - tried.at < TRY_AGAIN_SECONDS for tried in draft.state.adaptation.ways_tried),
        acts=acts and job.spec.remediation.mode is Mode.ACT,
        seen=draft.state.adaptation.ways_seen,
    )


def _round_seconds(job: Job, state: State, now: float, *, trains: bool) -> float:
    """Endless while other ways are being tried; where its user forbids it; and for a while after a round that slow
    communication has called for, twice as long after each further one: what others say of their waits does not keep a
    job restarting."""
    if not trains:
        return 0.0
    if state.adaptation.way_trial is not None or Remedy.PLAN_TRAFFIC not in job.spec.remediation.allow:
        return math.inf
    since = now - REMEMBERED_SECONDS
    times = [past.at for past in state.incidents.past if past.cause is Cause.SLOW_COMMUNICATION and past.at > since]
    if times and now - max(times) < HOLD_SECONDS * 2.0 ** (len(times) - 1):
        return math.inf
    return state.budget.round_seconds or GUESSED_ROUND_SECONDS


def words_of(jobs: Mapping[JobName, JobTraffic]) -> dict[str, tuple[WaySeen, ...]]:
    """What all flows have shown of their ways, by namespace; of those, too, whose flows have shown nothing."""
    words: dict[str, tuple[WaySeen, ...]] = {}
    for (namespace, _), job in sorted(jobs.items()):
        words[namespace] = (*words.get(namespace, ()), *job.seen)
    return words


def answers_of(memory: Memory) -> dict[JobName, Answers]:
    """What workers have answered to a question for their connections, by job, where one is out."""
    found: dict[JobName, Answers] = {}
    for name, job in memory:
        request = "" if job.plan is None else job.plan.evidence_request
        told = tuple(one for one in job.evidence.values() if one.request == request and (one.links or one.flows))
        found |= {name: told} if told else {}
    return found


def with_bytes(job: JobTraffic, answers: Answers) -> JobTraffic:
    """With what it has sent between nodes by these answers. Of a large job that takes seconds."""
    node = {rank: seat.node for seat in job.seats for rank in seat.ranks}
    sent = Counter[Pair]()
    for cell in links.join(answers)[0] if answers else ():
        if node.get(cell.source) != node.get(cell.destination):
            sent[cell.source, cell.destination] += cell.acked_bytes
    return replace(job, sent=sent)
