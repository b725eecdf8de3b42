"""Crashes: a rank has exited with an error. The launchers have restarted by then; this check decides what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pacekeeper_analysis.failures.crash import describe_reached_step, is_peer_consequence
from pacekeeper_analysis.failures.repetition import RepeatedFailure
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport

from ...api.conditions import Reason
from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...state.cluster_view import FRESH_WORKER_SECONDS
from ...state.desired_state import DesiredState
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, BackOff, CountRestart, Decision, FailJob, ReplaceWorker
from ..stragglers.pricing import (
    build_remedy_prices,
    build_replace_option,
    build_restart_option,
    choose_remedy_at_standstill,
)

SCRIPT_ERROR_TYPES = frozenset(
    {
        "SyntaxError",
        "IndentationError",
        "TabError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "UnboundLocalError",
    }
)
"""Exceptions that the script's text causes in any environment. The environment may cause other errors."""
CRASH_SETTLE_SECONDS = 2.0
"""Seconds before a crash is decided on. It may be the consequence of a lost worker, which shows a moment later. The
restart itself does not wait for this."""

SILENT_DEATH_REPORT_SECONDS = 3.0
"""Seconds by which the death of a watched rank that leaves no message may be reported later than its peers' errors: its
sidecar waits 2 s for a report of torchrun's agent."""


def check_crashes(observation: Observation, policy: Policy) -> Decision | None:
    """Decide on the crash that came first in the oldest round with crashes."""
    faults = observation.select_faults(FaultKind.RANK_FAILED)
    if not faults:
        return None
    round_ = min(fault.round for fault in faults)
    round_faults = tuple(fault for fault in faults if fault.round == round_)
    # A rank that failed by itself explains its peers' errors.
    first = min(round_faults, key=lambda fault: (is_peer_consequence(fault), fault.noticed_at))
    settle_seconds = CRASH_SETTLE_SECONDS
    if policy.observes_only and is_peer_consequence(first):
        settle_seconds += SILENT_DEATH_REPORT_SECONDS
    waits = observation.is_younger(first, settle_seconds)
    if waits and observation.progress.round <= round_ and not first.out_of_memory:
        return None
    return _decide_crash(observation, policy, first, round_faults)


def _decide_crash(
    observation: Observation, policy: Policy, fault: FaultReport, round_faults: Sequence[FaultReport]
) -> Decision:
    repetition = observation.state.budget.repetition.with_failure(fault)
    history = _CrashHistory.from_fault(observation, policy, fault, round_faults, repetition)
    stay_reason = history.reason_to_stay or policy.restraint_reason
    replace_option = build_replace_option(observation, policy, refused=stay_reason)
    restart_option = build_restart_option(observation, policy, helps=bool(replace_option.refused))
    choice = choose_remedy_at_standstill((restart_option, replace_option))
    chosen = choice.chosen
    moves = chosen is not None and chosen.option is replace_option
    waits = not stay_reason and _is_spare_coming(observation, policy)
    backs_off = _is_patient(observation, policy, fault, history)
    job_failure = _decide_job_failure(observation, policy, fault, history, repetition, moves or waits, backs_off)
    actions: tuple[Action, ...] = (CountRestart(),)
    if job_failure is not None:
        actions = (job_failure,)
    elif moves:
        # If no restart is left, a spare that may help uses none. If its rounds fail, too, they wait for a restart.
        free = backs_off and observation.is_budget_spent(policy)
        actions = (ReplaceWorker(fault.worker, history.reason_to_move, dead=True, disruption=free),)
    elif backs_off:
        actions = (BackOff(),)
    remedy = None if job_failure is not None or chosen is None else Remedy(chosen.option.remedy)
    is_silent = policy.observes_only and not fault.exit_code and not fault.out_of_memory
    how = "ended without an exception, by a signal or os._exit" if is_silent else _describe_exit(fault)
    return Decision(
        incident_key=IncidentKey(
            IncidentCause.OUT_OF_MEMORY if fault.out_of_memory else IncidentCause.CRASH, fault.round
        ),
        class_=IncidentClass.APPLICATION if fault.exit_code > 0 or history.follows_rank else IncidentClass.UNKNOWN,
        message=f"rank {fault.rank} on {fault.worker} {how} {_describe_progress(fault)}",
        first_sign=fault.noticed_at,
        actions=actions,
        remedy=remedy,
        remedies=build_remedy_prices(choice.prices, chosen if remedy else None),
        evidence=(fault.error,) if fault.error else (),
        rank=fault.rank,
        worker=fault.worker,
        settled_faults=tuple(round_fault.name for round_fault in round_faults),
        routine=True,
        last_step=_find_last_step(observation, fault),
        error=extract_error_signature(fault),
        no_progress=not fault.completed_step,
        repetition=repetition,
    )


