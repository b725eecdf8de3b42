"""What errands have brought back is written into the bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..observation import Observation, Policy, QuarantineDecision
from ..state import DesiredState, Incident, QuarantineRequest

MAX_REPORTED_NODES = 5
"""Nodes of an incident whose fate stands in it; the first that is open decides what the job's status says."""


def apply_effect_results(observation: Observation, _policy: Policy) -> DesiredState:
    return _apply_quarantine_decisions(observation.with_desired(_apply_template_verdict(observation)))


def _apply_template_verdict(observation: Observation) -> DesiredState:
    """Whether the API server accepts the job's pods: asked once for every generation, by a dry run."""
    verdict = observation.template
    if verdict is None or verdict.generation != observation.job.generation:
        return observation.desired
    if verdict.rejection:
        return observation.desired.with_placement(template_rejected=verdict.generation, rejection=verdict.rejection)
    return observation.desired.with_placement(template_accepted=verdict.generation, template_rejected=-1, rejection="")


def _apply_quarantine_decisions(observation: Observation) -> DesiredState:
    """What became of the nodes that were handed on stands in their incidents."""
    draft, incidents = observation.desired, observation.state.incidents
    rulings: dict[str, list[QuarantineDecision]] = {}
    for wanted in incidents.quarantines:
        if (ruling := observation.quarantine_decisions.get(wanted.node_key)) is not None:
            rulings.setdefault(wanted.incident, []).append(ruling)
    if not rulings:
        return draft
    current = tuple(_record_decisions(incident, rulings.get(incident.name, ())) for incident in incidents.current)
    left = tuple(_mark_raised(observation, wanted) for wanted in incidents.quarantines if not _is_decided(observation, wanted))
    return draft.with_incidents(current=current, quarantines=left)


def _record_decisions(incident: Incident, rulings: Sequence[QuarantineDecision]) -> Incident:
    """With what has become of the nodes that it blames."""
    if not rulings:
        return incident
    words = "; ".join(ruling.message for ruling in rulings[:MAX_REPORTED_NODES])
    more = f"; and {len(rulings) - MAX_REPORTED_NODES} more nodes" if len(rulings) > MAX_REPORTED_NODES else ""
    verdict = min(rulings, key=lambda ruling: ruling.verdict.is_final).verdict
    return replace(incident, quarantine=words + more, verdict=verdict)


def _mark_raised(observation: Observation, wanted: QuarantineRequest) -> QuarantineRequest:
    ruling = observation.quarantine_decisions.get(wanted.node_key)
    return wanted if ruling is None or wanted.raised else replace(wanted, raised=ruling.recorded)


def _is_decided(observation: Observation, wanted: QuarantineRequest) -> bool:
    """Nothing more will come of it."""
    ruling = observation.quarantine_decisions.get(wanted.node_key)
    return ruling is not None and ruling.verdict.is_final
