"""Ask each check what is wrong, write every answer down as an Incident, and act upon it where that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pacekeeper_analysis.plan import Stop

from ..api import MAX_EVIDENCE, Cause, Class, Mode
from ..decision import Decision
from ..observation import Observation, Policy
from ..state import Draft, Incident
from ..words import shortened
from . import straggler
from .crash import remember
from .remedies import apply
from .remedies.applied import Applied

MAX_DECISIONS = 100
"""A pass ends, whatever the checks say."""
MAX_PIECE, MAX_ALL = 4000, 16_000
"""Characters of one piece of evidence, and of all pieces: bookkeeping and Incidents must stay small."""
MAX_MESSAGE = 2000
Check = Callable[[Observation, Policy], Decision | None]


def step(observation: Observation, policy: Policy, checks: Sequence[Check]) -> Draft:
    """The draft after everything that is to be said now. Each check is asked until it has nothing new to say, under the
    draft that the decisions before have left."""
    made: list[Decision] = []
    for check in checks:
        while len(made) < MAX_DECISIONS and _goes_on(observation):
            decision = check(observation, policy)
            if decision is None or any(decision.subject == earlier.subject for earlier in made):
                break
            if decision.covered_by and decision.actions and _applies(policy, decision):
                observation = observation.with_draft(_settle(observation.draft, decision))
                observation = observation.with_draft(apply(decision, observation).draft)
                made.append(decision)
                continue
            if not _known(observation, policy, decision):
                observation = observation.with_draft(_carry_out(observation, policy, decision))
                made.append(decision)
                continue
            settled = _settle(observation.draft, decision)
            if settled == observation.draft:
                break
            observation = observation.with_draft(settled)
    return observation.draft


def _goes_on(observation: Observation) -> bool:
    return not observation.state.life.over and observation.plan.stop is Stop.NO


def _settle(draft: Draft, decision: Decision) -> Draft:
    """What the decision deals with is news no longer."""
    draft = draft.settle(decision.settles)
    seen = {value.key: value.value for value in decision.gpu_seen}
    return draft.with_gpus(values={**draft.state.gpus.values, **seen}) if seen else draft


def _known(observation: Observation, policy: Policy, decision: Decision) -> bool:
    """It has been dealt with; what was only recommended, or not allowed, is dealt with until more is allowed."""
    incidents, name = observation.state.incidents, decision.incident_name(observation.job)
    if decision.continues:
        before = incidents.find(name)
        return before is not None and before.remedy == decision.remedy
    if name in incidents.recommended:
        return not _applies(policy, decision)
    before = incidents.find(name)
    if before is not None and before.applied is None:
        return not (_applies(policy, decision) and decision.actions)  # nothing was allowed then
    return before is not None or name in incidents.closed


def _applies(policy: Policy, decision: Decision) -> bool:
    return policy.acts or (decision.routine and policy.recovers)


def _carry_out(observation: Observation, policy: Policy, decision: Decision) -> Draft:
    """Write the decision down as an Incident and, where it may be, act upon it."""
    draft = _settle(observation.draft, decision)
    applies = _applies(policy, decision)
    world = observation.with_draft(remember(draft, decision) if applies else draft)
    acts = applies and bool(decision.actions)
    done = apply(decision, world) if acts else Applied(world.draft)
    world = world.with_draft(done.draft)
    draft = world.draft
    measured = decision.class_ is Class.PERFORMANCE and decision.cause is not Cause.SLOW_STEPS
    if measured and not acts:
        draft = straggler.left_alone(world, forbidden=not applies)
    incident = _open(observation, policy, decision, observation.now if acts else None, done.words)
    recommended = tuple(name for name in draft.state.incidents.recommended if name != incident.name)
    return draft.with_incident(incident).with_incidents(recommended=recommended)


def _open(
    observation: Observation, policy: Policy, decision: Decision, applied: float | None, words: Sequence[str]
) -> Incident:
    before = observation.state.incidents.find(decision.continues)
    paused = (f"not applied: {policy.paused}",) if policy.paused else ()
    return Incident(
        name=decision.incident_name(observation.job),
        cause=decision.cause,
        class_=decision.class_,
        round=decision.round,
        message=shortened(decision.message, MAX_MESSAGE),
        first_sign=observation.in_time(decision.first_sign),
        detected=observation.now if before is None else before.detected,
        decided=observation.now,
        mode=Mode.ACT if _applies(policy, decision) else Mode.RECOMMEND,
        rank=decision.rank,
        worker=decision.worker,
        node=decision.node,
        evidence=_bounded((*words, *paused, *decision.evidence)),
        remedy=decision.remedy,
        remedies=decision.remedies,
        applied=applied,
        last_step=decision.last_step,
        slowdown_before=decision.slowdown_before,
        reference_seconds=decision.reference_seconds,
        predicted_after=decision.slowdown_after,
        predicted_gain=decision.predicted_gain,
        live=decision.live,
        finding=decision.finding or (None if before is None else before.finding),
    )


def _bounded(evidence: Sequence[str]) -> tuple[str, ...]:
    """As many pieces as there is room for. The end of each matters most: a script's last lines."""
    pieces = [text[-MAX_PIECE:] for text in evidence if text][:MAX_EVIDENCE]
    room, kept = MAX_ALL, []
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            break
        kept.append(piece)
    return tuple(kept)
