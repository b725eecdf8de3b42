"""The plan of a watched job: a description of its pods and ranks, which no launcher follows.

It lets all that observes TrainingJobs work on jobs that others have created. `membership` rises when pods change. A
round begins when a rank gets another process, however it was restarted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pacekeeper_analysis.protocol.plan import Member
from pacekeeper_analysis.protocol.reports import FaultReport, Heartbeat
from pacekeeper_analysis.protocol.watched_report import ReportedRank
from pacekeeper_analysis.stragglers import strategies

from ...api.training_job import JobKind, JobSpec, TrainingJob
from ...state.cluster_view import PodView
from ...state.desired_state import DesiredState, Incident, WatchedProcesses, WatchedRound, WorkerRecord
from ...state.observation import Observation
from .disruptions import DISRUPTION_CAUSES

UNWATCHED_MEMBER = "(unwatched)"
"""Member of a plan for all ranks that no watched pod has described. No pod can have this name."""
MAX_WATCHED_ROUNDS = 16
"""Rounds that are remembered: as many as the WatchedJob lists."""
PROCESS_DIGITS = 8
"""Hexadecimal digits by which the processes of one rank are distinguished."""


@dataclass(frozen=True)
class WatchedPodReport:
    """A pod of a watched job, and its ranks as its sidecar reports them."""

    pod: PodView
    ranks: tuple[ReportedRank, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(rank.rank for rank in self.ranks))

    @property
    def lives(self) -> bool:
        return not self.pod.ended and not self.pod.deleting


def describe_plan(
    desired: DesiredState, reports: Sequence[WatchedPodReport], now: float, last_step: int | None = None
) -> DesiredState:
    """Return the state with pods and ranks as they are now. `last_step`: the last completed one that was observed."""
    accepted = _accept_claims(desired, reports)
    desired = _begin_round_if_new(desired, accepted, now, last_step)
    members = _build_members(desired, accepted)
    workers = _build_records(desired, reports, members)
    if workers != desired.state.placement.workers:
        desired = desired.with_placement(workers=workers)
    round_ = desired.state.watched.rounds[-1].round if desired.state.watched.rounds else desired.plan.round
    if round_ != desired.plan.round:
        desired = desired.with_plan(round=round_).with_placement(highest_round=round_)
    if members == desired.plan.members:
        return desired
    if _list_slots(members) == _list_slots(desired.plan.members):
        return desired.with_plan(members=members)  # a pod has its address now
    deadband = strategies.compute_recovery_threshold(JobSpec(template={}).detection.straggler_slowdown) - 1
    changed = desired.with_plan(membership=desired.plan.membership + 1, members=members, metrics_deadband=deadband)
    return changed.with_requests(evidence=None)


def _list_slots(members: Sequence[Member]) -> list[tuple[str, tuple[int, ...]]]:
    return [(member.worker, member.ranks) for member in members]


def build_virtual_job(job: TrainingJob, desired: DesiredState) -> TrainingJob:
    """Return the job with the number of its pods, and of the ranks of each."""
    members = desired.plan.members
    counts = {len(member.ranks) for member in members}
    in_order = [rank for member in members for rank in member.ranks] == list(range(desired.plan.world_size))
    nproc = counts.pop() if len(counts) == 1 and in_order else 1  # else each rank is compared by itself
    spec = JobSpec(template={}, replicas=max(1, len(members)), nproc_per_node=nproc)
    return replace(job, spec=spec, kind=JobKind.WATCHED_JOB)


def place_reports(observation: Observation) -> Observation:
    """Return the observation with heartbeats and faults in the job's own membership and round.

    A watched container knows only its own restarts.
    """
    plan, watched = observation.plan, observation.state.watched
    heartbeats: dict[str, Heartbeat] = {}
    for view in observation.workers:
        if view.heartbeat is not None:
            is_earlier = view.pod is not None and _is_of_earlier_round(watched, view.pod.uid, view.heartbeat)
            round_ = max(1, plan.round - is_earlier)
            heartbeats[view.name] = replace(view.heartbeat, membership=plan.membership, round=round_)
    workers = tuple(
        replace(view, heartbeat=heartbeats[view.name]) if view.name in heartbeats else view
        for view in observation.workers
    )
    faults = tuple(_place_fault(fault, plan.membership, plan.round, heartbeats) for fault in observation.faults)
    return replace(observation, workers=workers, faults=faults)


def _place_fault(fault: FaultReport, membership: int, round_: int, heartbeats: Mapping[str, Heartbeat]) -> FaultReport:
    """Return the fault in the round of its worker's ranks, or in the one before if it was noticed before they began."""
    heartbeat = heartbeats.get(fault.worker)
    if heartbeat is not None:
        began = heartbeat.start.started_at
        round_ = heartbeat.round - (began is not None and fault.noticed_at < began)
    return replace(fault, membership=membership, round=max(1, round_))


