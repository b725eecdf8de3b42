"""A rank has ended with an error. Its launchers are in the next round already: here it is counted and judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pacekeeper_analysis.diagnose.crash import followed_from_peer
from pacekeeper_analysis.diagnose.repetition import Repetition
from pacekeeper_analysis.reports import Fault, FaultKind

from ..api import Cause, Class, Reason, Remedy
from ..decision import Action, BackOff, CountRestart, Decision, FailJob, ReplaceWorker
from ..observation import FRESH_SECONDS, Observation, Policy
from ..state import Draft
from ..subject import Subject
from .pricing import choose_at_standstill, replace_option, restart_option, written

OWN_ERRORS = frozenset(
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
SETTLE_SECONDS = 2.0
"""A crash may be the consequence of a lost worker, which shows a moment later. Nothing waits for this judgement."""


def check(observation: Observation, policy: Policy) -> Decision | None:
    failed = observation.faults_of(FaultKind.RANK_FAILED)
    if not failed:
        return None
    round_ = min(fault.round for fault in failed)
    of_round = tuple(fault for fault in failed if fault.round == round_)
    first = min(of_round, key=lambda fault: (followed_from_peer(fault), fault.noticed_at))
    waits = observation.is_younger(first, SETTLE_SECONDS)
    if waits and observation.round <= round_ and not first.out_of_memory:
        return None
    return _judge(observation, policy, first, of_round)


def _judge(observation: Observation, policy: Policy, fault: Fault, of_round: Sequence[Fault]) -> Decision:
    repetition = observation.state.budget.repetition.after(fault)
    blame = _Blame.of(observation, policy, fault, of_round, repetition)
    why_not_move = blame.why_not_move or policy.restraint
    move = replace_option(observation, policy, refused=why_not_move)
    stay = restart_option(observation, policy, helps=bool(move.refused))
    choice = choose_at_standstill((stay, move))
    chosen = choice.chosen
    moves = chosen is not None and chosen.option is move
    waits = not why_not_move and _spare_comes(observation, policy)
    patient = _is_patient(observation, policy, fault, blame)
    end = _hopeless(observation, policy, fault, blame, repetition, moves or waits, patient)
    actions: tuple[Action, ...] = (CountRestart(),)
    if end is not None:
        actions = (end,)
    elif moves:
        # A spare that may do better costs no restart where none is left: its rounds wait for one again.
        free = patient and observation.budget_is_spent(policy)
        actions = (ReplaceWorker(fault.worker, blame.why_move, dead=True, disruption=free),)
    elif patient:
        actions = (BackOff(),)
    remedy = None if end is not None or chosen is None else Remedy(chosen.option.remedy)
    return Decision(
        subject=Subject(Cause.OUT_OF_MEMORY if fault.out_of_memory else Cause.CRASH, fault.round),
        class_=Class.APPLICATION if fault.exit_code > 0 or blame.follows_rank else Class.UNKNOWN,
        message=f"rank {fault.rank} on {fault.worker} {_ending(fault)} {_progress(fault)}",
        first_sign=fault.noticed_at,
        actions=actions,
        remedy=remedy,
        remedies=written(choice.prices, chosen if remedy else None),
        evidence=(fault.error,) if fault.error else (),
        rank=fault.rank,
        worker=fault.worker,
        settles=tuple(each.name for each in of_round),
        routine=True,
        last_step=max(fault.step, observation.step),
        error=error_of(fault),
        barren=not fault.completed_step,
        repetition=repetition,
    )


@dataclass(frozen=True)
class _Blame:
    """What earlier crashes say about this one."""

    memory: bool
    follows_rank: bool  # the rank ran out of memory on another worker before
    again: bool  # the round before has led nowhere either
    same_worker: bool  # and that on the same worker
    repeats: bool  # the round before has led nowhere by the same error
    elsewhere: bool  # that came on another worker, too
    stuck: bool  # rounds end at this step again and again, and no other worker has been tried
    asked: bool  # by its exit code the script asks for another node

    @classmethod
    def of(
        cls,
        observation: Observation,
        policy: Policy,
        fault: Fault,
        of_round: Sequence[Fault],
        repetition: Repetition,
    ) -> _Blame:
        budget, error = observation.state.budget, error_of(fault)
        again = not fault.completed_step and 0 < budget.barren_round < fault.round
        others = any(each.worker != fault.worker and error_of(each) == error for each in of_round)
        return cls(
            memory=fault.out_of_memory,
            follows_rank=_follows_rank(observation, fault),
            again=again,
            same_worker=again and budget.barren_worker == fault.worker,
            repeats=again and bool(error) and budget.barren_error == error,
            elsewhere=others or budget.barren_worker != fault.worker,
            stuck=repetition.has_just_reached(policy.rounds_without_progress),
            asked=fault.exit_code in policy.exit_codes.replace_node,
        )

    @property
    def why_not_move(self) -> str:
        """ "": another worker may do better."""
        if self.follows_rank:
            return "it follows the rank"
        if self.repeats and self.elsewhere:
            return "the same error has come on another worker"
        return "" if self.why_move else "the worker is not at fault"

    @property
    def why_move(self) -> str:
        if self.asked:
            return "its exit code asks for another node"
        if self.memory:
            return "it ran out of memory"
        if self.same_worker:
            return "rounds end on it before their first step"
        return "rounds end on it at the same step" if self.stuck else ""


def _follows_rank(observation: Observation, fault: Fault) -> bool:
    past = observation.state.incidents.past
    moved = (item for item in past if item.cause is Cause.OUT_OF_MEMORY and item.worker != fault.worker)
    return fault.out_of_memory and any(item.rank == fault.rank for item in moved)


def _spare_comes(observation: Observation, policy: Policy) -> bool:
    """One that is not warm yet, or is to be made in the place of one that was lost. The rounds until it is warm count
    as others do."""
    to_be_made = len(observation.spares) < observation.job.spec.spares
    coming = any(view.heartbeat is None or view.silent_seconds <= FRESH_SECONDS for view in observation.spares)
    return (to_be_made or coming) and not policy.refusal(Remedy.REPLACE_WORKER)


def _is_patient(observation: Observation, policy: Policy, fault: Fault, blame: _Blame) -> bool:
    """Return whether the job lives on, and its next round waits unless a worker moves: it has trained, and its rounds
    now end before their first step by what the environment may have caused."""
    if fault.completed_step or not observation.has_trained or not policy.max_restarts:
        return False
    is_scripts_own = blame.repeats and _type_of(error_of(fault)) in OWN_ERRORS
    return not is_scripts_own and (blame.again or observation.budget_is_spent(policy))


def _type_of(error: str) -> str:
    """Return `ValueError` of `[rank0]: ValueError: …`; "": the line names no exception."""
    words = (word.rpartition(".")[2] for word in error.split(":")[:2])
    return next((word.strip() for word in words if word.strip().isidentifier()), "")


def remember(draft: Draft, decision: Decision) -> Draft:
    """A round that led nowhere, or no further than others: the next one that does is judged by it."""
    if decision.repetition is not None:
        draft = draft.with_budget(repetition=decision.repetition)
    if not decision.barren:
        return draft
    return draft.with_budget(
        barren_round=decision.round, barren_error=decision.error, barren_worker=decision.worker or ""
    )


def _hopeless(
    observation: Observation,
    policy: Policy,
    fault: Fault,
    blame: _Blame,
    repetition: Repetition,
    elsewhere: bool,
    patient: bool,
) -> FailJob | None:
    """The script says so, the same end twice before a step or too often at the same one, or no restarts left.

    elsewhere: there is another worker that is worth a try. patient: the job does not fail of this round.
    """
    if fault.exit_code in policy.exit_codes.do_not_retry:
        return FailJob(
            Reason.SCRIPT_FAILED,
            f"rank {fault.rank} {_ending(fault)}, which spec.remediation.exitCodes.doNotRetry names:\n{fault.error}",
        )
    if patient:
        return None
    if repetition.reaches(policy.rounds_without_progress) and not elsewhere:
        return FailJob(
            Reason.NO_PROGRESS,
            f"{repetition} (spec.remediation.maxRoundsWithoutProgress); the last: "
            f"rank {fault.rank} {_ending(fault)}:\n{fault.error}",
        )
    if blame.repeats and not elsewhere:
        return FailJob(
            Reason.SCRIPT_FAILED,
            f"rank {fault.rank} {_ending(fault)} in two rounds in a row before it had completed a step:\n{fault.error}",
        )
    used = observation.state.budget.within(observation.now, policy.restart_window)
    if used >= policy.max_restarts:
        return FailJob(
            Reason.RESTART_BUDGET_SPENT,
            f"{used} restarts within {policy.restart_window:.0f} s are all that spec.remediation.maxRestarts allows; "
            f"the last: rank {fault.rank} {_ending(fault)}:\n{fault.error}",
        )
    return None


def error_of(fault: Fault) -> str:
    """By which a repetition is known: the last line of the script's words, `ValueError: …`, or how it ended without
    any. "": a signal, which says nothing about why."""
    lines = [line.strip() for line in fault.error.strip().splitlines() if line.strip()]
    if lines or (fault.exit_code < 0 and not fault.out_of_memory):
        return lines[-1] if lines else ""
    return _ending(fault)


def _progress(fault: Fault) -> str:
    if fault.ended_peer >= 0:
        return (
            f"after step {fault.step}: rank {fault.ended_peer} had come to its end with code 0, and this rank waited "
            "for it (do all ranks get as many batches?)"
        )
    return f"after step {fault.step}" if fault.step >= 0 else "before its first step"


def _ending(fault: Fault) -> str:
    if fault.out_of_memory:
        return "was killed for want of memory"
    return f"was killed by signal {-fault.exit_code}" if fault.exit_code < 0 else f"exited with {fault.exit_code}"
