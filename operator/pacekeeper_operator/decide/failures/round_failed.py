"""Failed rounds: the launchers could not start a round although all workers are present. They rendezvous again."""

from __future__ import annotations

from pacekeeper_analysis.protocol.reports import FaultKind, LauncherState

from ...api.conditions import Reason
from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...formatting import MAX_LISTED_ITEMS, format_list
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, BackOff, Decision, FailJob, RestartRanks
from ..stragglers.pricing import build_remedy_prices, build_restart_option, choose_remedy_at_standstill
from . import unresponsive

ROUND_FAILED_SETTLE_SECONDS = 3.0
"""Seconds before a failed round is decided on. A lost worker or node is the usual reason and is checked first. A
launcher that gives up reports this before its faults show why."""


def check_failed_rounds(observation: Observation, policy: Policy) -> Decision | None:
    """Restart the ranks after a round that the launchers could not start and that no other check explains."""
    faults = observation.select_faults(FaultKind.ROUND_FAILED)
    given_up = [
        view
        for view in observation.members
        if view.heartbeat is not None
        and view.heartbeat.membership == observation.plan.membership
        and view.heartbeat.state in (LauncherState.LOST, LauncherState.FAILED)
    ]
    budget = observation.state.budget
    if not faults and (not given_up or budget.next_round_at is not None):
        return None  # launchers that gave up wait for the round that `back_off` begins
    if faults and observation.is_younger(faults[0], ROUND_FAILED_SETTLE_SECONDS):
        return None
    if observation.select_faults(FaultKind.RANK_FAILED) or unresponsive.has_unresponsive_member(observation):
        return None  # the checks of crashes and unresponsive workers come first
    if any(view.state_seconds < ROUND_FAILED_SETTLE_SECONDS for view in given_up):
        return None
    if any(not view.alive or view.record.leaving for view in observation.members):
        return None
    option = build_restart_option(observation, policy)
    choice = choose_remedy_at_standstill((option,))
    reporters = format_list(sorted({fault.worker for fault in faults} | {view.name for view in given_up}))
    message = f"the launchers could not start a round by themselves (reported by {reporters})"
    actions: tuple[Action, ...] = ()
    if (
        observation.state.lifecycle.has_trained
        and policy.max_restarts
        and (budget.backoffs or observation.is_budget_spent(policy))
    ):
        actions = (BackOff(),)
    elif observation.is_budget_spent(policy):
        actions = (FailJob(Reason.RESTART_BUDGET_SPENT, f"{message}, and no restart is left"),)
    elif choice.chosen is not None:
        actions = (RestartRanks(),)
    return Decision(
        incident_key=IncidentKey(IncidentCause.ROUND_FAILED, observation.progress.round),
        class_=IncidentClass.UNKNOWN,
        message=message,
        first_sign=min((fault.noticed_at for fault in faults), default=observation.now),
        actions=actions,
        remedy=Remedy.RESTART_RANKS if choice.chosen else None,
        remedies=build_remedy_prices(choice.prices, choice.chosen),
        evidence=tuple(fault.error for fault in faults if fault.error)[:MAX_LISTED_ITEMS],
        settled_faults=tuple(fault.name for fault in faults),
        routine=True,
        last_step=observation.progress.step,
    )
