"""A worker: one pod's launcher, sidecar, and ranks, and the events that affect them."""

from __future__ import annotations

from pacekeeper.launcher.health.gpu_monitor import GpuEvent
from pacekeeper_analysis.failures.gpu_health import GpuSign, XidOrigin, classify_xid
from pacekeeper_analysis.protocol.reports import GpuHealth

from ..kubernetes.api.objects import Object
from ..ports import KILLED_EXIT_CODE, ExitCallback
from .launcher import SimulatedLauncher
from .pod import WorkerPod
from .rank import SIGKILL_EXIT_CODE, TERMINATED_EXIT_CODE, SimulatedRank, StallReason
from .sidecar import SimulatedSidecar
from .training import SimulatedTraining
from .worker_world import WorkerWorld

LAUNCHER_PROCESS, SIDECAR_PROCESS, ALL_PROCESSES = "launcher", "sidecar", "pod"
"""Processes that can be paused."""
_SIDECAR_RESTART_SECONDS = (1.0, 2.0)
"""Seconds until a sidecar's container that has exited restarts."""
_SYSTEM_CALL_SECONDS = (60.0, 240.0)
"""Seconds until a system call that blocks a process returns."""
_GPU_CRASH_SECONDS = (0.05, 1.0)
"""Seconds from a GPU's error to the exit of the rank that uses it."""


