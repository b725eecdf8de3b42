"""Conditions of pods and nodes, and disruptions of pods."""

from __future__ import annotations

from collections.abc import Sequence

from .api.api_server import ApiServer
from .api.objects import Object, format_timestamp


def disrupt_pod(api: ApiServer, pod: Object, reason: str, message: str, at: float, *, manager: str) -> None:
    """Delete a pod as evictions, preemptions, and controllers do: the reason is written first. `at`: wall clock."""
    metadata, conditions = pod["metadata"], pod["status"].get("conditions", ())
    updated = with_condition(conditions, "DisruptionTarget", "True", at, reason, message)
    name, namespace = metadata["name"], metadata["namespace"]
    api.patch("pods", name, namespace, {"status": {"conditions": updated}}, subresource="status", manager=manager)
    api.delete("pods", name, namespace, uid=metadata["uid"])


def with_condition(
    conditions: Sequence[Object], type_: str, status: str, at: float, reason: str = "", message: str = ""
) -> list[Object]:
    """Return the conditions with this one.

    `at`: wall clock. The transition time stays if the status does not change.
    """
    previous = next((item for item in conditions if item["type"] == type_), None)
    condition: Object = {"type": type_, "status": status, "lastTransitionTime": format_timestamp(int(at))}
    if previous is not None and previous["status"] == status and "lastTransitionTime" in previous:
        condition["lastTransitionTime"] = previous["lastTransitionTime"]
    condition |= {key: text for key, text in (("reason", reason), ("message", message)) if text}
    if previous is None:
        return [*conditions, condition]
    return [condition if item is previous else item for item in conditions]


def get_condition_status(conditions: Sequence[Object], type_: str) -> str:
    """Return True, False, or Unknown; "": there is no such condition."""
    return next((item["status"] for item in conditions if item["type"] == type_), "")
