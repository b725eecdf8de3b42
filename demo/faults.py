"""The faults of the demo, each made from outside as the real world makes it, and what ought to come of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo import job, kube
from testcluster import faults, release

DEMO_TRAINER_CONTAINER = "trainer"
REPLICAS = 4
"""spec.replicas of examples/gpt.yaml."""
FULL_TAINT = "pacekeeper.dev/demo=full:NoSchedule"
XID_FALLEN_OFF_THE_BUS = 79
BASELINE_STEPS = 30
"""A fault that is found by a comparison with how the job trained before needs a before."""
STEP_MEGABITS = 22
"""What a rank sends of a step: 470,000 gradients of 32 bits, 1.5 times over (a ring of four ranks)."""


@dataclass(frozen=True)
class FaultRelief:
    """The end of a fault while the job goes on, after which it shall train as before again."""

    name: str
    how: str
    relieve: Callable[[], str]  # ends the fault and returns what was done, in words
    is_recovered: Callable[[], bool]
    event: str  # by which the operator says so
    remedy: str  # what it does
    timeout: float = 240.0


@dataclass(frozen=True)
class DemoFault:
    """One fault. `inject` makes it and returns what was done, in words; `undo` ends what would outlast the demo."""

    name: str
    how: str
    causes: tuple[str, ...]  # the causes under which the operator may rightly open its Incident
    remedies: tuple[str, ...]  # any of these is a right answer
    inject: Callable[[], str]
    undo: Callable[[], None] = lambda: None
    timeout: float = 120.0
    steady_steps: int = 10  # that the job shall have trained undisturbed before
    spare: bool = True  # whether with one in place
    relief: FaultRelief | None = None


def crash_rank() -> str:
    worker = job.find_worker_of_rank(2)
    faults.signal_process(_find_rank_process(worker), signal.SIGKILL)
    return f"SIGKILL to rank 2 on {worker}"


def hang_rank() -> str:
    worker = job.find_worker_of_rank(1)
    faults.signal_process(_find_rank_process(worker), signal.SIGSTOP)
    return f"SIGSTOP to rank 1 on {worker}"


def delete_worker() -> str:
    worker = job.find_worker_of_rank(3)
    kube.run_kubectl("delete", "pod", worker, "-n", job.NAMESPACE, "--wait=false")
    return f"kubectl delete pod {worker}"


@dataclass(frozen=True)
class StragglerFault:
    """One container's CPU quota cut while it runs, without a word to Kubernetes.

    To `part` of what another one uses: where the machine has too few processors for all, none comes near its quota.
    """

    part: float

    def inject(self) -> str:
        worker = job.find_worker_of_rank(2)
        used = faults.measure_millicores(job.NAMESPACE, job.find_worker_of_rank(0), DEMO_TRAINER_CONTAINER)
        millicores = max(1, round(self.part * used))
        faults.set_cpu_quota(job.NAMESPACE, worker, DEMO_TRAINER_CONTAINER, millicores)
        return f"CPU quota of {worker} cut to {millicores}m, where its peers use {used:.0f}m"


@dataclass
class LinkFault:
    """The network of one worker's node slowed down, both ways: every gradient has to pass it.

    So slow that this takes `step_times` steps of before: on a machine whose steps are longer, a backward pass would
    hide what passes at a given rate.
    """

    step_times: float
    node: str = ""

    def inject(self) -> str:
        worker, self.node = _find_worker_off_operator_node((1, 2, 3))
        step_seconds = job.read_step_seconds()
        if step_seconds is None:
            raise kube.DemoError("Prometheus knows no step of the job")
        megabits = max(1, round(STEP_MEGABITS / (self.step_times * step_seconds)))
        faults.slow_link(self.node, f"{megabits}mbit")
        return f"link of {self.node} slowed to {megabits} Mbit/s, which runs {worker}"

    def undo(self) -> None:
        if self.node:
            faults.clear_link(self.node)

    def relieve(self) -> str:
        self.undo()
        return f"link of {self.node} well again"


@dataclass
class GpuFault:
    """A GPU that has fallen off the bus, as DCGM's exporter shows it."""

    node: str = ""

    def inject(self) -> str:
        worker = job.find_worker_of_rank(0)
        self.node = job.find_node(worker)
        faults.set_xid(self.node, XID_FALLEN_OFF_THE_BUS)
        return f"XID {XID_FALLEN_OFF_THE_BUS} on GPU 0 of {self.node}, which runs {worker}"

    def undo(self) -> None:
        if self.node:
            faults.set_xid(self.node, 0)