@dataclass(frozen=True)
class _CrashHistory:
    """How a crash relates to earlier crashes."""

    out_of_memory: bool
    follows_rank: bool  # the rank ran out of memory on another worker before
    no_progress_again: bool  # this and an earlier round completed no step
    same_worker: bool  # and both ended on the same worker
    same_error: bool  # and both ended by the same error
    seen_elsewhere: bool  # the error occurred on another worker, too
    stuck_at_step: bool  # rounds repeatedly end at this step, and no other worker has been tried
    requests_new_node: bool  # the script's exit code requests another node

    @classmethod
    def from_fault(
        cls,
        observation: Observation,
        policy: Policy,
        fault: FaultReport,
        round_faults: Sequence[FaultReport],
        repetition: RepeatedFailure,
    ) -> _CrashHistory:
        budget, error = observation.state.budget, extract_error_signature(fault)
        earlier = budget.no_progress_round
        no_progress_again = not fault.completed_step and earlier is not None and earlier < fault.round
        seen_on_peer = any(
            round_fault.worker != fault.worker and extract_error_signature(round_fault) == error
            for round_fault in round_faults
        )
        return cls(
            out_of_memory=fault.out_of_memory,
            follows_rank=_follows_rank(observation, fault),
            no_progress_again=no_progress_again,
            same_worker=no_progress_again and budget.no_progress_worker == fault.worker,
            same_error=no_progress_again and bool(error) and budget.no_progress_error == error,
            seen_elsewhere=seen_on_peer or budget.no_progress_worker != fault.worker,
            stuck_at_step=repetition.has_just_reached_limit(policy.rounds_without_progress),
            requests_new_node=fault.exit_code in policy.exit_codes.replace_node,
        )

    @property
    def reason_to_stay(self) -> str:
        """Why the rank stays on its worker; "": another worker may help."""
        if self.follows_rank:
            return "it follows the rank"
        if self.same_error and self.seen_elsewhere:
            return "the same error has come on another worker"
        return "" if self.reason_to_move else "the worker is not at fault"

    @property
    def reason_to_move(self) -> str:
        """Why the rank moves to another worker; "": it need not."""
        if self.requests_new_node:
            return "its exit code requests another node"
        if self.out_of_memory:
            return "it ran out of memory"
        if self.same_worker:
            return "rounds end on it before their first step"
        return "rounds end on it at the same step" if self.stuck_at_step else ""


def _follows_rank(observation: Observation, fault: FaultReport) -> bool:
    past = observation.state.incidents.past
    oom_elsewhere = (
        incident
        for incident in past
        if incident.cause is IncidentCause.OUT_OF_MEMORY and incident.worker != fault.worker
    )
    return fault.out_of_memory and any(incident.rank == fault.rank for incident in oom_elsewhere)


def _is_spare_coming(observation: Observation, policy: Policy) -> bool:
    """Return whether a spare is warming up or still to be created. The rounds until it is warm count as others do."""
    is_missing = len(observation.spares) < observation.job.spec.spares
    coming = any(view.heartbeat is None or view.silent_seconds <= FRESH_WORKER_SECONDS for view in observation.spares)
    return (is_missing or coming) and not policy.find_refusal(Remedy.REPLACE_WORKER)


def _is_patient(observation: Observation, policy: Policy, fault: FaultReport, history: _CrashHistory) -> bool:
    """Return whether the job backs off instead of failing, unless a worker moves.

    It has trained before, and its rounds now end before their first step for a reason that may be the environment's.
    """
    if fault.completed_step or not observation.state.lifecycle.has_trained or not policy.max_restarts:
        return False
    is_script_error = history.same_error and _parse_error_type(extract_error_signature(fault)) in SCRIPT_ERROR_TYPES
    return not is_script_error and (history.no_progress_again or observation.is_budget_spent(policy))


