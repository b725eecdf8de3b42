"""Faults of workers: ranks, GPUs, scripts, launchers, sidecars, links."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..workers.pod import BAD_VALUE, MISTAKE
from .context import FaultContext
from .fault import Cost, Fault, HealCallback, NodeFault, WorkerFault
from .targets import TargetMissing, TargetRole


class HangPoint(StrEnum):
    """Where a rank hangs."""

    TRAIN = "train"
    COLLECTIVE = "collective"
    LOADER = "loader"


class WrongMetrics(StrEnum):
    """How a sidecar's metrics of ranks are wrong."""

    HUGE = "huge"  # its own ranks' values are years
    FOREIGN = "foreign"  # it reports ranks of other workers


class WorkerProcess(StrEnum):
    """The processes of a worker's pod."""

    LAUNCHER = "launcher"
    SIDECAR = "sidecar"
    POD = "pod"


@dataclass(frozen=True)
class RankCrashes(WorkerFault):
    """A rank crashes. Negative codes are signals."""

    code: int = 1

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).crash_rank(code=self.code)


@dataclass(frozen=True)
class RankRunsOutOfMemory(WorkerFault):
    """The kernel kills a rank for lack of memory."""

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).kill_rank_for_memory()


@dataclass(frozen=True)
class RankHangs(WorkerFault):
    """A rank hangs until it is killed."""

    where: HangPoint = HangPoint.TRAIN

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).hang_rank(self.where)


@dataclass(frozen=True)
class RankStopped(WorkerFault):
    """A rank is stopped with SIGSTOP permanently: it does not even write its stack."""

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).stop_rank()


@dataclass(frozen=True)
class RankCannotBeKilled(WorkerFault):
    """A rank hangs in the kernel."""

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).hang_rank_in_kernel()


@dataclass(frozen=True)
class LossIsBad(WorkerFault):
    """The loss is not a number."""

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.set_bad_loss(True)
        return lambda: worker.set_bad_loss(False)


@dataclass(frozen=True)
class GpuFails(WorkerFault):
    """A GPU reports an XID, and its rank crashes.

    XIDs 13 and 31 are the application's, 48, 79, and 95 the hardware's. 94 is contained: it affects one process.
    """

    xid: int = 79

    def inject(self, context: FaultContext) -> None:
        self.find_worker(context).raise_gpu_error(self.xid)


@dataclass(frozen=True)
class GpuWarns(WorkerFault):
    """Rows of a GPU's memory wait to be remapped, until the GPU is reset. Everything keeps working."""

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.set_gpu_warning(True)
        return lambda: worker.set_gpu_warning(False)


@dataclass(frozen=True)
class ScriptFails(WorkerFault):
    """The script fails in each round before its first step. `mistake`: with an error of its source code."""

    mistake: bool = False

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.script_fails = True
        worker.script_error = MISTAKE if self.mistake else BAD_VALUE
        return lambda: setattr(worker, "script_fails", False)


@dataclass(frozen=True)
class PlanIsRefused(WorkerFault):
    """The ranks refuse what the plan requests in addition to training."""

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.refuses_requests = True
        return lambda: setattr(worker, "refuses_requests", False)


@dataclass(frozen=True)
class CheckpointsFail(Fault):
    """Writes to a job's volume fail."""

    costs = (Cost.CHECKPOINTS,)
    job: int = 0

    def inject(self, context: FaultContext) -> HealCallback:
        volume = context.find_training(self.job).volume
        volume.fails = True
        return lambda: setattr(volume, "fails", False)


@dataclass(frozen=True)
class CheckpointIsTorn(Fault):
    """The newest checkpoint cannot be read."""

    job: int = 0

    def inject(self, context: FaultContext) -> None:
        context.find_training(self.job).volume.tear_newest()


@dataclass(frozen=True)
class VolumeIsSlow(Fault):
    """Each checkpoint takes `seconds` longer."""

    job: int = 0
    seconds: float = 20.0

    def inject(self, context: FaultContext) -> HealCallback:
        volume = context.find_training(self.job).volume
        volume.slow = self.seconds
        return lambda: setattr(volume, "slow", 0.0)


@dataclass(frozen=True)
class ProcessPaused(WorkerFault):
    """A process of a worker is stopped with SIGSTOP."""

    part: WorkerProcess = WorkerProcess.LAUNCHER

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        worker.pause(self.part)
        return lambda: worker.resume(self.part)


@dataclass(frozen=True)
class ProcessKilled(WorkerFault):
    """SIGKILL to the launcher or the sidecar. The kubelet restarts a sidecar, but not a trainer."""

    part: WorkerProcess = WorkerProcess.LAUNCHER

    def inject(self, context: FaultContext) -> None:
        worker = self.find_worker(context)
        if self.part is WorkerProcess.SIDECAR:
            worker.kill_sidecar()
        else:
            worker.kill()


@dataclass(frozen=True)
class MetricsAreWrong(WorkerFault):
    """A worker reports wrong metrics of its ranks."""

    costs = (Cost.METRICS,)
    metrics: WrongMetrics = WrongMetrics.HUGE

    def inject(self, context: FaultContext) -> HealCallback:
        worker = self.find_worker(context)
        context.log(f"{worker.name} reports wrong metrics: {self.metrics}")
        worker.wrong_metrics = self.metrics
        return lambda: setattr(worker, "wrong_metrics", "")


@dataclass(frozen=True)
class NodeIsSlow(NodeFault):
    """A node's ranks take `factor` times as long."""

    factor: float = 2.0

    def inject(self, context: FaultContext) -> HealCallback:
        node = self.find_node(context)
        context.log(f"{node.name} is slower by {self.factor:g}")
        node.slow = self.factor
        return lambda: setattr(node, "slow", 1.0)


@dataclass(frozen=True)
class LinkFails(WorkerFault):
    """The link between the nodes of two members is `factor` times slower; 0: it is dead."""

    other: int = 1
    factor: float = 0.0

    def inject(self, context: FaultContext) -> HealCallback:
        node, peer = self.find_worker(context).node, context.find_worker(TargetRole.MEMBER, self.other, self.job).node
        if node == peer:
            raise TargetMissing("both are on one node")
        network = context.world.network
        if self.factor:
            context.log(f"the link from {node} to {peer} is slower by {self.factor:g}")
            network.set_slowdown(node, peer, self.factor)
            return lambda: network.set_slowdown(node, peer, 1.0)
        context.log(f"the link from {node} to {peer} is dead")
        network.cut(node, peer)
        return lambda: network.mend(node, peer)
