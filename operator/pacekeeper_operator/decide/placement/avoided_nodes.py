"""Nodes on which no further pod of a job is to be placed."""

from __future__ import annotations

from ...state.observation import Observation
from ..nodes import node_leaving
from . import preflight


def list_avoided_nodes(observation: Observation) -> tuple[str, ...]:
    """Return their names, in order: suspects, nodes that failed the preflight, and nodes that are drained."""
    suspects = observation.cluster_view.suspects
    return tuple(
        sorted({*suspects, *preflight.list_failed_nodes(observation), *node_leaving.list_leaving_nodes(observation)})
    )
