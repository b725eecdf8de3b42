"""A worker: one pod's launcher, sidecar and ranks, and what befalls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pacekeeper.launcher.gpu import GpuEvent
from pacekeeper_analysis.diagnose.gpu_health import XidOrigin, GpuSign, classify_xid
from pacekeeper_analysis.reports import GpuHealth, Heartbeat
from pacekeeper_operator.api import LABEL_JOB, TRAINER_CONTAINER

from .folder import PodFolder
from .launcher import SimulatedLauncher
from .rank import BAD_VALUE, TERMINATED_EXIT_CODE, SIGKILL_EXIT_CODE, SimulatedRank, StallReason
from .sidecar import SimulatedSidecar

if TYPE_CHECKING:
    from ..kubernetes.containers import ExitCallback
    from ..world import World
    from .training import SimulatedTraining

Object = dict[str, Any]

KILLED_POD_EXIT_CODE = 137
LAUNCHER_PROCESS, SIDECAR_PROCESS, ALL_PROCESSES = "launcher", "sidecar", "pod"
"""What can be frozen."""
_SIDECAR_RESTART_SECONDS = (1.0, 2.0)
"""Seconds until a sidecar's container that has ended runs again."""
_SYSTEM_CALL_SECONDS = (60.0, 240.0)
"""Seconds until a system call that holds a process returns."""
_GPU_CRASH_SECONDS = (0.05, 1.0)
"""Seconds from a GPU's error to the end of the rank that uses it."""