@dataclass
class NodeFault:
    """A node whose network cable is pulled: its pods go on, but nobody hears of them."""

    node: str = ""

    def inject(self) -> str:
        """The operator's own would be healed only once Kubernetes has moved the operator."""
        worker, self.node = _find_worker_off_operator_node((3, 2))
        faults.disconnect_node(self.node)
        return f"link of {self.node} down, which runs {worker}"

    def undo(self) -> None:
        if self.node:
            faults.reconnect_node(self.node)


@dataclass
class NoRoomFault:
    """A worker and all spares lost, and no node takes another pod."""

    full: bool = False

    def inject(self) -> str:
        lost = [job.find_worker_of_rank(3), *job.list_spares()]
        kube.run_kubectl("taint", "nodes", "--all", "--overwrite", FULL_TAINT)
        self.full = True
        kube.run_kubectl("delete", "pod", *lost, "-n", job.NAMESPACE, "--wait=false")
        return f"all nodes full (taint {FULL_TAINT}); kubectl delete pod {' '.join(lost)}"

    def undo(self) -> None:
        if self.full:
            kube.run_kubectl("taint", "nodes", "--all", f"{FULL_TAINT}-")
        self.full = False

    def relieve(self) -> str:
        self.undo()
        return "nodes take pods again"


def list_faults() -> list[DemoFault]:
    """In the order in which the demo makes them: what leaves the cluster smaller comes last."""
    slowed, crawling, link = StragglerFault(0.65), StragglerFault(0.2), LinkFault(step_times=1.5)
    gpu, node, no_room = GpuFault(), NodeFault(), NoRoomFault()
    replaced = ("ReplaceWorker",)
    return [
        DemoFault("rank crash", "SIGKILL", ("crash",), ("RestartRanks",), crash_rank),
        DemoFault("rank hang", "SIGSTOP", ("hang",), ("RestartRanks",), hang_rank),
        DemoFault(
            "straggler",
            "CPU quota cut to 65 %",
            ("straggler",),
            ("Rebalance", "ReplaceWorker"),  # what slow steps have cost by then may be more than a warm spare does
            slowed.inject,
            steady_steps=BASELINE_STEPS,
        ),
        DemoFault(
            "straggler beyond shares",
            "CPU quota cut to 20 %",
            ("straggler",),
            replaced,
            crawling.inject,
            timeout=180,
            steady_steps=BASELINE_STEPS,
        ),
        DemoFault(
            "slow link",
            "tc tbf",
            ("slow-communication",),
            ("LocalSGD",),
            link.inject,
            link.undo,
            timeout=180,
            steady_steps=BASELINE_STEPS,
            relief=FaultRelief(
                "link well again",
                "tc tbf removed",
                link.relieve,
                lambda: job.get_current_mode() == "Sync",
                event="SyncModeChanged",
                remedy="Sync",
            ),
        ),
        DemoFault("worker deleted", "kubectl delete pod", ("worker-lost",), replaced, delete_worker),
        DemoFault("GPU error", "XID 79 in DCGM's metrics", ("gpu-error",), replaced, gpu.inject, gpu.undo),
        DemoFault("node lost", "link down", ("node-lost",), replaced, node.inject, node.undo),
        DemoFault(
            "no room for another worker",
            "all nodes tainted, kubectl delete pod",
            ("worker-lost",),
            replaced,
            no_room.inject,
            no_room.undo,
            spare=False,
            relief=FaultRelief(
                "room again",
                "taints removed",
                no_room.relieve,
                lambda: job.is_training_with(REPLICAS),
                event="Resized",
                remedy="Regrow",
            ),
        ),
    ]


def _find_worker_off_operator_node(ranks: Sequence[int]) -> tuple[str, str]:
    """Worker and node of the first of these ranks that is not on the node of the operator that leads."""
    operator = release.find_leading_pod()
    places = [(worker, job.find_node(worker)) for worker in map(job.find_worker_of_rank, ranks)]
    return next((worker, node) for worker, node in places if operator is None or node != operator["spec"]["nodeName"])


def _find_rank_process(worker: str) -> int:
    """The rank's process on the machine: the youngest of the trainer container that runs the training script."""
    pids = faults.list_container_pids(job.NAMESPACE, worker, DEMO_TRAINER_CONTAINER)
    if len(pids) < 3:  # launcher, warm process, rank
        raise kube.DemoError(f"{worker} runs no rank now (processes {pids})")
    return pids[-1]
