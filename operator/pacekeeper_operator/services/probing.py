"""Probe pods in the operator's namespace: create, find, and delete them, and choose nodes for comparison."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence

from ..api.names import LABEL_NO_QUARANTINE, LABEL_PROBE_GROUP, TAINT_QUARANTINE
from ..decide.nodes.probe_groups import PROBE_SERVERS_PER_GROUP
from ..kube.client import PODS, Cluster, Denied, Object, Objects
from ..node_probe import PROBE_SECRET_VARIABLE
from ..pods.manifests import GPU_RESOURCE, NodeProbeTask, ProbeImage, build_probe_pod
from ..settings import Settings

_MACHINE_LABELS = ("node.kubernetes.io/instance-type", "nvidia.com/gpu.product", "kubernetes.io/arch")
"""Node labels that identify the kind of machine."""


async def start_probe_pod(
    cluster: Cluster, settings: Settings, name: str, node: Object, owner: Object, kind: str, task: NodeProbeTask
) -> None:
    """Create a probe pod that `owner`, an object of this `kind`, owns. Raises the errors of the cluster client."""
    secrets = tuple(secret.strip() for secret in settings.image_pull_secrets.split(",") if secret.strip())
    image = ProbeImage(
        settings.image,
        settings.image_pull_policy,
        secrets,
        settings.probe_runtime_class,
        settings.probe_tolerations,
    )
    await cluster.create(PODS, build_probe_pod(name, settings.namespace, node, owner, kind, image, task))


async def list_probe_group_pods(cluster: Cluster, settings: Settings, group: str) -> Objects:
    return await cluster.list(PODS, settings.namespace, labels=f"{LABEL_PROBE_GROUP}={group}")


async def delete_probe_group_pods(cluster: Cluster, settings: Settings, group: str) -> None:
    """Delete all pods of the group, without waiting for kubelets that may be gone."""
    for body in await list_probe_group_pods(cluster, settings, group):
        metadata = body["metadata"]
        await cluster.delete(PODS, metadata["name"], settings.namespace, uid=metadata["uid"], grace=0)


async def count_probe_gpus(cluster: Cluster, node: Object, *, share: bool) -> int:
    """Return how many GPUs a probe requests: all of the node's or, with `share`, those that no pod holds.

    It is at least one if the node has GPUs. If none is free, the kubelet rejects the pod, which says nothing about the
    node.
    """
    total = int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0))
    return max(1, total - await _count_taken_gpus(cluster, node["metadata"]["name"])) if total and share else total


async def count_free_gpus(cluster: Cluster, node: Object) -> int:
    """Return the number of the node's GPUs that no pod holds."""
    total = int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0))
    return max(0, total - await _count_taken_gpus(cluster, node["metadata"]["name"])) if total else 0


async def count_single_gpu(cluster: Cluster, node: Object) -> int:
    """Return 1 if a GPU seems to be free, else 0: one is enough to show that pods find the driver."""
    total = int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0))
    taken = await _count_taken_gpus(cluster, node["metadata"]["name"]) if total else 0
    return int(total > 0 and (taken == sys.maxsize or taken < total))


def has_gpus(node: Object) -> bool:
    return int(node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, 0)) > 0


def choose_comparison_nodes(node: Object, nodes: Iterable[Object], salt: str) -> list[str]:
    """Return the names of nodes to probe next to `node`, of the same kind if possible; deterministic in `salt`.

    A node of another kind cannot show that `node` is slow, but shows that a check that fails on it works elsewhere.
    """
    usable = [
        candidate
        for candidate in nodes
        if candidate["metadata"]["uid"] != node["metadata"]["uid"] and is_usable(candidate)
    ]
    same_kind = [candidate for candidate in usable if get_machine_kind(candidate) == get_machine_kind(node)]
    names = [candidate["metadata"]["name"] for candidate in same_kind or usable]
    chosen = sorted(names, key=lambda name: hashlib.sha256(f"{salt}/{name}".encode()).digest())
    return chosen[: PROBE_SERVERS_PER_GROUP if same_kind else 1]


def get_machine_kind(node: Object) -> tuple[str, ...]:
    """Return the kind of machine. Nodes of one kind can be compared."""
    labels, capacity = node["metadata"].get("labels", {}), node.get("status", {}).get("capacity", {})
    return (
        *(labels.get(label, "") for label in _MACHINE_LABELS),
        str(capacity.get("cpu", "")),
        str(capacity.get(GPU_RESOURCE, "")),
    )


def is_usable(node: Object) -> bool:
    """Return whether any pod may be scheduled there, and no one has taken the node out of service."""
    spec, metadata = node.get("spec", {}), node["metadata"]
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node.get("status", {}).get("conditions", ()))
    taints = spec.get("taints") or ()
    barred = any(taint["effect"] == "NoExecute" or taint["key"] == TAINT_QUARANTINE for taint in taints)
    opted_out = LABEL_NO_QUARANTINE in metadata.get("labels", {})
    return (
        ready and not barred and not opted_out and not spec.get("unschedulable") and "deletionTimestamp" not in metadata
    )


def find_probe_group_secret(bodies: Sequence[Object]) -> str:
    """Return the secret of the group's existing pods. Empty: there are none."""
    variables = [v for body in bodies for c in body["spec"]["containers"] for v in c.get("env", ())]
    return next((str(v["value"]) for v in variables if v["name"] == PROBE_SECRET_VARIABLE), "")


async def _count_taken_gpus(cluster: Cluster, node: str) -> int:
    """Return the GPUs that pods on the node hold; sys.maxsize if the operator may not see all pods."""
    try:
        return sum(await cluster.collect(PODS, _count_pod_gpus, fields=f"spec.nodeName={node}"))
    except Denied:
        return sys.maxsize


def _count_pod_gpus(pod: Object) -> int:
    """Return the GPUs that the pod holds."""
    if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    limits = [container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]]
    return sum(int(limit.get(GPU_RESOURCE, 0)) for limit in limits)
