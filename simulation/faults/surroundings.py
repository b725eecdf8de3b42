"""Faults that affect many nodes or jobs at once: what they share fails."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pacekeeper_operator.node_probe import DRIVER, NETWORK

from ..kubernetes.nodes import SimulatedNode
from .context import FaultContext
from .fault import Fault, HealCallback, WorkerFault
from .targets import TargetMissing


class Away(StrEnum):
    """What is unavailable."""

    NAMES = "names"
    STORAGE = "storage"


_ERRORS = {
    Away.NAMES: "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    Away.STORAGE: "OSError: [Errno 5] Input/output error: '/data/shards/0007'",
}
"""Errors of processes that need it."""


class Loss(StrEnum):
    """What is lost at the start of an outage."""

    NOTHING = "nothing"
    RANK = "rank"  # a rank crashes
    WORKER = "worker"  # a pod is force-deleted
    NODE = "node"  # a worker's node loses power for the same time


class Check(StrEnum):
    """The check that probe pods fail."""

    NETWORK = NETWORK
    DRIVER = DRIVER


@dataclass(frozen=True)
class OutageAtStart(WorkerFault):
    """Each rank that starts fails with the same error before its first step.

    With `at_import`, each worker fails before it is ready. Running ranks continue, except for the `loss`.
    """

    away: Away = Away.NAMES
    at_import: bool = False
    loss: Loss = Loss.NODE

    def inject(self, context: FaultContext) -> HealCallback:
        node = self._lose(context)
        trainings = context.world.trainings
        context.log(f"every process that starts fails: {_ERRORS[self.away]}")
        trainings.outage, trainings.outage_at_import = _ERRORS[self.away], self.at_import

        def heal() -> None:
            trainings.outage, trainings.outage_at_import = "", False
            if node is not None:
                node.power_on()

        return heal

    def _lose(self, context: FaultContext) -> SimulatedNode | None:
        """Cause the loss. Return the node to power on again, if any."""
        if self.loss is Loss.NOTHING:
            return None
        worker = self.find_worker(context)
        if self.loss is Loss.RANK:
            worker.crash_rank()
        elif self.loss is Loss.WORKER:
            context.delete_pod(worker, force=True)
        else:
            node = context.find_node(worker)
            node.power_off()
            return node
        return None


@dataclass(frozen=True)
class ProbesFailAlike(WorkerFault):
    """Probe pods fail the same check on every node.

    At the same time, a worker reports an `xid` that did not occur (0: none), so that its node is probed.
    """

    check: Check = Check.NETWORK
    xid: int = 79

    def inject(self, context: FaultContext) -> HealCallback:
        if self.xid:
            self.find_worker(context).claim_gpu_error(self.xid)
        node_pool = context.world.node_pool
        context.log(f"probe pods fail check {self.check} on every node")
        node_pool.fail_probes(self.check)
        return lambda: node_pool.fail_probes("")


@dataclass(frozen=True)
class RackLosesPower(Fault):
    """The nodes of several members lose power at once. They return one after the other, `apart` seconds apart."""

    nodes: int = 3
    apart: float = 20.0
    job: int = 0

    def inject(self, context: FaultContext) -> HealCallback:
        names = context.nodes_of(self.job)[: self.nodes]
        if len(names) < 2:
            raise TargetMissing("the job is on one node")
        nodes = [context.world.nodes[name] for name in names]
        for node in nodes:
            node.power_off()

        def heal() -> None:
            for index, node in enumerate(nodes):
                context.world.call_after(index * self.apart, node.power_on)

        return heal
