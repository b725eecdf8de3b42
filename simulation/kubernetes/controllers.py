"""The controller manager's node and pod controllers.

They mark silent nodes, evict their pods, and delete orphaned pods. The garbage collector of owned objects belongs to
the API server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from .api.changes import ObjectChange
from .api.objects import KINDS, Object, format_timestamp
from .cluster_world import ClusterWorld
from .conditions import disrupt_pod, get_condition_status, with_condition
from .nodes import NodePool
from .placement import compute_toleration_seconds
from .pod_status import ENDED_PHASES

NODE_CHECK_INTERVAL_SECONDS = 5.0
"""Seconds between two checks of all nodes' heartbeats."""
NODE_SILENCE_SECONDS = 40.0
"""Seconds without a heartbeat after which a node is not Ready."""
RUNTIME_SILENCE_SECONDS = 180.0
"""Seconds after which a kubelet reports that its container runtime hangs."""
ORPHANED_POD_SECONDS = (40.0, 60.0)
"""Seconds from the deletion of a Node to that of its pods."""
CONTROLLER_REACTION_SECONDS = (0.02, 0.3)
CONTROLLER_RETRY_SECONDS = 1.0
"""Seconds until an unavailable API server is tried again."""
_DISRUPTED_SHARE, _DISRUPTED_NODES = 0.55, 3
"""If at least this share and this number of nodes are silent, the network counts as the cause."""

_NOT_READY_TAINT, _UNREACHABLE_TAINT = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"
_UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"
_OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service"
_PRESSURE_TAINTS = {
    "MemoryPressure": "node.kubernetes.io/memory-pressure",
    "DiskPressure": "node.kubernetes.io/disk-pressure",
    "PIDPressure": "node.kubernetes.io/pid-pressure",
}
_LIFECYCLE_TAINTS = (_NOT_READY_TAINT, _UNREACHABLE_TAINT, _UNSCHEDULABLE_TAINT, *_PRESSURE_TAINTS.values())


