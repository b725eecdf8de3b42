"""A worker that works, and had better be elsewhere: it moves at the next checkpoint, which loses no step.

Without a warm spare that is written down, and done once there is one: of many that are to move, one goes after the
other. Nobody has done anything wrong, so it burns no restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pacekeeper_analysis.diagnose.finding import Finding
from pacekeeper_analysis.price import Price

from ..api import IncidentCause, IncidentClass, Remedy
from ..decision import Action, Decision, QuarantineNode, ReplaceWorker
from ..observation import Observation, Policy, WorkerView
from ..subject import IncidentKey
from .pricing import NO_WARM_SPARE, estimate_exchange_seconds, build_replace_option, build_remedy_prices


@dataclass(frozen=True)
class WorkerMove:
    """Of one worker, whether it holds ranks or is a spare."""

    view: WorkerView
    cause: IncidentCause
    class_: IncidentClass
    reason: str  # for the worker's record
    message: str  # one sentence for people
    benefit: str  # why it is worth its cost
    stay_reason: str = ""  # why it does not move for now; "": nothing stands against it but the lack of a spare
    evidence: tuple[str, ...] = ()
    finding: Finding | None = None
    quarantine: QuarantineNode | None = None  # once it moves


def decide_move(
    observation: Observation, policy: Policy, move: WorkerMove, unfit: Callable[[WorkerView], bool]
) -> Decision | None:
    """What is new about it; None: it is written down, and nothing more can be done about it now.

    `unfit`: spares that had better be elsewhere, too.
    """
    decision = _build_decision(observation, policy, move, unfit)
    return decision if _is_new_decision(observation, policy, decision) else None


def _build_decision(observation: Observation, policy: Policy, move: WorkerMove, unfit: Callable[[WorkerView], bool]) -> Decision:
    view = move.view
    rank = next((member.ranks[0] for member in observation.plan.members if member.worker == view.name), None)
    seated = rank is not None
    open_ = [i for i in observation.state.incidents.open if i.cause is move.cause and i.worker == view.name]
    no_spare = NO_WARM_SPARE if seated and not _has_free_spare(observation, unfit) else ""
    option = build_replace_option(observation, policy, refused=move.stay_reason or no_spare)
    if not seated and option.refused == NO_WARM_SPARE:
        option = replace(option, refused="")  # who trains nothing needs none in its place
    cost = estimate_exchange_seconds(observation) if seated else 0.0
    price = Price(replace(option, cost_seconds=cost), math.inf, not option.refused, option.refused or move.benefit)
    actions: tuple[Action, ...] = ()
    if price.due:
        moved = ReplaceWorker(view.name, move.reason, dead=False, disruption=True, waits_for_checkpoint=seated)
        actions = (moved,) if move.quarantine is None else (moved, move.quarantine)
    return Decision(
        incident_key=_build_incident_key(observation, move),
        class_=move.class_,
        message=move.message,
        first_sign=open_[0].first_sign if open_ else observation.now,
        actions=actions,
        remedy=Remedy.REPLACE_WORKER if actions else None,
        remedies=build_remedy_prices((price,), price if price.due else None),
        evidence=move.evidence,
        rank=rank,
        worker=view.name,
        node=view.record.node or None,
        continued_incident=open_[0].name if open_ else "",
        live=True,
        last_step=observation.step,
        finding=move.finding,
    )


def _is_new_decision(observation: Observation, policy: Policy, decision: Decision) -> bool:
    """It is not written down yet, or something can be done about it now."""
    incidents, name = observation.state.incidents, decision.incident_name(observation.job)
    before = incidents.find(name)
    if before is not None and before.outcome is None:
        return before.applied is None and policy.applies_remedies and bool(decision.actions)
    return policy.applies_remedies or name not in incidents.recommended


def _build_incident_key(observation: Observation, move: WorkerMove) -> IncidentKey:
    """A reason that was over and comes again is another one."""
    subject = IncidentKey(move.cause, observation.round, worker=move.view.name)
    over = (subject.find_occurrence(name, observation.job) for name in observation.state.incidents.closed)
    return replace(subject, number=1 + max(over, default=0))


def _has_free_spare(observation: Observation, unfit: Callable[[WorkerView], bool]) -> bool:
    """More of them are warm, and fit, than are already waited for."""
    warm = sum(spare.warm and not unfit(spare) for spare in observation.spares)
    return warm > sum(bool(member.record.leaving) for member in observation.members)
