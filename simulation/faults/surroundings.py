"""What goes wrong for many at once, by no fault of theirs: what all nodes and jobs share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pacekeeper_operator.probe import DRIVER, NETWORK

from .fault import Fault, HealCallback, TargetMissing, WorkerFault

if TYPE_CHECKING:
    from ..kubernetes.nodes import SimulatedNode
    from .scene import FaultContext


class Away(StrEnum):
    """What is away."""

    NAMES = "names"
    STORAGE = "storage"


_ERRORS = {
    Away.NAMES: "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    Away.STORAGE: "OSError: [Errno 5] Input/output error: '/data/shards/0007'",
}
"""Of whoever needs it."""


class Loss(StrEnum):
    """What an outage takes along when it begins."""

    NOTHING = "nothing"
    RANK = "rank"  # one crashes
    WORKER = "worker"  # a pod is deleted by force
    NODE = "node"  # a worker's loses power for as long


class Check(StrEnum):
    """In which probe pods fail."""

    NETWORK = NETWORK
    DRIVER = DRIVER


@dataclass(frozen=True)
class OutageAtStart(WorkerFault):
    """Each rank that starts ends with the same error before its first step; with `at_import` each worker, before it is
    ready. What runs goes on, but for what the outage takes along."""

    away: Away = Away.NAMES
    at_import: bool = False
    loss: Loss = Loss.NODE

    def strike(self, scene: FaultContext) -> HealCallback:
        node = self._lose(scene)
        trainings = scene.world.trainings
        scene.log(f"whatever starts ends: {_ERRORS[self.away]}")
        trainings.outage, trainings.outage_at_import = _ERRORS[self.away], self.at_import

        def heal() -> None:
            trainings.outage, trainings.outage_at_import = "", False
            if node is not None:
                node.power_on()

        return heal

    def _lose(self, scene: FaultContext) -> SimulatedNode | None:
        """The node that is to be switched on again."""
        if self.loss is Loss.NOTHING:
            return None
        worker = self.find_worker(scene)
        if self.loss is Loss.RANK:
            worker.crash_rank()
        elif self.loss is Loss.WORKER:
            scene.delete_pod(worker, force=True)
        else:
            node = scene.find_node(worker)
            node.power_off()
            return node
        return None


@dataclass(frozen=True)
class ProbesFailAlike(WorkerFault):
    """Probe pods fail the same check on every node. Meanwhile a worker reports an `xid` that no GPU has had (0: it does
    not), so that its node is looked at."""

    check: Check = Check.NETWORK
    xid: int = 79

    def strike(self, scene: FaultContext) -> HealCallback:
        if self.xid:
            self.find_worker(scene).claim_gpu_error(self.xid)
        fleet = scene.world.node_pool
        scene.log(f"probe pods fail check {self.check} on every node")
        fleet.fail_probes(self.check)
        return lambda: fleet.fail_probes("")


@dataclass(frozen=True)
class RackLosesPower(Fault):
    """The nodes of several members of a job at once. They come back one after the other, so many seconds apart."""

    nodes: int = 3
    apart: float = 20.0
    job: int = 0

    def strike(self, scene: FaultContext) -> HealCallback:
        names = scene.nodes_of(self.job)[: self.nodes]
        if len(names) < 2:
            raise TargetMissing("the job is on one node")
        nodes = [scene.world.nodes[name] for name in names]
        for node in nodes:
            node.power_off()

        def heal() -> None:
            for place, node in enumerate(nodes):
                scene.world.call_after(place * self.apart, node.power_on)

        return heal
