"""What goes wrong inside of workers: ranks, GPUs, scripts, launchers, sidecars, links."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ..workers.rank import BAD_VALUE, MISTAKE
from .fault import Cost, Fault, Heal, Missed, NodeFault, Role, WorkerFault

if TYPE_CHECKING:
    from .scene import Scene


class Stand(StrEnum):
    """Where a rank stands still."""

    TRAIN = "train"
    COLLECTIVE = "collective"
    LOADER = "loader"


class Lie(StrEnum):
    """What a sidecar tells of ranks that is not so."""

    HUGE = "huge"  # its own take years
    FOREIGN = "foreign"  # others', which are not its own


class Part(StrEnum):
    """Of a worker's pod."""

    LAUNCHER = "launcher"
    SIDECAR = "sidecar"
    POD = "pod"


@dataclass(frozen=True)
class RankCrashes(WorkerFault):
    """Negative codes are signals."""

    code: int = 1

    def strike(self, scene: Scene) -> None:
        self.worker(scene).crash(code=self.code)


@dataclass(frozen=True)
class RankRunsOutOfMemory(WorkerFault):
    """The kernel kills it."""

    def strike(self, scene: Scene) -> None:
        self.worker(scene).out_of_memory()


@dataclass(frozen=True)
class RankHangs(WorkerFault):
    """For good: it is to be killed."""

    where: Stand = Stand.TRAIN

    def strike(self, scene: Scene) -> None:
        self.worker(scene).hang(self.where)


@dataclass(frozen=True)
class RankStopped(WorkerFault):
    """SIGSTOP, for good: it does not even say where it stands."""

    def strike(self, scene: Scene) -> None:
        self.worker(scene).stop_rank()


@dataclass(frozen=True)
class RankCannotBeKilled(WorkerFault):
    """It hangs in the kernel."""

    def strike(self, scene: Scene) -> None:
        self.worker(scene).hang_in_kernel()


@dataclass(frozen=True)
class LossIsBad(WorkerFault):
    """Not a number."""

    def strike(self, scene: Scene) -> Heal:
        worker = self.worker(scene)
        worker.bad_loss(True)
        return lambda: worker.bad_loss(False)


@dataclass(frozen=True)
class GpuFails(WorkerFault):
    """An XID: 13 and 31 are the application's, 48, 79 and 95 the hardware's, 94 is contained: it costs one
    process. The rank crashes of it."""

    xid: int = 79

    def strike(self, scene: Scene) -> None:
        self.worker(scene).gpu_error(self.xid)


@dataclass(frozen=True)
class GpuWarns(WorkerFault):
    """Rows of a GPU's memory wait to be remapped, until somebody resets it: everything works on."""

    def strike(self, scene: Scene) -> Heal:
        worker = self.worker(scene)
        worker.gpu_warns(True)
        return lambda: worker.gpu_warns(False)


@dataclass(frozen=True)
class ScriptFails(WorkerFault):
    """In each round, before its first step; with `mistake` of an error in its text."""

    mistake: bool = False

    def strike(self, scene: Scene) -> Heal:
        worker = self.worker(scene)
        worker.script_fails = True
        worker.script_error = MISTAKE if self.mistake else BAD_VALUE
        return lambda: setattr(worker, "script_fails", False)


@dataclass(frozen=True)
class PlanIsRefused(WorkerFault):
    """The ranks cannot follow what the plan asks of them beside training."""

    def strike(self, scene: Scene) -> Heal:
        worker = self.worker(scene)
        worker.refuses = True
        return lambda: setattr(worker, "refuses", False)


@dataclass(frozen=True)
class CheckpointsFail(Fault):
    """The volume of a job takes nothing."""

    costs = (Cost.CHECKPOINTS,)
    job: int = 0

    def strike(self, scene: Scene) -> Heal:
        volume = scene.training(self.job).volume
        volume.fails = True
        return lambda: setattr(volume, "fails", False)


@dataclass(frozen=True)
class CheckpointIsTorn(Fault):
    """The newest one cannot be read."""

    job: int = 0

    def strike(self, scene: Scene) -> None:
        scene.training(self.job).volume.tear_newest()


@dataclass(frozen=True)
class VolumeIsSlow(Fault):
    """Each checkpoint takes so many seconds longer."""

    job: int = 0
    by: float = 20.0

    def strike(self, scene: Scene) -> Heal:
        volume = scene.training(self.job).volume
        volume.slow = self.by
        return lambda: setattr(volume, "slow", 0.0)


@dataclass(frozen=True)
class Frozen(WorkerFault):
    """SIGSTOP."""

    part: Part = Part.LAUNCHER

    def strike(self, scene: Scene) -> Heal:
        worker = self.worker(scene)
        worker.freeze(self.part)
        return lambda: worker.thaw(self.part)


@dataclass(frozen=True)
class ProcessKilled(WorkerFault):
    """SIGKILL to the launcher, or to the sidecar: the kubelet restarts a sidecar, not a trainer."""

    part: Part = Part.LAUNCHER

    def strike(self, scene: Scene) -> None:
        worker = self.worker(scene)
        if self.part is Part.SIDECAR:
            worker.kill_sidecar()
        else:
            worker.kill()


@dataclass(frozen=True)
class FiguresLie(WorkerFault):
    """A worker tells of its ranks what is not so."""

    costs = (Cost.FIGURES,)
    lie: Lie = Lie.HUGE

    def strike(self, scene: Scene) -> Heal:
        worker = self.worker(scene)
        scene.tell(f"{worker.name} lies about ranks: {self.lie}")
        worker.figures_lie = self.lie
        return lambda: setattr(worker, "figures_lie", "")


@dataclass(frozen=True)
class NodeIsSlow(NodeFault):
    """Its ranks take so many times as long."""

    factor: float = 2.0

    def strike(self, scene: Scene) -> Heal:
        node = self.node(scene)
        scene.tell(f"{node.name} is slower by {self.factor:g}")
        node.slow = self.factor
        return lambda: setattr(node, "slow", 1.0)


@dataclass(frozen=True)
class LinkFails(WorkerFault):
    """Between the nodes of two members: so many times slower, or with 0 dead."""

    other: int = 1
    factor: float = 0.0

    def strike(self, scene: Scene) -> Heal:
        one, other = self.worker(scene).node, scene.worker(Role.MEMBER, self.other, self.job).node
        if one == other:
            raise Missed("both are on one node")
        network = scene.world.network
        if self.factor:
            scene.tell(f"the link from {one} to {other} is slower by {self.factor:g}")
            network.slow(one, other, self.factor)
            return lambda: network.slow(one, other, 1.0)
        scene.tell(f"the link from {one} to {other} is dead")
        network.cut(one, other)
        return lambda: network.mend(one, other)
