"""Quarantines in words: what approving and releasing does. Pure."""

from __future__ import annotations

from ..api import TAINT_QUARANTINE, ConditionStatus, Sign, format_duration
from .seen import SeenQuarantine
from .text import entries


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
