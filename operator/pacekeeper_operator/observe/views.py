"""Pods and nodes, reduced to what decisions need. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pacekeeper_analysis.fabric import locations
from pacekeeper_analysis.protocol.reports import FINISHED_MESSAGE

from ..api.formats import parse_time
from ..api.names import ANNOTATION_AVOIDED_NODES, LABEL_JOB, LABEL_POD_SET, SIDECAR_CONTAINER, find_trainer_name
from ..pods.injection import INJECTED_CONTAINERS
from ..pods.node_health import NodeHealthRules
from ..pods.resources import parse_quantity
from ..state.cluster_view import NodeView, PodView

GPU_RESOURCE_SUFFIX = "/gpu"
"""End of the names of vendors' resources for whole GPUs: nvidia.com/gpu, amd.com/gpu."""
_NORMAL_WAITING_REASONS = frozenset({"ContainerCreating", "PodInitializing"})


def view_pod(pod: Mapping[str, Any]) -> PodView:
    metadata, status = pod["metadata"], pod.get("status", {})
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    trainer = _find_trainer_state(metadata, status)
    failed = _find_failed_init_container(trainer, status)
    ended = failed.get("state", {}).get("terminated") or trainer.get("terminated") or {}
    container, waiting = _find_waiting_container(status)
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
        delete_by=parse_time(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else None,
        disruption_reason=disrupted.get("reason", "") if disrupted.get("status") == "True" else "",
        disrupted_at=_find_disruption_time(metadata, disrupted),
        unschedulable_message=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        exit_code=ended.get("exitCode"),
        failed_init_container=failed.get("name", ""),
        self_inflicted_reason=_explain_own_fault(status),
        exit_reason=(ended if ended.get("exitCode") else {} if ended else status).get("reason", ""),
        exit_message=(ended or status).get("message", ""),
        finished=ended.get("exitCode") == 0 and FINISHED_MESSAGE in ended.get("message", ""),
        scheduling_gated=scheduled.get("reason") == "SchedulingGated",
        pod_set=metadata.get("labels", {}).get(LABEL_POD_SET, ""),
        started="running" in trainer,
        avoided_nodes=frozenset(
            filter(None, (metadata.get("annotations") or {}).get(ANNOTATION_AVOIDED_NODES, "").split(","))
        ),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        waiting_container=container,
        gpus=sum(map(_count_gpus, pod["spec"].get("containers", ()))),
    )


def _find_disruption_time(metadata: Mapping[str, Any], disrupted: Mapping[str, Any]) -> float | None:
    """Return when the pod was disrupted or its deletion was requested, whichever came first; None: neither, or unknown.

    A deletion timestamp is the end of the grace period.
    """
    times = []
    if disrupted.get("status") == "True" and disrupted.get("lastTransitionTime"):
        times.append(parse_time(disrupted["lastTransitionTime"]))
    if "deletionTimestamp" in metadata:
        times.append(parse_time(metadata["deletionTimestamp"]) - (metadata.get("deletionGracePeriodSeconds") or 0))
    return min(times, default=None)


def _count_gpus(container: Mapping[str, Any]) -> int:
    """Return the whole GPUs of a container: extended resources have integer limits."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return sum(int(parse_quantity(str(value))) for name, value in limits.items() if name.endswith(GPU_RESOURCE_SUFFIX))


def view_node(node: Mapping[str, Any], health: NodeHealthRules, levels: Collection[str] = ()) -> NodeView:
    """Reduce a node. `levels` are the labels by which a Fabric locates nodes, in addition to the well-known ones."""
    metadata, status = node["metadata"], node.get("status", {})
    ready: Mapping[str, Any] = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), {})
    addresses = {item["type"]: item["address"] for item in status.get("addresses", ())}
    return NodeView(
        name=metadata["name"],
        uid=metadata["uid"],
        ready=ready.get("status") == "True",
        leave_reason=health.find_leave_reason(node),
        address=addresses.get("InternalIP", ""),
        boot_id=status.get("nodeInfo", {}).get("bootID", ""),
        labels={
            name: value
            for name, value in (metadata.get("labels") or {}).items()
            if name in levels or locations.is_location_label(name)
        },
    )


def _find_trainer_state(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the trainer's container."""
    name = find_trainer_name(metadata)
    for container in status.get("containerStatuses", ()):
        if container["name"] == name:
            state: Mapping[str, Any] = container.get("state", {})
            return state
    return {}


def _find_failed_init_container(trainer: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the init container of the user because of whose failure the trainer never ran. `trainer`: its state."""
    if status.get("phase") != "Failed" or status.get("reason") or "waiting" not in trainer:
        return {}  # a pod with a reason (Evicted, …) did not fail due to the container
    for container in status.get("initContainerStatuses", ()):
        code = container.get("state", {}).get("terminated", {}).get("exitCode", 0)
        if code and container["name"] not in {SIDECAR_CONTAINER, *INJECTED_CONTAINERS}:
            failed: Mapping[str, Any] = container
            return failed
    return {}


def _explain_own_fault(status: Mapping[str, Any]) -> str:
    """Return why the kubelet ended the pod if a replacement would end the same way; "" otherwise.

    The pod filled a volume or its own ephemeral storage, or its deadline is over. If a node is short of memory, other
    pods may be the cause.
    """
    reason, message = status.get("reason", ""), status.get("message", "").strip()
    if reason == "DeadlineExceeded":
        return f"{reason}: {message}"
    fills = any(text in message for text in ("exceeds the", "exceeded its"))  # emptyDirs, pods, containers
    fills = fills or ("resource: ephemeral-storage" in message and "was using" in message)
    return f"{reason}: {message}" if reason == "Evicted" and fills else ""


def _find_waiting_container(status: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the container that cannot start, and its state: an image that cannot be pulled, for example."""
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    for container in containers:
        waiting: Mapping[str, Any] = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _NORMAL_WAITING_REASONS:
            return container["name"], waiting
    return "", {}
