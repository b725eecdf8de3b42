"""Back-off: a job has trained, but its rounds now end before their first step. DNS, storage or a registry may be down.

The operator waits longer before each next round (`remedies.back_off`), and does not fail the job. Each of these rounds
counts against the restart budget. While that is spent, the next round waits until a restart leaves the window. The
back-off ends with the first step that all ranks complete (`lifecycle.lifecycle`).
"""

from __future__ import annotations

from pacekeeper_analysis.protocol.reports import LauncherState

from ...api.formats import format_time
from ...api.incident import IncidentCause
from ...api.training_job import Remedy
from ...state import rounds
from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import BackOff
from ..lifecycle import lifecycle
from ..placement import workforce
from ..remedies import back_off
from . import crash, round_failed, start_failed

ANOTHER = "spec.remediation.maxRestarts allows another restart"


def advance_back_off(observation: Observation, policy: Policy) -> DesiredState:
    """Count a further round that failed, and begin the next one once it is due."""
    if not observation.state.budget.backoffs or not policy.applies_routine_remedies or _has_lost_a_worker(observation):
        return observation.desired  # a lost worker has its own remedy
    observation = observation.with_desired(_count_failed_round(observation, policy))
    if observation.state.budget.next_round_at is None or observation.now < compute_next_round_time(observation, policy):
        return observation.desired
    if policy.find_refusal(Remedy.RESTART_RANKS) or _has_running_ranks(observation):
        return observation.desired
    desired = rounds.begin_round(observation, observation.plan.members).count_restart(observation.now)
    return desired.with_budget(next_round_at=None)


def compute_next_round_time(observation: Observation, policy: Policy) -> float:
    """Return when the next round may begin, in seconds since the epoch."""
    budget, now = observation.state.budget, observation.now
    planned = budget.next_round_at
    due = now if planned is None or workforce.is_due(planned, now) else planned
    return max(due, budget.find_next_restart_time(max(1, policy.max_restarts), now, policy.restart_window))


def describe_back_off(observation: Observation, policy: Policy) -> str:
    """Return why the next round or worker waits, and until when, for users; "": nothing waits."""
    message = (
        _describe_rounds(observation, policy)
        or _describe_failed_starts(observation)
        or _describe_hang(observation, policy)
    )
    if message:
        return message
    stuck_reason = lifecycle.explain_stuck_start(observation)
    return f"{stuck_reason}; its kubelet tries again" if stuck_reason else ""


def _describe_failed_starts(observation: Observation) -> str:
    placement = observation.state.placement
    failed, retry_at = placement.failed_starts, placement.retry_at
    if failed < start_failed.MAX_FAILED_STARTS or not workforce.is_waiting_for_starts(observation):
        return ""
    next_start = (
        f"the next one is made at {_format_clock_time(retry_at)}"
        if retry_at is not None and observation.now < retry_at
        else "the next one starts"
    )
    incident = start_failed.newest_incident(observation)
    last_message = "" if incident is None else f"; the last one: {incident.message}"
    return f"{failed} workers in a row ended before they were ready; {next_start}{last_message}"


def _describe_hang(observation: Observation, policy: Policy) -> str:
    """Describe a round that hangs before its first step while no restart is left (`hang`); "": there is none."""
    hangs = (
        incident
        for incident in observation.state.incidents.open
        if incident.cause is IncidentCause.HANG and incident.round == observation.progress.round
    )
    if (
        not any(incident.applied is None for incident in hangs)
        or not observation.is_budget_spent(policy)
        or not policy.applies_routine_remedies
    ):
        return ""
    due = observation.state.budget.find_next_restart_time(
        max(1, policy.max_restarts), observation.now, policy.restart_window
    )
    return f"the round hangs; the next one begins at {_format_clock_time(due)}, when {ANOTHER}"


def _describe_rounds(observation: Observation, policy: Policy) -> str:
    budget = observation.state.budget
    if not budget.backoffs:
        return ""
    due = compute_next_round_time(observation, policy)
    if budget.next_round_at is None:
        timing = "is under way"
    elif due > max(budget.next_round_at, observation.now):
        timing = f"begins at {_format_clock_time(due)}, when {ANOTHER}"
    else:
        timing = f"begins at {_format_clock_time(budget.next_round_at)}"
    last_error = f"; the last error: {budget.no_progress_error}" if budget.no_progress_error else ""
    return f"rounds end before their first step; attempt {budget.backoffs} {timing}{last_error}"


def _format_clock_time(at: float) -> str:
    return f"{format_time(at)[:19]}Z"


def _has_lost_a_worker(observation: Observation) -> bool:
    missing = len(observation.members) < len(observation.plan.members)
    return missing or any(not view.alive or view.record.leaving for view in observation.members)


def _count_failed_round(observation: Observation, policy: Policy) -> DesiredState:
    """Count a round that failed again. The first one's Incident covers all: hours of them would make hundreds."""
    for check in (crash.check_crashes, round_failed.check_failed_rounds):
        decision = check(observation, policy)
        if decision is not None and decision.actions == (BackOff(),):
            desired = crash.record_no_progress(observation.desired.settle_faults(decision.settled_faults), decision)
            observation = observation.with_desired(desired)
            return back_off.apply_back_off(BackOff(), decision, observation).desired
    return observation.desired


def _has_running_ranks(observation: Observation) -> bool:
    """Return whether a launcher has begun a round by itself."""
    heartbeats = (view.heartbeat for view in observation.members)
    current = (
        heartbeat
        for heartbeat in heartbeats
        if heartbeat is not None and heartbeat.membership == observation.plan.membership
    )
    return any(heartbeat.state is LauncherState.RUNNING for heartbeat in current)