class SimulatedWorker(WorkerPod):
    """The containers of a worker's pod (`simulation.ports.Containers`)."""

    training: SimulatedTraining
    launcher: SimulatedLauncher
    sidecar: SimulatedSidecar

    def __init__(self, world: WorkerWorld, pod: Object, node: str, address: str, exited: ExitCallback) -> None:
        super().__init__(world, pod, node, address)
        self.ended = False
        """Whether its trainer's container has ended."""
        self._world = world
        self._exited = exited
        self._random = world.create_random(f"worker {self.uid}")
        self._sidecars = 1
        self._kill_at = float("inf")
        self._ending: tuple[int, str, str] | None = None
        """How the trainer's container ends, once none of its processes is left."""
        self.training = world.trainings.get_or_create_training(self)
        self.launcher = SimulatedLauncher(world, self, self.on_rank_end, self.on_trainer_end)
        self.sidecar = SimulatedSidecar(world, self, self.launcher, self._sidecars)

    @property
    def ranks(self) -> list[SimulatedRank]:
        """The running ranks."""
        return [rank for rank in self.launcher.ranks if rank.is_alive]

    def export_steps(self) -> list[int] | None:
        """Return the step of each rank that has reached its peers; None: the sidecar does not answer."""
        if not self.sidecar.serves or self.sidecar.dead or self.sidecar.paused:
            return None
        return [rank.step for rank in self.launcher.ranks if rank.training_round is not None]

    # Actions of its kubelet.

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

    def kill(self, code: int = KILLED_EXIT_CODE, reason: str = "") -> None:
        self.is_gone = True
        self.sidecar.kill()
        self._end_trainer(code, reason)

    def restart_sidecar(self) -> None:
        self.sidecar.kill()
        if not self.is_gone:
            self._sidecars += 1
            self.sidecar = SimulatedSidecar(self._world, self, self.launcher, self._sidecars)
            self.sidecar.start()

    # The end of the trainer's container.

    def on_trainer_end(self, code: int, message: str = "") -> None:
        """End the trainer's container: its launcher has exited."""
        self._end_trainer(code, "", message)

    def _end_trainer(self, code: int, reason: str, message: str = "") -> None:
        """End the trainer's container: when process 1 ends, all others are killed."""
        self.launcher.kill()
        if self._ending is None:
            self._ending = (code, reason, message)
        for rank in self.launcher.ranks:
            rank.end(SIGKILL_EXIT_CODE)
        self._end_if_empty()

    def on_rank_end(self, rank: SimulatedRank) -> None:
        for callback in self._world.trainings.on_rank_exit:
            callback(rank)
        self.launcher.wake()
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        """End the container when its processes are gone. A process that cannot be killed keeps it."""
        if self._ending is None or self.ranks:
            return
        if self.is_gone:
            self._world.forget_worker(self.uid)
        if not self.ended:
            self.ended = True
            for callback in self._world.trainings.on_exit:
                callback(self)
            self.sidecar.end()
            self._exited(*self._ending)

    # Faults.

    def pause(self, part: str) -> None:
        """Stop the launcher, the sidecar, or all processes of the pod with SIGSTOP."""
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
        """Kill the sidecar. Its container restarts soon."""
        self._world.log.record(self.name, "the sidecar is killed")
        self.sidecar.kill()
        killed = self.sidecar
        self._world.call_after(self._random.uniform(*_SIDECAR_RESTART_SECONDS), self._restart_killed_sidecar, killed)

    def _restart_killed_sidecar(self, killed: SimulatedSidecar) -> None:
        if self.sidecar is killed and not self.ended:
            self.restart_sidecar()

    def crash_rank(self, code: int = 1, local: int = 0) -> None:
        """Crash a running rank. A negative code is the signal."""
        for rank in self._list_target_ranks(local, f"crashes with {code}"):
            error = "ValueError: a bad sample" if code > 0 and code != TERMINATED_EXIT_CODE else ""
            if error:
                self._may_blame_script(rank)
            rank.end(code, error)

    def kill_rank_for_memory(self, local: int = 0) -> None:
        """Let the kernel kill a rank for lack of memory."""
        for rank in self._list_target_ranks(local, "is out of memory"):
            self._may_blame_script(rank)
            rank.end(SIGKILL_EXIT_CODE, out_of_memory=True)

    def _may_blame_script(self, rank: SimulatedRank) -> None:
        """Record that a failure before a first step looks like a mistake of the script."""
        if not rank.steps_in_round:
            self.training.failed_on[self.name] = None

    def hang_rank(self, where: str = StallReason.TRAIN, local: int = 0) -> None:
        """Hang a rank permanently: in training, in a collective, or in the loader."""
        for rank in self._list_target_ranks(local, f"hangs ({where})", observed=True):
            rank.stall(StallReason(where), self._world.now())

    def stop_rank(self, local: int = 0) -> None:
        """Stop a rank with SIGSTOP permanently."""
        for rank in self._list_target_ranks(local, "is stopped", observed=True):
            rank.stall(StallReason.STOPPED, self._world.now())

    def hang_rank_in_kernel(self, local: int = 0) -> None:
        """Hang a rank in the kernel: it cannot be killed for minutes."""
        for rank in self._list_target_ranks(local, "hangs in the kernel", observed=True):
            rank.stall(StallReason.KERNEL, self._world.now())
            self._world.call_after(self._random.uniform(*_SYSTEM_CALL_SECONDS), self._return_from_kernel, rank)

    def _return_from_kernel(self, rank: SimulatedRank) -> None:
        rank.resume(StallReason.KERNEL, self._world.now())

    def set_bad_loss(self, bad: bool) -> None:
        """Set whether the loss is bad, from the next step on."""
        self.loss_is_bad = bad

    def claim_gpu_error(self, xid: int, local: int = 0) -> None:
        """Let the launcher report an XID that did not occur."""
        gpu = f"GPU-{self.uid[:8]}-{local}"
        self._world.log.record(self.name, f"reports XID {xid} on {gpu}, which it has not had")
        self.launcher.report_gpu_error(GpuEvent(gpu, xid, f"XID {xid} on {gpu}"))

    def raise_gpu_error(self, xid: int, local: int = 0) -> None:
        """Raise an XID: NVML reports it to the launcher, and the rank crashes."""
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
        """Set whether rows wait to be remapped: NVML reports it to the launcher, and DCGM for the node."""
        gpu = f"GPU-{self.uid[:8]}-{local}"
        self._world.log.record(self.name, f"rows of {gpu} {'wait' if warns else 'no longer wait'} to be remapped")
        self.launcher.set_gpu_health((GpuHealth(gpu, (str(GpuSign.ROWS_PENDING),) if warns else ()),))
        self._world.prometheus.show_pending_rows(self.node, str(local), warns)

    def _list_target_ranks(self, local: int, description: str, *, observed: bool = False) -> list[SimulatedRank]:
        """Return the rank with this local rank, if it runs.

        `observed`: only if its launcher observes it. Before that, only peers would notice a stalled rank, and their
        timeouts are not simulated.
        """
        targets = [
            rank for rank in self.ranks if rank.local == local and (rank.training_round is not None or not observed)
        ]
        for rank in targets:
            self._world.log.record(self.name, f"rank {rank.number} {description}")
        return targets
