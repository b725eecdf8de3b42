"""Conditions of pods and nodes, and what is said of a pod that somebody takes away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .objects import Object, format_timestamp

if TYPE_CHECKING:
    from .api_server import ApiServer


def disrupt_pod(api: ApiServer, pod: Object, reason: str, message: str, at: float, *, who: str) -> None:
    """Delete a pod as evictions, preemptions and controllers do: first it is written down why. `at`: wall clock."""
    metadata, conditions = pod["metadata"], pod["status"].get("conditions", ())
    said = with_condition(conditions, "DisruptionTarget", "True", at, reason, message)
    name, namespace = metadata["name"], metadata["namespace"]
    api.patch("pods", name, namespace, {"status": {"conditions": said}}, subresource="status", manager=who)
    api.delete("pods", name, namespace, uid=metadata["uid"])


def with_condition(
    conditions: Sequence[Object], type_: str, status: str, at: float, reason: str = "", message: str = ""
) -> list[Object]:
    """All of them, with this one. The time of its transition (`at`: wall clock) stays while its status does."""
    before = next((item for item in conditions if item["type"] == type_), None)
    written: Object = {"type": type_, "status": status, "lastTransitionTime": format_timestamp(int(at))}
    if before is not None and before["status"] == status and "lastTransitionTime" in before:
        written["lastTransitionTime"] = before["lastTransitionTime"]
    written |= {key: words for key, words in (("reason", reason), ("message", message)) if words}
    if before is None:
        return [*conditions, written]
    return [written if item is before else item for item in conditions]


def get_condition_status(conditions: Sequence[Object], type_: str) -> str:
    """True, False, Unknown; "": there is no such condition."""
    return next((item["status"] for item in conditions if item["type"] == type_), "")
