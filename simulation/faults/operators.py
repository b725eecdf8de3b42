"""Faults of the operator's own pods and of its Lease."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pacekeeper_operator.kube.leader_election import LEASE_NAME

from ..network import API_PLACE, PROMETHEUS_PLACE
from ..operators.pod import OperatorPod
from ..world import OPERATOR_NAMESPACE
from .context import PERSON_MANAGER, FaultContext
from .fault import Fault, HealCallback, OperatorFault
from .targets import TargetMissing


class OperatorPartition(StrEnum):
    """What an operator pod does not reach."""

    API = "api"
    NODES = "nodes"
    PROMETHEUS = "prometheus"
    ALL = "all"


@dataclass(frozen=True)
class OperatorKilled(OperatorFault):
    """SIGKILL: the container restarts."""

    def inject(self, context: FaultContext) -> None:
        self.find_pod(context).kill()


@dataclass(frozen=True)
class OperatorPaused(OperatorFault):
    """SIGSTOP: when the operator resumes, its state is outdated."""

    def inject(self, context: FaultContext) -> HealCallback:
        pod = self.find_pod(context)
        process = pod.process
        pod.pause()
        return lambda: pod.resume() if pod.process is process else None


@dataclass(frozen=True)
class OperatorRemoved(OperatorFault):
    """A pod is force-deleted and replaced. With `runs_on`, its process ends only later."""

    runs_on: bool = False

    def inject(self, context: FaultContext) -> None:
        context.world.deployment.replace(
            self.find_pod(context), OperatorPod.remove_unnoticed if self.runs_on else OperatorPod.remove
        )


@dataclass(frozen=True)
class OperatorReplaced(OperatorFault):
    """A pod is replaced in order, as in a rolling update."""

    def inject(self, context: FaultContext) -> None:
        context.world.deployment.replace(self.find_pod(context), OperatorPod.end)


@dataclass(frozen=True)
class OperatorIsCutOff(OperatorFault):
    """An operator pod is cut off from some places, in both directions."""

    partition: OperatorPartition = OperatorPartition.API

    def inject(self, context: FaultContext) -> HealCallback:
        name, network = self.find_pod(context).name, context.world.network
        context.log(f"{name} is cut off from {self.partition}")
        if self.partition is OperatorPartition.ALL:
            network.isolate(name)
            return lambda: network.rejoin(name)
        places = {
            OperatorPartition.API: [API_PLACE],
            OperatorPartition.NODES: list(context.world.nodes),
            OperatorPartition.PROMETHEUS: [PROMETHEUS_PLACE],
        }[self.partition]
        for place in places:
            network.cut(name, place)

        def heal() -> None:
            for place in places:
                network.mend(name, place)

        return heal


@dataclass(frozen=True)
class OperatorClockIsOff(OperatorFault):
    """The clock of one pod's node jumps, and later jumps back."""

    hours: float = 24.0

    def inject(self, context: FaultContext) -> HealCallback:
        name, clocks = self.find_pod(context).name, context.world.clocks
        context.log(f"the clock of {name} is off by {self.hours:g} h")
        clocks[name] = self.hours * 3600.0

        def heal() -> None:
            clocks.pop(name, None)

        return heal


@dataclass(frozen=True)
class OperatorScaled(Fault):
    """The operator is scaled to `replicas`, and back."""

    replicas: int = 2

    def inject(self, context: FaultContext) -> HealCallback:
        deployment = context.world.deployment
        original = context.world.settings.operators
        context.log(f"the operator is scaled to {self.replicas}")
        deployment.scale(self.replicas)
        return lambda: deployment.scale(original)


@dataclass(frozen=True)
class LeaseDeleted(Fault):
    """A user deletes the Lease."""

    def inject(self, context: FaultContext) -> None:
        if context.world.api.get("leases", LEASE_NAME, OPERATOR_NAMESPACE) is None:
            raise TargetMissing("there is no Lease")
        context.log("the Lease is deleted")
        context.world.api.delete("leases", LEASE_NAME, OPERATOR_NAMESPACE)


@dataclass(frozen=True)
class LeaseEdited(Fault):
    """A user edits the Lease: it names a holder that does not exist, for a long time."""

    holder: str = "nobody"
    seconds: int = 3600

    def inject(self, context: FaultContext) -> None:
        if context.world.api.get("leases", LEASE_NAME, OPERATOR_NAMESPACE) is None:
            raise TargetMissing("there is no Lease")
        context.log(f"the Lease names {self.holder}")
        spec = {"holderIdentity": self.holder, "leaseDurationSeconds": self.seconds}
        context.world.api.patch("leases", LEASE_NAME, OPERATOR_NAMESPACE, {"spec": spec}, manager=PERSON_MANAGER)