class SimulatedWorker:
    """`simulation.kubernetes.containers.Containers` of a worker's pod."""

    def __init__(self, world: World, pod: Object, node: str, address: str, exited: ExitCallback) -> None:
        metadata = pod["metadata"]
        trainer = next(container for container in pod["spec"]["containers"] if container["name"] == TRAINER_CONTAINER)
        self.pod = pod
        self.name: str = metadata["name"]
        self.uid: str = metadata["uid"]
        self.namespace: str = metadata["namespace"]
        self.job: str = metadata["labels"][LABEL_JOB]
        self.job_uid: str = metadata["ownerReferences"][0]["uid"]
        self.node = node
        self.address = address
        self.environment: dict[str, str] = {
            item["name"]: str(item["value"]) for item in trainer.get("env", ()) if "value" in item
        }
        self.arguments: list[str] = trainer.get("args", [])
        self.window_steps = int(self.environment.get("PACEKEEPER_WINDOW_STEPS") or 32)
        self.folder = PodFolder(Heartbeat(worker=self.name))
        self.is_gone = False
        """Nothing of it runs any more."""
        self.ended = False
        """Its trainer's container has."""
        self.script_fails = False
        """Each rank that starts here fails before its first step."""
        self.script_error = BAD_VALUE
        """Of what."""
        self.wrong_metrics = ""
        """What is wrong in what its sidecar tells of ranks: "huge", or "foreign"; "": nothing."""
        self.refuses_requests = False
        """The ranks here cannot follow another course than the simplest."""
        self.loss_is_bad = False
        self._world = world
        self._exited = exited
        self._random = world.create_random(f"worker {self.uid}")
        self._sidecars = 1
        self._kill_at = float("inf")
        self._ending: tuple[int, str, str] | None = None
        """How the trainer's container ends, once none of its processes is left."""
        self.training: SimulatedTraining = world.trainings.get_or_create_training(self)
        self.launcher = SimulatedLauncher(world, self)
        self.sidecar = SimulatedSidecar(world, self, self._sidecars)

    @property
    def ranks(self) -> list[SimulatedRank]:
        """Those that run."""
        return [rank for rank in self.launcher.ranks if rank.is_alive]

    @property
    def has_no_power(self) -> bool:
        return not self._world.network.can_reach(self.node, self.node)

    # What its kubelet does.

    def start(self) -> None:
        self.sidecar.start()
        self.launcher.start()

    def terminate(self, grace: float) -> None:
        at = self._world.now() + grace
        if at < self._kill_at:
            self._kill_at = at
            self._world.call_after(grace, self._on_grace_expired, at)
            self.launcher.end()

    def _on_grace_expired(self, at: float) -> None:
        if at == self._kill_at:
            self.kill()

    def kill(self, code: int = KILLED_POD_EXIT_CODE, reason: str = "") -> None:
        self.is_gone = True
        self.sidecar.kill()
        self._end_trainer(code, reason)

    def restart_sidecar(self) -> None:
        self.sidecar.kill()
        if not self.is_gone:
            self._sidecars += 1
            self.sidecar = SimulatedSidecar(self._world, self, self._sidecars)
            self.sidecar.start()

    # How the trainer's container ends.

    def on_trainer_end(self, code: int, message: str = "") -> None:
        """Its launcher has exited."""
        self._end_trainer(code, "", message)

    def _end_trainer(self, code: int, reason: str, message: str = "") -> None:
        """Process 1 of its container has ended, and takes all others along."""
        self.launcher.kill()
        if self._ending is None:
            self._ending = (code, reason, message)
        for rank in self.launcher.ranks:
            rank.end(SIGKILL_EXIT_CODE)
        self._end_if_empty()

    def on_rank_end(self, rank: SimulatedRank) -> None:
        for tell in self._world.trainings.on_rank_exit:
            tell(rank)
        self.launcher.wake()
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        """A process that cannot be killed keeps its container."""
        if self._ending is None or self.ranks:
            return
        if self.is_gone:
            self._world.workers.pop(self.uid, None)
        if not self.ended:
            self.ended = True
            for tell in self._world.trainings.on_exit:
                tell(self)
            self.sidecar.end()
            self._exited(*self._ending)

    # What befalls it.

    def pause(self, part: str) -> None:
        """SIGSTOP to the launcher, the sidecar, or all that runs in the pod."""
        self._world.log.record(self.name, f"{part} is frozen")
        if part in (LAUNCHER_PROCESS, ALL_PROCESSES):
            self.launcher.pause()
            self.sidecar.check_launcher()
        if part == ALL_PROCESSES:
            for rank in self.ranks:
                rank.stall(StallReason.STOPPED, self._world.now())
        if part in (SIDECAR_PROCESS, ALL_PROCESSES):
            self.sidecar.pause()

    def resume(self, part: str) -> None:
        self._world.log.record(self.name, f"{part} runs on")
        if part in (SIDECAR_PROCESS, ALL_PROCESSES):
            self.sidecar.resume()
        if part in (LAUNCHER_PROCESS, ALL_PROCESSES):
            self.launcher.resume()
        if part == ALL_PROCESSES:
            for rank in self.ranks:
                rank.resume(StallReason.STOPPED, self._world.now())

    def kill_sidecar(self) -> None:
        """Its container runs again soon."""
        self._world.log.record(self.name, "the sidecar is killed")
        self.sidecar.kill()
        killed = self.sidecar
        self._world.call_after(self._random.uniform(*_SIDECAR_RESTART_SECONDS), self._restart_killed_sidecar, killed)

    def _restart_killed_sidecar(self, killed: SimulatedSidecar) -> None:
        if self.sidecar is killed and not self.ended:
            self.restart_sidecar()

    def crash_rank(self, code: int = 1, local: int = 0) -> None:
        """Of a rank that runs. Negative: the signal."""
        for rank in self._list_target_ranks(local, f"crashes with {code}"):
            error = "ValueError: a bad sample" if code > 0 and code != TERMINATED_EXIT_CODE else ""
            if error:
                self._may_blame_script(rank)
            rank.end(code, error)

    def kill_rank_for_memory(self, local: int = 0) -> None:
        """The kernel kills a rank."""
        for rank in self._list_target_ranks(local, "is out of memory"):
            self._may_blame_script(rank)
            rank.end(SIGKILL_EXIT_CODE, out_of_memory=True)

    def _may_blame_script(self, rank: SimulatedRank) -> None:
        """What strikes before a first step looks like a mistake of the script, whoever struck."""
        if not rank.steps_in_round:
            self.training.failed_on[self.name] = None

    def hang_rank(self, where: str = StallReason.TRAIN, local: int = 0) -> None:
        """For good: in training, in a collective or in the loader."""
        for rank in self._list_target_ranks(local, f"hangs ({where})", seen=True):
            rank.stall(StallReason(where), self._world.now())

    def stop_rank(self, local: int = 0) -> None:
        """SIGSTOP, for good."""
        for rank in self._list_target_ranks(local, "is stopped", seen=True):
            rank.stall(StallReason.STOPPED, self._world.now())

    def hang_rank_in_kernel(self, local: int = 0) -> None:
        """It cannot be killed for minutes."""
        for rank in self._list_target_ranks(local, "hangs in the kernel", seen=True):
            rank.stall(StallReason.KERNEL, self._world.now())
            self._world.call_after(self._random.uniform(*_SYSTEM_CALL_SECONDS), self._return_from_kernel, rank)

    def _return_from_kernel(self, rank: SimulatedRank) -> None:
        rank.resume(StallReason.KERNEL, self._world.now())

    def set_bad_loss(self, bad: bool) -> None:
        """From its next step on, or no longer."""
        self.loss_is_bad = bad

    def claim_gpu_error(self, xid: int, local: int = 0) -> None:
        """The launcher reports what no GPU has had."""
        gpu = f"GPU-{self.uid[:8]}-{local}"
        self._world.log.record(self.name, f"reports XID {xid} on {gpu}, which it has not had")
        self.launcher.report_gpu_error(GpuEvent(gpu, xid, f"XID {xid} on {gpu}"))

    def raise_gpu_error(self, xid: int, local: int = 0) -> None:
        """NVML tells the launcher, and the rank crashes."""
        gpu = f"GPU-{self.uid[:8]}-{local}"
        self._world.log.record(self.name, f"XID {xid} on {gpu}")
        self.launcher.report_gpu_error(GpuEvent(gpu, xid, f"XID {xid} on {gpu}"))
        self._world.prometheus.count_xid(self.node, str(local), xid)
        for rank in self._list_target_ranks(local, "loses its GPU"):
            if classify_xid(xid) is XidOrigin.APPLICATION:
                self._may_blame_script(rank)
            error = f"RuntimeError: CUDA error: uncorrectable error (XID {xid})"
            self._world.call_after(self._random.uniform(*_GPU_CRASH_SECONDS), rank.end, 1, error)

    def set_gpu_warning(self, warns: bool, local: int = 0) -> None:
        """NVML tells the launcher, and DCGM tells of the node, for whoever comes there, too."""
        gpu = f"GPU-{self.uid[:8]}-{local}"
        self._world.log.record(self.name, f"rows of {gpu} {'wait' if warns else 'no longer wait'} to be remapped")
        self.launcher.set_gpu_health((GpuHealth(gpu, (str(GpuSign.ROWS_PENDING),) if warns else ()),))
        self._world.prometheus.show_pending_rows(self.node, str(local), warns)

    def _list_target_ranks(self, local: int, words: str, *, seen: bool = False) -> list[SimulatedRank]:
        """The rank at this place, if one runs there; `seen`: only where its launcher sees what it does. One that stands
        still before is missed by its peers alone, whose time-outs are not simulated."""
        found = [rank for rank in self.ranks if rank.local == local and (rank.training_round is not None or not seen)]
        for rank in found:
            self._world.log.record(self.name, f"rank {rank.number} {words}")
        return found
