"""What goes wrong inside of workers: ranks, GPUs, scripts, launchers, sidecars, links."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ..workers.rank import BAD_VALUE, MISTAKE
from .fault import Cost, Fault, HealCallback, TargetMissing, NodeFault, TargetRole, WorkerFault

if TYPE_CHECKING:
    from .scene import FaultContext


class HangPoint(StrEnum):
    """Where a rank stands still."""

    TRAIN = "train"
    COLLECTIVE = "collective"
    LOADER = "loader"


class WrongMetrics(StrEnum):
    """What a sidecar tells of ranks that is not so."""

    HUGE = "huge"  # its own take years
    FOREIGN = "foreign"  # others', which are not its own


class WorkerProcess(StrEnum):
    """Of a worker's pod."""

    LAUNCHER = "launcher"
    SIDECAR = "sidecar"
    POD = "pod"


@dataclass(frozen=True)
class RankCrashes(WorkerFault):
    """Negative codes are signals."""

    code: int = 1

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).crash_rank(code=self.code)


@dataclass(frozen=True)
class RankRunsOutOfMemory(WorkerFault):
    """The kernel kills it."""

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).kill_rank_for_memory()


@dataclass(frozen=True)
class RankHangs(WorkerFault):
    """For good: it is to be killed."""

    where: HangPoint = HangPoint.TRAIN

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).hang_rank(self.where)


@dataclass(frozen=True)
class RankStopped(WorkerFault):
    """SIGSTOP, for good: it does not even say where it stands."""

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).stop_rank()


@dataclass(frozen=True)
class RankCannotBeKilled(WorkerFault):
    """It hangs in the kernel."""

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).hang_rank_in_kernel()


@dataclass(frozen=True)
class LossIsBad(WorkerFault):
    """Not a number."""

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.set_bad_loss(True)
        return lambda: worker.set_bad_loss(False)


@dataclass(frozen=True)
class GpuFails(WorkerFault):
    """An XID: 13 and 31 are the application's, 48, 79 and 95 the hardware's, 94 is contained: it costs one
    process. The rank crashes of it."""

    xid: int = 79

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).raise_gpu_error(self.xid)


@dataclass(frozen=True)
class GpuWarns(WorkerFault):
    """Rows of a GPU's memory wait to be remapped, until somebody resets it: everything works on."""

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.set_gpu_warning(True)
        return lambda: worker.set_gpu_warning(False)


@dataclass(frozen=True)
class ScriptFails(WorkerFault):
    """In each round, before its first step; with `mistake` of an error in its text."""

    mistake: bool = False

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.script_fails = True
        worker.script_error = MISTAKE if self.mistake else BAD_VALUE
        return lambda: setattr(worker, "script_fails", False)


@dataclass(frozen=True)
class PlanIsRefused(WorkerFault):
    """The ranks cannot follow what the plan asks of them beside training."""

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.refuses_requests = True
        return lambda: setattr(worker, "refuses", False)


@dataclass(frozen=True)
class CheckpointsFail(Fault):
    """The volume of a job takes nothing."""

    costs = (Cost.CHECKPOINTS,)
    job: int = 0

    def inject(self, context: FaultContext) -> HealCallback:
        volume = context.find_training(self.job).volume
        volume.fails = True
        return lambda: setattr(volume, "fails", False)


@dataclass(frozen=True)
class CheckpointIsTorn(Fault):
    """The newest one cannot be read."""

    job: int = 0

    def inject(self, context: FaultContext) -> None:
        context.find_training(self.job).volume.tear_newest()


@dataclass(frozen=True)
class VolumeIsSlow(Fault):
    """Each checkpoint takes so many seconds longer."""

    job: int = 0
    seconds: float = 20.0

    def inject(self, context: FaultContext) -> HealCallback:
        volume = context.find_training(self.job).volume
        volume.slow = self.seconds
        return lambda: setattr(volume, "slow", 0.0)


@dataclass(frozen=True)
class ProcessPaused(WorkerFault):
    """SIGSTOP."""

    part: WorkerProcess = WorkerProcess.LAUNCHER

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.pause(self.part)
        return lambda: worker.resume(self.part)


@dataclass(frozen=True)
class ProcessKilled(WorkerFault):
    """SIGKILL to the launcher, or to the sidecar: the kubelet restarts a sidecar, not a trainer."""

    part: WorkerProcess = WorkerProcess.LAUNCHER

    def inject(self, context: FaultContext) -> None:
        worker = self.find_worker(context)
        if self.part is WorkerProcess.SIDECAR:
            worker.kill_sidecar()
        else:
            worker.kill()


@dataclass(frozen=True)
class MetricsAreWrong(WorkerFault):
    """A worker tells of its ranks what is not so."""

    costs = (Cost.METRICS,)
    metrics: WrongMetrics = WrongMetrics.HUGE

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        context.log(f"{worker.name} lies about ranks: {self.metrics}")
        worker.wrong_metrics = self.metrics
        return lambda: setattr(worker, "wrong_metrics", "")


@dataclass(frozen=True)
class NodeIsSlow(NodeFault):
    """Its ranks take so many times as long."""

    factor: float = 2.0

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        context.log(f"{node.name} is slower by {self.factor:g}")
        node.slow = self.factor
        return lambda: setattr(node, "slow", 1.0)


@dataclass(frozen=True)
class LinkFails(WorkerFault):
    """Between the nodes of two members: so many times slower, or with 0 dead."""

    other: int = 1
    factor: float = 0.0

    def inject(self, context: FaultContext) -> HealCallback:
        one, other = self.find_worker(context).node, context.find_worker(TargetRole.MEMBER, self.other, self.job).node
        if one == other:
            raise TargetMissing("both are on one node")
        network = context.world.network
        if self.factor:
            context.log(f"the link from {one} to {other} is slower by {self.factor:g}")
            network.set_slowdown(one, other, self.factor)
            return lambda: network.set_slowdown(one, other, 1.0)
        context.log(f"the link from {one} to {other} is dead")
        network.cut(one, other)
        return lambda: network.mend(one, other)
