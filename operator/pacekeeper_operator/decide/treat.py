"""Ask each check what is wrong, write every answer down as an Incident, and act upon it where that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pacekeeper_analysis.plan import Stop

from ..api import MAX_EVIDENCE_ITEMS, IncidentCause, IncidentClass, RemediationMode
from ..decision import Decision
from ..observation import Observation, Policy
from ..state import DesiredState, Incident
from ..words import shorten_text
from . import straggler
from .crash import record_no_progress
from .remedies import apply_actions
from .remedies.applied import ActionResult

MAX_DECISIONS_PER_PASS = 100
"""A pass ends, whatever the checks say."""
MAX_EVIDENCE_PIECE_CHARACTERS, MAX_TOTAL_EVIDENCE_CHARACTERS = 4000, 16_000
"""Characters of one piece of evidence, and of all pieces: bookkeeping and Incidents must stay small."""
MAX_INCIDENT_MESSAGE_CHARACTERS = 2000
DecisionCheck = Callable[[Observation, Policy], Decision | None]


def run_checks(observation: Observation, policy: Policy, checks: Sequence[DecisionCheck]) -> DesiredState:
    """The draft after everything that is to be said now. Each check is asked until it has nothing new to say, under the
    draft that the decisions before have left."""
    made: list[Decision] = []
    for check in checks:
        while len(made) < MAX_DECISIONS_PER_PASS and _is_job_running(observation):
            decision = check(observation, policy)
            if decision is None or any(decision.incident_key == earlier.incident_key for earlier in made):
                break
            if decision.covered_by and decision.actions and _can_apply(policy, decision):
                observation = observation.with_desired(_settle_decision(observation.desired, decision))
                observation = observation.with_desired(apply_actions(decision, observation).desired)
                made.append(decision)
                continue
            if not _is_known_decision(observation, policy, decision):
                observation = observation.with_desired(_carry_out_decision(observation, policy, decision))
                made.append(decision)
                continue
            settled = _settle_decision(observation.desired, decision)
            if settled == observation.desired:
                break
            observation = observation.with_desired(settled)
    return observation.desired


def _is_job_running(observation: Observation) -> bool:
    return not observation.state.life.is_over and observation.plan.stop is Stop.NO


def _settle_decision(draft: DesiredState, decision: Decision) -> DesiredState:
    """What the decision deals with is news no longer."""
    draft = draft.settle_faults(decision.settled_faults)
    seen = {value.key: value.value for value in decision.gpu_readings}
    return draft.with_gpus(values={**draft.state.gpus.values, **seen}) if seen else draft


def _is_known_decision(observation: Observation, policy: Policy, decision: Decision) -> bool:
    """It has been dealt with; what was only recommended, or not allowed, is dealt with until more is allowed."""
    incidents, name = observation.state.incidents, decision.incident_name(observation.job)
    if decision.continued_incident:
        before = incidents.find(name)
        return before is not None and before.remedy == decision.remedy
    if name in incidents.recommended:
        return not _can_apply(policy, decision)
    before = incidents.find(name)
    if before is not None and before.applied is None:
        return not (_can_apply(policy, decision) and decision.actions)  # nothing was allowed then
    return before is not None or name in incidents.closed


def _can_apply(policy: Policy, decision: Decision) -> bool:
    return policy.applies_remedies or (decision.routine and policy.applies_routine_remedies)


def _carry_out_decision(observation: Observation, policy: Policy, decision: Decision) -> DesiredState:
    """Write the decision down as an Incident and, where it may be, act upon it."""
    draft = _settle_decision(observation.desired, decision)
    applies = _can_apply(policy, decision)
    world = observation.with_desired(record_no_progress(draft, decision) if applies else draft)
    acts = applies and bool(decision.actions)
    done = apply_actions(decision, world) if acts else ActionResult(world.desired)
    world = world.with_desired(done.desired)
    draft = world.desired
    measured = decision.class_ is IncidentClass.PERFORMANCE and decision.cause is not IncidentCause.SLOW_STEPS
    if measured and not acts:
        draft = straggler.suppress_bottleneck(world, forbidden=not applies)
    incident = _build_incident(observation, policy, decision, observation.now if acts else None, done.notes)
    recommended = tuple(name for name in draft.state.incidents.recommended if name != incident.name)
    return draft.with_incident(incident).with_incidents(recommended=recommended)


def _build_incident(
    observation: Observation, policy: Policy, decision: Decision, applied: float | None, words: Sequence[str]
) -> Incident:
    before = observation.state.incidents.find(decision.continued_incident)
    paused = (f"not applied: {policy.paused}",) if policy.paused else ()
    return Incident(
        name=decision.incident_name(observation.job),
        cause=decision.cause,
        class_=decision.class_,
        round=decision.round,
        message=shorten_text(decision.message, MAX_INCIDENT_MESSAGE_CHARACTERS),
        first_sign=observation.clamp_time(decision.first_sign),
        detected=observation.now if before is None else before.detected,
        decided=observation.now,
        mode=RemediationMode.ACT if _can_apply(policy, decision) else RemediationMode.RECOMMEND,
        rank=decision.rank,
        worker=decision.worker,
        node=decision.node,
        evidence=_bound_evidence((*words, *paused, *decision.evidence)),
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


def _bound_evidence(evidence: Sequence[str]) -> tuple[str, ...]:
    """As many pieces as there is room for. The end of each matters most: a script's last lines."""
    pieces = [text[-MAX_EVIDENCE_PIECE_CHARACTERS:] for text in evidence if text][:MAX_EVIDENCE_ITEMS]
    room, kept = MAX_TOTAL_EVIDENCE_CHARACTERS, []
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            break
        kept.append(piece)
    return tuple(kept)
