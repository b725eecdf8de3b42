"""What goes wrong with the operator's own pods and with its Lease."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pacekeeper_operator.services.leadership import LEASE_NAME

from ..network import API_PLACE, PROMETHEUS_PLACE
from ..operators.pod import OperatorPod
from ..world import OPERATOR_NAMESPACE
from .fault import Fault, HealCallback, TargetMissing, OperatorFault
from .scene import PERSON_MANAGER

if TYPE_CHECKING:
    from .scene import FaultContext


class OperatorPartition(StrEnum):
    """Whom a pod of the operator does not reach."""

    API = "api"
    NODES = "nodes"
    PROMETHEUS = "prometheus"
    ALL = "all"


@dataclass(frozen=True)
class OperatorKilled(OperatorFault):
    """SIGKILL: its container starts again."""

    def inject(self, context: FaultContext) -> None:
        self.find_pod(context).kill()


@dataclass(frozen=True)
class OperatorPaused(OperatorFault):
    """SIGSTOP: it wakes up in a world that has gone on."""

    def inject(self, context: FaultContext) -> HealCallback:
        pod = self.find_pod(context)
        process = pod.process
        pod.pause()
        return lambda: pod.resume() if pod.process is process else None


@dataclass(frozen=True)
class OperatorRemoved(OperatorFault):
    """The pod goes by force, and another is made; with `runs_on` the old one's process does not hear of it so soon."""

    runs_on: bool = False

    def inject(self, context: FaultContext) -> None:
        context.world.deployment.replace(self.find_pod(context), OperatorPod.remove_unnoticed if self.runs_on else OperatorPod.remove)


@dataclass(frozen=True)
class OperatorReplaced(OperatorFault):
    """In order, as by a rolling update."""

    def inject(self, context: FaultContext) -> None:
        context.world.deployment.replace(self.find_pod(context), OperatorPod.end)


@dataclass(frozen=True)
class OperatorIsCutOff(OperatorFault):
    """From some, in both directions."""

    partition: OperatorPartition = OperatorPartition.API

    def inject(self, context: FaultContext) -> HealCallback:
        name, network = self.find_pod(context).name, context.world.network
        context.log(f"{name} is cut off from {self.partition}")
        if self.partition is OperatorPartition.ALL:
            network.isolate(name)
            return lambda: network.rejoin(name)
        others = {
            OperatorPartition.API: [API_PLACE],
            OperatorPartition.NODES: list(context.world.nodes),
            OperatorPartition.PROMETHEUS: [PROMETHEUS_PLACE],
        }[self.partition]
        for other in others:
            network.cut(name, other)

        def heal() -> None:
            for other in others:
                network.mend(name, other)

        return heal


@dataclass(frozen=True)
class OperatorClockIsOff(OperatorFault):
    """Of one pod's node: it jumps, and later back."""

    hours: float = 24.0

    def strike(self, scene: FaultContext) -> HealCallback:
        name, clocks = self.find_pod(scene).name, scene.world.clocks
        scene.log(f"the clock of {name} is off by {self.hours:g} h")
        clocks[name] = self.hours * 3600.0

        def heal() -> None:
            clocks.pop(name, None)

        return heal


@dataclass(frozen=True)
class OperatorScaled(Fault):
    """To so many replicas, and back."""

    replicas: int = 2

    def inject(self, context: FaultContext) -> HealCallback:
        deployment = context.world.deployment
        before = context.world.settings.operators
        context.log(f"the operator is scaled to {self.replicas}")
        deployment.scale(self.replicas)
        return lambda: deployment.scale(before)


@dataclass(frozen=True)
class LeaseDeleted(Fault):
    """By a person."""

    def inject(self, context: FaultContext) -> None:
        if context.world.api.get("leases", LEASE_NAME, OPERATOR_NAMESPACE) is None:
            raise TargetMissing("there is no Lease")
        context.log("the Lease is deleted")
        context.world.api.delete("leases", LEASE_NAME, OPERATOR_NAMESPACE)


@dataclass(frozen=True)
class LeaseEdited(Fault):
    """It names somebody who does not exist, for a very long time."""

    holder: str = "nobody"
    seconds: int = 3600

    def inject(self, context: FaultContext) -> None:
        if context.world.api.get("leases", LEASE_NAME, OPERATOR_NAMESPACE) is None:
            raise TargetMissing("there is no Lease")
        context.log(f"the Lease names {self.holder}")
        spec = {"holderIdentity": self.holder, "leaseDurationSeconds": self.seconds}
        context.world.api.patch("leases", LEASE_NAME, OPERATOR_NAMESPACE, {"spec": spec}, manager=PERSON_MANAGER)
