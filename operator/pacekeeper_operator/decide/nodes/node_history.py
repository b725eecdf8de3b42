"""The history of nodes across jobs: which Incidents count against a node, and which nodes are less preferred for it.

An Incident that is recorded twice counts once, by its namespace and name. A history never excludes a node: the reports
of a job's workers may be wrong, and a tenant may forge them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...api.incident import IncidentCause, IncidentClass, IncidentOutcome
from ...api.node_history import MAX_NODE_INCIDENTS, NodeHistory, NodeIncident, NodeIncidentKind
from ...api.training_job import Remedy
from ...state.cluster_view import NodeView
from ...state.desired_state import Incident

DAY_SECONDS = 86400.0
NODE_INCIDENT_TTL_SECONDS = 90 * DAY_SECONDS
MIN_INCIDENT_DAYS = 2
"""Days with Incidents from which on a node is less preferred. Incidents on one day may have one cause: a bug in a
script, a switch, a forged report."""
MAX_UNRELIABLE_NODES = 16
"""Nodes that a pod's affinity names. Each is one more term that the scheduler compares with every node."""

_CAUSE_TO_KIND: Mapping[IncidentCause, NodeIncidentKind] = {
    IncidentCause.NODE_LOST: NodeIncidentKind.LOST,
    IncidentCause.HANG: NodeIncidentKind.HUNG,
    IncidentCause.WORKER_UNRESPONSIVE: NodeIncidentKind.HUNG,
    IncidentCause.STRAGGLER: NodeIncidentKind.SLOW,
    IncidentCause.SLOW_COMMUNICATION: NodeIncidentKind.SLOW,
    IncidentCause.GPU_ERROR: NodeIncidentKind.GPU_ERROR,
    IncidentCause.GPU_WARNING: NodeIncidentKind.GPU_ERROR,
}
"""Causes that may be a node's fault. Crashes, and pods lost without their node, are the job's fault or intended."""
_NON_NODE_CLASSES = (IncidentClass.APPLICATION, IncidentClass.DISRUPTION)
_MOVING_REMEDIES = (Remedy.REPLACE_WORKER, Remedy.QUARANTINE_NODE)
_OUTCOME_TO_LEFT_WITH_NODE: Mapping[IncidentOutcome, bool] = {
    IncidentOutcome.RECOVERED: True,
    IncidentOutcome.INEFFECTIVE: False,
}


def build_entry(namespace: str, incident: Incident, now: float) -> NodeIncident | None:
    """Return the entry of an Incident that has ended in its node's history; None: it does not count against the node.

    `now` bounds its date, so that a clock that was ahead does not make the entry last longer.
    """
    kind = _CAUSE_TO_KIND.get(incident.cause)
    if incident.outcome is None or not incident.node or kind is None or incident.class_ in _NON_NODE_CLASSES:
        return None
    moved = incident.applied is not None and incident.remedy in _MOVING_REMEDIES
    resolved_by_move = _OUTCOME_TO_LEFT_WITH_NODE.get(incident.outcome) if moved else None
    return NodeIncident(namespace, incident.name, kind, min(incident.detected, now), resolved_by_move)


def with_entry(history: NodeHistory, entry: NodeIncident) -> NodeHistory:
    """Return the history with this Incident, cut to the newest `MAX_NODE_INCIDENTS`. A known one changes nothing."""
    if any((incident.namespace, incident.name) == (entry.namespace, entry.name) for incident in history.incidents):
        return history
    newest = sorted((entry, *history.incidents), key=lambda incident: incident.at, reverse=True)
    return replace(history, incidents=tuple(newest[:MAX_NODE_INCIDENTS]))


def drop_old_entries(history: NodeHistory, now: float) -> NodeHistory:
    """Return the history without entries older than `NODE_INCIDENT_TTL_SECONDS`."""
    recent = tuple(incident for incident in history.incidents if incident.at > now - NODE_INCIDENT_TTL_SECONDS)
    return history if recent == history.incidents else replace(history, incidents=recent)


def count_incident_days(history: NodeHistory, now: float) -> int:
    """Return on how many days (UTC) the node had Incidents that count.

    An Incident that went on after the worker was moved to another node does not count.
    """
    counted = (
        incident.at for incident in drop_old_entries(history, now).incidents if incident.resolved_by_move is not False
    )
    return len({int(at // DAY_SECONDS) for at in counted})


def rank_unreliable_nodes(
    histories: Iterable[NodeHistory], nodes: Mapping[str, NodeView], now: float
) -> tuple[str, ...]:
    """Return the names of nodes that had Incidents on several days, the worst first.

    The history of an earlier node with the same name does not count.
    """
    days = {
        history.node: count_incident_days(history, now)
        for history in histories
        if history.node in nodes and nodes[history.node].uid == history.node_uid
    }
    repeated = sorted((-count, name) for name, count in days.items() if count >= MIN_INCIDENT_DAYS)
    return tuple(name for _, name in repeated[:MAX_UNRELIABLE_NODES])
