"""What nodes are remembered for across jobs: which Incidents count, and which nodes are preferred less for them.

An Incident that is recorded twice counts once, by its namespace and name. Nothing here excludes a node: what a job's
workers report may be wrong, and a tenant may invent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..api import MAX_NODE_INCIDENTS, Cause, Class, NodeHistory, NodeIncident, NodeTrouble, Outcome, Remedy
from ..observation import NodeView
from ..state import Incident

DAY_SECONDS = 86400.0
REMEMBERED_SECONDS = 90 * DAY_SECONDS
REPEATED_DAYS = 2
"""Incidents on one day may have one cause (a bug in a script, a switch, a tenant's invention). A node with Incidents on
so many days is preferred less."""
MAX_UNRELIABLE = 16
"""Nodes that a pod's affinity names: each is one more term that the scheduler compares with every node."""

_KINDS: Mapping[Cause, NodeTrouble] = {
    Cause.NODE_LOST: NodeTrouble.LOST,
    Cause.HANG: NodeTrouble.HUNG,
    Cause.WORKER_FROZEN: NodeTrouble.HUNG,
    Cause.STRAGGLER: NodeTrouble.SLOW,
    Cause.SLOW_COMMUNICATION: NodeTrouble.SLOW,
    Cause.GPU_ERROR: NodeTrouble.GPU_ERROR,
    Cause.GPU_WARNING: NodeTrouble.GPU_ERROR,
}
"""What may be a node's fault. Crashes, and pods that are lost without their node, are their job's, or wanted."""
_NOT_THE_NODES = (Class.APPLICATION, Class.DISRUPTION)
_MOVES = (Remedy.REPLACE_WORKER, Remedy.QUARANTINE_NODE)
_LEFT: Mapping[Outcome, bool] = {Outcome.RECOVERED: True, Outcome.NOT_HELPED: False}


def entry_of(namespace: str, incident: Incident, now: float) -> NodeIncident | None:
    """What its node is remembered for once the Incident has ended; None: it is not the node's. `now` bounds its date: a
    clock that was ahead makes nothing last longer."""
    kind = _KINDS.get(incident.cause)
    if incident.outcome is None or not incident.node or kind is None or incident.class_ in _NOT_THE_NODES:
        return None
    moved = incident.applied is not None and incident.remedy in _MOVES
    left = _LEFT.get(incident.outcome) if moved else None
    return NodeIncident(namespace, incident.name, kind, min(incident.detected, now), left)


def with_entry(history: NodeHistory, entry: NodeIncident) -> NodeHistory:
    """The history with this Incident; unchanged where it is known, or older than all of as many as are kept."""
    if any((one.namespace, one.name) == (entry.namespace, entry.name) for one in history.incidents):
        return history
    newest = sorted((entry, *history.incidents), key=lambda one: one.at, reverse=True)
    return replace(history, incidents=tuple(newest[:MAX_NODE_INCIDENTS]))


def without_old(history: NodeHistory, now: float) -> NodeHistory:
    """The history without what is no longer remembered."""
    recent = tuple(one for one in history.incidents if one.at > now - REMEMBERED_SECONDS)
    return history if recent == history.incidents else replace(history, incidents=recent)


def count_days(history: NodeHistory, now: float) -> int:
    """On how many days (UTC) the node had Incidents that are remembered and are not known to have stayed with the job
    when its worker was moved."""
    counted = (one.at for one in without_old(history, now).incidents if one.left_with_node is not False)
    return len({int(at // DAY_SECONDS) for at in counted})


def unreliable_nodes(histories: Iterable[NodeHistory], nodes: Mapping[str, NodeView], now: float) -> tuple[str, ...]:
    """Names of nodes that had Incidents on several days, the worst first. A history of an earlier node of the same name
    counts for nothing."""
    days = {
        history.node: count_days(history, now)
        for history in histories
        if history.node in nodes and nodes[history.node].uid == history.node_uid
    }
    repeated = sorted((-count, name) for name, count in days.items() if count >= REPEATED_DAYS)
    return tuple(name for _, name in repeated[:MAX_UNRELIABLE])
