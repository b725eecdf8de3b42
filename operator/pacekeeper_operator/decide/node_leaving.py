"""A node that its platform wants empty: workers leave it before they are made to, by a checkpoint and a warm spare.

By a cordon, and by the taints and conditions that the platform names (`node_health`). Who owns a node's health is left
to it: the operator neither quarantines such a node nor puts a worker there.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..api import Cause, Class
from ..decision import Decision
from ..observation import Observation, Policy, WorkerView
from ..state import Incident
from . import gpu_warning, move
from .move import Move

EVICTED_SECONDS = 5.0
"""Whoever drains a node marks it, and evicts its pods at once: what is gone by then is lost (`worker_lost`)."""


def check(observation: Observation, policy: Policy) -> Decision | None:
    """Spares go first: a worker must not be moved to one that has to leave, too."""

    def unfit(spare: WorkerView) -> bool:
        return bool(_why(observation, spare)) or gpu_warning.is_warned(observation, spare)

    for view in (*observation.spares, *observation.members):
        why = _why(observation, view)
        decision = move.decide(observation, policy, _move(view, why), unfit) if why and view.usable else None
        if decision is not None:
            return decision
    return None


def lasts(observation: Observation, incident: Incident) -> bool:
    """Whether the worker of an incident, about which nothing has been done so far, is still to leave."""
    view = observation.worker(incident.worker or "")
    return view is not None and not view.record.leaving and bool(_mark(observation, view))


def avoided(observation: Observation) -> Iterator[str]:
    """Nodes on which no worker is to be placed. A template may tolerate every taint, and conditions keep nobody off."""
    return (node.name for node in observation.surroundings.nodes.values() if node.leaving)


def _why(observation: Observation, view: WorkerView) -> str:
    """Why it is to leave now; "": it is not."""
    since = observation.surroundings.leaving_since.get(view.node, observation.now)
    return _mark(observation, view) if observation.now - since >= EVICTED_SECONDS else ""


def _mark(observation: Observation, view: WorkerView) -> str:
    """From a node that is not Ready nobody leaves by a checkpoint: its workers are lost, or not."""
    node = observation.surroundings.nodes.get(view.node)
    return node.leaving if node is not None and node.ready else ""


def _move(view: WorkerView, why: str) -> Move:
    words = f"{view.node} is to be empty: {why}"
    return Move(
        view=view,
        cause=Cause.NODE_LEAVING,
        class_=Class.DISRUPTION,
        why=words,
        message=f"{view.name} leaves its node, since {words}",
        worth="to be evicted costs more",
        evidence=(words,),
    )
