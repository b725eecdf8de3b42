"""The launchers could not start a round by themselves, although all workers are there: they meet anew."""

from __future__ import annotations

from pacekeeper_analysis.reports import FaultKind, LauncherState

from ..api import IncidentCause, IncidentClass, Reason, Remedy
from ..decision import Action, BackOff, Decision, FailJob, RestartRanks
from ..observation import Observation, Policy
from ..subject import IncidentKey
from ..words import MAX_LISTED_ITEMS, format_list
from . import frozen
from .pricing import choose_remedy_at_standstill, build_restart_option, build_remedy_prices

ROUND_FAILED_SETTLE_SECONDS = 3.0
"""A lost worker or node is looked for first; it is the usual reason. Who gives up says so before his faults say why."""


def check_failed_rounds(observation: Observation, policy: Policy) -> Decision | None:
    failed = observation.select_faults(FaultKind.ROUND_FAILED)
    given_up = [
        view
        for view in observation.members
        if view.heartbeat is not None
        and view.heartbeat.membership == observation.plan.membership
        and view.heartbeat.state in (LauncherState.LOST, LauncherState.FAILED)
    ]
    budget = observation.state.budget
    if not failed and (not given_up or budget.next_round_at):
        return None  # what has given up waits for the round that `back_off` begins
    if failed and observation.is_younger(failed[0], ROUND_FAILED_SETTLE_SECONDS):
        return None
    if observation.select_faults(FaultKind.RANK_FAILED) or frozen.has_unresponsive_member(observation):
        return None  # why they gave up is judged first
    if any(view.state_seconds < ROUND_FAILED_SETTLE_SECONDS for view in given_up):
        return None
    if any(not view.alive or view.record.leaving for view in observation.members):
        return None
    option = build_restart_option(observation, policy)
    choice = choose_remedy_at_standstill((option,))
    who = format_list(sorted({fault.worker for fault in failed} | {view.name for view in given_up}))
    message = f"the launchers could not start a round by themselves (told by {who})"
    actions: tuple[Action, ...] = ()
    if observation.has_trained and policy.max_restarts and (budget.backoffs or observation.is_budget_spent(policy)):
        actions = (BackOff(),)
    elif observation.is_budget_spent(policy):
        actions = (FailJob(Reason.RESTART_BUDGET_SPENT, f"{message}, and no restart is left"),)
    elif choice.chosen is not None:
        actions = (RestartRanks(),)
    return Decision(
        incident_key=IncidentKey(IncidentCause.ROUND_FAILED, observation.round),
        class_=IncidentClass.UNKNOWN,
        message=message,
        first_sign=min((fault.noticed_at for fault in failed), default=observation.now),
        actions=actions,
        remedy=Remedy.RESTART_RANKS if choice.chosen else None,
        remedies=build_remedy_prices(choice.prices, choice.chosen),
        evidence=tuple(fault.error for fault in failed if fault.error)[:MAX_LISTED_ITEMS],
        settled_faults=tuple(fault.name for fault in failed),
        routine=True,
        last_step=observation.step,
    )
