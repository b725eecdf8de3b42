"""What nodes are remembered for across jobs: which Incidents count, and which nodes are preferred less for them.

An Incident that is recorded twice counts once, by its namespace and name. Nothing here excludes a node: what a job's
workers report may be wrong, and a tenant may invent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..api import MAX_NODE_INCIDENTS, IncidentCause, IncidentClass, NodeHistory, NodeIncident, NodeIncidentKind, IncidentOutcome, Remedy
from ..observation import NodeView
from ..state import Incident

DAY_SECONDS = 86400.0
NODE_INCIDENT_TTL_SECONDS = 90 * DAY_SECONDS
MIN_INCIDENT_DAYS = 2
"""Incidents on one day may have one cause (a bug in a script, a switch, a tenant's invention). A node with Incidents on
so many days is preferred less."""
MAX_UNRELIABLE_NODES = 16
"""Nodes that a pod's affinity names: each is one more term that the scheduler compares with every node."""

_CAUSE_TO_KIND: Mapping[IncidentCause, NodeIncidentKind] = {
    IncidentCause.NODE_LOST: NodeIncidentKind.LOST,
    IncidentCause.HANG: NodeIncidentKind.HUNG,
    IncidentCause.WORKER_FROZEN: NodeIncidentKind.HUNG,
    IncidentCause.STRAGGLER: NodeIncidentKind.SLOW,
    IncidentCause.SLOW_COMMUNICATION: NodeIncidentKind.SLOW,
    IncidentCause.GPU_ERROR: NodeIncidentKind.GPU_ERROR,
    IncidentCause.GPU_WARNING: NodeIncidentKind.GPU_ERROR,
}
"""What may be a node's fault. Crashes, and pods that are lost without their node, are their job's, or wanted."""
_NON_NODE_CLASSES = (IncidentClass.APPLICATION, IncidentClass.DISRUPTION)
_MOVING_REMEDIES = (Remedy.REPLACE_WORKER, Remedy.QUARANTINE_NODE)
_OUTCOME_TO_LEFT_WITH_NODE: Mapping[IncidentOutcome, bool] = {IncidentOutcome.RECOVERED: True, IncidentOutcome.NOT_HELPED: False}


def build_entry(namespace: str, incident: Incident, now: float) -> NodeIncident | None:
    """What its node is remembered for once the Incident has ended; None: it is not the node's. `now` bounds its date: a
    clock that was ahead makes nothing last longer."""
    kind = _CAUSE_TO_KIND.get(incident.cause)
    if incident.outcome is None or not incident.node or kind is None or incident.class_ in _NON_NODE_CLASSES:
        return None
    moved = incident.applied is not None and incident.remedy in _MOVING_REMEDIES
    left = _OUTCOME_TO_LEFT_WITH_NODE.get(incident.outcome) if moved else None
    return NodeIncident(namespace, incident.name, kind, min(incident.detected, now), left)


def with_entry(history: NodeHistory, entry: NodeIncident) -> NodeHistory:
    """The history with this Incident; unchanged where it is known, or older than all of as many as are kept."""
    if any((one.namespace, one.name) == (entry.namespace, entry.name) for one in history.incidents):
        return history
    newest = sorted((entry, *history.incidents), key=lambda one: one.at, reverse=True)
    return replace(history, incidents=tuple(newest[:MAX_NODE_INCIDENTS]))


def drop_old_entries(history: NodeHistory, now: float) -> NodeHistory:
    """The history without what is no longer remembered."""
    recent = tuple(one for one in history.incidents if one.at > now - NODE_INCIDENT_TTL_SECONDS)
    return history if recent == history.incidents else replace(history, incidents=recent)


def count_incident_days(history: NodeHistory, now: float) -> int:
    """On how many days (UTC) the node had Incidents that are remembered and are not known to have stayed with the job
    when its worker was moved."""
    counted = (one.at for one in drop_old_entries(history, now).incidents if one.left_with_node is not False)
    return len({int(at // DAY_SECONDS) for at in counted})


def rank_unreliable_nodes(histories: Iterable[NodeHistory], nodes: Mapping[str, NodeView], now: float) -> tuple[str, ...]:
    """Names of nodes that had Incidents on several days, the worst first. A history of an earlier node of the same name
    counts for nothing."""
    days = {
        history.node: count_incident_days(history, now)
        for history in histories
        if history.node in nodes and nodes[history.node].uid == history.node_uid
    }
    repeated = sorted((-count, name) for name, count in days.items() if count >= MIN_INCIDENT_DAYS)
    return tuple(name for _, name in repeated[:MAX_UNRELIABLE_NODES])