def _parse_error_type(error: str) -> str:
    """Return `ValueError` for `[rank0]: ValueError: …`; "": the line names no exception."""
    parts = (part.rpartition(".")[2] for part in error.split(":")[:2])
    return next((part.strip() for part in parts if part.strip().isidentifier()), "")


def _find_last_step(observation: Observation, fault: FaultReport) -> int | None:
    """Return the last step that the rank or the job has completed; None: there is none."""
    steps = (fault.step, observation.progress.step)
    return max((step for step in steps if step is not None), default=None)


def record_no_progress(desired: DesiredState, decision: Decision) -> DesiredState:
    """Record a round that completed no step, or ended at the same step as others. The next such round is compared."""
    if decision.repetition is not None:
        desired = desired.with_budget(repetition=decision.repetition)
    if not decision.no_progress:
        return desired
    return desired.with_budget(
        no_progress_round=decision.round, no_progress_error=decision.error, no_progress_worker=decision.worker or ""
    )


def _decide_job_failure(
    observation: Observation,
    policy: Policy,
    fault: FaultReport,
    history: _CrashHistory,
    repetition: RepeatedFailure,
    other_worker_possible: bool,
    backs_off: bool,
) -> FailJob | None:
    """Return why the job fails; None: it does not.

    It fails by an exit code that forbids a retry, or if no restart is left. It also fails by too many ends at the same
    step, and by the same error in two rounds without a step. `other_worker_possible`: another worker may help.
    `backs_off`: the job backs off instead.
    """
    if fault.exit_code in policy.exit_codes.do_not_retry:
        return FailJob(
            Reason.SCRIPT_FAILED,
            f"rank {fault.rank} {_describe_exit(fault)}, which spec.remediation.exitCodes.doNotRetry "
            f"names:\n{fault.error}",
        )
    if backs_off:
        return None
    if repetition.reaches_limit(policy.rounds_without_progress) and not other_worker_possible:
        return FailJob(
            Reason.NO_PROGRESS,
            f"{repetition} (spec.remediation.maxRoundsWithoutProgress); the last: "
            f"rank {fault.rank} {_describe_exit(fault)}:\n{fault.error}",
        )
    if history.same_error and not other_worker_possible:
        return FailJob(
            Reason.SCRIPT_FAILED,
            f"rank {fault.rank} {_describe_exit(fault)} in two rounds in a row before it had completed a "
            f"step:\n{fault.error}",
        )
    used = observation.state.budget.count_restarts_within(observation.now, policy.restart_window)
    if used >= policy.max_restarts:
        return FailJob(
            Reason.RESTART_BUDGET_SPENT,
            f"{used} restarts within {policy.restart_window:.0f} s are all that spec.remediation.maxRestarts allows; "
            f"the last: rank {fault.rank} {_describe_exit(fault)}:\n{fault.error}",
        )
    return None


def extract_error_signature(fault: FaultReport) -> str:
    """Return what identifies a repeated error: the script's last line (`ValueError: …`), or else how the rank exited.

    "": the rank was killed by a signal, which does not show a cause.
    """
    lines = [line.strip() for line in fault.error.strip().splitlines() if line.strip()]
    if lines or (fault.exit_code < 0 and not fault.out_of_memory):
        return lines[-1] if lines else ""
    return _describe_exit(fault)


def _describe_progress(fault: FaultReport) -> str:
    progress = describe_reached_step(fault.step)
    if fault.ended_peer is not None:
        return (
            f"{progress}: rank {fault.ended_peer} had exited with code 0, and this rank waited "
            "for it (do all ranks get the same number of batches?)"
        )
    return progress


def _describe_exit(fault: FaultReport) -> str:
    if fault.out_of_memory:
        return "was killed because it ran out of memory"
    return f"was killed by signal {-fault.exit_code}" if fault.exit_code < 0 else f"exited with {fault.exit_code}"
