"""Machines with their kubelets: faults, and users' actions."""

from __future__ import annotations

from collections.abc import Mapping

from ..network import SIMULATED_KUBELET_PORT
from .api.changes import ObjectChange
from .api.objects import Object, format_timestamp
from .cluster_world import ClusterWorld
from .conditions import disrupt_pod
from .kubelet import Kubelet
from .machine import Machine

BOOT_SECONDS = (3.0, 15.0)
"""Seconds from power-on to a running kubelet."""
_PERSON_MANAGER = "kubectl"


class SimulatedNode(Machine):
    """A machine with its kubelet. It stays the same Python object when another machine takes its name."""

    def __init__(
        self, world: ClusterWorld, name: str, number: int, resources: Mapping[str, str], labels: Mapping[str, str]
    ):
        super().__init__(name, number, resources, labels)
        self.kubelet = Kubelet(world, self)
        self._world = world
        self._random = world.create_random(f"node {name}")
        self._boot_number = 0

    # Faults.

    def power_off(self) -> None:
        """Turn the power off at once."""
        self._boot_number += 1  # cancels a boot in progress
        if self.powered:
            self.powered = False
            self._world.log.record(self.name, "loses power")
            self._world.network.set_power(self.name, on=False)
            self.kubelet.lose_power()

    def power_on(self) -> None:
        """Turn the power on. The node boots for a while."""
        if not self.powered:
            self._boot_number += 1
            self._world.log.record(self.name, "is switched on")
            self._world.call_after(self._random.uniform(*BOOT_SECONDS), self._finish_boot, self._boot_number)

    def _finish_boot(self, boot_number: int) -> None:
        if boot_number == self._boot_number:
            self.powered = True
            self._world.log.record(self.name, "is up")
            self._world.network.set_power(self.name, on=True)
            self.stuck_since = None
            self.kubelet.start()

    def shut_down(self, grace: float) -> None:
        """Shut down, as for a system update: the kubelet ends all pods first, within `grace` seconds."""
        self._world.log.record(self.name, "shuts down")
        message = "Pod was terminated in response to imminent node shutdown."
        for uid in self.kubelet.list_running_pods():
            self.kubelet.end_pod(uid, "Terminated", message, grace=grace, disrupts=True)
        self._world.call_after(grace + 3.0, self.power_off)

    def stop_kubelet(self) -> None:
        self._world.log.record(self.name, "its kubelet stops")
        self.kubelet.stop()

    def start_kubelet(self) -> None:
        self._world.log.record(self.name, "its kubelet starts")
        self.kubelet.start()

    def hang_runtime(self) -> None:
        self._world.log.record(self.name, "its container runtime hangs")
        self.stuck_since = self._world.now()

    def mend_runtime(self) -> None:
        self._world.log.record(self.name, "its container runtime works")
        self.stuck_since = None

    def evict(self, uid: str) -> None:
        """Evict a pod because of node pressure."""
        self.kubelet.end_pod(uid, "Evicted", "The node was low on resource: memory.", grace=1.0, disrupts=True)

    def vanish(self) -> None:
        """Remove the machine and its object, as a cloud does. `power_on` is another machine of this name."""
        self.power_off()
        self.kubelet.forget()
        self.remove()

    # Actions of users.

    def remove(self) -> None:
        """Delete the Node object. The machine runs on; a kubelet that starts registers a new object."""
        if self._world.api.get("nodes", self.name) is not None:
            self._world.log.record(_PERSON_MANAGER, f"deletes node {self.name}")
            self._world.api.delete("nodes", self.name)

    def cordon(self) -> None:
        self._patch_spec(f"cordons {self.name}", {"unschedulable": True})

    def uncordon(self) -> None:
        self._patch_spec(f"uncordons {self.name}", {"unschedulable": None})

    def drain(self) -> None:
        """Cordon the node, and evict its pods."""
        self.cordon()
        world = self._world
        for pod in world.api.list_all("pods"):
            if pod["spec"].get("nodeName") == self.name and "deletionTimestamp" not in pod["metadata"]:
                message = "Eviction API: evicting"
                world.call_after(self._random.uniform(0.0, 0.5), self._evict_through_api, pod, message)

    def _evict_through_api(self, pod: Object, message: str) -> None:
        world, metadata = self._world, pod["metadata"]
        stored = world.api.get("pods", metadata["name"], metadata["namespace"])
        if stored is not None and stored["metadata"]["uid"] == metadata["uid"]:
            world.log.record(_PERSON_MANAGER, f"evicts pod {metadata['name']}")
            disrupt_pod(world.api, stored, "EvictionByEvictionAPI", message, world.wall_time(), manager=_PERSON_MANAGER)

    def taint(self, key: str, effect: str, value: str = "") -> None:
        """Add a taint, and replace those with the same key."""
        taint = {
            "key": key,
            "effect": effect,
            "value": value,
            "timeAdded": format_timestamp(int(self._world.wall_time())),
        }
        self._patch_spec(f"taints {self.name}: {key}:{effect}", {"taints": [*self._list_other_taints(key), taint]})

    def untaint(self, key: str) -> None:
        self._patch_spec(f"takes taint {key} off {self.name}", {"taints": self._list_other_taints(key) or None})

    def _list_other_taints(self, key: str) -> list[Object]:
        stored = self._world.api.get("nodes", self.name)
        taints = [] if stored is None else stored["spec"].get("taints", [])
        return [taint for taint in taints if taint["key"] != key]

    def _patch_spec(self, message: str, spec: Object) -> None:
        if self._world.api.get("nodes", self.name) is not None:
            self._world.log.record(_PERSON_MANAGER, message)
            self._world.api.patch("nodes", self.name, "", {"spec": spec}, manager=_PERSON_MANAGER)


class NodePool:
    """All machines of a world."""

    def __init__(self, world: ClusterWorld) -> None:
        self.nodes: dict[str, SimulatedNode] = {}
        self._world = world
        self._shared_check = ""
        world.api.subscribe(self._on_change)

    def add_node(
        self, name: str, resources: Mapping[str, str], labels: Mapping[str, str] | None = None
    ) -> SimulatedNode:
        """Add a running machine."""
        node = SimulatedNode(self._world, name, len(self.nodes), resources, labels or {})
        node.shared_check = self._shared_check
        self.nodes[name] = node
        self._world.network.addresses[node.address] = name
        node.kubelet.start()
        return node

    def fail_probes(self, check: str) -> None:
        """Make probe pods fail this check on all present and future nodes; "": on none."""
        self._shared_check = check
        for node in self.nodes.values():
            node.shared_check = check

    def is_listening(self, address: str, port: int) -> bool:
        """Return whether a process accepts connections there, on a machine that is up."""
        kubelet = self.nodes[self._world.network.addresses[address]].kubelet
        return kubelet.running if port == SIMULATED_KUBELET_PORT else kubelet.is_listening(address)

    def _on_change(self, change: ObjectChange) -> None:
        if change.plural == "pods":
            name = change.object["spec"].get("nodeName")
            if name in self.nodes:
                self.nodes[name].kubelet.on_pod_change(change)
