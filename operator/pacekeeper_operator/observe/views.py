"""Pods and nodes, reduced to what decisions need. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pacekeeper_analysis.fabric import places
from pacekeeper_analysis.reports import FINISHED_MESSAGE

from ..api import ANNOTATION_AVOIDS, LABEL_JOB, TRAINER, parse_time
from ..node_health import NodeHealth
from ..observation import NodeView, PodView

_HARMLESS = frozenset({"ContainerCreating", "PodInitializing"})


def view_pod(pod: Mapping[str, Any]) -> PodView:
    metadata, status = pod["metadata"], pod.get("status", {})
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    ended = _trainer(status).get("terminated") or {}
    waiting = _waiting(status)
    disrupted = conditions.get("DisruptionTarget", {})
    scheduled = conditions.get("PodScheduled", {})
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        phase=status.get("phase", "Pending"),
        job=metadata.get("labels", {}).get(LABEL_JOB, ""),
        owner=next((o["uid"] for o in metadata.get("ownerReferences", ()) if o.get("controller")), ""),
        node=pod["spec"].get("nodeName", ""),
        address=status.get("podIP", ""),
        created_at=parse_time(metadata["creationTimestamp"]),
        deleting="deletionTimestamp" in metadata,
        delete_by=parse_time(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else 0.0,
        disrupted=disrupted.get("reason", "") if disrupted.get("status") == "True" else "",
        unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        exit_code=ended.get("exitCode"),
        exit_reason=(ended if ended.get("exitCode") else {} if ended else status).get("reason", ""),
        exit_message=(ended or status).get("message", ""),
        finished=ended.get("exitCode") == 0 and FINISHED_MESSAGE in ended.get("message", ""),
        gated=scheduled.get("reason") == "SchedulingGated",
        started="running" in _trainer(status),
        avoids=frozenset(filter(None, (metadata.get("annotations") or {}).get(ANNOTATION_AVOIDS, "").split(","))),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
    )


def view_node(node: Mapping[str, Any], health: NodeHealth, levels: Collection[str] = ()) -> NodeView:
    """`levels`: names of labels by which a Fabric says where nodes are; others are known anyway."""
    metadata, status = node["metadata"], node.get("status", {})
    ready: Mapping[str, Any] = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), {})
    addresses = {item["type"]: item["address"] for item in status.get("addresses", ())}
    return NodeView(
        name=metadata["name"],
        uid=metadata["uid"],
        ready=ready.get("status") == "True",
        leaving=health.why_empty(node),
        address=addresses.get("InternalIP", ""),
        labels={
            name: value
            for name, value in (metadata.get("labels") or {}).items()
            if name in levels or places.concerns(name)
        },
    )


def _trainer(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the trainer's container."""
    for container in status.get("containerStatuses", ()):
        if container["name"] == TRAINER:
            state: Mapping[str, Any] = container.get("state", {})
            return state
    return {}


def _waiting(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Why some container cannot start: an image that cannot be pulled, a missing ConfigMap, …"""
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    for container in containers:
        waiting: Mapping[str, Any] = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _HARMLESS:
            return waiting
    return {}
