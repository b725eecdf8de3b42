"""A worker: one pod's launcher, sidecar and ranks, and what befalls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pacekeeper.launcher.gpu import GpuEvent
from pacekeeper_analysis.diagnose.gpu_health import Origin, Sign, xid_blame
from pacekeeper_analysis.reports import GpuHealth, Heartbeat
from pacekeeper_operator.api import LABEL_JOB, TRAINER

from .folder import Folder
from .launcher import Launcher
from .rank import BAD_VALUE, LEFT, SIGKILL, Rank, Stand
from .sidecar import Sidecar

if TYPE_CHECKING:
    from ..kubernetes.containers import Exited
    from ..world import World
    from .training import Training

Object = dict[str, Any]

KILLED = 137
LAUNCHER, SIDECAR, POD = "launcher", "sidecar", "pod"
"""What can be frozen."""
_RESTARTS = (1.0, 2.0)
"""Seconds until a sidecar's container that has ended runs again."""
_IN_THE_KERNEL = (60.0, 240.0)
"""Seconds until a system call that holds a process returns."""
_CRASHES = (0.05, 1.0)
"""Seconds from a GPU's error to the end of the rank that uses it."""


class Worker:
    """`simulation.kubernetes.containers.Containers` of a worker's pod."""

    def __init__(self, world: World, pod: Object, node: str, address: str, exited: Exited) -> None:
        metadata = pod["metadata"]
        trainer = next(container for container in pod["spec"]["containers"] if container["name"] == TRAINER)
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
        self.folder = Folder(Heartbeat(worker=self.name))
        self.gone = False
        """Nothing of it runs any more."""
        self.ended = False
        """Its trainer's container has."""
        self.script_fails = False
        """Each rank that starts here fails before its first step."""
        self.script_error = BAD_VALUE
        """Of what."""
        self.figures_lie = ""
        """What is wrong in what its sidecar tells of ranks: "huge", or "foreign"; "": nothing."""
        self.refuses = False
        """The ranks here cannot follow another course than the simplest."""
        self.loss_is_bad = False
        self._world = world
        self._exited = exited
        self._random = world.random(f"worker {self.uid}")
        self._sidecars = 1
        self._kill_at = float("inf")
        self._ending: tuple[int, str, str] | None = None
        """How the trainer's container ends, once none of its processes is left."""
        self.training: Training = world.trainings.of_worker(self)
        self.launcher = Launcher(world, self)
        self.sidecar = Sidecar(world, self, self._sidecars)

    @property
    def ranks(self) -> list[Rank]:
        """Those that run."""
        return [rank for rank in self.launcher.ranks if rank.alive]

    @property
    def without_power(self) -> bool:
        return not self._world.network.reaches(self.node, self.node)

    # What its kubelet does.

    def start(self) -> None:
        self.sidecar.start()
        self.launcher.start()

    def terminate(self, grace: float) -> None:
        at = self._world.now() + grace
        if at < self._kill_at:
            self._kill_at = at
            self._world.after(grace, self._grace_is_over, at)
            self.launcher.end()

    def _grace_is_over(self, at: float) -> None:
        if at == self._kill_at:
            self.kill()

    def kill(self, code: int = KILLED, reason: str = "") -> None:
        self.gone = True
        self.sidecar.kill()
        self._trainer_dies(code, reason)

    def restart_sidecar(self) -> None:
        self.sidecar.kill()
        if not self.gone:
            self._sidecars += 1
            self.sidecar = Sidecar(self._world, self, self._sidecars)
            self.sidecar.start()

    # How the trainer's container ends.

    def trainer_ends(self, code: int, message: str = "") -> None:
        """Its launcher has exited."""
        self._trainer_dies(code, "", message)

    def _trainer_dies(self, code: int, reason: str, message: str = "") -> None:
        """Process 1 of its container has ended, and takes all others along."""
        self.launcher.kill()
        if self._ending is None:
            self._ending = (code, reason, message)
        for rank in self.launcher.ranks:
            rank.end(SIGKILL)
        self._end_if_empty()

    def rank_ended(self, rank: Rank) -> None:
        for tell in self._world.trainings.on_rank_exit:
            tell(rank)
        self.launcher.wake()
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        """A process that cannot be killed keeps its container."""
        if self._ending is None or self.ranks:
            return
        if self.gone:
            self._world.workers.pop(self.uid, None)
        if not self.ended:
            self.ended = True
            for tell in self._world.trainings.on_exit:
                tell(self)
            self.sidecar.end()
            self._exited(*self._ending)

    # What befalls it.

    def freeze(self, part: str) -> None:
        """SIGSTOP to the launcher, the sidecar, or all that runs in the pod."""
        self._world.story.tell(self.name, f"{part} is frozen")
        if part in (LAUNCHER, POD):
            self.launcher.pause()
            self.sidecar.listen()
        if part == POD:
            for rank in self.ranks:
                rank.stand_still(Stand.STOPPED, self._world.now())
        if part in (SIDECAR, POD):
            self.sidecar.pause()

    def thaw(self, part: str) -> None:
        self._world.story.tell(self.name, f"{part} runs on")
        if part in (SIDECAR, POD):
            self.sidecar.resume()
        if part in (LAUNCHER, POD):
            self.launcher.resume()
        if part == POD:
            for rank in self.ranks:
                rank.move_on(Stand.STOPPED, self._world.now())

    def kill_sidecar(self) -> None:
        """Its container runs again soon."""
        self._world.story.tell(self.name, "the sidecar is killed")
        self.sidecar.kill()
        killed = self.sidecar
        self._world.after(self._random.uniform(*_RESTARTS), self._restart, killed)

    def _restart(self, killed: Sidecar) -> None:
        if self.sidecar is killed and not self.ended:
            self.restart_sidecar()

    def crash(self, code: int = 1, local: int = 0) -> None:
        """Of a rank that runs. Negative: the signal."""
        for rank in self._victims(local, f"crashes with {code}"):
            error = "ValueError: a bad sample" if code > 0 and code != LEFT else ""
            if error:
                self._seems_the_script(rank)
            rank.end(code, error)

    def out_of_memory(self, local: int = 0) -> None:
        """The kernel kills a rank."""
        for rank in self._victims(local, "is out of memory"):
            self._seems_the_script(rank)
            rank.end(SIGKILL, out_of_memory=True)

    def _seems_the_script(self, rank: Rank) -> None:
        """What strikes before a first step looks like a mistake of the script, whoever struck."""
        if not rank.steps_in_round:
            self.training.failed_on[self.name] = None

    def hang(self, where: str = Stand.TRAIN, local: int = 0) -> None:
        """For good: in training, in a collective or in the loader."""
        for rank in self._victims(local, f"hangs ({where})", seen=True):
            rank.stand_still(Stand(where), self._world.now())

    def stop_rank(self, local: int = 0) -> None:
        """SIGSTOP, for good."""
        for rank in self._victims(local, "is stopped", seen=True):
            rank.stand_still(Stand.STOPPED, self._world.now())

    def hang_in_kernel(self, local: int = 0) -> None:
        """It cannot be killed for minutes."""
        for rank in self._victims(local, "hangs in the kernel", seen=True):
            rank.stand_still(Stand.KERNEL, self._world.now())
            self._world.after(self._random.uniform(*_IN_THE_KERNEL), self._return_from_kernel, rank)

    def _return_from_kernel(self, rank: Rank) -> None:
        rank.move_on(Stand.KERNEL, self._world.now())

    def bad_loss(self, bad: bool) -> None:
        """From its next step on, or no longer."""
        self.loss_is_bad = bad

    def claim_gpu_error(self, xid: int, local: int = 0) -> None:
        """The launcher reports what no GPU has had."""
        gpu = f"GPU-{self.uid[:8]}-{local}"
        self._world.story.tell(self.name, f"reports XID {xid} on {gpu}, which it has not had")
        self.launcher.gpu_error(GpuEvent(gpu, xid, f"XID {xid} on {gpu}"))

    def gpu_error(self, xid: int, local: int = 0) -> None:
        """NVML tells the launcher, and the rank crashes."""
        gpu = f"GPU-{self.uid[:8]}-{local}"
        self._world.story.tell(self.name, f"XID {xid} on {gpu}")
        self.launcher.gpu_error(GpuEvent(gpu, xid, f"XID {xid} on {gpu}"))
        self._world.prometheus.count_xid(self.node, str(local), xid)
        for rank in self._victims(local, "loses its GPU"):
            if xid_blame(xid) is Origin.APPLICATION:
                self._seems_the_script(rank)
            error = f"RuntimeError: CUDA error: uncorrectable error (XID {xid})"
            self._world.after(self._random.uniform(*_CRASHES), rank.end, 1, error)

    def gpu_warns(self, warns: bool, local: int = 0) -> None:
        """NVML tells the launcher, and DCGM tells of the node, for whoever comes there, too."""
        gpu = f"GPU-{self.uid[:8]}-{local}"
        self._world.story.tell(self.name, f"rows of {gpu} {'wait' if warns else 'no longer wait'} to be remapped")
        self.launcher.gpu_health((GpuHealth(gpu, (str(Sign.ROWS_PENDING),) if warns else ()),))
        self._world.prometheus.show_pending_rows(self.node, str(local), warns)

    def _victims(self, local: int, words: str, *, seen: bool = False) -> list[Rank]:
        """The rank at this place, if one runs there; `seen`: only where its launcher sees what it does. One that stands
        still before is missed by its peers alone, whose time-outs are not simulated."""
        found = [rank for rank in self.ranks if rank.local == local and (rank.run is not None or not seen)]
        for rank in found:
            self._world.story.tell(self.name, f"rank {rank.number} {words}")
        return found
