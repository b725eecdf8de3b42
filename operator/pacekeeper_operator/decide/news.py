"""What errands have brought back is written into the bookkeeping."""

from __future__ import annotations

from dataclasses import replace

from ..observation import Observation, Policy
from ..state import Draft, WantedQuarantine


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
    for wanted in incidents.quarantines:
        ruling = observation.rulings.get(wanted.incident)
        incident = incidents.find(wanted.incident)
        if ruling is not None and incident is not None:
            draft = draft.with_incident(replace(incident, quarantine=ruling.words, verdict=ruling.verdict))
    left = tuple(_told(observation, wanted) for wanted in incidents.quarantines if not _ruled(observation, wanted))
    return draft if left == incidents.quarantines else draft.with_incidents(quarantines=left)


def _told(observation: Observation, wanted: WantedQuarantine) -> WantedQuarantine:
    ruling = observation.rulings.get(wanted.incident)
    return wanted if ruling is None or wanted.raised else replace(wanted, raised=ruling.raised)


def _ruled(observation: Observation, wanted: WantedQuarantine) -> bool:
    """Nothing more will come of it."""
    ruling = observation.rulings.get(wanted.incident)
    return ruling is not None and ruling.verdict.final
