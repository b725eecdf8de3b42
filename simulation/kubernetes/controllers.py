"""What the controller manager does about nodes and pods: it marks nodes that are not heard of, takes their pods away
in time, and collects what belongs to nothing any more. The garbage collector of owned objects is the API server's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .conditions import disrupt, status_of, with_condition
from .objects import KINDS, Object, timestamp
from .placement import toleration_seconds
from .pod_status import ENDED

if TYPE_CHECKING:
    from .api_server import Change
    from .nodes import Fleet
    from .surroundings import Surroundings

LOOKS = 5.0
"""Seconds between two looks at the heartbeats of all nodes."""
SILENT = 40.0
"""Seconds without a heartbeat after which a node is not taken for ready."""
RUNTIME_SILENT = 180.0
"""Seconds after which a kubelet says that its container runtime hangs."""
ORPHANED = (40.0, 60.0)
"""Seconds from the end of a node's object to that of its pods."""
REACTS = (0.02, 0.3)
TRIES_AGAIN = 1.0
"""Seconds until an API server that is away is tried again."""
_DISRUPTED_SHARE, _DISRUPTED_NODES = 0.55, 3
"""When so large a share of the nodes, and as many, are silent, the fault is taken for the network's."""

_NOT_READY, _UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"
_CORDONED = "node.kubernetes.io/unschedulable"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_PRESSURES = {
    "MemoryPressure": "node.kubernetes.io/memory-pressure",
    "DiskPressure": "node.kubernetes.io/disk-pressure",
    "PIDPressure": "node.kubernetes.io/pid-pressure",
}
_OURS = (_NOT_READY, _UNREACHABLE, _CORDONED, *_PRESSURES.values())


