"""A rank has ended with an error. Its launchers are in the next round already: here it is counted and judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pacekeeper_analysis.diagnose.crash import is_peer_consequence
from pacekeeper_analysis.diagnose.repetition import RepeatedFailure
from pacekeeper_analysis.reports import FaultReport, FaultKind

from ..api import IncidentCause, IncidentClass, Reason, Remedy
from ..decision import Action, BackOff, CountRestart, Decision, FailJob, ReplaceWorker
from ..observation import FRESH_WORKER_SECONDS, Observation, Policy
from ..state import DesiredState
from ..subject import IncidentKey
from .pricing import choose_remedy_at_standstill, build_replace_option, build_restart_option, build_remedy_prices

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
"""What Python raises for the text of a script, whatever is away. Other errors may be the environment's."""
CRASH_SETTLE_SECONDS = 2.0
"""A crash may be the consequence of a lost worker, which shows a moment later. Nothing waits for this judgement."""


def check_crashes(observation: Observation, policy: Policy) -> Decision | None:
    failed = observation.select_faults(FaultKind.RANK_FAILED)
    if not failed:
        return None
    round_ = min(fault.round for fault in failed)
    of_round = tuple(fault for fault in failed if fault.round == round_)
    first = min(of_round, key=lambda fault: (is_peer_consequence(fault), fault.noticed_at))
    waits = observation.is_younger(first, CRASH_SETTLE_SECONDS)
    if waits and observation.round <= round_ and not first.out_of_memory:
        return None
    return _decide_crash(observation, policy, first, of_round)


def _decide_crash(observation: Observation, policy: Policy, fault: FaultReport, of_round: Sequence[FaultReport]) -> Decision:
    repetition = observation.state.budget.repetition.with_failure(fault)
    blame = _CrashHistory.from_fault(observation, policy, fault, of_round, repetition)
    why_not_move = blame.reason_to_stay or policy.restraint_reason
    move = build_replace_option(observation, policy, refused=why_not_move)
    stay = build_restart_option(observation, policy, helps=bool(move.refused))
    choice = choose_remedy_at_standstill((stay, move))
    chosen = choice.chosen
    moves = chosen is not None and chosen.option is move
    waits = not why_not_move and _is_spare_coming(observation, policy)
    patient = _is_patient(observation, policy, fault, blame)
    end = _decide_job_failure(observation, policy, fault, blame, repetition, moves or waits, patient)
    actions: tuple[Action, ...] = (CountRestart(),)
    if end is not None:
        actions = (end,)
    elif moves:
        # A spare that may do better costs no restart where none is left: its rounds wait for one again.
        free = patient and observation.is_budget_spent(policy)
        actions = (ReplaceWorker(fault.worker, blame.reason_to_move, dead=True, disruption=free),)
    elif patient:
        actions = (BackOff(),)
    remedy = None if end is not None or chosen is None else Remedy(chosen.option.remedy)
    return Decision(
        incident_key=IncidentKey(IncidentCause.OUT_OF_MEMORY if fault.out_of_memory else IncidentCause.CRASH, fault.round),
        class_=IncidentClass.APPLICATION if fault.exit_code > 0 or blame.follows_rank else IncidentClass.UNKNOWN,
        message=f"rank {fault.rank} on {fault.worker} {_describe_exit(fault)} {_describe_progress(fault)}",
        first_sign=fault.noticed_at,
        actions=actions,
        remedy=remedy,
        remedies=build_remedy_prices(choice.prices, chosen if remedy else None),
        evidence=(fault.error,) if fault.error else (),
        rank=fault.rank,
        worker=fault.worker,
        settled_faults=tuple(each.name for each in of_round),
        routine=True,
        last_step=max(fault.step, observation.step),
        error=extract_error_signature(fault),
        no_progress=not fault.completed_step,
        repetition=repetition,
    )


@dataclass(frozen=True)
class _CrashHistory:
    """What earlier crashes say about this one."""

    out_of_memory: bool
    follows_rank: bool  # the rank ran out of memory on another worker before
    no_progress_again: bool  # the round before has led nowhere either
    same_worker: bool  # and that on the same worker
    same_error: bool  # the round before has led nowhere by the same error
    seen_elsewhere: bool  # that came on another worker, too
    stuck_at_step: bool  # rounds end at this step again and again, and no other worker has been tried
    requests_new_node: bool  # by its exit code the script asks for another node

    @classmethod
    def from_fault(
        cls,
        observation: Observation,
        policy: Policy,
        fault: FaultReport,
        of_round: Sequence[FaultReport],
        repetition: RepeatedFailure,
    ) -> _CrashHistory:
        budget, error = observation.state.budget, extract_error_signature(fault)
        again = not fault.completed_step and 0 < budget.barren_round < fault.round
        others = any(each.worker != fault.worker and extract_error_signature(each) == error for each in of_round)
        return cls(
            out_of_memory=fault.out_of_memory,
            follows_rank=_follows_rank(observation, fault),
            no_progress_again=again,
            same_worker=again and budget.barren_worker == fault.worker,
            same_error=again and bool(error) and budget.barren_error == error,
            seen_elsewhere=others or budget.barren_worker != fault.worker,
            stuck_at_step=repetition.has_just_reached_limit(policy.rounds_without_progress),
            requests_new_node=fault.exit_code in policy.exit_codes.replace_node,
        )

    @property
    def reason_to_stay(self) -> str:
        """ "": another worker may do better."""
        if self.follows_rank:
            return "it follows the rank"
        if self.same_error and self.seen_elsewhere:
            return "the same error has come on another worker"
        return "" if self.reason_to_move else "the worker is not at fault"

    @property
    def reason_to_move(self) -> str:
        if self.requests_new_node:
            return "its exit code asks for another node"
        if self.out_of_memory:
            return "it ran out of memory"
        if self.same_worker:
            return "rounds end on it before their first step"
        return "rounds end on it at the same step" if self.stuck_at_step else ""


