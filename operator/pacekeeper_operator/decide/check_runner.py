"""Run the checks, record each decision as an Incident, and apply its actions where the policy allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pacekeeper_analysis.protocol.plan import Stop

from ..api.incident import MAX_EVIDENCE_ITEMS, IncidentCause, IncidentClass
from ..api.training_job import RemediationMode
from ..formatting import shorten_text
from ..state.desired_state import DesiredState, Incident
from ..state.observation import Observation
from ..state.policy import Policy
from .decision import Decision
from .failures.crash import record_no_progress
from .remedies import apply_actions
from .remedies.action_result import ActionResult
from .stragglers import straggler

MAX_DECISIONS_PER_PASS = 100
"""Bound on the decisions of a pass, so that it ends even if a check keeps deciding."""
MAX_EVIDENCE_PIECE_CHARACTERS, MAX_TOTAL_EVIDENCE_CHARACTERS = 4000, 16_000
"""Characters of one piece of evidence, and of all pieces: the job's state and Incidents must stay small."""
MAX_INCIDENT_MESSAGE_CHARACTERS = 2000
DecisionCheck = Callable[[Observation, Policy], Decision | None]


def run_checks(observation: Observation, policy: Policy, checks: Sequence[DecisionCheck]) -> DesiredState:
    """Return the desired state after all decisions of this pass.

    Each check runs until it returns nothing new, on the desired state that the decisions before it left.
    """
    decisions: list[Decision] = []
    for check in checks:
        while len(decisions) < MAX_DECISIONS_PER_PASS and _is_job_running(observation):
            decision = check(observation, policy)
            if decision is None or any(decision.incident_key == earlier.incident_key for earlier in decisions):
                break
            # An open incident covers the fault: act, but open no other incident.
            if decision.covered_by and decision.actions and _can_apply(policy, decision):
                observation = observation.with_desired(_settle_decision(observation.desired, decision))
                observation = observation.with_desired(apply_actions(decision, observation).desired)
                decisions.append(decision)
                continue
            if not _is_known_decision(observation, policy, decision):
                observation = observation.with_desired(_carry_out_decision(observation, policy, decision))
                decisions.append(decision)
                continue
            # Known: settle its faults, so that the check can find the next one.
            settled = _settle_decision(observation.desired, decision)
            if settled == observation.desired:
                break
            observation = observation.with_desired(settled)
    return observation.desired


def _is_job_running(observation: Observation) -> bool:
    return not observation.state.lifecycle.is_over and observation.plan.stop is Stop.NO


def _settle_decision(desired: DesiredState, decision: Decision) -> DesiredState:
    """Mark the faults and GPU readings of the decision as settled."""
    desired = desired.settle_faults(decision.settled_faults)
    readings = {value.key: value.value for value in decision.gpu_readings}
    return desired.with_gpus(values={**desired.state.gpus.values, **readings}) if readings else desired


def _is_known_decision(observation: Observation, policy: Policy, decision: Decision) -> bool:
    """Return whether the decision was handled. One that was only recommended is handled until more is allowed."""
    incidents, name = observation.state.incidents, decision.incident_name(observation.job)
    if decision.continued_incident:
        incident = incidents.find(name)
        return incident is not None and incident.remedy == decision.remedy
    if name in incidents.recommended:
        return not _can_apply(policy, decision)
    incident = incidents.find(name)
    if incident is not None and incident.applied is None:
        return not (_can_apply(policy, decision) and decision.actions)  # actions were not allowed then
    return incident is not None or name in incidents.closed


def _can_apply(policy: Policy, decision: Decision) -> bool:
    return policy.applies_remedies or (decision.routine and policy.applies_routine_remedies)


def _carry_out_decision(observation: Observation, policy: Policy, decision: Decision) -> DesiredState:
    """Record the decision as an Incident, and apply its actions where the policy allows."""
    desired = _settle_decision(observation.desired, decision)
    applies = _can_apply(policy, decision)
    updated = observation.with_desired(record_no_progress(desired, decision) if applies else desired)
    acts = applies and bool(decision.actions)
    result = apply_actions(decision, updated) if acts else ActionResult(updated.desired)
    updated = updated.with_desired(result.desired)
    desired = updated.desired
    measured = decision.class_ is IncidentClass.PERFORMANCE and decision.cause is not IncidentCause.SLOW_STEPS
    if measured and not acts:
        desired = straggler.suppress_bottleneck(updated, forbidden=not applies)
    incident = _build_incident(observation, policy, decision, observation.now if acts else None, result.notes)
    recommended = tuple(name for name in desired.state.incidents.recommended if name != incident.name)
    return desired.with_incident(incident).with_incidents(recommended=recommended)


def _build_incident(
    observation: Observation, policy: Policy, decision: Decision, applied: float | None, notes: Sequence[str]
) -> Incident:
    previous = observation.state.incidents.find(decision.continued_incident)
    paused = (f"not applied: {policy.paused}",) if policy.paused and not policy.observes_only else ()
    return Incident(
        name=decision.incident_name(observation.job),
        cause=decision.cause,
        class_=decision.class_,
        round=decision.round,
        message=shorten_text(decision.message, MAX_INCIDENT_MESSAGE_CHARACTERS),
        first_sign=observation.clamp_time(decision.first_sign),
        detected=observation.now if previous is None else previous.detected,
        decided=observation.now,
        mode=RemediationMode.ACT if _can_apply(policy, decision) else RemediationMode.RECOMMEND,
        rank=decision.rank,
        worker=decision.worker,
        node=decision.node,
        evidence=_bound_evidence((*notes, *paused, *decision.evidence)),
        remedy=decision.remedy,
        remedies=decision.remedies,
        applied=applied,
        last_step=decision.last_step,
        slowdown_before=decision.slowdown_before,
        reference_seconds=_get_reference_seconds(observation, decision),
        steps_before=decision.steps_before,
        predicted_after=decision.slowdown_after,
        predicted_gain=decision.predicted_gain,
        live=decision.live,
        finding=decision.finding or (None if previous is None else previous.finding),
    )


def _get_reference_seconds(observation: Observation, decision: Decision) -> float | None:
    """Return the time of a step without the fault. A standstill changes none; afterwards, it is not known at once."""
    if decision.class_ is IncidentClass.PERFORMANCE:
        return decision.reference_seconds
    return observation.progress.step_seconds or observation.plan.step_seconds


def _bound_evidence(evidence: Sequence[str]) -> tuple[str, ...]:
    """Return the pieces that fit. Each is cut at its beginning: a script's last lines matter most."""
    pieces = [text[-MAX_EVIDENCE_PIECE_CHARACTERS:] for text in evidence if text][:MAX_EVIDENCE_ITEMS]
    remaining, retained = MAX_TOTAL_EVIDENCE_CHARACTERS, []
    for piece in pieces:
        remaining -= len(piece)
        if remaining < 0:
            break
        retained.append(piece)
    return tuple(retained)
