"""The move of a healthy worker that should run elsewhere: at the next checkpoint, so that no step is lost.

Without a warm spare, the move is recorded in an incident, and carried out once there is one. Of many workers that are
to move, one goes after the other. It does not count against the restart budget, since nothing has failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pacekeeper_analysis.failures.finding import Finding
from pacekeeper_analysis.stragglers.price import Price

from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...state.cluster_view import WorkerView
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, Decision, QuarantineNode, ReplaceWorker
from ..stragglers.pricing import NO_WARM_SPARE, build_remedy_prices, build_replace_option


@dataclass(frozen=True)
class WorkerMove:
    """A move of one worker, which holds ranks or is a spare."""

    view: WorkerView
    cause: IncidentCause
    class_: IncidentClass
    reason: str  # for the worker's record
    message: str  # one sentence for people
    benefit: str  # why it is worth its cost
    stay_reason: str = ""  # why it does not move for now; "": only a spare may be missing
    evidence: tuple[str, ...] = ()
    finding: Finding | None = None
    quarantine: QuarantineNode | None = None  # once it moves


def decide_move(
    observation: Observation, policy: Policy, move: WorkerMove, is_unfit: Callable[[WorkerView], bool]
) -> Decision | None:
    """Return the decision if it is new; None: it is recorded, and nothing more can be done about it now.

    `is_unfit`: tells the spares that should run elsewhere, too.
    """
    decision = _build_decision(observation, policy, move, is_unfit)
    return decision if _is_new_decision(observation, policy, decision) else None


def _build_decision(
    observation: Observation, policy: Policy, move: WorkerMove, is_unfit: Callable[[WorkerView], bool]
) -> Decision:
    view = move.view
    rank = next((member.ranks[0] for member in observation.plan.members if member.worker == view.name), None)
    is_assigned = rank is not None
    open_incidents = [
        incident
        for incident in observation.state.incidents.open
        if incident.cause is move.cause and incident.worker == view.name
    ]
    no_spare = NO_WARM_SPARE if is_assigned and not _has_free_spare(observation, is_unfit) else ""
    option = build_replace_option(observation, policy, refused=move.stay_reason or no_spare)
    if not is_assigned and option.refused == NO_WARM_SPARE:
        option = replace(option, refused="")  # a worker without ranks needs no replacement
    cost = observation.restarts.estimate_exchange_seconds() if is_assigned else 0.0
    price = Price(replace(option, cost_seconds=cost), math.inf, not option.refused, option.refused or move.benefit)
    actions: tuple[Action, ...] = ()
    if price.due:
        replacement = ReplaceWorker(
            view.name, move.reason, dead=False, disruption=True, waits_for_checkpoint=is_assigned
        )
        actions = (replacement,) if move.quarantine is None else (replacement, move.quarantine)
    return Decision(
        incident_key=_build_incident_key(observation, move),
        class_=move.class_,
        message=move.message,
        first_sign=open_incidents[0].first_sign if open_incidents else observation.now,
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if actions else None,
        remedies=build_remedy_prices((price,), price if price.due else None),
        evidence=move.evidence,
        rank=rank,
        worker=view.name,
        node=view.record.node or None,
        continued_incident=open_incidents[0].name if open_incidents else "",
        live=True,
        last_step=observation.progress.step,
        finding=move.finding,
    )


def _is_new_decision(observation: Observation, policy: Policy, decision: Decision) -> bool:
    """Return whether the decision is not recorded yet, or can be carried out now."""
    incidents, name = observation.state.incidents, decision.incident_name(observation.job)
    incident = incidents.find(name)
    if incident is not None and incident.outcome is None:
        return incident.applied is None and policy.applies_remedies and bool(decision.actions)
    return policy.applies_remedies or name not in incidents.recommended


def _build_incident_key(observation: Observation, move: WorkerMove) -> IncidentKey:
    """Return the key of the move's incident. A reason that was over and recurs is another incident."""
    key = IncidentKey(move.cause, observation.progress.round, worker=move.view.name)
    occurrences = (key.find_occurrence(name, observation.job) for name in observation.state.incidents.closed)
    return replace(key, occurrence=1 + max(occurrences, default=0))


def _has_free_spare(observation: Observation, is_unfit: Callable[[WorkerView], bool]) -> bool:
    """Return whether more spares are warm and fit than are awaited already."""
    warm = sum(spare.warm and not is_unfit(spare) for spare in observation.spares)
    return warm > sum(bool(member.record.leaving) for member in observation.members)