def _follows_rank(observation: Observation, fault: FaultReport) -> bool:
    past = observation.state.incidents.past
    moved = (item for item in past if item.cause is IncidentCause.OUT_OF_MEMORY and item.worker != fault.worker)
    return fault.out_of_memory and any(item.rank == fault.rank for item in moved)


def _is_spare_coming(observation: Observation, policy: Policy) -> bool:
    """One that is not warm yet, or is to be made in the place of one that was lost. The rounds until it is warm count
    as others do."""
    to_be_made = len(observation.spares) < observation.job.spec.spares
    coming = any(view.heartbeat is None or view.silent_seconds <= FRESH_WORKER_SECONDS for view in observation.spares)
    return (to_be_made or coming) and not policy.find_refusal(Remedy.REPLACE_WORKER)


def _is_patient(observation: Observation, policy: Policy, fault: FaultReport, blame: _CrashHistory) -> bool:
    """Return whether the job lives on, and its next round waits unless a worker moves: it has trained, and its rounds
    now end before their first step by what the environment may have caused."""
    if fault.completed_step or not observation.has_trained or not policy.max_restarts:
        return False
    is_scripts_own = blame.same_error and _parse_error_type(extract_error_signature(fault)) in SCRIPT_ERROR_TYPES
    return not is_scripts_own and (blame.no_progress_again or observation.is_budget_spent(policy))


def _parse_error_type(error: str) -> str:
    """Return `ValueError` of `[rank0]: ValueError: …`; "": the line names no exception."""
    words = (word.rpartition(".")[2] for word in error.split(":")[:2])
    return next((word.strip() for word in words if word.strip().isidentifier()), "")


def record_no_progress(draft: DesiredState, decision: Decision) -> DesiredState:
    """A round that led nowhere, or no further than others: the next one that does is judged by it."""
    if decision.repetition is not None:
        draft = draft.with_budget(repetition=decision.repetition)
    if not decision.no_progress:
        return draft
    return draft.with_budget(
        barren_round=decision.round, barren_error=decision.error, barren_worker=decision.worker or ""
    )


def _decide_job_failure(
    observation: Observation,
    policy: Policy,
    fault: FaultReport,
    blame: _CrashHistory,
    repetition: RepeatedFailure,
    other_worker_possible: bool,
    patient: bool,
) -> FailJob | None:
    """The script says so, the same end twice before a step or too often at the same one, or no restarts left.

    elsewhere: there is another worker that is worth a try. patient: the job does not fail of this round.
    """
    if fault.exit_code in policy.exit_codes.do_not_retry:
        return FailJob(
            Reason.SCRIPT_FAILED,
            f"rank {fault.rank} {_describe_exit(fault)}, which spec.remediation.exitCodes.doNotRetry names:\n{fault.error}",
        )
    if patient:
        return None
    if repetition.reaches_limit(policy.rounds_without_progress) and not other_worker_possible:
        return FailJob(
            Reason.NO_PROGRESS,
            f"{repetition} (spec.remediation.maxRoundsWithoutProgress); the last: "
            f"rank {fault.rank} {_describe_exit(fault)}:\n{fault.error}",
        )
    if blame.same_error and not other_worker_possible:
        return FailJob(
            Reason.SCRIPT_FAILED,
            f"rank {fault.rank} {_describe_exit(fault)} in two rounds in a row before it had completed a step:\n{fault.error}",
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
    """By which a repetition is known: the last line of the script's words, `ValueError: …`, or how it ended without
    any. "": a signal, which says nothing about why."""
    lines = [line.strip() for line in fault.error.strip().splitlines() if line.strip()]
    if lines or (fault.exit_code < 0 and not fault.out_of_memory):
        return lines[-1] if lines else ""
    return _describe_exit(fault)


def _describe_progress(fault: FaultReport) -> str:
    if fault.ended_peer >= 0:
        return (
            f"after step {fault.step}: rank {fault.ended_peer} had come to its end with code 0, and this rank waited "
            "for it (do all ranks get as many batches?)"
        )
    return f"after step {fault.step}" if fault.step >= 0 else "before its first step"


def _describe_exit(fault: FaultReport) -> str:
    if fault.out_of_memory:
        return "was killed for want of memory"
    return f"was killed by signal {-fault.exit_code}" if fault.exit_code < 0 else f"exited with {fault.exit_code}"
