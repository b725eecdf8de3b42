"""A node that its platform wants empty: workers leave it before they are made to, by a checkpoint and a warm spare.

By a cordon, and by the taints and conditions that the platform names (`node_health`). Who owns a node's health is left
to it: the operator neither quarantines such a node nor puts a worker there.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..api import IncidentCause, IncidentClass
from ..decision import Decision
from ..observation import Observation, Policy, WorkerView
from ..state import Incident
from . import gpu_warning, move
from .move import WorkerMove

DRAIN_SETTLE_SECONDS = 5.0
"""Whoever drains a node marks it, and evicts its pods at once: what is gone by then is lost (`worker_lost`)."""


def check_leaving_nodes(observation: Observation, policy: Policy) -> Decision | None:
    """Spares go first: a worker must not be moved to one that has to leave, too."""

    def unfit(spare: WorkerView) -> bool:
        return bool(_explain_leaving(observation, spare)) or gpu_warning.has_gpu_warning(observation, spare)

    for view in (*observation.spares, *observation.members):
        why = _explain_leaving(observation, view)
        decision = move.decide_move(observation, policy, _build_move(view, why), unfit) if why and view.usable else None
        if decision is not None:
            return decision
    return None


def is_still_leaving(observation: Observation, incident: Incident) -> bool:
    """Whether the worker of an incident, about which nothing has been done so far, is still to leave."""
    view = observation.find_worker(incident.worker or "")
    return view is not None and not view.record.leaving and bool(_get_leaving_mark(observation, view))


def list_leaving_nodes(observation: Observation) -> Iterator[str]:
    """Nodes on which no worker is to be placed. A template may tolerate every taint, and conditions keep nobody off."""
    return (node.name for node in observation.cluster_view.nodes.values() if node.leave_reason)


def _explain_leaving(observation: Observation, view: WorkerView) -> str:
    """Why it is to leave now; "": it is not."""
    since = observation.cluster_view.leaving_since.get(view.node, observation.now)
    return _get_leaving_mark(observation, view) if observation.now - since >= DRAIN_SETTLE_SECONDS else ""


def _get_leaving_mark(observation: Observation, view: WorkerView) -> str:
    """From a node that is not Ready nobody leaves by a checkpoint: its workers are lost, or not."""
    node = observation.cluster_view.nodes.get(view.node)
    return node.leave_reason if node is not None and node.ready else ""


def _build_move(view: WorkerView, why: str) -> WorkerMove:
    words = f"{view.node} is to be empty: {why}"
    return WorkerMove(
        view=view,
        cause=IncidentCause.NODE_LEAVING,
        class_=IncidentClass.DISRUPTION,
        reason=words,
        message=f"{view.name} leaves its node, since {words}",
        benefit="to be evicted costs more",
        evidence=(words,),
    )
