"""Nodes in words: what approving and releasing a quarantine does, and which Incidents nodes have had. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..api import (
    TAINT_QUARANTINE,
    ConditionStatus,
    NodeHistory,
    NodeHistoryStatus,
    NodeIncident,
    NodeTrouble,
    Sign,
    format_duration,
)
from ..decide.node_history import REPEATED_DAYS, count_days, without_old
from .seen import SeenQuarantine
from .text import duration, entries, table

_LEFT = {True: "yes", False: "no", None: "not known"}


def overview(histories: Sequence[NodeHistory], now: float) -> str:
    """One line a node that had Incidents within 90 days, the worst first."""
    recent = [without_old(history, now) for history in histories]
    known = sorted(
        (history for history in recent if history.incidents),
        key=lambda history: (-count_days(history, now), -history.incidents[0].at, history.node),
    )
    rows = [
        (history.node, str(count_days(history, now)), *_counts(history), _ago(history.incidents[0], now))
        for history in known
    ]
    return table(("NODE", "DAYS", "LOST", "HUNG", "SLOW", "GPU", "LAST"), rows) if rows else "no node had Incidents"


def story(history: NodeHistory, now: float) -> str:
    """All Incidents of one node within 90 days."""
    recent = without_old(history, now)
    days = count_days(recent, now)
    less = "spares and replacements prefer other nodes" if days >= REPEATED_DAYS else "it is used like any other"
    head = f"node {history.node}: {len(recent.incidents)} Incidents within 90 days, on {days} days; {less}"
    rows = [
        (_ago(one, now), one.kind, _LEFT[one.left_with_node], f"{one.namespace}/{one.name}") for one in recent.incidents
    ]
    return f"{head}\n{table(('WHEN', 'KIND', 'LEFT WITH NODE', 'INCIDENT'), rows)}" if rows else head


def _counts(history: NodeHistory) -> tuple[str, ...]:
    counts = {one.kind: one.count for one in NodeHistoryStatus.of(history.incidents).counts}
    return tuple(str(counts.get(kind, 0)) for kind in NodeTrouble)


def _ago(incident: NodeIncident, now: float) -> str:
    return f"{duration(max(0.0, now - incident.at))} ago"


def approval(seen: SeenQuarantine) -> str:
    """What is known of the node, and what happens when its quarantine is approved."""
    lasts = format_duration(seen.spec.expires_after)
    return _with(
        seen,
        f"it is cordoned and tainted ({TAINT_QUARANTINE}:NoSchedule): no new pods; jobs move their workers off it. "
        f"After {lasts} probe pods decide whether it is released. It cannot be taken back but by a release",
    )


def release(seen: SeenQuarantine) -> str:
    """And when it is released."""
    if not seen.status.cordoned_at:
        return _with(seen, "its node is untouched; the operator asks no more about it")
    left = "; it was cordoned before, and stays so" if seen.status.previously_cordoned else ""
    return _with(seen, f"our taint and cordon are taken away, and pods may come{left}")


def _with(seen: SeenQuarantine, then: str) -> str:
    told, spec = seen.status, seen.spec
    said = [f"{_who(sign)}: {sign.reason} ({sign.witness})" for sign in spec.signs]
    pairs = [
        ("phase", f"{told.phase or 'not looked at yet'}{f': {told.message}' if told.message else ''}"),
        ("reason", spec.reason),
        *(("said by", words) for words in said),
        *((condition.type, _said(condition)) for condition in told.conditions),
        ("then", then),
    ]
    return f"node {seen.node}\n{entries(pairs)}"


def _said(condition: ConditionStatus) -> str:
    words = f"{condition.status} ({condition.reason})"
    return f"{words}: {condition.message}" if condition.message else words


def _who(sign: Sign) -> str:
    return "the platform" if sign.by_platform else f"{sign.namespace}/{sign.incident}"
