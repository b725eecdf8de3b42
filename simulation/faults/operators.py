"""What goes wrong with the operator's own pods and with its Lease."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pacekeeper_operator.services.leadership import LEASE

from ..network import API, PROMETHEUS
from ..operators.pod import OperatorPod
from ..world import OPERATOR_NAMESPACE
from .fault import Fault, Heal, Missed, OperatorFault
from .scene import PERSON

if TYPE_CHECKING:
    from .scene import Scene


class Beyond(StrEnum):
    """Whom a pod of the operator does not reach."""

    API = "api"
    NODES = "nodes"
    PROMETHEUS = "prometheus"
    ALL = "all"


@dataclass(frozen=True)
class OperatorKilled(OperatorFault):
    """SIGKILL: its container starts again."""

    def strike(self, scene: Scene) -> None:
        self.pod(scene).kill()


@dataclass(frozen=True)
class OperatorFrozen(OperatorFault):
    """SIGSTOP: it wakes up in a world that has gone on."""

    def strike(self, scene: Scene) -> Heal:
        pod = self.pod(scene)
        process = pod.process
        pod.pause()
        return lambda: pod.resume() if pod.process is process else None


@dataclass(frozen=True)
class OperatorRemoved(OperatorFault):
    """The pod goes by force, and another is made; with `runs_on` the old one's process does not hear of it so soon."""

    runs_on: bool = False

    def strike(self, scene: Scene) -> None:
        scene.world.deployment.replace(self.pod(scene), OperatorPod.lose if self.runs_on else OperatorPod.remove)


@dataclass(frozen=True)
class OperatorReplaced(OperatorFault):
    """In order, as by a rolling update."""

    def strike(self, scene: Scene) -> None:
        scene.world.deployment.replace(self.pod(scene), OperatorPod.end)


@dataclass(frozen=True)
class OperatorIsCutOff(OperatorFault):
    """From some, in both directions."""

    beyond: Beyond = Beyond.API

    def strike(self, scene: Scene) -> Heal:
        name, network = self.pod(scene).name, scene.world.network
        scene.tell(f"{name} is cut off from {self.beyond}")
        if self.beyond is Beyond.ALL:
            network.isolate(name)
            return lambda: network.rejoin(name)
        others = {
            Beyond.API: [API],
            Beyond.NODES: list(scene.world.nodes),
            Beyond.PROMETHEUS: [PROMETHEUS],
        }[self.beyond]
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

    def strike(self, scene: Scene) -> Heal:
        name, clocks = self.pod(scene).name, scene.world.clocks
        scene.tell(f"the clock of {name} is off by {self.hours:g} h")
        clocks[name] = self.hours * 3600.0

        def heal() -> None:
            clocks.pop(name, None)

        return heal


@dataclass(frozen=True)
class OperatorScaled(Fault):
    """To so many replicas, and back."""

    replicas: int = 2

    def strike(self, scene: Scene) -> Heal:
        deployment = scene.world.deployment
        before = scene.world.settings.operators
        scene.tell(f"the operator is scaled to {self.replicas}")
        deployment.scale(self.replicas)
        return lambda: deployment.scale(before)


@dataclass(frozen=True)
class LeaseDeleted(Fault):
    """By a person."""

    def strike(self, scene: Scene) -> None:
        if scene.world.api.get("leases", LEASE, OPERATOR_NAMESPACE) is None:
            raise Missed("there is no Lease")
        scene.tell("the Lease is deleted")
        scene.world.api.delete("leases", LEASE, OPERATOR_NAMESPACE)


@dataclass(frozen=True)
class LeaseEdited(Fault):
    """It names somebody who does not exist, for a very long time."""

    holder: str = "nobody"
    seconds: int = 3600

    def strike(self, scene: Scene) -> None:
        if scene.world.api.get("leases", LEASE, OPERATOR_NAMESPACE) is None:
            raise Missed("there is no Lease")
        scene.tell(f"the Lease names {self.holder}")
        spec = {"holderIdentity": self.holder, "leaseDurationSeconds": self.seconds}
        scene.world.api.patch("leases", LEASE, OPERATOR_NAMESPACE, {"spec": spec}, manager=PERSON)
