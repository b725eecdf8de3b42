"""Whether a job's policy lets it blame a node. What becomes of the node is not the job's to decide: node_suspicion."""

from __future__ import annotations

from ..api import Remedy, Witness
from ..decision import QuarantineNode
from ..observation import Observation, Policy


def propose_quarantine(
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
    view = observation.cluster_view.nodes.get(node)
    uid = view.uid if view else ""
    return QuarantineNode(node, uid, reason, _explain_refusal(observation, policy, node), witness, weak)


def _explain_refusal(observation: Observation, policy: Policy, node: str) -> str:
    if policy.find_refusal(Remedy.QUARANTINE_NODE):
        return policy.find_refusal(Remedy.QUARANTINE_NODE)
    view = observation.cluster_view.nodes.get(node)
    if view is None:
        return "the node is not known any more"
    return f"somebody else sees to the node: {view.leave_reason}" if view.leave_reason else ""
