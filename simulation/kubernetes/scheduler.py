"""The scheduler: chooses a node for each pod. It acts on changes, and does not poll."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass

from .api.changes import ObjectChange
from .api.objects import Object
from .cluster_world import ClusterWorld
from .placement import NodeOffer, PodNeeds, find_obstacle, score_preferences
from .pod_status import ENDED_PHASES

_SCHEDULING_SECONDS = (0.01, 0.15)
"""Bounds of the seconds from a change, or the last pod, to the next pod."""
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 1.0, 10.0
"""Seconds before a pod without a place is retried. They double each time, up to the maximum."""
_API_RETRY_SECONDS = 1.0
"""Seconds until an unavailable API server is tried again."""


@dataclass(eq=False)
class _PendingPod:
    """A pod without a node."""

    pod: Object
    needs: PodNeeds
    tries: int = 0
    not_before: float = 0.0  # math.inf: until something changes
    backoff_until: float = 0.0


class Scheduler:
    """The scheduler of a world."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._random = world.create_random("scheduler")
        self._offers: dict[str, NodeOffer] = {}
        self._pods_without_node: dict[str, dict[str, PodNeeds]] = {}  # by the name of a node that does not exist
        self._waiting: dict[str, _PendingPod] = {}  # by UID, in the order of arrival
        self._next: asyncio.TimerHandle | None = None
        world.api.subscribe(self._on_change)

    def _schedule_next(self) -> None:
        """Place the first pod that is due."""
        self._next = None
        world, now = self._world, self._world.now()
        if world.api.faults.is_unavailable:
            self._next = world.call_after(_API_RETRY_SECONDS, self._schedule_next)
            return
        ready = next((item for item in self._waiting.values() if item.not_before <= now), None)
        if ready is not None:
            self._place_pod(ready)
        self._plan_next()

    def _place_pod(self, pending: _PendingPod) -> None:
        needs, offers = pending.needs, self._offers
        obstacles = {name: find_obstacle(needs, offer, offers) for name, offer in offers.items()}
        fitting = [
            (-score_preferences(needs, offers[name], offers), name)
            for name, obstacle in obstacles.items()
            if not obstacle
        ]
        if fitting:
            best = min(fitting)[0]
            self._bind_pod(pending, self._random.choice([name for score, name in fitting if score == best]))
        else:
            self._back_off(pending, obstacles)

    def _bind_pod(self, pending: _PendingPod, node: str) -> None:
        name, namespace = pending.pod["metadata"]["name"], pending.pod["metadata"]["namespace"]
        binding = {"spec": {"nodeName": node}}
        self._world.api.patch("pods", name, namespace, binding, subresource="binding", manager="scheduler")

    def _back_off(self, pending: _PendingPod, obstacles: dict[str, str]) -> None:
        pending.tries += 1
        pending.not_before = math.inf
        pause = min(_MAX_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2.0 ** (pending.tries - 1))
        pending.backoff_until = self._world.now() + pause
        message = _format_obstacles(obstacles)
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        conditions = pending.pod["status"].get("conditions", [])
        if condition not in conditions:
            metadata, others = pending.pod["metadata"], [item for item in conditions if item["type"] != "PodScheduled"]
            status = {"status": {"conditions": [*others, condition]}}
            name, namespace = metadata["name"], metadata["namespace"]
            self._world.api.patch("pods", name, namespace, status, subresource="status", manager="scheduler")
            self._world.log.record("scheduler", f"pod {name} has no place: {message}")

    def _plan_next(self) -> None:
        """Schedule a run for when the next pod is due."""
        at = min((item.not_before for item in self._waiting.values()), default=math.inf)
        if at == math.inf:
            return
        wait = max(at - self._world.now(), self._random.uniform(*_SCHEDULING_SECONDS))
        if self._next is not None:
            if self._next.when() <= self._world.now() + wait:
                return
            self._next.cancel()
        self._next = self._world.call_after(wait, self._schedule_next)

    def _retry_unplaced(self) -> None:
        """Retry pods that had no place."""
        for item in self._waiting.values():
            if item.not_before == math.inf:
                item.not_before = item.backoff_until
        self._plan_next()

    def _on_change(self, change: ObjectChange) -> None:
        if change.plural == "pods":
            self._on_pod_change(change.type == "DELETED", change.object)
        elif change.plural == "nodes":
            self._on_node_change(change)

    def _on_pod_change(self, deleted: bool, pod: Object) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
        if deleted or node is not None or not _needs_placement(pod):
            self._waiting.pop(uid, None)
        elif uid in self._waiting:
            self._waiting[uid].pod = pod
        else:
            self._waiting[uid] = _PendingPod(pod, PodNeeds.parse(pod))
            self._plan_next()
        if node is None:
            return
        offer = self._offers.get(node)
        node_pods = offer.pods if offer is not None else self._pods_without_node.setdefault(node, {})
        if deleted or pod["status"].get("phase") in ENDED_PHASES:
            if uid not in node_pods:
                return
            if offer is not None:
                offer.remove(uid)
            else:
                del node_pods[uid]
            self._retry_unplaced()
        elif uid not in node_pods:
            needs = PodNeeds.parse(pod)
            if offer is not None:
                offer.add(needs)
            else:
                node_pods[uid] = needs
            if needs.labels:  # another pod may have affinity to it
                self._retry_unplaced()

    def _on_node_change(self, change: ObjectChange) -> None:
        node, previous = change.object, change.previous
        name = node["metadata"]["name"]
        if change.type == "DELETED":
            self._pods_without_node[name] = self._offers.pop(name).pods
        elif previous is None or _read_offer(previous) != _read_offer(node):
            old = self._offers.get(name)
            self._offers[name] = NodeOffer(
                node, old.pods if old is not None else self._pods_without_node.pop(name, None)
            )
            self._retry_unplaced()


def _format_obstacles(obstacles: dict[str, str]) -> str:
    if not obstacles:
        return "no nodes available to schedule pods"
    counts = ", ".join(f"{count} {obstacle}" for obstacle, count in sorted(Counter(obstacles.values()).items()))
    return f"0/{len(obstacles)} nodes are available: {counts}."


def _needs_placement(pod: Object) -> bool:
    spec = pod["spec"]
    return (
        "deletionTimestamp" not in pod["metadata"]
        and not spec.get("schedulingGates")
        and spec.get("schedulerName", "default-scheduler") == "default-scheduler"
    )


def _read_offer(node: Object) -> tuple[object, ...]:
    return node.get("spec"), node["metadata"].get("labels"), (node.get("status") or {}).get("allocatable")
