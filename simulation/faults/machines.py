"""Faults of nodes and of the pods on them, and users' actions on nodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pacekeeper_operator.api.names import LABEL_NO_QUARANTINE

from ..kubernetes.api.changes import ObjectChange
from ..kubernetes.conditions import disrupt_pod
from ..kubernetes.machine import ImagePulls
from ..kubernetes.nodes import SimulatedNode
from ..network import API_PLACE
from ..workers.worker import SimulatedWorker
from ..world import NAMESPACE
from .context import PERSON_MANAGER, FaultContext
from .fault import Fault, HealCallback, NodeFault, WorkerFault
from .targets import TargetMissing

MAINTENANCE_TAINT = "example.com/maintenance"
"""A taint that only users set."""


class NodePartition(StrEnum):
    """What a node does not reach."""

    API = "api"
    OPERATOR = "operator"
    PEERS = "peers"
    ALL = "all"


@dataclass(frozen=True)
class PowerFails(NodeFault):
    """A node loses power. With a duration, it is a reboot."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.power_off()
        return node.power_on


@dataclass(frozen=True)
class KubeletStops(NodeFault):
    """The kubelet stops. Running containers continue."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.stop_kubelet()
        return node.start_kubelet


@dataclass(frozen=True)
class RuntimeHangs(NodeFault):
    """Containers neither start nor end."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.hang_runtime()
        return node.mend_runtime


@dataclass(frozen=True)
class NodeShutsDown(NodeFault):
    """A node shuts down in order: its pods are ended first."""

    grace: float = 10.0

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.shut_down(self.grace)
        return node.power_on


@dataclass(frozen=True)
class NodeIsCutOff(NodeFault):
    """A node is cut off from some places, in both directions."""

    partition: NodePartition = NodePartition.ALL

    def inject(self, context: FaultContext) -> HealCallback:
        node, network = self.find_node(context), context.world.network
        context.log(f"{node.name} is cut off from {self.partition}")
        if self.partition is NodePartition.ALL:
            network.isolate(node.name)
            return lambda: network.rejoin(node.name)
        places = {
            NodePartition.API: [API_PLACE],
            NodePartition.OPERATOR: [pod.name for pod in context.world.deployment.pods],
            NodePartition.PEERS: [place for place in context.world.nodes if place != node.name],
        }[self.partition]
        for place in places:
            network.cut(node.name, place)

        def heal() -> None:
            for place in places:
                network.mend(node.name, place)

        return heal


@dataclass(frozen=True)
class NodeVanishes(NodeFault):
    """The machine disappears with its object. Another one with the same name replaces it."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.vanish()
        return node.power_on


@dataclass(frozen=True)
class NodeDeleted(NodeFault):
    """A user deletes the Node object. The machine runs on, and registers again when its kubelet restarts."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.remove()

        def heal() -> None:
            node.stop_kubelet()
            node.start_kubelet()

        return heal


@dataclass(frozen=True)
class NodeAdded(Fault):
    """A machine is added."""

    def inject(self, context: FaultContext) -> None:
        context.world.add_node()


@dataclass(frozen=True)
class NodeCordoned(NodeFault):
    """A user cordons a node."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.cordon()
        return node.uncordon


@dataclass(frozen=True)
class NodeDrained(NodeFault):
    """A user drains a node."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.drain()
        return node.uncordon


@dataclass(frozen=True)
class NodeTainted(NodeFault):
    """A user taints a node."""

    effect: str = "NoSchedule"

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        node.taint(MAINTENANCE_TAINT, self.effect)
        return lambda: node.untaint(MAINTENANCE_TAINT)


@dataclass(frozen=True)
class NodeOptedOut(NodeFault):
    """The platform team opts a node out of quarantines."""

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        _set_opt_out_label(context, node, "true")
        return lambda: _set_opt_out_label(context, node, None)