def _accept_claims(desired: DesiredState, reports: Sequence[WatchedPodReport]) -> dict[str, WatchedPodReport]:
    """Return the pods whose ranks count, by name.

    A rank belongs to the pod that holds it by the plan, else to the one that was created first. A pod that claims a
    rank of another one, or another world size than most ranks, has none.
    """
    holders = _list_holders(desired)
    world_size = _find_world_size(reports, len(desired.state.watched.present))
    in_order = sorted(
        (report for report in reports if report.ranks),
        key=lambda report: (
            not report.lives,
            not _is_holder(report, holders),
            report.pod.created_at,
            report.pod.name,
        ),
    )
    accepted: dict[str, WatchedPodReport] = {}
    taken: set[int] = set()
    for report in in_order:
        if report.ranks[0].world_size == world_size and taken.isdisjoint(report.numbers):
            accepted[report.pod.name] = report
            taken.update(report.numbers)
    return accepted


def _list_holders(desired: DesiredState) -> dict[int, str]:
    """Return the UID of the pod that holds each rank by the plan."""
    uids = {record.name: record.uid for record in desired.state.placement.workers}
    return {
        rank: uids[member.worker] for member in desired.plan.members if member.worker in uids for rank in member.ranks
    }


def _is_holder(report: WatchedPodReport, holders: Mapping[int, str]) -> bool:
    return all(holders.get(rank) == report.pod.uid for rank in report.numbers)


def _find_world_size(reports: Sequence[WatchedPodReport], present: int) -> int:
    """Return the world size of most ranks, or the `present` one of several; 0: no rank is described."""
    living = [report for report in reports if report.lives and report.ranks] or [r for r in reports if r.ranks]
    sizes = Counter(rank.world_size for report in living for rank in report.ranks)
    return max(sizes, key=lambda size: (sizes[size], size == present, size), default=0)


def _begin_round_if_new(
    desired: DesiredState, accepted: Mapping[str, WatchedPodReport], now: float, last_step: int | None
) -> DesiredState:
    """Return the state in the present round: a new one if a rank of this round has got another process."""
    watched = desired.state.watched
    world_size = next((report.ranks[0].world_size for report in accepted.values()), len(watched.present))
    processes = {
        rank.rank: identify_process(report.pod.uid, rank) for report in accepted.values() for rank in report.ranks
    }
    earlier = {rank: name for rank, name in enumerate(watched.earlier) if name}
    current = {rank: name for rank, name in processes.items() if earlier.get(rank) != name}
    known = {rank: name for rank, name in enumerate(watched.present) if name}
    begins = any(known.get(rank, name) != name for rank, name in current.items())
    begins = begins or (bool(known) and bool(current) and world_size != len(watched.present))
    if not begins and (not current or all(known.get(rank) == name for rank, name in current.items())):
        return desired
    rounds = watched.rounds
    if begins and rounds[-1].first_step is not None:  # its processes have trained, and belong to it alone
        earlier |= known
        current = {rank: name for rank, name in processes.items() if earlier.get(rank) != name}
    if begins or not rounds:
        rounds = (*_end_last_round(desired, now, last_step), WatchedRound(_get_next_round(rounds), now))
        known = {}
    known |= current
    return desired.with_watched(
        present=tuple(known.get(rank, "") for rank in range(world_size)),
        earlier=tuple(earlier.get(rank, "") for rank in range(world_size)),
        rounds=rounds[-MAX_WATCHED_ROUNDS:],
    )


