"""The faults of the demo, each made from outside as the real world makes it, and what ought to come of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo import job, kube
from testcluster import faults, release

TRAINER = "trainer"
REPLICAS = 4
"""spec.replicas of examples/gpt.yaml."""
FULL = "pacekeeper.dev/demo=full:NoSchedule"
XID_FALLEN_OFF_THE_BUS = 79
BASELINE_STEPS = 30
"""A fault that is found by a comparison with how the job trained before needs a before."""
STEP_MEGABITS = 22
"""What a rank sends of a step: 470,000 gradients of 32 bits, 1.5 times over (a ring of four ranks)."""


@dataclass(frozen=True)
class Relief:
    """The end of a fault while the job goes on, after which it shall train as before again."""

    name: str
    how: str
    relieve: Callable[[], str]  # ends the fault and returns what was done, in words
    as_before: Callable[[], bool]
    event: str  # by which the operator says so
    remedy: str  # what it does
    timeout: float = 240.0


@dataclass(frozen=True)
class Fault:
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
    relief: Relief | None = None


def rank_crash() -> str:
    worker = job.worker_of_rank(2)
    faults.signal_process(_rank_process(worker), signal.SIGKILL)
    return f"SIGKILL to rank 2 on {worker}"


def rank_hang() -> str:
    worker = job.worker_of_rank(1)
    faults.signal_process(_rank_process(worker), signal.SIGSTOP)
    return f"SIGSTOP to rank 1 on {worker}"


def worker_deleted() -> str:
    worker = job.worker_of_rank(3)
    kube.kubectl("delete", "pod", worker, "-n", job.NAMESPACE, "--wait=false")
    return f"kubectl delete pod {worker}"


@dataclass(frozen=True)
class StragglerFault:
    """One container's CPU quota cut while it runs, without a word to Kubernetes.

    To `part` of what another one uses: where the machine has too few processors for all, none comes near its quota.
    """

    part: float

    def inject(self) -> str:
        worker = job.worker_of_rank(2)
        used = faults.used_millicores(job.NAMESPACE, job.worker_of_rank(0), TRAINER)
        millicores = max(1, round(self.part * used))
        faults.set_cpu_quota(job.NAMESPACE, worker, TRAINER, millicores)
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
        worker, self.node = _away_from_the_operator((1, 2, 3))
        step_seconds = job.step_seconds()
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
        worker = job.worker_of_rank(0)
        self.node = job.node_of(worker)
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
        worker, self.node = _away_from_the_operator((3, 2))
        faults.node_down(self.node)
        return f"link of {self.node} down, which runs {worker}"

    def undo(self) -> None:
        if self.node:
            faults.node_up(self.node)


@dataclass
class NoRoom:
    """A worker and all spares lost, and no node takes another pod."""

    full: bool = False

    def inject(self) -> str:
        lost = [job.worker_of_rank(3), *job.spares()]
        kube.kubectl("taint", "nodes", "--all", "--overwrite", FULL)
        self.full = True
        kube.kubectl("delete", "pod", *lost, "-n", job.NAMESPACE, "--wait=false")
        return f"all nodes full (taint {FULL}); kubectl delete pod {' '.join(lost)}"

    def undo(self) -> None:
        if self.full:
            kube.kubectl("taint", "nodes", "--all", f"{FULL}-")
        self.full = False

    def relieve(self) -> str:
        self.undo()
        return "nodes take pods again"


def all_faults() -> list[Fault]:
    """In the order in which the demo makes them: what leaves the cluster smaller comes last."""
    slowed, crawling, link = StragglerFault(0.65), StragglerFault(0.2), LinkFault(step_times=1.5)
    gpu, node, no_room = GpuFault(), NodeFault(), NoRoom()
    replaced = ("ReplaceWorker",)
    return [
        Fault("rank crash", "SIGKILL", ("crash",), ("RestartRanks",), rank_crash),
        Fault("rank hang", "SIGSTOP", ("hang",), ("RestartRanks",), rank_hang),
        Fault(
            "straggler",
            "CPU quota cut to 65 %",
            ("straggler",),
            ("Rebalance", "ReplaceWorker"),  # what slow steps have cost by then may be more than a warm spare does
            slowed.inject,
            steady_steps=BASELINE_STEPS,
        ),
        Fault(
            "straggler beyond shares",
            "CPU quota cut to 20 %",
            ("straggler",),
            replaced,
            crawling.inject,
            timeout=180,
            steady_steps=BASELINE_STEPS,
        ),
        Fault(
            "slow link",
            "tc tbf",
            ("slow-communication",),
            ("LocalSGD",),
            link.inject,
            link.undo,
            timeout=180,
            steady_steps=BASELINE_STEPS,
            relief=Relief(
                "link well again",
                "tc tbf removed",
                link.relieve,
                lambda: job.mode_in_force() == "Sync",
                event="SyncModeChanged",
                remedy="Sync",
            ),
        ),
        Fault("worker deleted", "kubectl delete pod", ("worker-lost",), replaced, worker_deleted),
        Fault("GPU error", "XID 79 in DCGM's metrics", ("gpu-error",), replaced, gpu.inject, gpu.undo),
        Fault("node lost", "link down", ("node-lost",), replaced, node.inject, node.undo),
        Fault(
            "no room for another worker",
            "all nodes tainted, kubectl delete pod",
            ("worker-lost",),
            replaced,
            no_room.inject,
            no_room.undo,
            spare=False,
            relief=Relief(
                "room again",
                "taints removed",
                no_room.relieve,
                lambda: job.trains_with(REPLICAS),
                event="Resized",
                remedy="Regrow",
            ),
        ),
    ]


def _away_from_the_operator(ranks: Sequence[int]) -> tuple[str, str]:
    """Worker and node of the first of these ranks that is not on the node of the operator that leads."""
    operator = release.leading_pod()
    places = [(worker, job.node_of(worker)) for worker in map(job.worker_of_rank, ranks)]
    return next((worker, node) for worker, node in places if operator is None or node != operator["spec"]["nodeName"])


def _rank_process(worker: str) -> int:
    """The rank's process on the machine: the youngest of the trainer container that runs the training script."""
    pids = faults.container_pids(job.NAMESPACE, worker, TRAINER)
    if len(pids) < 3:  # launcher, warm process, rank
        raise kube.DemoError(f"{worker} runs no rank now (processes {pids})")
    return pids[-1]
