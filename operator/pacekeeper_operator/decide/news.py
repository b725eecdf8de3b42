"""What errands have brought back is written into the bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..observation import Observation, Policy, Ruling
from ..state import Draft, Incident, WantedQuarantine

MOST_TOLD = 5
"""Nodes of an incident whose fate stands in it; the first that is open decides what the job's status says."""


def step(observation: Observation, _policy: Policy) -> Draft:
    return _quarantines(observation.with_draft(_template(observation)))


def _template(observation: Observation) -> Draft:
    """Whether the API server accepts the job's pods: asked once for every generation, by a dry run."""
    verdict = observation.template
    if verdict is None or verdict.generation != observation.job.generation:
        return observation.draft
    if verdict.rejection:
        return observation.draft.with_placement(template_rejected=verdict.generation, rejection=verdict.rejection)
    return observation.draft.with_placement(template_accepted=verdict.generation, template_rejected=-1, rejection="")


def _quarantines(observation: Observation) -> Draft:
    """What became of the nodes that were handed on stands in their incidents."""
    draft, incidents = observation.draft, observation.state.incidents
    rulings: dict[str, list[Ruling]] = {}
    for wanted in incidents.quarantines:
        if (ruling := observation.rulings.get(wanted.case)) is not None:
            rulings.setdefault(wanted.incident, []).append(ruling)
    if not rulings:
        return draft
    current = tuple(_told_of(incident, rulings.get(incident.name, ())) for incident in incidents.current)
    left = tuple(_told(observation, wanted) for wanted in incidents.quarantines if not _ruled(observation, wanted))
    return draft.with_incidents(current=current, quarantines=left)


def _told_of(incident: Incident, rulings: Sequence[Ruling]) -> Incident:
    """With what has become of the nodes that it blames."""
    if not rulings:
        return incident
    words = "; ".join(ruling.words for ruling in rulings[:MOST_TOLD])
    more = f"; and {len(rulings) - MOST_TOLD} more nodes" if len(rulings) > MOST_TOLD else ""
    verdict = min(rulings, key=lambda ruling: ruling.verdict.final).verdict
    return replace(incident, quarantine=words + more, verdict=verdict)


def _told(observation: Observation, wanted: WantedQuarantine) -> WantedQuarantine:
    ruling = observation.rulings.get(wanted.case)
    return wanted if ruling is None or wanted.raised else replace(wanted, raised=ruling.raised)


def _ruled(observation: Observation, wanted: WantedQuarantine) -> bool:
    """Nothing more will come of it."""
    ruling = observation.rulings.get(wanted.case)
    return ruling is not None and ruling.verdict.final
