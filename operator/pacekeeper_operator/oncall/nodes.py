"""Nodes in words: what approving and releasing a quarantine does, and which Incidents nodes have had. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..api import (
    TAINT_QUARANTINE,
    ConditionStatus,
    NodeHistory,
    NodeHistoryStatus,
    NodeIncident,
    NodeIncidentKind,
    NodeSuspicion,
    format_duration,
)
from ..decide.node_history import MIN_INCIDENT_DAYS, count_incident_days, drop_old_entries
from .seen import LoadedQuarantine
from .text import format_elapsed, format_entries, format_table

_RESOLVED_BY_MOVE_TEXT = {True: "yes", False: "no", None: "not known"}


def format_overview(histories: Sequence[NodeHistory], now: float) -> str:
    """One line a node that had Incidents within 90 days, the worst first."""
    recent = [drop_old_entries(history, now) for history in histories]
    known = sorted(
        (history for history in recent if history.incidents),
        key=lambda history: (-count_incident_days(history, now), -history.incidents[0].at, history.node),
    )
    rows = [
        (history.node, str(count_incident_days(history, now)), *_format_counts(history), _format_age(history.incidents[0], now))
        for history in known
    ]
    return format_table(("NODE", "DAYS", "LOST", "HUNG", "SLOW", "GPU", "LAST"), rows) if rows else "no node had Incidents"


def format_history(history: NodeHistory, now: float) -> str:
    """All Incidents of one node within 90 days."""
    recent = drop_old_entries(history, now)
    days = count_incident_days(recent, now)
    less = "spares and replacements prefer other nodes" if days >= MIN_INCIDENT_DAYS else "it is used like any other"
    head = f"node {history.node}: {len(recent.incidents)} Incidents within 90 days, on {days} days; {less}"
    rows = [
        (_format_age(one, now), one.kind, _RESOLVED_BY_MOVE_TEXT[one.left_with_node], f"{one.namespace}/{one.name}") for one in recent.incidents
    ]
    return f"{head}\n{format_table(('WHEN', 'KIND', 'LEFT WITH NODE', 'INCIDENT'), rows)}" if rows else head


def _format_counts(history: NodeHistory) -> tuple[str, ...]:
    counts = {one.kind: one.count for one in NodeHistoryStatus.from_incidents(history.incidents).counts}
    return tuple(str(counts.get(kind, 0)) for kind in NodeIncidentKind)


def _format_age(incident: NodeIncident, now: float) -> str:
    return f"{format_elapsed(max(0.0, now - incident.at))} ago"


def describe_approval(seen: LoadedQuarantine) -> str:
    """What is known of the node, and what happens when its quarantine is approved."""
    lasts = format_duration(seen.spec.expires_after)
    return _describe_quarantine(
        seen,
        f"it is cordoned and tainted ({TAINT_QUARANTINE}:NoSchedule): no new pods; jobs move their workers off it. "
        f"After {lasts} probe pods decide whether it is released. It cannot be taken back but by a release",
    )


def describe_release(seen: LoadedQuarantine) -> str:
    """And when it is released."""
    if not seen.status.cordoned_at:
        return _describe_quarantine(seen, "its node is untouched; the operator asks no more about it")
    left = "; it was cordoned before, and stays so" if seen.status.previously_cordoned else ""
    return _describe_quarantine(seen, f"our taint and cordon are taken away, and pods may come{left}")


def _describe_quarantine(seen: LoadedQuarantine, then: str) -> str:
    told, spec = seen.status, seen.spec
    said = [f"{_format_origin(sign)}: {sign.reason} ({sign.witness})" for sign in spec.signs]
    pairs = [
        ("phase", f"{told.phase or 'not looked at yet'}{f': {told.message}' if told.message else ''}"),
        ("reason", spec.reason),
        *(("said by", words) for words in said),
        *((condition.type, _format_condition(condition)) for condition in told.conditions),
        ("then", then),
    ]
    return f"node {seen.node}\n{format_entries(pairs)}"


def _format_condition(condition: ConditionStatus) -> str:
    words = f"{condition.status} ({condition.reason})"
    return f"{words}: {condition.message}" if condition.message else words


def _format_origin(sign: NodeSuspicion) -> str:
    return "the platform" if sign.is_from_platform else f"{sign.namespace}/{sign.incident}"
