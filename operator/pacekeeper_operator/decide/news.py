"""What errands have brought back is written into the bookkeeping."""

from __future__ import annotations

from dataclasses import replace

from ..observation import Observation, Policy
from ..state import Draft


def step(observation: Observation, _policy: Policy) -> Draft:
    return _quarantines(observation.with_draft(_template(observation)))


def _template(observation: Observation) -> Draft:
    """Whether the API server accepts the job's pods: asked once for every generation, by a dry run."""
    verdict, placement = observation.template, observation.state.placement
    if verdict is None or verdict.generation != observation.job.generation:
        return observation.draft
    if verdict.rejection:
        return observation.draft.with_placement(template_rejected=verdict.generation, rejection=verdict.rejection)
    if placement.template_accepted == verdict.generation:
        return observation.draft
    return observation.draft.with_placement(template_accepted=verdict.generation, template_rejected=-1, rejection="")


def _quarantines(observation: Observation) -> Draft:
    """What became of the nodes that were handed on stands in their incidents."""
    draft, incidents = observation.draft, observation.state.incidents
    for wanted in incidents.quarantines:
        words = observation.quarantine_words.get(wanted.node)
        incident = incidents.find(wanted.incident)
        if words and incident is not None:
            draft = draft.with_incident(replace(incident, quarantine=words))
    left = tuple(wanted for wanted in incidents.quarantines if wanted.node not in observation.quarantine_words)
    return draft if left == incidents.quarantines else draft.with_incidents(quarantines=left)
