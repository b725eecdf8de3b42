"""Quarantine proposals: whether a job's policy lets it blame a node. `node_suspicion` decides what follows."""

from __future__ import annotations

from ...api.node_quarantine import Witness
from ...api.training_job import Remedy
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import QuarantineNode


def propose_quarantine(
    observation: Observation,
    policy: Policy,
    node: str,
    reason: str,
    witness: Witness = Witness.NONE,
    *,
    weak: bool = False,
) -> QuarantineNode:
    """Return the action that blames `node`, with the reason why it is only recorded, if any.

    `weak`: not enough to probe the node, since the job itself may be the cause.
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
    return f"the platform already drains the node: {view.leave_reason}" if view.leave_reason else ""
