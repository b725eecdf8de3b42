"""Whether a job's policy lets it blame a node. What becomes of the node is not the job's to decide: node_suspicion."""

from __future__ import annotations

from ..api import Remedy, Witness
from ..decision import QuarantineNode
from ..observation import Observation, Policy


def propose(
    observation: Observation, policy: Policy, node: str, reason: str, witness: Witness = Witness.NONE
) -> QuarantineNode:
    """A suspicion against `node`, with the reason why it is only written down, if any."""
    view = observation.surroundings.nodes.get(node)
    return QuarantineNode(node, view.uid if view else "", reason, _refusal(observation, policy, node), witness)


def _refusal(observation: Observation, policy: Policy, node: str) -> str:
    if policy.refusal(Remedy.QUARANTINE_NODE):
        return policy.refusal(Remedy.QUARANTINE_NODE)
    return "" if node in observation.surroundings.nodes else "the node is not known any more"