@dataclass(frozen=True)
class NodeIsSick(NodeFault):
    """Probes on a node fail.

    With `fails`, each rank that starts there fails, too, and the running ones crash, with an `xid` of their GPUs.
    """

    fails: bool = False
    xid: int = 0

    def inject(self, context: FaultContext) -> HealCallback:
        node, sick = self.find_node(context), True
        context.log(f"{node.name} is sick")
        node.fault_message = "CUDA error: an illegal memory access was encountered"

        def infect(change: ObjectChange) -> None:
            worker = context.world.workers.get(change.object["metadata"]["uid"])
            if sick and worker is not None and worker.node == node.name:
                worker.script_fails = True

        def heal() -> None:
            nonlocal sick
            sick, node.fault_message = False, ""
            for worker in context.list_running_workers():
                if worker.node == node.name:
                    worker.script_fails = False

        if self.fails:
            context.watch_kind("pods", infect)
            for worker in context.list_running_workers():
                if worker.node == node.name:
                    worker.script_fails = True
                    _fail_worker(worker, self.xid)
        return heal


@dataclass(frozen=True)
class ClockIsOff(NodeFault):
    """A node's clock is wrong; with `operators`, the operators' clocks, too."""

    hours: float = 3.0
    operators: bool = False

    def inject(self, context: FaultContext) -> HealCallback:
        places = [self.find_node(context).name, *(pod.name for pod in context.world.deployment.pods if self.operators)]
        context.log(f"the clocks of {', '.join(places)} are off by {self.hours:g} h")
        for place in places:
            context.world.clocks[place] = self.hours * 3600.0

        def heal() -> None:
            for place in places:
                context.world.clocks.pop(place, None)

        return heal


@dataclass(frozen=True)
class ImagesUnavailable(NodeFault):
    """Images cannot be pulled, or pulls hang."""

    images: ImagePulls = ImagePulls.FAIL

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        context.log(f"images of {node.name}: {self.images}")
        node.images = self.images
        return lambda: setattr(node, "images", ImagePulls.SUCCEED)


@dataclass(frozen=True)
class KubeletRefuses(NodeFault):
    """The kubelet rejects each new pod."""

    reason: str = "UnexpectedAdmissionError"

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        context.log(f"the kubelet of {node.name} refuses pods: {self.reason}")
        node.refuses = self.reason
        return lambda: setattr(node, "refuses", "")


@dataclass(frozen=True)
class PodDeleted(WorkerFault):
    """A pod is deleted. With `force`, the object is deleted at once, and its processes run on for a while."""

    force: bool = False

    def inject(self, context: FaultContext) -> None:
        worker = self.find_worker(context)
        context.delete_pod(worker, force=self.force)


@dataclass(frozen=True)
class PodEvicted(WorkerFault):
    """The kubelet evicts a pod because of memory pressure."""

    def inject(self, context: FaultContext) -> None:
        worker = self.find_worker(context)
        context.log(f"pod {worker.name} is evicted")
        context.find_node(worker).evict(worker.uid)


@dataclass(frozen=True)
class PodPreempted(WorkerFault):
    """The scheduler preempts a pod for one with a higher priority."""

    def inject(self, context: FaultContext) -> None:
        worker, api = self.find_worker(context), context.world.api
        pod = api.get("pods", worker.name, NAMESPACE)
        if pod is None:
            raise TargetMissing(f"pod {worker.name} is gone")
        context.log(f"pod {worker.name} is preempted")
        disrupt_pod(api, pod, "PreemptionByScheduler", "preempting", context.world.wall_time(), manager="scheduler")


@dataclass(frozen=True)
class PodKilledForMemory(WorkerFault):
    """The kernel kills the trainer's container for lack of memory."""

    def inject(self, context: FaultContext) -> None:
        worker = self.find_worker(context)
        context.log(f"pod {worker.name} is killed for memory")
        worker.kill(137, "OOMKilled")


def _fail_worker(worker: SimulatedWorker, xid: int) -> None:
    if xid:
        worker.raise_gpu_error(xid)
    else:
        worker.crash_rank()


def _set_opt_out_label(context: FaultContext, node: SimulatedNode, value: str | None) -> None:
    if context.world.api.get("nodes", node.name) is not None:
        labels = {"metadata": {"labels": {LABEL_NO_QUARANTINE: value}}}
        context.log(f"{node.name} is {'opted out of' if value else 'free for'} quarantines")
        context.world.api.patch("nodes", node.name, "", labels, manager=PERSON_MANAGER)
