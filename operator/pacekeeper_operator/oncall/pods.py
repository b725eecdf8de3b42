"""Pods of a job that do not run, in the words of whoever keeps them from it: their events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pacekeeper_analysis.errors import InputError

from ..api import Object, parse_time
from .text import format_elapsed, format_paragraph

MOST_PODS, MOST_EVENTS = 3, 3
"""Pods, and events of each, that are shown. A job whose workers do not start has the same reason for most of them."""
NOT_RUNNING = "status.phase!=Running,status.phase!=Succeeded"
"""Field selector."""


def choose(pods: Sequence[Object]) -> list[Object]:
    """Return those whose events are looked at: what waits goes before what has failed, and the newest first."""
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
    return sorted(newest, key=_has_failed)[:MOST_PODS]


def describe(pod: Object, events: Sequence[Object], now: float) -> str:
    """Return what its events say, the newest of each reason first: warnings, or else the last of all. "": there is
    none (the API server keeps them for an hour)."""
    newest = sorted(events, key=_last_seen, reverse=True)
    warnings = [event for event in newest if event.get("type") == "Warning"]
    by_reason = {event.get("reason", ""): event for event in reversed(warnings or newest[:1])}
    if not by_reason:
        return ""
    metadata, node = pod["metadata"], pod.get("spec", {}).get("nodeName", "")
    where = f" on {node}" if node else ""
    phase = pod.get("status", {}).get("phase", "Pending")
    title = f"Pod {metadata['name']}{where} is {phase} (kubectl describe pod {metadata['name']}):"
    shown = islice(sorted(by_reason.values(), key=_last_seen, reverse=True), MOST_EVENTS)
    return "\n".join([format_paragraph(title), *(format_paragraph(_say(event, now), "    ", "  ") for event in shown)])


def _say(event: Object, now: float) -> str:
    seen = _last_seen(event)
    ago = f"{format_elapsed(max(0.0, now - seen))} ago" if seen else ""
    count = int(event.get("count") or (event.get("series") or {}).get("count") or 1)
    often = f"{count} times, the last" if count > 1 else ""
    when = " ".join(filter(None, (often, ago)))
    return f"{event.get('reason', '')}{f' ({when})' if when else ''}: {event.get('message', '')}"


def _has_failed(pod: Object) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Failed")


def _last_seen(event: Object) -> float:
    """Seconds since the epoch; 0: it does not say."""
    told = (
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    try:
        return next((parse_time(at) for at in told if at), 0.0)
    except (InputError, ValueError):
        return 0.0
