"""Whether a job's policy lets it blame a node. What becomes of the node is not the job's to decide: node_suspicion."""

from __future__ import annotations

from ..api import Remedy, Witness
from ..decision import QuarantineNode
from ..observation import Observation, Policy


def propose(
    observation: Observation,
    policy: Policy,
    node: str,
    reason: str,
    witness: Witness = Witness.NONE,
    *,
    weak: bool = False,
) -> QuarantineNode:
    """A suspicion against `node`, with the reason why it is only written down, if any.

    `weak`: alone no reason to look at the node, for what it says of it may be the job's own doing.
    """
    view = observation.surroundings.nodes.get(node)
    uid = view.uid if view else ""
    return QuarantineNode(node, uid, reason, _refusal(observation, policy, node), witness, weak)


def _refusal(observation: Observation, policy: Policy, node: str) -> str:
    if policy.refusal(Remedy.QUARANTINE_NODE):
        return policy.refusal(Remedy.QUARANTINE_NODE)
    view = observation.surroundings.nodes.get(node)
    if view is None:
        return "the node is not known any more"
    return f"somebody else sees to the node: {view.leaving}" if view.leaving else ""
