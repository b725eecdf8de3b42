"""Leaving nodes: the platform drains a node, and workers leave it before they are evicted, by a checkpoint and a spare.

A cordon marks such a node, or the taints and conditions that the platform names (`pods.node_health`). The platform owns
the node's health: the operator neither quarantines such a node nor places a worker there.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...api.incident import IncidentCause, IncidentClass
from ...state.cluster_view import WorkerView
from ...state.desired_state import Incident
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision
from ..failures import gpu_warning
from ..placement import move
from ..placement.move import WorkerMove

DRAIN_SETTLE_SECONDS = 5.0
"""Seconds between a node's mark and the first move. A drain marks a node and evicts its pods at once. Those pods are
lost (`worker_lost`)."""


def check_leaving_nodes(observation: Observation, policy: Policy) -> Decision | None:
    """Move the first worker that must leave its node. Spares first: a worker must not move to one that must leave."""

    def unfit(spare: WorkerView) -> bool:
        return bool(_explain_leaving(observation, spare)) or gpu_warning.has_gpu_warning(observation, spare)

    for view in (*observation.spares, *observation.members):
        reason = _explain_leaving(observation, view)
        decision = (
            move.decide_move(observation, policy, _build_move(view, reason), unfit) if reason and view.usable else None
        )
        if decision is not None:
            return decision
    return None


def is_still_leaving(observation: Observation, incident: Incident) -> bool:
    """Return whether the worker of an incident without an applied remedy must still leave its node."""
    view = observation.find_worker(incident.worker or "")
    return view is not None and not view.record.leaving and bool(_get_leaving_mark(observation, view))


def list_leaving_nodes(observation: Observation) -> Iterator[str]:
    """Yield the nodes on which to place no worker.

    Kubernetes alone does not keep pods off: a template may tolerate every taint, and conditions repel no pod.
    """
    return (node.name for node in observation.cluster_view.nodes.values() if node.leave_reason)


def _explain_leaving(observation: Observation, view: WorkerView) -> str:
    """Return why the worker must leave now; "": it need not."""
    since = observation.cluster_view.leaving_since.get(view.node, observation.now)
    return _get_leaving_mark(observation, view) if observation.now - since >= DRAIN_SETTLE_SECONDS else ""


def _get_leaving_mark(observation: Observation, view: WorkerView) -> str:
    """Return the mark of the worker's node; "": there is none, or the node is not Ready.

    No checkpoint is possible on a node that is not Ready: its workers are lost, or they recover.
    """
    node = observation.cluster_view.nodes.get(view.node)
    return node.leave_reason if node is not None and node.ready else ""


def _build_move(view: WorkerView, mark: str) -> WorkerMove:
    reason = f"{view.node} is being drained: {mark}"
    return WorkerMove(
        view=view,
        cause=IncidentCause.NODE_LEAVING,
        class_=IncidentClass.DISRUPTION,
        reason=reason,
        message=f"{view.name} leaves its node, since {reason}",
        benefit="an eviction costs more",
        evidence=(reason,),
    )