def _get_next_round(rounds: Sequence[WatchedRound]) -> int:
    return rounds[-1].round + 1 if rounds else 1


def _end_last_round(desired: DesiredState, now: float, last_step: int | None) -> Iterator[WatchedRound]:
    """Yield the rounds until now, of which the last one has ended."""
    rounds = desired.state.watched.rounds
    yield from rounds[:-1]
    for last in rounds[-1:]:
        yield end_round(last, desired.state.incidents.open, now, last_step)


def end_round(round_: WatchedRound, incidents: Iterable[Incident], now: float, last_step: int | None) -> WatchedRound:
    """Return the round as ended. It ends once."""
    if round_.ended is not None:
        return round_
    return explain_end(replace(round_, last_step=last_step, ended=now), incidents)


def explain_end(round_: WatchedRound, incidents: Iterable[Incident]) -> WatchedRound:
    """Return the round with the open incident that stopped it, which may be known only later, and since when."""
    if round_.ended is None or round_.cause:
        return round_
    stops = [incident for incident in incidents if incident.round == round_.round and not incident.live]
    cause = min(stops, key=lambda incident: incident.cause not in DISRUPTION_CAUSES, default=None)
    if cause is None:
        return round_
    return replace(round_, ended=min(round_.ended, cause.first_sign), cause=cause.message[:512])


def identify_process(pod_uid: str, rank: ReportedRank) -> str:
    """Return a name of the rank's process, by which a later one is distinguished."""
    text = f"{pod_uid}/{rank.pid}/{rank.started_at}"
    return hashlib.sha256(text.encode()).hexdigest()[:PROCESS_DIGITS]


def _is_of_earlier_round(watched: WatchedProcesses, pod_uid: str, heartbeat: Heartbeat) -> bool:
    ranks = () if heartbeat.watched is None else heartbeat.watched.ranks
    return any(
        rank.rank < len(watched.earlier) and watched.earlier[rank.rank] == identify_process(pod_uid, rank)
        for rank in ranks
    )


def _build_members(desired: DesiredState, accepted: Mapping[str, WatchedPodReport]) -> tuple[Member, ...]:
    """Return who has which rank, in rank order. A pod that is gone keeps its ranks until another one has them."""
    world_size = len(desired.state.watched.present)
    by_worker = {name: report.numbers for name, report in accepted.items()}
    taken = {rank for numbers in by_worker.values() for rank in numbers}
    addresses = {name: report.pod.address for name, report in accepted.items()}
    for member in desired.plan.members:
        left = tuple(rank for rank in member.ranks if rank not in taken and rank < world_size)
        if left and member.worker not in (*by_worker, UNWATCHED_MEMBER):
            by_worker[member.worker], addresses[member.worker] = left, member.address
            taken.update(left)
    missing = tuple(rank for rank in range(world_size) if rank not in taken)
    if missing:
        by_worker[UNWATCHED_MEMBER] = missing
    members = (Member(worker, addresses.get(worker, ""), ranks) for worker, ranks in by_worker.items())
    return tuple(sorted(members, key=lambda member: member.ranks))


def _build_records(
    desired: DesiredState, reports: Sequence[WatchedPodReport], members: Sequence[Member]
) -> tuple[WorkerRecord, ...]:
    """Return the record of each pod that exists, or still holds ranks."""
    pods = {report.pod.name: report.pod for report in reports}
    gone = {
        record.name: record
        for record in desired.state.placement.workers
        if record.name not in pods and any(member.worker == record.name for member in members)
    }
    return tuple(
        WorkerRecord(name, ordinal, 0, pods[name].uid, pods[name].node)
        if name in pods
        else replace(gone[name], ordinal=ordinal)
        for ordinal, name in enumerate(sorted((*pods, *gone)))
    )
