"""What the GPUs of a watched job were used for, as its WatchedJob stores it."""

from __future__ import annotations

from collections.abc import Sequence

from pacekeeper_analysis.accounting.gpu_account import GpuAccount, SlowRank, TrainingMoment, advance_account
from pacekeeper_analysis.accounting.rank_work import RankSums, collect_sums
from pacekeeper_analysis.protocol.reports import Heartbeat, StepProgress

from ...api.incident import IncidentCause
from ...state.desired_state import WatchedRound
from ...state.observation import Observation
from ...state.straggler_estimate import EstimatedFault
from .described_plan import UNWATCHED_MEMBER
from .estimated_faults import list_suspects


def account_for_gpus(observation: Observation, account: GpuAccount) -> GpuAccount:
    """Return the account with the seconds until now. It ends with the job."""
    completed_at = observation.state.lifecycle.completed_at
    if completed_at is not None and account.until is not None and account.until >= completed_at:
        return account
    return advance_account(account, _build_moment(observation))


def _build_moment(observation: Observation) -> TrainingMoment:
    rounds = observation.state.watched.rounds
    present = rounds[-1] if rounds else None
    heartbeats = [] if present is None else _list_heartbeats(observation, present.round)
    slowest = _find_slowest(heartbeats)
    steps = slowest.steps_in_round
    resumed_from = None if present is None else present.resumed_from
    if resumed_from is None and len(rounds) == 1 and rounds[0].round == 1:
        resumed_from = 0
    suspects, sums = list_suspects(observation), _collect_sums(heartbeats, observation.plan.world_size)
    # With sums, the own work of a slow rank is known, and what a slow link takes is communication.
    unknown = [fault for fault in suspects if sums is None or fault.fault is EstimatedFault.ROTATING_RANKS]
    hang = next((i for i in observation.state.incidents.open if i.cause is IncidentCause.HANG), None)
    culprits = [hang.node] if hang is not None else [_find_node(observation, fault.rank) for fault in unknown]
    return TrainingMoment(
        now=observation.now,
        gpus=_count_gpus(observation),
        round=0 if present is None else present.round,
        round_began=None if present is None else _find_beginning(rounds, heartbeats),
        first_step_ended=None if present is None else present.first_step,
        steps_in_round=steps,
        step=None if resumed_from is None else resumed_from + steps,
        step_ended=None if not steps else observation.now if slowest.step_ended_at is None else slowest.step_ended_at,
        previous_round_ended=rounds[-2].ended if len(rounds) > 1 else None,
        is_over=observation.state.lifecycle.completed_at is not None,
        is_hung=hang is not None,
        knows_last_step=hang is None or all(h.sent_at is None or h.sent_at > hang.first_sign for h in heartbeats),
        step_seconds=observation.metrics.step_seconds,
        slowdown=max((fault.job_slowdown for fault in unknown if fault.job_slowdown is not None), default=1.0),
        exposed_share=observation.metrics.wait_share or 0.0,
        culprit_nodes=tuple(node for node in culprits if node),
        sums=sums,
        slow_ranks=tuple(
            SlowRank(fault.rank, fault.since - _get_window_seconds(observation), _find_node(observation, fault.rank))
            for fault in suspects
            if fault.rank is not None and sums is not None
        ),
    )


def _list_heartbeats(observation: Observation, round_: int) -> list[Heartbeat]:
    """Return the heartbeats of all members in this round; []: some are missing."""
    heartbeats = [each for each in observation.progress.heartbeats if each.round == round_]
    described = [member for member in observation.plan.members if member.worker != UNWATCHED_MEMBER]
    return heartbeats if len(heartbeats) == len(described) else []


def _find_slowest(heartbeats: Sequence[Heartbeat]) -> StepProgress:
    """Return the progress of the member with the fewest steps. Of several, the end of the last one counts."""
    reports = (heartbeat.progress for heartbeat in heartbeats)
    return min(
        reports, key=lambda report: (report.steps_in_round, -(report.step_ended_at or 0)), default=StepProgress()
    )


def _collect_sums(heartbeats: Sequence[Heartbeat], world_size: int) -> RankSums | None:
    reports = (heartbeat.watched for heartbeat in heartbeats)
    return collect_sums([each for report in reports if report is not None for each in report.sums], world_size)


def _find_beginning(rounds: Sequence[WatchedRound], heartbeats: Sequence[Heartbeat]) -> float:
    """Return when the first process of the last round began, which describes itself only later."""
    started = (heartbeat.start.started_at for heartbeat in heartbeats)
    began = min((rounds[-1].began, *(at for at in started if at is not None)))
    ended = rounds[-2].ended if len(rounds) > 1 else None
    return began if ended is None else max(began, min(ended, rounds[-1].began))


def _get_window_seconds(observation: Observation) -> float:
    """Return the duration of a window of metrics. What begins in one is dated by it."""
    return observation.metrics.steps * (observation.metrics.step_seconds or 0.0)


def _count_gpus(observation: Observation) -> int:
    """Return the GPUs that running pods hold. Of a job without GPUs: its ranks on them, or its pods if none is known.

    A pod that waits for a node holds none.
    """
    pods = [view for view in observation.workers if view.alive and view.record.node]
    if any(view.pod is not None and view.pod.gpus for view in pods):
        return sum(view.pod.gpus for view in pods if view.pod is not None)
    ranks = {member.worker: len(member.ranks) for member in observation.plan.members}
    return sum(ranks.get(view.name, 1) for view in pods)


def _find_node(observation: Observation, rank: int | None) -> str:
    worker = None if rank is None else observation.find_worker_of_rank(rank)
    view = None if worker is None else observation.find_worker(worker)
    return "" if view is None else view.record.node
