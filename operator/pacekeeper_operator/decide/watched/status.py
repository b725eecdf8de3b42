"""The status of a WatchedJob: phase, conditions, rounds, and what probably slows or blocks the job."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from typing import Any

from pacekeeper_analysis.accounting.gpu_account import GpuAccount
from pacekeeper_analysis.protocol.watched_report import RecordingLevel, ReportedRank

from ...api.conditions import ConditionStatus
from ...api.formats import format_duration
from ...api.incident import IncidentCause
from ...api.watched_job import (
    AccountStatus,
    PotentialSavings,
    WatchedJobCondition,
    WatchedJobPhase,
    WatchedJobReason,
    WatchedJobStatus,
    WatchedRoundStatus,
)
from ...formatting import format_list, shorten_text
from ...state.cluster_view import FRESH_WORKER_SECONDS, WorkerView
from ...state.desired_state import WatchedRound
from ...state.observation import Observation
from ..lifecycle.progress import round_remaining_seconds
from .estimated_faults import describe_fault, list_suspects

MAX_STATUS_TEXT_CHARACTERS = 512
"""Limit of the CRD for each text of the status."""
MAX_NAMED_PODS = 8


def build_watched_status(
    observation: Observation,
    before: WatchedJobStatus,
    account: GpuAccount | None = None,
    *,
    injection_stop: str | None = None,
) -> WatchedJobStatus:
    """Build the status.

    `before`: the last one, for the times at which conditions have changed. `account`: until now; None: it begins.
    `injection_stop`: why new pods are not watched; None: they are, or it is not known.
    """
    pods = [view for view in observation.workers if view.alive]
    reporting = [view for view in pods if is_reporting(view)]
    ranks = [rank for view in observation.members if view.alive for rank in _list_ranks(view)]
    known = {rank.rank for rank in ranks}
    recordings = sorted({rank.recording for rank in ranks}, key=list(RecordingLevel).index)
    suspects = list_suspects(observation)
    slowdowns = [fault.job_slowdown for fault in suspects if fault.job_slowdown is not None]
    hang = next((i for i in observation.state.incidents.open if i.cause is IncidentCause.HANG), None)
    is_over = observation.state.lifecycle.completed_at is not None
    conditions = (
        _build_unknown_conditions(is_over=is_over)
        if is_over or not pods
        else (
            _build_covered(observation, known),
            _build_reporting(pods, reporting),
            _build_recording(recordings[-1] if recordings else None),
            _build_broken(ranks),
        )
    )
    if injection_stop is not None and not is_over:
        uncovered = _build_uncovered(injection_stop, len(known), observation.plan.world_size)
        conditions = (uncovered, *(condition for condition in conditions if condition.type != uncovered.type))
    account = account or GpuAccount()
    avoidable = observation.state.watched.avoidable
    return WatchedJobStatus(
        phase=_choose_phase(observation, known, len(reporting) == len(pods), is_over=is_over),
        pods=f"{len(reporting)}/{len(pods)}",
        ranks=f"{len(known)}/{observation.plan.world_size}" if observation.plan.members else None,
        torch=_join_versions({rank.torch for rank in ranks}),
        python=_join_versions({rank.python for rank in ranks}),
        recording=recordings[-1] if recordings else None,
        step=observation.progress.step,
        step_seconds=None if is_over else observation.metrics.step_seconds,
        **_report_progress(observation, is_over=is_over),
        slowdown=max(slowdowns, default=None),
        culprits=tuple(
            _limit_text(f"{describe_fault(observation, fault)} (P = {fault.probability:.2f})") for fault in suspects
        ),
        waiting=None if hang is None else _limit_text(hang.message),
        rounds=tuple(_build_round(round_) for round_ in observation.state.watched.rounds),
        account=AccountStatus.from_account(account),
        potential_savings=PotentialSavings(avoidable.seconds * account.gpus, avoidable.incidents),
        conditions=tuple(_date_condition(condition, before, observation.now) for condition in conditions),
    )


def is_reporting(view: WorkerView) -> bool:
    """Return whether the pod's sidecar reaches the operator."""
    return view.heartbeat is not None and view.silent_seconds <= FRESH_WORKER_SECONDS


def _report_progress(observation: Observation, *, is_over: bool) -> dict[str, Any]:
    """Return the fields of the status that the script itself reports, from the pod of its first rank that does."""
    reports = (view.heartbeat.reported_progress for view in observation.members if view.heartbeat is not None)
    report = next((report for report in reports if report is not None), None)
    if report is None or report.percent is None:
        return {}
    seconds = None if is_over else report.remaining_seconds
    return {
        "total_steps": report.total_steps,
        "progress": f"{report.percent}%",
        "remaining": None if seconds is None else format_duration(round_remaining_seconds(seconds)),
    }


def _choose_phase(observation: Observation, known: Set[int], reports: bool, *, is_over: bool) -> WatchedJobPhase:
    if is_over:
        return WatchedJobPhase.ENDED
    if not known:
        return WatchedJobPhase.UNWATCHED
    complete = len(known) == observation.plan.world_size and reports
    return WatchedJobPhase.WATCHED if complete else WatchedJobPhase.PARTLY_WATCHED


