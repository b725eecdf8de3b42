"""Slowness that the operator causes itself: a new pod of the job starts on the machine of a rank. It passes."""

from __future__ import annotations

from ...state.cluster_view import WorkerView
from ...state.observation import Observation


def find_starting_neighbor(observation: Observation, worker: str, window_seconds: float) -> str | None:
    """Return a new worker that starts on the machine of `worker`, or has within the last window; None: none does.

    For `window_seconds` after its start, metrics and evidence still cover steps during it.
    """
    node = _get_node(observation, worker)
    starting = (
        view
        for view in observation.workers
        if view.name not in observation.assigned and _is_starting(view, window_seconds)
    )
    return next((view.name for view in starting if _share_machine(observation, view.node, node)), None)


def _is_starting(view: WorkerView, window_seconds: float) -> bool:
    """Return whether its trainer imports what it needs, or has become warm less than a window ago."""
    is_importing = view.alive and view.record.starting_since is not None
    return is_importing or (view.warm and view.state_seconds < window_seconds)


def _get_node(observation: Observation, worker: str) -> str:
    view = observation.find_worker(worker)
    return "" if view is None else view.node


def _share_machine(observation: Observation, first: str, second: str) -> bool:
    """Return whether two nodes are one, or run under one kernel, as nodes that are containers do."""
    if not first or not second:
        return False
    nodes = observation.cluster_view.nodes
    boots = {nodes[name].boot_id if name in nodes else "" for name in (first, second)}
    return first == second or (len(boots) == 1 and "" not in boots)
