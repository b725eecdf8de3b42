"""Rounds of a job that has trained, and that now end before their first step: DNS, storage or a registry may be away.

The operator waits longer before each next round (`remedies.back_off`), and does not fail the job. Each of these rounds
counts against the restart budget: while that is spent, the next round waits until a restart leaves the window. The wait
is over with the first step that all ranks complete (`stages`).
"""

from __future__ import annotations

from pacekeeper_analysis.reports import LauncherState

from .. import rounds
from ..api import IncidentCause, Remedy, format_time
from ..decision import BackOff
from ..observation import Observation, Policy
from ..state import DesiredState
from . import crash, round_failed, stages, start_failed, workforce
from .remedies import back_off

ANOTHER = "spec.remediation.maxRestarts allows another restart"


def advance_back_off(observation: Observation, policy: Policy) -> DesiredState:
    """Count another round that failed, and begin the next one once it is due."""
    if not observation.state.budget.backoffs or not policy.applies_routine_remedies or _has_lost_a_worker(observation):
        return observation.desired  # a loss has a remedy of its own
    observation = observation.with_desired(_count_failed_round(observation, policy))
    if not observation.state.budget.next_round_at or observation.now < compute_next_round_time(observation, policy):
        return observation.desired
    if policy.find_refusal(Remedy.RESTART_RANKS) or _has_running_ranks(observation):
        return observation.desired
    draft = rounds.begin_round(observation, observation.plan.members).count_restart(observation.now)
    return draft.with_budget(next_round_at=0.0)


def compute_next_round_time(observation: Observation, policy: Policy) -> float:
    """Return when the next round may begin, in seconds since the epoch."""
    budget, now = observation.state.budget, observation.now
    at = now if workforce.is_due(budget.next_round_at, now) else budget.next_round_at
    return max(at, budget.find_next_restart_time(max(1, policy.max_restarts), now, policy.restart_window))


def describe_back_off(observation: Observation, policy: Policy) -> str:
    """Return why the next round or worker waits and until when, for people; "": nothing waits."""
    words = (
        _describe_rounds(observation, policy) or _describe_failed_starts(observation) or _describe_hang(observation, policy)
    )
    if words:
        return words
    stuck = stages.explain_stuck_start(observation)
    return f"{stuck}; its kubelet tries again" if stuck else ""


def _describe_failed_starts(observation: Observation) -> str:
    placement = observation.state.placement
    failed, at = placement.failed_starts, placement.retry_at
    if failed < start_failed.MAX_FAILED_STARTS or not workforce.is_waiting_for_starts(observation):
        return ""
    then = f"the next one is made at {_format_clock_time(at)}" if observation.now < at else "the next one starts"
    last = start_failed.newest_incident(observation)
    why = "" if last is None else f"; the last one: {last.message}"
    return f"{failed} workers in a row ended before they were ready; {then}{why}"


def _describe_hang(observation: Observation, policy: Policy) -> str:
    """A round that hangs before its first step, and no restart is left (`hang`)."""
    open_ = (i for i in observation.state.incidents.open if i.cause is IncidentCause.HANG and i.round == observation.round)
    if not any(i.applied is None for i in open_) or not observation.is_budget_spent(policy) or not policy.applies_routine_remedies:
        return ""
    due = observation.state.budget.find_next_restart_time(max(1, policy.max_restarts), observation.now, policy.restart_window)
    return f"the round hangs; the next one begins at {_format_clock_time(due)}, when {ANOTHER}"


def _describe_rounds(observation: Observation, policy: Policy) -> str:
    budget = observation.state.budget
    if not budget.backoffs:
        return ""
    due = compute_next_round_time(observation, policy)
    if not budget.next_round_at:
        then = "is under way"
    elif due > max(budget.next_round_at, observation.now):
        then = f"begins at {_format_clock_time(due)}, when {ANOTHER}"
    else:
        then = f"begins at {_format_clock_time(budget.next_round_at)}"
    last = f"; the last error: {budget.barren_error}" if budget.barren_error else ""
    return f"rounds end before their first step; attempt {budget.backoffs} {then}{last}"


def _format_clock_time(at: float) -> str:
    return f"{format_time(at)[:19]}Z"


def _has_lost_a_worker(observation: Observation) -> bool:
    missing = len(observation.members) < len(observation.plan.members)
    return missing or any(not view.alive or view.record.leaving for view in observation.members)


def _count_failed_round(observation: Observation, policy: Policy) -> DesiredState:
    """The Incident of the first such round stays open, and covers all: hours would make hundreds of Incidents."""
    for check in (crash.check_crashes, round_failed.check_failed_rounds):
        decision = check(observation, policy)
        if decision is not None and decision.actions == (BackOff(),):
            draft = crash.record_no_progress(observation.desired.settle_faults(decision.settled_faults), decision)
            observation = observation.with_desired(draft)
            return back_off.apply_back_off(BackOff(), decision, observation).desired
    return observation.desired


def _has_running_ranks(observation: Observation) -> bool:
    """Whether some launcher has begun a round by itself."""
    beats = (view.heartbeat for view in observation.members)
    here = (beat for beat in beats if beat is not None and beat.membership == observation.plan.membership)
    return any(beat.state is LauncherState.RUNNING for beat in here)