class _Controller:
    """Acts some time after a change, and not while there is no API server."""

    def __init__(self, world: Surroundings) -> None:
        self._world = world
        self._random = world.random(type(self).__name__)
        world.api.subscribe(self._heard)

    def _heard(self, change: Change) -> None:
        raise NotImplementedError

    def _soon(self, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        return self._later(self._random.uniform(*REACTS), call, *arguments)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        return self._world.after(seconds, self._act, call, arguments)

    def _act(self, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if self._world.api.faults.away:
            self._later(TRIES_AGAIN, call, *arguments)
        else:
            call(*arguments)


class NodeLifecycle(_Controller):
    """Conditions and taints of nodes, from their heartbeats."""

    def __init__(self, world: Surroundings, fleet: Fleet) -> None:
        super().__init__(world)
        self._fleet = fleet
        self._heard_at: dict[str, float] = {}  # by name; of the last heartbeat
        self._due: dict[str, None] = {}  # nodes whose taints are looked at in a moment
        self._later(LOOKS, self._look)

    def _look(self) -> None:
        world, now = self._world, self._world.now()
        self._later(LOOKS, self._look)
        for node in self._fleet.nodes.values():
            if node.kubelet.in_touch:
                self._heard_at[node.name] = now
        for stored in world.api.all("nodes"):
            self._judge(stored, now)

    def _judge(self, stored: Object, now: float) -> None:
        name, before = stored["metadata"]["name"], status_of(stored["status"].get("conditions", ()), "Ready")
        node, wall = self._fleet.nodes.get(name), self._world.wall()
        silent = now - self._heard_at.setdefault(name, now) >= SILENT
        stuck = node is not None and node.stuck_since is not None and now - node.stuck_since >= RUNTIME_SILENT
        if silent:
            ready, reason, message = "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status."
        elif stuck:
            ready, reason, message = "False", "KubeletNotReady", "container runtime is down"
        else:
            ready, reason, message = "True", "KubeletReady", "kubelet is posting ready status"
        if ready != before:
            conditions = with_condition(stored["status"].get("conditions", ()), "Ready", ready, wall, reason, message)
            self._world.story.tell(name, {"True": "is ready", "False": "is not ready"}.get(ready, "is not heard of"))
            patch = {"status": {"conditions": conditions}}
            self._world.api.patch("nodes", name, "", patch, subresource="status", manager="node-controller")
        elif ready != "True":
            self._mark(name)  # what was held back while most were silent

    def _heard(self, change: Change) -> None:
        if change.plural != "nodes":
            return
        name = change.object["metadata"]["name"]
        if change.type != "MODIFIED":
            self._heard_at.pop(name, None)
        if change.type != "DELETED" and name not in self._due and _taints(change.object) != self._wanted(change.object):
            self._due[name] = None
            self._soon(self._mark, name)

    def _mark(self, name: str) -> None:
        self._due.pop(name, None)
        stored = self._world.api.get("nodes", name)
        if stored is None:
            return
        wanted = self._wanted(stored)
        if wanted != _taints(stored):
            patch = {"spec": {"taints": wanted or None}}
            self._world.api.patch("nodes", name, "", patch, manager="node-controller")

    def _wanted(self, stored: Object) -> list[Object]:
        """All taints that the node should have; others' stay as they are."""
        conditions, kept = stored["status"].get("conditions", ()), _taints(stored)
        wanted: list[tuple[str, str]] = []
        if stored["spec"].get("unschedulable"):
            wanted.append((_CORDONED, "NoSchedule"))
        wanted += [(key, "NoSchedule") for type_, key in _PRESSURES.items() if status_of(conditions, type_) == "True"]
        ready = status_of(conditions, "Ready")
        if ready != "True":
            key = _NOT_READY if ready == "False" else _UNREACHABLE
            wanted.append((key, "NoSchedule"))
            if not self._most_are_silent() or any((t["key"], t["effect"]) == (key, "NoExecute") for t in kept):
                wanted.append((key, "NoExecute"))
        taints = [taint for taint in kept if taint["key"] not in _OURS or (taint["key"], taint["effect"]) in wanted]
        there = [(taint["key"], taint["effect"]) for taint in taints]
        added = timestamp(int(self._world.wall()))
        new = [item for item in wanted if item not in there]
        return [*taints, *({"key": key, "effect": effect, "timeAdded": added} for key, effect in new)]

    def _most_are_silent(self) -> bool:
        """Then nobody's pods are taken away."""
        ready = [
            status_of(node["status"].get("conditions", ()), "Ready") == "True" for node in self._world.api.all("nodes")
        ]
        silent = len(ready) - sum(ready)
        return silent >= _DISRUPTED_NODES and silent / len(ready) > _DISRUPTED_SHARE


@dataclass(frozen=True)
class _Eviction:
    """Of a pod; virtual seconds."""

    decided: float
    due: float
    timer: asyncio.TimerHandle


class TaintEviction(_Controller):
    """Pods leave nodes with a NoExecute taint, as soon as they no longer tolerate it."""

    def __init__(self, world: Surroundings) -> None:
        super().__init__(world)
        self._evictions: dict[str, _Eviction] = {}  # by the pod's uid

    def _heard(self, change: Change) -> None:
        if change.plural == "nodes":
            taints = [] if change.type == "DELETED" else _evicting(change.object)
            if taints != (_evicting(change.before) if change.before is not None else []):
                for pod in self._world.api.all("pods"):
                    if pod["spec"].get("nodeName") == change.object["metadata"]["name"]:
                        self._look_at(pod, taints)
        elif change.plural == "pods":
            pod, before = change.object, change.before
            if change.type == "DELETED" or pod["status"].get("phase") in ENDED:
                self._call_off(pod["metadata"]["uid"])
            elif pod["spec"].get("nodeName") and (before is None or not before["spec"].get("nodeName")):
                node = self._world.api.get("nodes", pod["spec"]["nodeName"])
                self._look_at(pod, [] if node is None else _evicting(node))

    def _look_at(self, pod: Object, taints: list[Object]) -> None:
        uid, now = pod["metadata"]["uid"], self._world.now()
        tolerations = pod["spec"].get("tolerations", ())
        tolerated = min((toleration_seconds(taint, tolerations) or 0.0 for taint in taints), default=math.inf)
        known = self._evictions.get(uid)
        decided = now if known is None else known.decided
        due = decided + tolerated
        if known is not None and known.due == due:
            return
        self._call_off(uid)
        if due < math.inf and "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ENDED:
            wait = max(0.0, due - now) + self._random.uniform(*REACTS)
            timer = self._later(wait, self._evict, uid, pod["metadata"]["name"], pod["metadata"]["namespace"])
            self._evictions[uid] = _Eviction(decided, due, timer)

    def _call_off(self, uid: str) -> None:
        if uid in self._evictions:
            self._evictions.pop(uid).timer.cancel()

    def _evict(self, uid: str, name: str, namespace: str) -> None:
        world = self._world
        self._evictions.pop(uid, None)
        pod = world.api.get("pods", name, namespace)
        if pod is not None and pod["metadata"]["uid"] == uid and "deletionTimestamp" not in pod["metadata"]:
            world.story.tell("taint-eviction", f"takes pod {name} off {pod['spec']['nodeName']}")
            message = "Taint manager: deleting due to NoExecute taint"
            disrupt(world.api, pod, "DeletionByTaintManager", message, world.wall(), who="taint-eviction")


class PodCollector(_Controller):
    """Removes pods of nodes that are gone, and pods that wait for the end of a node that is out of service."""

    def _heard(self, change: Change) -> None:
        if change.plural == "nodes":
            name = change.object["metadata"]["name"]
            if change.type == "DELETED":
                self._later(self._random.uniform(*ORPHANED), self._collect, name)
            elif any(taint["key"] == _OUT_OF_SERVICE for taint in _taints(change.object)):
                self._soon(self._collect, name)
        elif change.plural == "pods" and change.type != "DELETED":
            name, before = change.object["spec"].get("nodeName"), change.before
            known = before is not None and before["spec"].get("nodeName")
            if name and not known and self._world.api.get("nodes", name) is None:
                self._later(self._random.uniform(*ORPHANED), self._collect, name)

    def _collect(self, name: str) -> None:
        world = self._world
        node = world.api.get("nodes", name)
        out = node is not None and any(taint["key"] == _OUT_OF_SERVICE for taint in _taints(node))
        silent = node is not None and status_of(node["status"].get("conditions", ()), "Ready") != "True"
        for pod in world.api.all("pods"):
            if pod["spec"].get("nodeName") != name:
                continue
            if node is None or (out and silent and "deletionTimestamp" in pod["metadata"]):
                self._remove(pod)

    def _remove(self, pod: Object) -> None:
        world, metadata, status = self._world, pod["metadata"], pod["status"]
        name, namespace = metadata["name"], metadata["namespace"]
        world.story.tell("pod-collector", f"removes pod {name}: there is no node {pod['spec']['nodeName']}")
        if status.get("phase") not in ENDED:
            message = "PodGC: node no longer exists"
            conditions = with_condition(
                status.get("conditions", ()), "DisruptionTarget", "True", world.wall(), "DeletionByPodGC", message
            )
            patch = {"status": {"phase": "Failed", "conditions": conditions}}
            world.api.patch("pods", name, namespace, patch, subresource="status", manager="pod-collector")
        world.api.delete("pods", name, namespace, uid=metadata["uid"], grace=0)


class NamespaceCollector(_Controller):
    """Empties namespaces that are deleted, and lets them go when they are empty."""

    def __init__(self, world: Surroundings) -> None:
        super().__init__(world)
        self._ending: dict[str, None] = {}

    def _heard(self, change: Change) -> None:
        metadata = change.object["metadata"]
        if change.plural == "namespaces":
            if change.type == "DELETED":
                self._ending.pop(metadata["name"], None)
            elif "deletionTimestamp" in metadata and metadata["name"] not in self._ending:
                self._ending[metadata["name"]] = None
                self._world.story.tell("namespace-collector", f"empties namespace {metadata['name']}")
                kinds = [kind.plural for kind in KINDS.values() if kind.namespaced]
                self._random.shuffle(kinds)
                for plural in kinds:
                    self._soon(self._empty, plural, metadata["name"])
        elif change.type == "DELETED" and metadata.get("namespace") in self._ending:
            self._soon(self._let_go, metadata["namespace"])

    def _empty(self, plural: str, namespace: str) -> None:
        for body in self._world.api.all(plural, namespace):
            self._world.api.delete(plural, body["metadata"]["name"], namespace, uid=body["metadata"]["uid"])
        self._let_go(namespace)

    def _let_go(self, namespace: str) -> None:
        api = self._world.api
        kinds = [kind.plural for kind in KINDS.values() if kind.namespaced]
        if namespace in self._ending and not any(api.all(plural, namespace) for plural in kinds):
            api.patch("namespaces", namespace, "", {"spec": {"finalizers": None}}, subresource="finalize")


def _taints(node: Object) -> list[Object]:
    taints: list[Object] = node["spec"].get("taints") or []
    return taints


def _evicting(node: Object) -> list[Object]:
    return [taint for taint in _taints(node) if taint["effect"] == "NoExecute"]
