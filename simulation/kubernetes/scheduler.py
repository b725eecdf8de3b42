"""The scheduler: which node each pod is put on. It acts when something changes, and never looks around for itself."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .objects import Object
from .placement import Needs, Offer, liking, obstacle
from .pod_status import ENDED

if TYPE_CHECKING:
    from .api_server import Change
    from .surroundings import Surroundings

_THINKS = (0.01, 0.15)
"""Seconds, from a change or the last pod to the next one."""
_BACK_OFF, _LONGEST_BACK_OFF = 1.0, 10.0
"""Seconds before a pod that could not be placed is tried again, doubled each time."""
_AGAIN = 1.0
"""Seconds until an API server that is down is tried again."""


@dataclass(eq=False)
class _Waiting:
    """A pod that has no node yet."""

    pod: Object
    needs: Needs
    tries: int = 0
    not_before: float = 0.0  # math.inf: until something changes
    back_off_until: float = 0.0


class Scheduler:
    """Of a world."""

    def __init__(self, world: Surroundings) -> None:
        self._world = world
        self._random = world.random("scheduler")
        self._offers: dict[str, Offer] = {}
        self._homeless: dict[str, dict[str, Needs]] = {}  # by name of a node that is not there (yet)
        self._waiting: dict[str, _Waiting] = {}  # by uid, in the order in which they came
        self._next: asyncio.TimerHandle | None = None
        world.api.subscribe(self._heard)

    def _turn(self) -> None:
        """The first pod whose time has come."""
        self._next = None
        world, now = self._world, self._world.now()
        if world.api.faults.away:
            self._next = world.after(_AGAIN, self._turn)
            return
        ready = next((item for item in self._waiting.values() if item.not_before <= now), None)
        if ready is not None:
            self._place(ready)
        self._plan()

    def _place(self, waiting: _Waiting) -> None:
        needs, offers = waiting.needs, self._offers
        obstacles = {name: obstacle(needs, offer, offers) for name, offer in offers.items()}
        fitting = [(-liking(needs, offers[name], offers), name) for name, why in obstacles.items() if not why]
        if fitting:
            best = min(fitting)[0]
            self._bind(waiting, self._random.choice([name for score, name in fitting if score == best]))
        else:
            self._park(waiting, obstacles)

    def _bind(self, waiting: _Waiting, node: str) -> None:
        name, namespace = waiting.pod["metadata"]["name"], waiting.pod["metadata"]["namespace"]
        binding = {"spec": {"nodeName": node}}
        self._world.api.patch("pods", name, namespace, binding, subresource="binding", manager="scheduler")

    def _park(self, waiting: _Waiting, obstacles: dict[str, str]) -> None:
        waiting.tries += 1
        waiting.not_before = math.inf
        pause = min(_LONGEST_BACK_OFF, _BACK_OFF * 2.0 ** (waiting.tries - 1))
        waiting.back_off_until = self._world.now() + pause
        message = _in_words(obstacles)
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        before = waiting.pod["status"].get("conditions", [])
        if condition not in before:
            metadata, others = waiting.pod["metadata"], [item for item in before if item["type"] != "PodScheduled"]
            status = {"status": {"conditions": [*others, condition]}}
            name, namespace = metadata["name"], metadata["namespace"]
            self._world.api.patch("pods", name, namespace, status, subresource="status", manager="scheduler")
            self._world.story.tell("scheduler", f"pod {name} has no place: {message}")

    def _plan(self) -> None:
        """A turn when the next pod's time has come."""
        at = min((item.not_before for item in self._waiting.values()), default=math.inf)
        if at == math.inf:
            return
        wait = max(at - self._world.now(), self._random.uniform(*_THINKS))
        if self._next is not None:
            if self._next.when() <= self._world.now() + wait:
                return
            self._next.cancel()
        self._next = self._world.after(wait, self._turn)

    def _something_changed(self) -> None:
        """Who could not be placed may find a place now."""
        for item in self._waiting.values():
            if item.not_before == math.inf:
                item.not_before = item.back_off_until
        self._plan()

    def _heard(self, change: Change) -> None:
        if change.plural == "pods":
            self._heard_of_pod(change.type == "DELETED", change.object)
        elif change.plural == "nodes":
            self._heard_of_node(change)

    def _heard_of_pod(self, gone: bool, pod: Object) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
        if gone or node is not None or not _to_be_placed(pod):
            self._waiting.pop(uid, None)
        elif uid in self._waiting:
            self._waiting[uid].pod = pod
        else:
            self._waiting[uid] = _Waiting(pod, Needs.parse(pod))
            self._plan()
        if node is None:
            return
        offer = self._offers.get(node)
        known = offer.pods if offer is not None else self._homeless.setdefault(node, {})
        if gone or pod["status"].get("phase") in ENDED:
            if uid not in known:
                return
            if offer is not None:
                offer.remove(uid)
            else:
                del known[uid]
            self._something_changed()
        elif uid not in known:
            needs = Needs.parse(pod)
            if offer is not None:
                offer.add(needs)
            else:
                known[uid] = needs
            if needs.labels:  # someone may want to be close to it
                self._something_changed()

    def _heard_of_node(self, change: Change) -> None:
        node, before = change.object, change.before
        name = node["metadata"]["name"]
        if change.type == "DELETED":
            self._homeless[name] = self._offers.pop(name).pods
        elif before is None or _offered(before) != _offered(node):
            old = self._offers.get(name)
            self._offers[name] = Offer(node, old.pods if old is not None else self._homeless.pop(name, None))
            self._something_changed()


def _in_words(obstacles: dict[str, str]) -> str:
    if not obstacles:
        return "no nodes available to schedule pods"
    counted = ", ".join(f"{count} {words}" for words, count in sorted(Counter(obstacles.values()).items()))
    return f"0/{len(obstacles)} nodes are available: {counted}."


def _to_be_placed(pod: Object) -> bool:
    spec = pod["spec"]
    return (
        "deletionTimestamp" not in pod["metadata"]
        and not spec.get("schedulingGates")
        and spec.get("schedulerName", "default-scheduler") == "default-scheduler"
    )


def _offered(node: Object) -> tuple[object, ...]:
    return node.get("spec"), node["metadata"].get("labels"), (node.get("status") or {}).get("allocatable")
