"""Want the quarantine of a node.

It is asked for once plan and bookkeeping are written: an operator that dies in between finds here what it wanted.
"""

from __future__ import annotations

from dataclasses import replace

from ...decision import Decision, QuarantineNode
from ...observation import Observation
from ...state import Draft, WantedQuarantine
from .applied import Applied


def apply(action: QuarantineNode, decision: Decision, observation: Observation) -> Applied:
    if action.withheld:
        return Applied(observation.draft, (f"no quarantine of {action.node}: {action.withheld}",))
    return Applied(want(observation, action, decision.incident_name(observation.job)))


def want(observation: Observation, action: QuarantineNode, incident: str) -> Draft:
    """The same on behalf of an incident that is written already."""
    wanted = WantedQuarantine(action.node, action.uid, action.reason, incident, action.witness, action.weak)
    wanted = replace(wanted, at=observation.now)
    others = tuple(w for w in observation.state.incidents.quarantines if w.node != action.node)
    return observation.draft.with_incidents(quarantines=(*others, wanted))