class _Controller:
    """A controller that acts some time after a change, and not while the API server is unavailable."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._random = world.create_random(type(self).__name__)
        world.api.subscribe(self._on_change)

    def _on_change(self, change: ObjectChange) -> None:
        raise NotImplementedError

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        return self._call_later(self._random.uniform(*CONTROLLER_REACTION_SECONDS), call, *arguments)

    def _call_later(self, seconds: float, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        return self._world.call_after(seconds, self._call_when_available, call, arguments)

    def _call_when_available(self, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if self._world.api.faults.is_unavailable:
            self._call_later(CONTROLLER_RETRY_SECONDS, call, *arguments)
        else:
            call(*arguments)


class NodeLifecycle(_Controller):
    """Maintains conditions and taints of nodes from their heartbeats."""

    def __init__(self, world: ClusterWorld, node_pool: NodePool) -> None:
        super().__init__(world)
        self._node_pool = node_pool
        self._heartbeat_at: dict[str, float] = {}  # by name: time of the last heartbeat
        self._due: dict[str, None] = {}  # nodes whose taints will be updated soon
        self._call_later(NODE_CHECK_INTERVAL_SECONDS, self._check_nodes)

    def _check_nodes(self) -> None:
        world, now = self._world, self._world.now()
        self._call_later(NODE_CHECK_INTERVAL_SECONDS, self._check_nodes)
        for node in self._node_pool.nodes.values():
            if node.kubelet.is_connected:
                self._heartbeat_at[node.name] = now
        for stored in world.api.list_all("nodes"):
            self._update_conditions(stored, now)

    def _update_conditions(self, stored: Object, now: float) -> None:
        name, old_status = (
            stored["metadata"]["name"],
            get_condition_status(stored["status"].get("conditions", ()), "Ready"),
        )
        node, wall = self._node_pool.nodes.get(name), self._world.wall_time()
        silent = now - self._heartbeat_at.setdefault(name, now) >= NODE_SILENCE_SECONDS
        stuck = node is not None and node.stuck_since is not None and now - node.stuck_since >= RUNTIME_SILENCE_SECONDS
        if silent:
            ready, reason, message = "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status."
        elif stuck:
            ready, reason, message = "False", "KubeletNotReady", "container runtime is down"
        else:
            ready, reason, message = "True", "KubeletReady", "kubelet is posting ready status"
        if ready != old_status:
            conditions = with_condition(stored["status"].get("conditions", ()), "Ready", ready, wall, reason, message)
            self._world.log.record(name, {"True": "is ready", "False": "is not ready"}.get(ready, "is not heard of"))
            patch = {"status": {"conditions": conditions}}
            self._world.api.patch("nodes", name, "", patch, subresource="status", manager="node-controller")
        elif ready != "True":
            self._update_taints(name)  # applies taints that were withheld while most nodes were silent

    def _on_change(self, change: ObjectChange) -> None:
        if change.plural != "nodes":
            return
        name = change.object["metadata"]["name"]
        if change.type != "MODIFIED":
            self._heartbeat_at.pop(name, None)
        if (
            change.type != "DELETED"
            and name not in self._due
            and _get_taints(change.object) != self._compute_taints(change.object)
        ):
            self._due[name] = None
            self._call_soon(self._update_taints, name)

    def _update_taints(self, name: str) -> None:
        self._due.pop(name, None)
        stored = self._world.api.get("nodes", name)
        if stored is None:
            return
        wanted = self._compute_taints(stored)
        if wanted != _get_taints(stored):
            patch = {"spec": {"taints": wanted or None}}
            self._world.api.patch("nodes", name, "", patch, manager="node-controller")

    def _compute_taints(self, stored: Object) -> list[Object]:
        """Return all taints that the node should have. Taints of others stay."""
        conditions, current = stored["status"].get("conditions", ()), _get_taints(stored)
        wanted: list[tuple[str, str]] = []
        if stored["spec"].get("unschedulable"):
            wanted.append((_UNSCHEDULABLE_TAINT, "NoSchedule"))
        wanted += [
            (key, "NoSchedule")
            for type_, key in _PRESSURE_TAINTS.items()
            if get_condition_status(conditions, type_) == "True"
        ]
        ready = get_condition_status(conditions, "Ready")
        if ready != "True":
            key = _NOT_READY_TAINT if ready == "False" else _UNREACHABLE_TAINT
            wanted.append((key, "NoSchedule"))
            if not self._are_most_silent() or any((t["key"], t["effect"]) == (key, "NoExecute") for t in current):
                wanted.append((key, "NoExecute"))
        taints = [
            taint
            for taint in current
            if taint["key"] not in _LIFECYCLE_TAINTS or (taint["key"], taint["effect"]) in wanted
        ]
        present = [(taint["key"], taint["effect"]) for taint in taints]
        added = format_timestamp(int(self._world.wall_time()))
        new = [item for item in wanted if item not in present]
        return [*taints, *({"key": key, "effect": effect, "timeAdded": added} for key, effect in new)]

    def _are_most_silent(self) -> bool:
        """Return whether most nodes are silent: then no pods are evicted."""
        ready = [
            get_condition_status(node["status"].get("conditions", ()), "Ready") == "True"
            for node in self._world.api.list_all("nodes")
        ]
        silent = len(ready) - sum(ready)
        return silent >= _DISRUPTED_NODES and silent / len(ready) > _DISRUPTED_SHARE


@dataclass(frozen=True)
class _Eviction:
    """A scheduled eviction of a pod; virtual seconds."""

    decided: float
    due: float
    timer: asyncio.TimerHandle


class TaintEviction(_Controller):
    """Evicts pods from nodes with a NoExecute taint when they no longer tolerate it."""

    def __init__(self, world: ClusterWorld) -> None:
        super().__init__(world)
        self._evictions: dict[str, _Eviction] = {}  # by the pod's UID

    def _on_change(self, change: ObjectChange) -> None:
        if change.plural == "nodes":
            taints = [] if change.type == "DELETED" else _select_no_execute_taints(change.object)
            if taints != (_select_no_execute_taints(change.previous) if change.previous is not None else []):
                for pod in self._world.api.list_all("pods"):
                    if pod["spec"].get("nodeName") == change.object["metadata"]["name"]:
                        self._evaluate_pod(pod, taints)
        elif change.plural == "pods":
            pod, previous = change.object, change.previous
            if change.type == "DELETED" or pod["status"].get("phase") in ENDED_PHASES:
                self._cancel_eviction(pod["metadata"]["uid"])
            elif pod["spec"].get("nodeName") and (previous is None or not previous["spec"].get("nodeName")):
                node = self._world.api.get("nodes", pod["spec"]["nodeName"])
                self._evaluate_pod(pod, [] if node is None else _select_no_execute_taints(node))

    def _evaluate_pod(self, pod: Object, taints: list[Object]) -> None:
        uid, now = pod["metadata"]["uid"], self._world.now()
        tolerations = pod["spec"].get("tolerations", ())
        tolerated = min((compute_toleration_seconds(taint, tolerations) or 0.0 for taint in taints), default=math.inf)
        eviction = self._evictions.get(uid)
        decided = now if eviction is None else eviction.decided
        due = decided + tolerated
        if eviction is not None and eviction.due == due:
            return
        self._cancel_eviction(uid)
        if (
            due < math.inf
            and "deletionTimestamp" not in pod["metadata"]
            and pod["status"].get("phase") not in ENDED_PHASES
        ):
            wait = max(0.0, due - now) + self._random.uniform(*CONTROLLER_REACTION_SECONDS)
            timer = self._call_later(wait, self._evict_pod, uid, pod["metadata"]["name"], pod["metadata"]["namespace"])
            self._evictions[uid] = _Eviction(decided, due, timer)

    def _cancel_eviction(self, uid: str) -> None:
        if uid in self._evictions:
            self._evictions.pop(uid).timer.cancel()

    def _evict_pod(self, uid: str, name: str, namespace: str) -> None:
        world = self._world
        self._evictions.pop(uid, None)
        pod = world.api.get("pods", name, namespace)
        if pod is not None and pod["metadata"]["uid"] == uid and "deletionTimestamp" not in pod["metadata"]:
            world.log.record("taint-eviction", f"takes pod {name} off {pod['spec']['nodeName']}")
            message = "Taint manager: deleting due to NoExecute taint"
            disrupt_pod(world.api, pod, "DeletionByTaintManager", message, world.wall_time(), manager="taint-eviction")


class PodCollector(_Controller):
    """Deletes pods of deleted nodes, and terminating pods of nodes that are out of service."""

    def _on_change(self, change: ObjectChange) -> None:
        if change.plural == "nodes":
            name = change.object["metadata"]["name"]
            if change.type == "DELETED":
                self._call_later(self._random.uniform(*ORPHANED_POD_SECONDS), self._collect_pods, name)
            elif any(taint["key"] == _OUT_OF_SERVICE_TAINT for taint in _get_taints(change.object)):
                self._call_soon(self._collect_pods, name)
        elif change.plural == "pods" and change.type != "DELETED":
            name, previous = change.object["spec"].get("nodeName"), change.previous
            was_bound = previous is not None and previous["spec"].get("nodeName")
            if name and not was_bound and self._world.api.get("nodes", name) is None:
                self._call_later(self._random.uniform(*ORPHANED_POD_SECONDS), self._collect_pods, name)

    def _collect_pods(self, name: str) -> None:
        world = self._world
        node = world.api.get("nodes", name)
        out_of_service = node is not None and any(taint["key"] == _OUT_OF_SERVICE_TAINT for taint in _get_taints(node))
        silent = node is not None and get_condition_status(node["status"].get("conditions", ()), "Ready") != "True"
        for pod in world.api.list_all("pods"):
            if pod["spec"].get("nodeName") != name:
                continue
            if node is None or (out_of_service and silent and "deletionTimestamp" in pod["metadata"]):
                self._remove_pod(pod)

    def _remove_pod(self, pod: Object) -> None:
        world, metadata, status = self._world, pod["metadata"], pod["status"]
        name, namespace = metadata["name"], metadata["namespace"]
        world.log.record("pod-collector", f"removes pod {name}: there is no node {pod['spec']['nodeName']}")
        if status.get("phase") not in ENDED_PHASES:
            message = "PodGC: node no longer exists"
            conditions = with_condition(
                status.get("conditions", ()), "DisruptionTarget", "True", world.wall_time(), "DeletionByPodGC", message
            )
            patch = {"status": {"phase": "Failed", "conditions": conditions}}
            world.api.patch("pods", name, namespace, patch, subresource="status", manager="pod-collector")
        world.api.delete("pods", name, namespace, uid=metadata["uid"], grace=0)


class NamespaceCollector(_Controller):
    """Empties deleted namespaces, and removes them when they are empty."""

    def __init__(self, world: ClusterWorld) -> None:
        super().__init__(world)
        self._ending: dict[str, None] = {}

    def _on_change(self, change: ObjectChange) -> None:
        metadata = change.object["metadata"]
        if change.plural == "namespaces":
            if change.type == "DELETED":
                self._ending.pop(metadata["name"], None)
            elif "deletionTimestamp" in metadata and metadata["name"] not in self._ending:
                self._ending[metadata["name"]] = None
                self._world.log.record("namespace-collector", f"empties namespace {metadata['name']}")
                kinds = [kind.plural for kind in KINDS.values() if kind.namespaced]
                self._random.shuffle(kinds)
                for plural in kinds:
                    self._call_soon(self._delete_kind, plural, metadata["name"])
        elif change.type == "DELETED" and metadata.get("namespace") in self._ending:
            self._call_soon(self._finish_deletion, metadata["namespace"])

    def _delete_kind(self, plural: str, namespace: str) -> None:
        for body in self._world.api.list_all(plural, namespace):
            self._world.api.delete(plural, body["metadata"]["name"], namespace, uid=body["metadata"]["uid"])
        self._finish_deletion(namespace)

    def _finish_deletion(self, namespace: str) -> None:
        api = self._world.api
        kinds = [kind.plural for kind in KINDS.values() if kind.namespaced]
        if namespace in self._ending and not any(api.list_all(plural, namespace) for plural in kinds):
            api.patch("namespaces", namespace, "", {"spec": {"finalizers": None}}, subresource="finalize")


def _get_taints(node: Object) -> list[Object]:
    taints: list[Object] = node["spec"].get("taints") or []
    return taints


def _select_no_execute_taints(node: Object) -> list[Object]:
    return [taint for taint in _get_taints(node) if taint["effect"] == "NoExecute"]
