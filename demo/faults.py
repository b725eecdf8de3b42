"""The faults of the demo, each caused from outside as in the real world, and the expected result."""

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
"""A fault that is detected by a comparison needs a baseline."""
STEP_MEGABITS = 7
"""Data that a rank sends per step: 141,000 gradients of 32 bits, 1.5 times (a ring of four ranks)."""


@dataclass(frozen=True)
class FaultRelief:
    """The end of a fault while the job runs. Afterwards the job must train as before."""

    name: str
    how: str
    relieve: Callable[[], str]  # ends the fault, and returns a description
    is_recovered: Callable[[], bool]
    event: str  # by which the operator reports it
    remedy: str  # of the operator
    timeout: float = 240.0


@dataclass(frozen=True)
class DemoFault:
    """One fault. `inject` causes it and returns a description. `undo` ends what would outlast the demo."""

    name: str
    how: str
    causes: tuple[str, ...]  # the correct causes of its Incident
    remedies: tuple[str, ...]  # the correct remedies
    inject: Callable[[], str]
    undo: Callable[[], None] = lambda: None
    prepare: Callable[[], None] = lambda: None  # what takes time before the fault
    timeout: float = 120.0
    steady_steps: int = 10  # undisturbed steps before the fault
    spare: bool = True  # whether a spare must be in place before it
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


@dataclass
class StragglerFault:
    """One container's CPU quota is cut while it runs, unknown to Kubernetes.

    The quota is `part` of another container's usage: if the machine has too few processors, no container reaches its
    quota.
    """

    part: float
    worker: str = ""
    used_millicores: float = 0.0  # of another rank

    def prepare(self) -> None:
        """Measure for two seconds, before the fault begins."""
        self.worker = job.find_worker_of_rank(2)
        self.used_millicores = faults.measure_millicores(
            job.NAMESPACE, job.find_worker_of_rank(0), DEMO_TRAINER_CONTAINER
        )

    def inject(self) -> str:
        millicores = max(1, round(self.part * self.used_millicores))
        faults.set_cpu_quota(job.NAMESPACE, self.worker, DEMO_TRAINER_CONTAINER, millicores)
        return f"CPU quota of {self.worker} cut to {millicores}m, where its peers use {self.used_millicores:.0f}m"


@dataclass
class LinkFault:
    """The network of one worker's node is slow, in both directions. Every gradient passes through it.

    A step's gradients then take `step_times` previous steps. With a fixed rate, a longer backward pass on a slower
    machine could hide the delay.
    """

    step_times: float
    node: str = ""

    def inject(self) -> str:
        worker, self.node = _find_worker_off_operator_node((1, 2, 3))
        step_seconds = job.read_step_seconds()
        if step_seconds is None:
            raise kube.DemoError("Prometheus has no step time of the job")
        megabits = max(1, round(STEP_MEGABITS / (self.step_times * step_seconds)))
        faults.slow_link(self.node, f"{megabits}mbit")
        return f"link of {self.node} slowed to {megabits} Mbit/s, which runs {worker}"

    def undo(self) -> None:
        if self.node:
            faults.clear_link(self.node)

    def relieve(self) -> str:
        self.undo()
        return f"link of {self.node} restored"


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
    """A node whose network cable is unplugged: its pods run on, but are unreachable."""

    node: str = ""

    def inject(self) -> str:
        """Disconnect a node without the operator: that would heal only after Kubernetes has moved the operator."""
        worker, self.node = _find_worker_off_operator_node((3, 2))
        faults.disconnect_node(self.node)
        return f"link of {self.node} down, which runs {worker}"

    def undo(self) -> None:
        if self.node:
            faults.reconnect_node(self.node)


@dataclass
class CapacityFault:
    """A worker and all spares are lost, and no node accepts another pod."""

    full: bool = False

    def inject(self) -> str:
        lost_pods = [job.find_worker_of_rank(3), *job.list_spares()]
        kube.run_kubectl("taint", "nodes", "--all", "--overwrite", FULL_TAINT)
        self.full = True
        kube.run_kubectl("delete", "pod", *lost_pods, "-n", job.NAMESPACE, "--wait=false")
        return f"all nodes full (taint {FULL_TAINT}); kubectl delete pod {' '.join(lost_pods)}"

    def undo(self) -> None:
        if self.full:
            kube.run_kubectl("taint", "nodes", "--all", f"{FULL_TAINT}-")
        self.full = False

    def relieve(self) -> str:
        self.undo()
        return "nodes accept pods again"


def list_faults() -> list[DemoFault]:
    """Return the faults in the demo's order: those that reduce the cluster come last."""
    mild_straggler, severe_straggler, slow_link = StragglerFault(0.65), StragglerFault(0.2), LinkFault(step_times=1.5)
    gpu, node, capacity = GpuFault(), NodeFault(), CapacityFault()
    replace_worker = ("ReplaceWorker",)
    return [
        DemoFault("rank crash", "SIGKILL", ("crash",), ("RestartRanks",), crash_rank),
        DemoFault("rank hang", "SIGSTOP", ("hang",), ("RestartRanks",), hang_rank),
        DemoFault(
            "straggler",
            "CPU quota cut to 65 %",
            ("straggler",),
            ("Rebalance",),
            mild_straggler.inject,
            prepare=mild_straggler.prepare,
            steady_steps=BASELINE_STEPS,
        ),
        DemoFault(
            "straggler beyond shares",
            "CPU quota cut to 20 %",
            ("straggler",),
            replace_worker,
            severe_straggler.inject,
            prepare=severe_straggler.prepare,
            timeout=180,
            steady_steps=BASELINE_STEPS,
        ),
        DemoFault(
            "slow link",
            "tc tbf",
            ("slow-communication",),
            ("LocalSGD",),
            slow_link.inject,
            slow_link.undo,
            timeout=180,
            steady_steps=BASELINE_STEPS,
            relief=FaultRelief(
                "link well again",
                "tc tbf removed",
                slow_link.relieve,
                lambda: job.get_current_mode() == "Sync",
                event="SyncModeChanged",
                remedy="Sync",
            ),
        ),
        DemoFault("worker deleted", "kubectl delete pod", ("worker-lost",), replace_worker, delete_worker),
        DemoFault("GPU error", "XID 79 in DCGM's metrics", ("gpu-error",), replace_worker, gpu.inject, gpu.undo),
        DemoFault("node lost", "link down", ("node-lost",), replace_worker, node.inject, node.undo),
        DemoFault(
            "no capacity for another worker",
            "all nodes tainted, kubectl delete pod",
            ("worker-lost",),
            replace_worker,
            capacity.inject,
            capacity.undo,
            spare=False,
            relief=FaultRelief(
                "capacity again",
                "taints removed",
                capacity.relieve,
                lambda: job.is_training_with(REPLICAS),
                event="Resized",
                remedy="Regrow",
            ),
        ),
    ]


def _find_worker_off_operator_node(ranks: Sequence[int]) -> tuple[str, str]:
    """Return worker and node of the first of these ranks that is not on the node of the leading operator."""
    operator_pod = release.find_leading_pod()
    placements = [(worker, job.find_node(worker)) for worker in map(job.find_worker_of_rank, ranks)]
    return next(
        (worker, node)
        for worker, node in placements
        if operator_pod is None or node != operator_pod["spec"]["nodeName"]
    )


def _find_rank_process(worker: str) -> int:
    """Return the rank's process on the machine."""
    pids = faults.list_rank_pids(job.NAMESPACE, worker, DEMO_TRAINER_CONTAINER)
    if not pids:
        raise kube.DemoError(f"{worker} runs no rank now")
    return pids[-1]
