"""Want the quarantine of a node.

It is asked for once plan and bookkeeping are written: an operator that dies in between finds here what it wanted.
"""

from __future__ import annotations

from dataclasses import replace

from ...decision import Decision, QuarantineNode
from ...observation import Observation
from ...state import DesiredState, QuarantineRequest
from .applied import ActionResult


def apply_quarantine_node(action: QuarantineNode, decision: Decision, observation: Observation) -> ActionResult:
    if action.withheld:
        return ActionResult(observation.desired, (f"no quarantine of {action.node}: {action.withheld}",))
    return ActionResult(request_quarantine(observation, action, decision.incident_name(observation.job)))


def request_quarantine(observation: Observation, action: QuarantineNode, incident: str) -> DesiredState:
    """The same on behalf of an incident that is written already."""
    wanted = QuarantineRequest(action.node, action.uid, action.reason, incident, action.witness, action.weak)
    wanted = replace(wanted, at=observation.now)
    others = tuple(w for w in observation.state.incidents.quarantines if w.node != action.node)
    return observation.desired.with_incidents(quarantines=(*others, wanted))
