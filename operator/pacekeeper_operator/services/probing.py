"""Probe pods in the operator's namespace: making, finding and ending them, and whom a node is held against."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence

from ..api import LABEL_PROBE_GROUP, LABEL_NO_QUARANTINE, TAINT_QUARANTINE
from ..cluster import PODS, Cluster, Denied, Object, Objects
from ..decide.node_circle import PROBE_SERVERS_PER_GROUP
from ..manifests import GPU_RESOURCE, ProbeImage, NodeProbeTask, build_probe_pod
from ..probe import PROBE_SECRET_VARIABLE
from ..settings import Settings

_MACHINE_LABELS = ("node.kubernetes.io/instance-type", "nvidia.com/gpu.product", "kubernetes.io/arch")
"""Labels of a node that say what it is."""


async def start_probe_pod(
    cluster: Cluster, settings: Settings, name: str, node: Object, owner: Object, kind: str, task: NodeProbeTask
) -> None:
    """`owner`: the object of this `kind` that the pod goes with. Raises what the cluster does."""
    secrets = tuple(secret.strip() for secret in settings.image_pull_secrets.split(",") if secret.strip())
    image = ProbeImage(
        settings.image,
        settings.image_pull_policy,
        secrets,
        settings.probe_runtime_class,
        settings.probe_tolerations,
    )
    await cluster.create(PODS, build_probe_pod(name, settings.namespace, node, owner, kind, image, task))


async def list_probe_group_pods(cluster: Cluster, settings: Settings, circle: str) -> Objects:
    return await cluster.list(PODS, settings.namespace, labels=f"{LABEL_PROBE_GROUP}={circle}")


async def delete_probe_group_pods(cluster: Cluster, settings: Settings, circle: str) -> None:
    """All pods of the circle, without waiting for kubelets that may be gone."""
    for body in await list_probe_group_pods(cluster, settings, circle):
        metadata = body["metadata"]
        await cluster.delete(PODS, metadata["name"], settings.namespace, uid=metadata["uid"], grace=0)


async def count_probe_gpus(cluster: Cluster, node: Object, *, share: bool) -> int:
    """How many a probe asks for: all of the node's, or, with `share`, those that no pod holds. One at least: where none
    is free the kubelet refuses the pod, which says nothing about the node."""
    wanted = int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0))
    return max(1, wanted - await _count_taken_gpus(cluster, node["metadata"]["name"])) if wanted and share else wanted


async def count_free_gpus(cluster: Cluster, node: Object) -> int:
    """Those that no pod holds."""
    wanted = int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0))
    return max(0, wanted - await _count_taken_gpus(cluster, node["metadata"]["name"])) if wanted else 0


async def count_single_gpu(cluster: Cluster, node: Object) -> int:
    """1, where one is free, as far as can be told: enough to show that pods find the driver there."""
    wanted = int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0))
    taken = await _count_taken_gpus(cluster, node["metadata"]["name"]) if wanted else 0
    return int(wanted > 0 and (taken == sys.maxsize or taken < wanted))


def has_gpus(node: Object) -> bool:
    return int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0)) > 0


def choose_comparison_nodes(node: Object, nodes: Iterable[Object], salt: str) -> list[str]:
    """Names of nodes that can be probed beside `node`; the same ones for the same `salt`. Of the same kind, or one of
    another kind: it cannot show that the node is slow, but that what fails there works elsewhere."""
    usable = [other for other in nodes if other["metadata"]["uid"] != node["metadata"]["uid"] and is_usable(other)]
    alike = [other for other in usable if get_machine_kind(other) == get_machine_kind(node)]
    names = [other["metadata"]["name"] for other in alike or usable]
    chosen = sorted(names, key=lambda name: hashlib.sha256(f"{salt}/{name}".encode()).digest())
    return chosen[: PROBE_SERVERS_PER_GROUP if alike else 1]


def get_machine_kind(node: Object) -> tuple[str, ...]:
    """Nodes of one kind may be held against one another."""
    labels, capacity = node["metadata"].get("labels", {}), node.get("status", {}).get("capacity", {})
    return (*(labels.get(label, "") for label in _MACHINE_LABELS), str(capacity.get("cpu", "")), str(capacity.get(GPU_RESOURCE, "")))


def is_usable(node: Object) -> bool:
    """Somebody's pods may come there; nobody has taken it out of service."""
    spec, metadata = node.get("spec", {}), node["metadata"]
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node.get("status", {}).get("conditions", ()))
    taints = spec.get("taints") or ()
    barred = any(taint["effect"] == "NoExecute" or taint["key"] == TAINT_QUARANTINE for taint in taints)
    opted_out = LABEL_NO_QUARANTINE in metadata.get("labels", {})
    return (
        ready and not barred and not opted_out and not spec.get("unschedulable") and "deletionTimestamp" not in metadata
    )


def find_probe_group_secret(bodies: Sequence[Object]) -> str:
    """By which the pods of a circle know each other, as those have it that were made before; "": there are none."""
    variables = [v for body in bodies for c in body["spec"]["containers"] for v in c.get("env", ())]
    return next((str(v["value"]) for v in variables if v["name"] == PROBE_SECRET_VARIABLE), "")


async def _count_taken_gpus(cluster: Cluster, node: str) -> int:
    """GPUs that pods on the node hold; all of them, as far as can be told, where not all pods may be seen."""
    try:
        return sum(await cluster.collect(PODS, _count_pod_gpus, fields=f"spec.nodeName={node}"))
    except Denied:
        return sys.maxsize


def _count_pod_gpus(pod: Object) -> int:
    """Those that the pod holds."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    limits = [container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]]
    return sum(int(limit.get(GPU_RESOURCE, 0)) for limit in limits)
