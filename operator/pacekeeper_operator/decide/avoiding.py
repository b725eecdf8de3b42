"""Nodes on which no further pod of a job is to be placed."""

from __future__ import annotations

from ..observation import Observation
from . import node_leaving, preflight


def list_avoided_nodes(observation: Observation) -> tuple[str, ...]:
    """Names, in order: suspects, those that were slow before the job's start, and those that are to be empty."""
    suspects = observation.cluster_view.suspects
    return tuple(sorted({*suspects, *preflight.list_failed_nodes(observation), *node_leaving.list_leaving_nodes(observation)}))
