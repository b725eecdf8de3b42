"""Rounds of a job that has trained, and that now end before their first step: DNS, storage or a registry may be away.

The operator waits longer before each next round (`remedies.back_off`), and does not fail the job. Each of these rounds
counts against the restart budget: while that is spent, the next round waits until a restart leaves the window. The wait
is over with the first step that all ranks complete (`stages`).
"""

from __future__ import annotations

from pacekeeper_analysis.reports import LauncherState

from .. import rounds
from ..api import Cause, Remedy, format_time
from ..decision import BackOff
from ..observation import Observation, Policy
from ..state import Draft
from . import crash, round_failed, stages, start_failed, workforce
from .remedies import back_off

ANOTHER = "spec.remediation.maxRestarts allows another restart"


def step(observation: Observation, policy: Policy) -> Draft:
    """Count another round that failed, and begin the next one once it is due."""
    if not observation.state.budget.backoffs or not policy.recovers or _has_lost_a_worker(observation):
        return observation.draft  # a loss has a remedy of its own
    observation = observation.with_draft(_count_again(observation, policy))
    if not observation.state.budget.next_round_at or observation.now < due_at(observation, policy):
        return observation.draft
    if policy.refusal(Remedy.RESTART_RANKS) or _has_ranks(observation):
        return observation.draft
    draft = rounds.begin(observation, observation.plan.members).count_restart(observation.now)
    return draft.with_budget(next_round_at=0.0)


def due_at(observation: Observation, policy: Policy) -> float:
    """Return when the next round may begin, in seconds since the epoch."""
    budget, now = observation.state.budget, observation.now
    at = now if workforce.is_due(budget.next_round_at, now) else budget.next_round_at
    return max(at, budget.room_at(max(1, policy.max_restarts), now, policy.restart_window))


def describe(observation: Observation, policy: Policy) -> str:
    """Return why the next round or worker waits and until when, for people; "": nothing waits."""
    words = (
        _describe_rounds(observation, policy) or _describe_starts(observation) or _describe_hang(observation, policy)
    )
    if words:
        return words
    stuck = stages.why_not_started(observation)
    return f"{stuck}; its kubelet tries again" if stuck else ""


def _describe_starts(observation: Observation) -> str:
    placement = observation.state.placement
    failed, at = placement.failed_starts, placement.retry_at
    if failed < start_failed.TRIES or not workforce.waits_for_starts(observation):
        return ""
    then = f"the next one is made at {_clock_time(at)}" if observation.now < at else "the next one starts"
    last = start_failed.newest_incident(observation)
    why = "" if last is None else f"; the last one: {last.message}"
    return f"{failed} workers in a row ended before they were ready; {then}{why}"


def _describe_hang(observation: Observation, policy: Policy) -> str:
    """A round that hangs before its first step, and no restart is left (`hang`)."""
    open_ = (i for i in observation.state.incidents.open if i.cause is Cause.HANG and i.round == observation.round)
    if not any(i.applied is None for i in open_) or not observation.budget_is_spent(policy) or not policy.recovers:
        return ""
    due = observation.state.budget.room_at(max(1, policy.max_restarts), observation.now, policy.restart_window)
    return f"the round hangs; the next one begins at {_clock_time(due)}, when {ANOTHER}"


def _describe_rounds(observation: Observation, policy: Policy) -> str:
    budget = observation.state.budget
    if not budget.backoffs:
        return ""
    due = due_at(observation, policy)
    if not budget.next_round_at:
        then = "is under way"
    elif due > max(budget.next_round_at, observation.now):
        then = f"begins at {_clock_time(due)}, when {ANOTHER}"
    else:
        then = f"begins at {_clock_time(budget.next_round_at)}"
    last = f"; the last error: {budget.barren_error}" if budget.barren_error else ""
    return f"rounds end before their first step; attempt {budget.backoffs} {then}{last}"


def _clock_time(at: float) -> str:
    return f"{format_time(at)[:19]}Z"


def _has_lost_a_worker(observation: Observation) -> bool:
    missing = len(observation.members) < len(observation.plan.members)
    return missing or any(not view.alive or view.record.leaving for view in observation.members)


def _count_again(observation: Observation, policy: Policy) -> Draft:
    """The Incident of the first such round stays open, and covers all: hours would make hundreds of Incidents."""
    for check in (crash.check, round_failed.check):
        decision = check(observation, policy)
        if decision is not None and decision.actions == (BackOff(),):
            draft = crash.remember(observation.draft.settle(decision.settles), decision)
            observation = observation.with_draft(draft)
            return back_off.apply(BackOff(), decision, observation).draft
    return observation.draft


def _has_ranks(observation: Observation) -> bool:
    """Whether some launcher has begun a round by itself."""
    beats = (view.heartbeat for view in observation.members)
    here = (beat for beat in beats if beat is not None and beat.membership == observation.plan.membership)
    return any(beat.state is LauncherState.RUNNING for beat in here)
