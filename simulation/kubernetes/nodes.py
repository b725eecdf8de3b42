"""Machines with their kubelets: what can happen to them, and what people do with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..network import KUBELET_PORT
from .conditions import disrupt, with_condition
from .kubelet import Images, Kubelet
from .objects import Object, timestamp

if TYPE_CHECKING:
    from .api_server import Change
    from .surroundings import Surroundings

BOOTS = (3.0, 15.0)
"""Seconds from power to a kubelet that runs."""
_PERSON = "kubectl"
_PODS = 110


class Node:
    """A machine. It stays the same object when another machine takes its name."""

    def __init__(
        self, world: Surroundings, name: str, number: int, resources: Mapping[str, str], labels: Mapping[str, str]
    ):
        self.name = name
        self.address = f"192.0.2.{number + 1}"
        self.pods_network = f"10.{number}"
        self.powered = True
        self.stuck_since: float | None = None
        """Since when its container runtime starts and ends nothing (virtual seconds); what runs goes on."""
        self.slow = 1.0
        """How much longer its ranks take to compute."""
        self.sick = ""
        """Why it cannot be used, in a probe's words."""
        self.shared_check = ""
        """Check of a probe that this node fails like all others, by no fault of its own."""
        self.refuses = ""
        """Reason with which its kubelet refuses each new pod: UnexpectedAdmissionError, …"""
        self.images = Images.COME
        self.kubelet = Kubelet(world, self)
        self._world = world
        self._resources = {"pods": str(_PODS), **resources}
        self._labels = labels
        self._random = world.random(f"node {name}")
        self._boots = 0

    # What happens to it.

    def power_off(self) -> None:
        """At once, as by its plug."""
        self._boots += 1  # one that is under way comes to nothing
        if self.powered:
            self.powered = False
            self._world.story.tell(self.name, "loses power")
            self._world.network.power(self.name, on=False)
            self.kubelet.lose_power()

    def power_on(self) -> None:
        """It boots for a while."""
        if not self.powered:
            self._boots += 1
            self._world.story.tell(self.name, "is switched on")
            self._world.after(self._random.uniform(*BOOTS), self._up, self._boots)

    def _up(self, boots: int) -> None:
        if boots == self._boots:
            self.powered = True
            self._world.story.tell(self.name, "is up")
            self._world.network.power(self.name, on=True)
            self.stuck_since = None
            self.kubelet.start()

    def shut_down(self, grace: float) -> None:
        """As by an update of its system: its kubelet ends all pods first, which may take `grace` seconds."""
        self._world.story.tell(self.name, "shuts down")
        message = "Pod was terminated in response to imminent node shutdown."
        for uid in self.kubelet.pods():
            self.kubelet.end(uid, "Terminated", message, grace=grace, disrupts=True)
        self._world.after(grace + 3.0, self.power_off)

    def stop_kubelet(self) -> None:
        self._world.story.tell(self.name, "its kubelet stops")
        self.kubelet.stop()

    def start_kubelet(self) -> None:
        self._world.story.tell(self.name, "its kubelet starts")
        self.kubelet.start()

    def hang_runtime(self) -> None:
        self._world.story.tell(self.name, "its container runtime hangs")
        self.stuck_since = self._world.now()

    def mend_runtime(self) -> None:
        self._world.story.tell(self.name, "its container runtime works")
        self.stuck_since = None

    def evict(self, uid: str) -> None:
        """Of the pods here, this one uses too much memory or disk."""
        self.kubelet.end(uid, "Evicted", "The node was low on resource: memory.", grace=1.0, disrupts=True)

    def vanish(self) -> None:
        """The cloud takes the machine away, and its object with it; `power_on` is another machine of this name."""
        self.power_off()
        self.kubelet.forget()
        self.remove()

    # What people do with it.

    def remove(self) -> None:
        """Its object. The machine and all that runs on it are still there; a kubelet that starts makes a new one."""
        if self._world.api.get("nodes", self.name) is not None:
            self._world.story.tell(_PERSON, f"deletes node {self.name}")
            self._world.api.delete("nodes", self.name)

    def cordon(self) -> None:
        self._patch(f"cordons {self.name}", {"unschedulable": True})

    def uncordon(self) -> None:
        self._patch(f"uncordons {self.name}", {"unschedulable": None})

    def drain(self) -> None:
        """Cordon it, and evict its pods."""
        self.cordon()
        world = self._world
        for pod in world.api.all("pods"):
            if pod["spec"].get("nodeName") == self.name and "deletionTimestamp" not in pod["metadata"]:
                words = "Eviction API: evicting"
                world.after(self._random.uniform(0.0, 0.5), self._evict_by_api, pod, words)

    def _evict_by_api(self, pod: Object, words: str) -> None:
        world, metadata = self._world, pod["metadata"]
        stored = world.api.get("pods", metadata["name"], metadata["namespace"])
        if stored is not None and stored["metadata"]["uid"] == metadata["uid"]:
            world.story.tell(_PERSON, f"evicts pod {metadata['name']}")
            disrupt(world.api, stored, "EvictionByEvictionAPI", words, world.wall(), who=_PERSON)

    def taint(self, key: str, effect: str, value: str = "") -> None:
        """Replaces what it has of this key."""
        taint = {"key": key, "effect": effect, "value": value, "timeAdded": timestamp(int(self._world.wall()))}
        self._patch(f"taints {self.name}: {key}:{effect}", {"taints": [*self._taints_but(key), taint]})

    def untaint(self, key: str) -> None:
        self._patch(f"takes taint {key} off {self.name}", {"taints": self._taints_but(key) or None})

    def _taints_but(self, key: str) -> list[Object]:
        stored = self._world.api.get("nodes", self.name)
        taints = [] if stored is None else stored["spec"].get("taints", [])
        return [taint for taint in taints if taint["key"] != key]

    def _patch(self, words: str, spec: Object) -> None:
        if self._world.api.get("nodes", self.name) is not None:
            self._world.story.tell(_PERSON, words)
            self._world.api.patch("nodes", self.name, "", {"spec": spec}, manager=_PERSON)

    def body(self) -> Object:
        """Its object, as its kubelet registers it."""
        conditions: list[Object] = []
        for type_ in ("MemoryPressure", "DiskPressure", "PIDPressure"):
            conditions = with_condition(conditions, type_, "False", self._world.wall())
        conditions = with_condition(conditions, "Ready", "True", self._world.wall(), "KubeletReady")
        addresses = [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.name}]
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": {"kubernetes.io/hostname": self.name, **self._labels}},
            "spec": {},
            "status": {
                "addresses": addresses,
                "capacity": self._resources,
                "allocatable": self._resources,
                "conditions": conditions,
            },
        }


class Fleet:
    """All machines of a world."""

    def __init__(self, world: Surroundings) -> None:
        self.nodes: dict[str, Node] = {}
        self._world = world
        self._shared_check = ""
        world.api.subscribe(self._heard)

    def add(self, name: str, resources: Mapping[str, str], labels: Mapping[str, str] | None = None) -> Node:
        """A machine that runs."""
        node = Node(self._world, name, len(self.nodes), resources, labels or {})
        node.shared_check = self._shared_check
        self.nodes[name] = node
        self._world.network.addresses[node.address] = name
        node.kubelet.start()
        return node

    def fail_probes(self, check: str) -> None:
        """From now on probe pods fail this check on all nodes, those to come included; "": they fail none."""
        self._shared_check = check
        for node in self.nodes.values():
            node.shared_check = check

    def listens(self, address: str, port: int) -> bool:
        """Whether something takes connections there, on a machine that is up."""
        kubelet = self.nodes[self._world.network.addresses[address]].kubelet
        return kubelet.running if port == KUBELET_PORT else kubelet.listens(address)

    def _heard(self, change: Change) -> None:
        if change.plural == "pods":
            name = change.object["spec"].get("nodeName")
            if name in self.nodes:
                self.nodes[name].kubelet.hear(change)