def _build_unknown_conditions(*, is_over: bool) -> tuple[ConditionStatus, ...]:
    """Return the conditions while no pod of the job runs."""
    reason = WatchedJobReason.ENDED if is_over else WatchedJobReason.NO_PODS
    message = "the job has ended" if is_over else "no pod of the job runs: its controller may create others"
    return tuple(ConditionStatus(condition, "Unknown", reason, message) for condition in WatchedJobCondition)


def _build_covered(observation: Observation, known: Set[int]) -> ConditionStatus:
    covered, world_size = WatchedJobCondition.COVERED, observation.plan.world_size
    if not known:
        message = (
            "no process of its pods has become a rank: none has created a process group or taken an optimizer step, or "
            "PYTHONPATH does not reach them"
        )
        return ConditionStatus(covered, "False", WatchedJobReason.NO_RANKS, message)
    missing = sorted(set(range(world_size)) - known)
    if missing:
        message = (
            f"{len(missing)} of {world_size} ranks are not watched ({format_list(missing)}): only stopped ranks "
            "are blamed for a hang, and slow ranks are not told"
        )
        return ConditionStatus(covered, "False", WatchedJobReason.RANKS_MISSING, _limit_text(message))
    return ConditionStatus(covered, "True", WatchedJobReason.ALL_RANKS, f"all {world_size} ranks are watched")


def _build_uncovered(injection_stop: str, known: int, world_size: int) -> ConditionStatus:
    """Return the condition of a job whose next pods are not watched."""
    message = f"new pods are not watched: {injection_stop} ({known} of {world_size} ranks that run now are watched)"
    return ConditionStatus(
        WatchedJobCondition.COVERED, "False", WatchedJobReason.INJECTION_IS_OFF, _limit_text(message)
    )


def _build_reporting(pods: list[WorkerView], reporting: list[WorkerView]) -> ConditionStatus:
    silent = [view.name for view in pods if view not in reporting]
    if not silent:
        return ConditionStatus(
            WatchedJobCondition.REPORTING, "True", WatchedJobReason.ALL_PODS, f"all {len(pods)} pods report"
        )
    message = (
        f"{len(silent)} of {len(pods)} pods do not report ({', '.join(silent[:MAX_NAMED_PODS])}): check the log of "
        "their container pacekeeper-watch, and whether a NetworkPolicy lets it reach the operator"
    )
    return ConditionStatus(WatchedJobCondition.REPORTING, "False", WatchedJobReason.PODS_SILENT, _limit_text(message))


def _build_recording(recording: RecordingLevel | None) -> ConditionStatus:
    if recording is None:
        return ConditionStatus(
            WatchedJobCondition.RECORDING, "Unknown", WatchedJobReason.NOT_REPORTED, "no rank has described itself"
        )
    if recording is RecordingLevel.STEPS_ONLY:
        message = "with this version of torch only steps are recorded: slow ranks cannot be told from their peers"
        return ConditionStatus(WatchedJobCondition.RECORDING, "False", recording, message)
    return ConditionStatus(WatchedJobCondition.RECORDING, "True", recording, "own work and waits are recorded")


def _build_broken(ranks: Iterable[ReportedRank]) -> ConditionStatus:
    broken = [rank for rank in ranks if rank.broken]
    if not broken:
        return ConditionStatus(
            WatchedJobCondition.BROKEN, "False", WatchedJobReason.NOTHING_BROKEN, "the library works in all ranks"
        )
    numbers = format_list([rank.rank for rank in broken])
    message = f"the library has disabled itself in rank {numbers}, and the ranks train on: {broken[0].broken}"
    return ConditionStatus(WatchedJobCondition.BROKEN, "True", WatchedJobReason.LIBRARY_DISABLED, _limit_text(message))


def _date_condition(condition: ConditionStatus, before: WatchedJobStatus, now: float) -> ConditionStatus:
    """Return the condition with the time of its last change."""
    previous = next((item for item in before.conditions if item.type == condition.type), None)
    is_same = previous is not None and previous.status == condition.status
    changed_at = previous.last_transition_time if is_same and previous is not None else None
    return replace(condition, type=str(condition.type), last_transition_time=now if changed_at is None else changed_at)


def _build_round(round_: WatchedRound) -> WatchedRoundStatus:
    return WatchedRoundStatus(
        round=round_.round,
        began=round_.began,
        first_step=round_.first_step,
        resumed_from=round_.resumed_from,
        last_step=round_.last_step,
        ended=round_.ended,
        cause=round_.cause or None,
    )


def _list_ranks(view: WorkerView) -> tuple[ReportedRank, ...]:
    report = None if view.heartbeat is None else view.heartbeat.watched
    return () if report is None else report.ranks


def _join_versions(versions: Iterable[str]) -> str | None:
    return ", ".join(sorted(filter(None, versions)))[:64] or None


def _limit_text(text: str) -> str:
    return shorten_text(text, MAX_STATUS_TEXT_CHARACTERS)
