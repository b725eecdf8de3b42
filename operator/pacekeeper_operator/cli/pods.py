"""Pods of a job that do not run, explained by their events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pacekeeper_analysis.errors import InputError

from ..api.formats import parse_time
from ..api.names import Object
from .text import format_elapsed, format_paragraph

MOST_PODS, MOST_EVENTS = 3, 3
"""Pods that are shown, and events of each. If workers do not start, most of them have the same reason."""
NOT_RUNNING = "status.phase!=Running,status.phase!=Succeeded"
"""Field selector of pods."""


def choose_waiting_pods(pods: Sequence[Object]) -> list[Object]:
    """Return the pods whose events are read: waiting ones before failed ones, the newest first."""
    newest = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)
    return sorted(newest, key=_has_failed)[:MOST_PODS]


def describe_pod(pod: Object, events: Sequence[Object], now: float) -> str:
    """Describe a pod by its events, the newest of each reason first: warnings, or else the latest of all.

    "": there are none (the API server keeps them for an hour).
    """
    newest = sorted(events, key=_get_sort_time, reverse=True)
    warnings = [event for event in newest if event.get("type") == "Warning"]
    by_reason = {event.get("reason", ""): event for event in reversed(warnings or newest[:1])}
    if not by_reason:
        return ""
    metadata, node = pod["metadata"], pod.get("spec", {}).get("nodeName", "")
    location = f" on {node}" if node else ""
    phase = pod.get("status", {}).get("phase", "Pending")
    title = f"Pod {metadata['name']}{location} is {phase} (kubectl describe pod {metadata['name']}):"
    shown = islice(sorted(by_reason.values(), key=_get_sort_time, reverse=True), MOST_EVENTS)
    return "\n".join(
        [format_paragraph(title), *(format_paragraph(_describe_event(event, now), "    ", "  ") for event in shown)]
    )


def _describe_event(event: Object, now: float) -> str:
    seen_at = _last_seen(event)
    age = "" if seen_at is None else f"{format_elapsed(max(0.0, now - seen_at))} ago"
    count = int(event.get("count") or (event.get("series") or {}).get("count") or 1)
    repeats = f"{count} times, the last" if count > 1 else ""
    when = " ".join(filter(None, (repeats, age)))
    return f"{event.get('reason', '')}{f' ({when})' if when else ''}: {event.get('message', '')}"


def _has_failed(pod: Object) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Failed")


def _get_sort_time(event: Object) -> float:
    """Return the time of an event by which it is sorted. One without a time is the oldest."""
    return _last_seen(event) or 0.0


def _last_seen(event: Object) -> float | None:
    """Return the time of an event in seconds since the epoch; None: unknown."""
    times = (
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    try:
        return next((parse_time(at) for at in times if at), None)
    except (InputError, ValueError):
        return None
