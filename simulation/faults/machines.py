"""What goes wrong with nodes and with pods on them, and what people do with nodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pacekeeper_operator.api import LABEL_NO_QUARANTINE

from ..kubernetes.conditions import disrupt
from ..kubernetes.kubelet import Images
from ..network import API
from ..world import NAMESPACE
from .fault import Fault, Heal, Missed, NodeFault, WorkerFault
from .scene import PERSON

MAINTENANCE = "example.com/maintenance"
"""A taint that nobody but people knows."""

if TYPE_CHECKING:
    from ..kubernetes.api_server import Change
    from ..kubernetes.nodes import Node
    from ..workers.worker import Worker
    from .scene import Scene


class Beyond(StrEnum):
    """Whom a node does not reach."""

    API = "api"
    OPERATOR = "operator"
    PEERS = "peers"
    ALL = "all"


@dataclass(frozen=True)
class PowerFails(NodeFault):
    """Of a node: with a time it is a reboot."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.power_off()
        return node.power_on


@dataclass(frozen=True)
class KubeletStops(NodeFault):
    """What runs goes on."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.stop_kubelet()
        return node.start_kubelet


@dataclass(frozen=True)
class RuntimeHangs(NodeFault):
    """Containers neither start nor end."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.hang_runtime()
        return node.mend_runtime


@dataclass(frozen=True)
class NodeShutsDown(NodeFault):
    """In order: its pods are ended first."""

    grace: float = 10.0

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.shut_down(self.grace)
        return node.power_on


@dataclass(frozen=True)
class NodeIsCutOff(NodeFault):
    """From some, in both directions."""

    beyond: Beyond = Beyond.ALL

    def strike(self, scene: Scene) -> Heal:
        node, network = self.node(scene), scene.world.network
        scene.tell(f"{node.name} is cut off from {self.beyond}")
        if self.beyond is Beyond.ALL:
            network.isolate(node.name)
            return lambda: network.rejoin(node.name)
        others = {
            Beyond.API: [API],
            Beyond.OPERATOR: [pod.name for pod in scene.world.deployment.pods],
            Beyond.PEERS: [other for other in scene.world.nodes if other != node.name],
        }[self.beyond]
        for other in others:
            network.cut(node.name, other)

        def heal() -> None:
            for other in others:
                network.mend(node.name, other)

        return heal


@dataclass(frozen=True)
class NodeVanishes(NodeFault):
    """The machine, and its object with it. Another one comes under the same name."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.vanish()
        return node.power_on


@dataclass(frozen=True)
class NodeDeleted(NodeFault):
    """Its object only, by a person: the machine runs on, and registers anew when its kubelet starts again."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.remove()

        def heal() -> None:
            node.stop_kubelet()
            node.start_kubelet()

        return heal


@dataclass(frozen=True)
class NodeAdded(Fault):
    """Another machine."""

    def strike(self, scene: Scene) -> None:
        scene.world.add_node()


@dataclass(frozen=True)
class NodeCordoned(NodeFault):
    """By a person."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.cordon()
        return node.uncordon


@dataclass(frozen=True)
class NodeDrained(NodeFault):
    """By a person."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.drain()
        return node.uncordon


@dataclass(frozen=True)
class NodeTainted(NodeFault):
    """By a person."""

    effect: str = "NoSchedule"

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        node.taint(MAINTENANCE, self.effect)
        return lambda: node.untaint(MAINTENANCE)


@dataclass(frozen=True)
class NodeOptedOut(NodeFault):
    """The platform team wants no quarantine of it."""

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        _label(scene, node, "true")
        return lambda: _label(scene, node, None)


