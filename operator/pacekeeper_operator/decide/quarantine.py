"""Whether a job's finding may touch a node. Opt-outs, budgets and the pause are the quarantine service's to keep."""

from __future__ import annotations

from ..api import Remedy
from ..decision import QuarantineNode
from ..observation import Observation, Policy


def propose(observation: Observation, policy: Policy, node: str, reason: str) -> QuarantineNode:
    """A quarantine of `node`, with the reason why it is refused, if any."""
    view = observation.surroundings.nodes.get(node)
    return QuarantineNode(node, view.uid if view else "", reason, _refusal(observation, policy, node))


def _refusal(observation: Observation, policy: Policy, node: str) -> str:
    failing = observation.surroundings.suspects | {node} | _unreachable(observation)
    if policy.refusal(Remedy.QUARANTINE_NODE):
        return policy.refusal(Remedy.QUARANTINE_NODE)
    if node not in observation.surroundings.nodes:
        return "the node is not known any more"
    if len(failing) >= policy.breaker_nodes:
        return f"{BREAKER}: {len(failing)} nodes fail at once, which is a fault of network or power rather than theirs"
    return ""


def _unreachable(observation: Observation) -> set[str]:
    return {view.pod.node for view in observation.workers if view.node_reachable is False and view.pod is not None}


BREAKER = "the breaker has tripped"
