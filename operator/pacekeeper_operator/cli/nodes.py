"""Nodes as text: the effects of approving and releasing a quarantine, and the Incidents of nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..api.conditions import ConditionStatus
from ..api.formats import format_duration
from ..api.names import TAINT_QUARANTINE
from ..api.node_history import NodeHistory, NodeHistoryStatus, NodeIncident, NodeIncidentKind
from ..api.node_quarantine import NodeSuspicion
from ..decide.nodes.node_history import MIN_INCIDENT_DAYS, count_incident_days, drop_old_entries
from .loaded_objects import LoadedQuarantine
from .text import format_elapsed, format_entries, format_table

_RESOLVED_BY_MOVE_TEXT = {True: "yes", False: "no", None: "not known"}


def format_overview(histories: Sequence[NodeHistory], now: float) -> str:
    """Format one line for each node that had Incidents within 90 days, the worst first."""
    recent = [drop_old_entries(history, now) for history in histories]
    ranked = sorted(
        (history for history in recent if history.incidents),
        key=lambda history: (-count_incident_days(history, now), -history.incidents[0].at, history.node),
    )
    rows = [
        (
            history.node,
            str(count_incident_days(history, now)),
            *_format_counts(history),
            _format_age(history.incidents[0], now),
        )
        for history in ranked
    ]
    return (
        format_table(("NODE", "DAYS", "LOST", "HUNG", "SLOW", "GPU", "LAST"), rows) if rows else "no node had Incidents"
    )


def format_history(history: NodeHistory, now: float) -> str:
    """Format all Incidents of one node within 90 days."""
    recent = drop_old_entries(history, now)
    days = count_incident_days(recent, now)
    effect = "spares and replacements prefer other nodes" if days >= MIN_INCIDENT_DAYS else "it is used like any other"
    header = f"node {history.node}: {len(recent.incidents)} Incidents within 90 days, on {days} days; {effect}"
    rows = [
        (
            _format_age(incident, now),
            incident.kind,
            _RESOLVED_BY_MOVE_TEXT[incident.resolved_by_move],
            f"{incident.namespace}/{incident.name}",
        )
        for incident in recent.incidents
    ]
    return f"{header}\n{format_table(('WHEN', 'KIND', 'RESOLVED BY MOVE', 'INCIDENT'), rows)}" if rows else header


def _format_counts(history: NodeHistory) -> tuple[str, ...]:
    counts = {entry.kind: entry.count for entry in NodeHistoryStatus.from_incidents(history.incidents).counts}
    return tuple(str(counts.get(kind, 0)) for kind in NodeIncidentKind)


def _format_age(incident: NodeIncident, now: float) -> str:
    return f"{format_elapsed(max(0.0, now - incident.at))} ago"


def describe_approval(quarantine: LoadedQuarantine) -> str:
    """Describe a quarantine, and the effect of its approval."""
    duration = format_duration(quarantine.spec.expires_after)
    return _describe_quarantine(
        quarantine,
        f"it is cordoned and tainted ({TAINT_QUARANTINE}:NoSchedule): no new pods; jobs move their workers off it. "
        f"After {duration} probe pods decide whether it is released. Only a release undoes it",
    )


def describe_release(quarantine: LoadedQuarantine) -> str:
    """Describe a quarantine, and the effect of its release."""
    if not quarantine.status.cordoned_at:
        return _describe_quarantine(quarantine, "its node is untouched; the operator stops checking it")
    cordon_note = "; it was cordoned before, and stays so" if quarantine.status.previously_cordoned else ""
    return _describe_quarantine(quarantine, f"our taint and cordon are removed, and pods may be scheduled{cordon_note}")


def _describe_quarantine(quarantine: LoadedQuarantine, effect: str) -> str:
    status, spec = quarantine.status, quarantine.spec
    reports = [
        f"{_format_origin(suspicion)}: {suspicion.reason} ({suspicion.witness})" for suspicion in spec.suspicions
    ]
    pairs = [
        ("phase", f"{status.phase or 'not observed yet'}{f': {status.message}' if status.message else ''}"),
        ("reason", spec.reason),
        *(("reported by", report) for report in reports),
        *((condition.type, _format_condition(condition)) for condition in status.conditions),
        ("then", effect),
    ]
    return f"node {quarantine.node}\n{format_entries(pairs)}"


def _format_condition(condition: ConditionStatus) -> str:
    text = f"{condition.status} ({condition.reason})"
    return f"{text}: {condition.message}" if condition.message else text


def _format_origin(suspicion: NodeSuspicion) -> str:
    return "the platform" if suspicion.is_from_platform else f"{suspicion.namespace}/{suspicion.incident}"