@dataclass(frozen=True)
class NodeIsSick(NodeFault):
    """Probes on it fail. With `fails` so does each rank that begins there, and those that run crash, with an `xid` of
    their GPUs."""

    fails: bool = False
    xid: int = 0

    def strike(self, scene: Scene) -> Heal:
        node, sick = self.node(scene), True
        scene.tell(f"{node.name} is sick")
        node.sick = "CUDA error: an illegal memory access was encountered"

        def infect(change: Change) -> None:
            worker = scene.world.workers.get(change.object["metadata"]["uid"])
            if sick and worker is not None and worker.node == node.name:
                worker.script_fails = True

        def heal() -> None:
            nonlocal sick
            sick, node.sick = False, ""
            for worker in scene.running():
                if worker.node == node.name:
                    worker.script_fails = False

        if self.fails:
            scene.watch("pods", infect)
            for worker in scene.running():
                if worker.node == node.name:
                    worker.script_fails = True
                    _break_down(worker, self.xid)
        return heal


@dataclass(frozen=True)
class ClockIsOff(NodeFault):
    """A node's; with `operators` the operator's, too."""

    hours: float = 3.0
    operators: bool = False

    def strike(self, scene: Scene) -> Heal:
        places = [self.node(scene).name, *(pod.name for pod in scene.world.deployment.pods if self.operators)]
        scene.tell(f"the clocks of {', '.join(places)} are off by {self.hours:g} h")
        for place in places:
            scene.world.clocks[place] = self.hours * 3600.0

        def heal() -> None:
            for place in places:
                scene.world.clocks.pop(place, None)

        return heal


@dataclass(frozen=True)
class ImagesDoNotCome(NodeFault):
    """They cannot be pulled, or pulling hangs."""

    images: Images = Images.FAIL

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        scene.tell(f"images of {node.name}: {self.images}")
        node.images = self.images
        return lambda: setattr(node, "images", Images.COME)


@dataclass(frozen=True)
class KubeletRefuses(NodeFault):
    """Each new pod."""

    reason: str = "UnexpectedAdmissionError"

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        scene.tell(f"the kubelet of {node.name} refuses pods: {self.reason}")
        node.refuses = self.reason
        return lambda: setattr(node, "refuses", "")


@dataclass(frozen=True)
class PodDeleted(WorkerFault):
    """By somebody; with `force` the object goes at once, and its processes run on for a while."""

    force: bool = False

    def strike(self, scene: Scene) -> None:
        worker = self.worker(scene)
        scene.delete_pod(worker, force=self.force)


@dataclass(frozen=True)
class PodEvicted(WorkerFault):
    """By its kubelet, which is short of memory."""

    def strike(self, scene: Scene) -> None:
        worker = self.worker(scene)
        scene.tell(f"pod {worker.name} is evicted")
        scene.node_of(worker).evict(worker.uid)


@dataclass(frozen=True)
class PodPreempted(WorkerFault):
    """By the scheduler, for a pod of a higher priority."""

    def strike(self, scene: Scene) -> None:
        worker, api = self.worker(scene), scene.world.api
        pod = api.get("pods", worker.name, NAMESPACE)
        if pod is None:
            raise Missed(f"pod {worker.name} is gone")
        scene.tell(f"pod {worker.name} is preempted")
        disrupt(api, pod, "PreemptionByScheduler", "preempting", scene.world.wall(), who="scheduler")


@dataclass(frozen=True)
class PodKilledForMemory(WorkerFault):
    """All of the trainer's container at once."""

    def strike(self, scene: Scene) -> None:
        worker = self.worker(scene)
        scene.tell(f"pod {worker.name} is killed for memory")
        worker.kill(137, "OOMKilled")


def _break_down(worker: Worker, xid: int) -> None:
    if xid:
        worker.gpu_error(xid)
    else:
        worker.crash()


def _label(scene: Scene, node: Node, value: str | None) -> None:
    if scene.world.api.get("nodes", node.name) is not None:
        labels = {"metadata": {"labels": {LABEL_NO_QUARANTINE: value}}}
        scene.tell(f"{node.name} is {'opted out of' if value else 'free for'} quarantines")
        scene.world.api.patch("nodes", node.name, "", labels, manager=PERSON)
