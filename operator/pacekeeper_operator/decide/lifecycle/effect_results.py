"""Effect results: the dry run of the template, and the quarantine decisions, recorded in the job's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...state.desired_state import DesiredState, Incident, QuarantineRequest
from ...state.effect_results import QuarantineDecision
from ...state.observation import Observation
from ...state.policy import Policy

MAX_REPORTED_NODES = 5
"""Nodes of an incident whose quarantine decisions are written out in it. The first open one sets its verdict."""


def apply_effect_results(observation: Observation, _policy: Policy) -> DesiredState:
    """Record the results of the effects that earlier passes requested."""
    return _apply_quarantine_decisions(observation.with_desired(_apply_template_verdict(observation)))


def _apply_template_verdict(observation: Observation) -> DesiredState:
    """Record whether the API server accepts the job's pods. A dry run checks this once per generation."""
    verdict = observation.template
    if verdict is None or verdict.generation != observation.job.generation:
        return observation.desired
    if verdict.rejection:
        return observation.desired.with_placement(template_rejected=verdict.generation, rejection=verdict.rejection)
    return observation.desired.with_placement(
        template_accepted=verdict.generation, template_rejected=None, rejection=""
    )


def _apply_quarantine_decisions(observation: Observation) -> DesiredState:
    """Record in each incident what became of the nodes that it blames."""
    desired, incidents = observation.desired, observation.state.incidents
    decisions: dict[str, list[QuarantineDecision]] = {}
    for request in incidents.quarantine_requests:
        if (decision := observation.quarantine_decisions.get(request.node_key)) is not None:
            decisions.setdefault(request.incident, []).append(decision)
    if not decisions:
        return desired
    current = tuple(_record_decisions(incident, decisions.get(incident.name, ())) for incident in incidents.current)
    remaining = tuple(
        _mark_raised(observation, request)
        for request in incidents.quarantine_requests
        if not _is_decided(observation, request)
    )
    return desired.with_incidents(current=current, quarantine_requests=remaining)


def _record_decisions(incident: Incident, decisions: Sequence[QuarantineDecision]) -> Incident:
    """Return the incident with the decisions about its nodes."""
    if not decisions:
        return incident
    summary = "; ".join(decision.message for decision in decisions[:MAX_REPORTED_NODES])
    more = f"; and {len(decisions) - MAX_REPORTED_NODES} more nodes" if len(decisions) > MAX_REPORTED_NODES else ""
    verdict = min(decisions, key=lambda decision: decision.verdict.is_final).verdict
    return replace(incident, quarantine_summary=summary + more, verdict=verdict)


def _mark_raised(observation: Observation, request: QuarantineRequest) -> QuarantineRequest:
    decision = observation.quarantine_decisions.get(request.node_key)
    return request if decision is None or request.recorded else replace(request, recorded=decision.recorded)


def _is_decided(observation: Observation, request: QuarantineRequest) -> bool:
    """Return whether the decision is final."""
    decision = observation.quarantine_decisions.get(request.node_key)
    return decision is not None and decision.verdict.is_final
