"""Request the quarantine of a node.

The request is part of the desired state, and is sent once that is written. So an operator that crashes in between finds
it again.
"""

from __future__ import annotations

from dataclasses import replace

from ...state.desired_state import DesiredState, QuarantineRequest
from ...state.observation import Observation
from ..decision import Decision, QuarantineNode
from .action_result import ActionResult


def apply_quarantine_node(action: QuarantineNode, decision: Decision, observation: Observation) -> ActionResult:
    if action.withheld:
        return ActionResult(observation.desired, (f"no quarantine of {action.node}: {action.withheld}",))
    return ActionResult(request_quarantine(observation, action, decision.incident_name(observation.job)))


def request_quarantine(observation: Observation, action: QuarantineNode, incident: str) -> DesiredState:
    """Return the desired state with a quarantine request on behalf of `incident`, the name of a recorded incident."""
    request = QuarantineRequest(action.node, action.uid, action.reason, incident, action.witness, action.weak)
    request = replace(request, at=observation.now)
    others = tuple(other for other in observation.state.incidents.quarantine_requests if other.node != action.node)
    return observation.desired.with_incidents(quarantine_requests=(*others, request))
