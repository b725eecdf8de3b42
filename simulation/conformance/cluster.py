"""Scenarios on the test cluster. Workers run the PACED program; the operator is a process on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import singledispatch

from pacekeeper_operator.api.names import LABEL_JOB, SIDECAR_CONTAINER, TRAINER_CONTAINER
from pacekeeper_operator.state.desired_state import DesiredState
from testcluster import faults as machine
from testing.kubernetes.cluster import KubectlCluster, running_cluster, scratch_namespace
from testing.kubernetes.jobs import ClusterJob, build_paced_job
from testing.kubernetes.resources import run_without_operator
from testing.operators.operator_process import OperatorProcess, run_operator_process

from ..faults import machines, people, ranks
from ..faults.fault import Fault, HealCallback, NodeFault, WorkerFault
from ..faults.operators import OperatorKilled
from ..faults.targets import TargetMissing, TargetRole
from .scenario import CONFORMANCE_STEP_SECONDS, WORKER_GRACE_SECONDS, ConformanceScenario
from .scenario_run import Object, SequenceEntry, run_scenario

MAX_TRAINING_STEPS = 10_000_000
TRAINER_RESOURCES = {"requests": {"cpu": "20m", "memory": "256Mi"}, "limits": {"memory": "1200Mi"}}
"""Resources of a trainer: so little memory that a rank fills it before it seems to hang. No CPU limit: the kernel's
reclaim would use up the container's quota, and throttle its launcher until it counts as unresponsive."""
MAX_CONCURRENT_JOBS = 3
"""Jobs that train at the same time, unless their scenarios are exclusive."""


@contextmanager
def prepare_cluster() -> Iterator[tuple[KubectlCluster, OperatorProcess]]:
    """Start the cluster with this operator as its only one."""
    with running_cluster() as cluster, run_without_operator(cluster), run_operator_process(cluster) as operator:
        yield cluster, operator


def run_all_on_cluster(
    cluster: KubectlCluster,
    operator: OperatorProcess,
    scenarios: Iterable[ConformanceScenario],
    on_entry: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[ConformanceScenario, tuple[SequenceEntry, ...]]]:
    """Run scenarios and yield their results: concurrent ones first, then exclusive ones one after the other.

    `on_entry`: called with each entry, and with the incidents' messages.
    """
    scenarios = list(scenarios)

    def play(scenario: ConformanceScenario) -> tuple[ConformanceScenario, tuple[SequenceEntry, ...]]:
        return scenario, run_one_on_cluster(cluster, operator, scenario, on_entry)

    with ThreadPoolExecutor(MAX_CONCURRENT_JOBS) as pool:
        yield from pool.map(play, [scenario for scenario in scenarios if not scenario.is_exclusive])
    yield from map(play, [scenario for scenario in scenarios if scenario.is_exclusive])


def run_one_on_cluster(
    cluster: KubectlCluster,
    operator: OperatorProcess,
    scenario: ConformanceScenario,
    on_entry: Callable[[str], None] = lambda _: None,
) -> tuple[SequenceEntry, ...]:
    with scratch_namespace(cluster) as namespace:
        target = ClusterTarget(operator, ClusterJob(cluster, namespace, scenario.job.name), scenario)
        try:
            return asyncio.run(run_scenario(target, scenario, on_entry))
        finally:
            cluster.kubectl("delete", "trainingjobs", "--all", "-n", namespace, "--wait=false")
            if scenario.is_exclusive:
                cluster.kubectl("delete", "nodequarantines", "--all", "--timeout=60s", timeout=70)


@dataclass(frozen=True)
class ClusterTarget:
    """One job in its own namespace."""

    operator: OperatorProcess
    test_job: ClusterJob
    scenario: ConformanceScenario

    def create_job(self) -> None:
        settings = self.scenario.job
        anti_affinity = {
            "labelSelector": {"matchLabels": {LABEL_JOB: settings.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        body = build_paced_job(
            settings.name,
            MAX_TRAINING_STEPS,
            trainer={"resources": TRAINER_RESOURCES},
            environment={"STOP_EVERY": "20", "SLEEP": str(CONFORMANCE_STEP_SECONDS)},
            pod={
                "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [anti_affinity]}},
                "terminationGracePeriodSeconds": WORKER_GRACE_SECONDS,
            },
            replicas=settings.replicas,
            spares=settings.spares,
            **settings.spec,
        )
        ClusterJob.apply(self.test_job.cluster, self.test_job.namespace, body)

    def strike(self, fault: Fault) -> HealCallback | None:
        return _inject_fault(fault, self)

    def kill_operator(self) -> None:
        self.operator.kill()

    def restart_operator(self) -> None:
        self.operator.start()

    def read_job(self) -> Object:
        return self.test_job.read()

    def read_desired(self) -> DesiredState | None:
        return self.test_job.read_desired()

    def list_incidents(self) -> list[Object]:
        return list(self.test_job.list_incidents())

    def list_pods(self) -> frozenset[str]:
        return frozenset(pod["metadata"]["name"] for pod in self.test_job.list_pods())

    def find_rank(self, fault: WorkerFault | NodeFault) -> int:
        """Return the rank of the member that a fault affects: each member has one, in the order of the plan."""
        return fault.index % len(self.test_job.read_plan()["members"])

    def find_worker(self, fault: WorkerFault) -> str:
        """Return the pod that a fault affects. Raises TargetMissing if there is no spare."""
        if fault.role is TargetRole.MEMBER:
            return self.test_job.find_worker(self.find_rank(fault))
        members = [member["worker"] for member in self.test_job.read_plan()["members"]]
        spares = sorted(self.list_pods() - set(members))
        if not spares:
            raise TargetMissing(f"job {self.test_job.name} has no spare")
        return spares[fault.index % len(spares)]

    def command_script(self, fault: WorkerFault, command: str) -> None:
        """Make the script of the affected rank execute a command in its next step."""
        file = self.test_job.find_checkpoint_folder() / f"fault-{self.find_rank(fault)}"
        temporary = file.with_suffix(".new")
        temporary.write_text(command)
        temporary.rename(file)

    def run_kubectl(self, *arguments: str, stdin: str | None = None) -> None:
        self.test_job.cluster.kubectl(*arguments, stdin=stdin)


@singledispatch
def _inject_fault(fault: Fault, target: ClusterTarget) -> HealCallback | None:
    raise NotImplementedError(f"the test cluster cannot inject this fault: {fault}")


@_inject_fault.register
def _(fault: ranks.RankCrashes, target: ClusterTarget) -> None:
    if fault.code < 0:
        target.test_job.crash_rank(target.find_rank(fault))
    else:
        target.command_script(fault, "raise")


@_inject_fault.register
def _(fault: ranks.RankRunsOutOfMemory, target: ClusterTarget) -> None:
    target.command_script(fault, "fill")


@_inject_fault.register
def _(fault: ranks.RankHangs, target: ClusterTarget) -> None:
    target.command_script(fault, "hang")


@_inject_fault.register
def _(fault: ranks.RankStopped, target: ClusterTarget) -> None:
    target.test_job.hang_rank(target.find_rank(fault))


@_inject_fault.register
def _(fault: ranks.ProcessPaused, target: ClusterTarget) -> HealCallback:
    """Stop the launcher only, or all processes of the pod."""
    namespace, worker = target.test_job.namespace, target.find_worker(fault)
    launcher, *other_pids = machine.list_container_pids(namespace, worker, TRAINER_CONTAINER)
    stopped = [launcher]
    if fault.part is ranks.WorkerProcess.POD:
        stopped += [*other_pids, *machine.list_container_pids(namespace, worker, SIDECAR_CONTAINER)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    def heal() -> None:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return heal


@_inject_fault.register
def _(fault: ranks.ProcessKilled, target: ClusterTarget) -> None:
    container = SIDECAR_CONTAINER if fault.part is ranks.WorkerProcess.SIDECAR else TRAINER_CONTAINER
    pid, *_ = machine.list_container_pids(target.test_job.namespace, target.find_worker(fault), container)
    os.kill(pid, signal.SIGKILL)


@_inject_fault.register
def _(fault: machines.PodDeleted, target: ClusterTarget) -> None:
    force_flags = ["--force", "--grace-period=0"] if fault.force else []
    target.run_kubectl(
        "delete", "pod", target.find_worker(fault), "-n", target.test_job.namespace, "--wait=false", *force_flags
    )


@_inject_fault.register
def _(fault: machines.NodeDrained, target: ClusterTarget) -> HealCallback:
    rank = target.find_rank(fault)
    worker, node, namespace = (
        target.test_job.find_worker(rank),
        target.test_job.find_node(rank),
        target.test_job.namespace,
    )
    target.run_kubectl("cordon", node)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": worker, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{worker}/eviction"
    target.run_kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    return lambda: target.run_kubectl("uncordon", node)


@_inject_fault.register
def _(fault: machines.NodeTainted, target: ClusterTarget) -> HealCallback:
    node = target.test_job.find_node(target.find_rank(fault))
    target.run_kubectl("taint", "node", node, f"{machines.MAINTENANCE_TAINT}:{fault.effect}", "--overwrite")
    return lambda: target.run_kubectl("taint", "node", node, f"{machines.MAINTENANCE_TAINT}-")


@_inject_fault.register
def _(fault: machines.NodeIsCutOff, target: ClusterTarget) -> HealCallback:
    node = target.test_job.find_node(target.find_rank(fault))
    machine.disconnect_node(node)
    return lambda: machine.reconnect_node(node)


@_inject_fault.register
def _(_: OperatorKilled, target: ClusterTarget) -> None:
    target.kill_operator()
    target.restart_operator()


@_inject_fault.register
def _(_: people.JobSuspended, target: ClusterTarget) -> HealCallback:
    target.test_job.patch(suspend=True)
    return lambda: target.test_job.patch(suspend=False)


@_inject_fault.register
def _(fault: people.JobScaled, target: ClusterTarget) -> None:
    target.test_job.patch(replicas=fault.replicas)


@_inject_fault.register
def _(_: people.JobFinishes, target: ClusterTarget) -> None:
    """Let the job finish as soon as its ranks check the file."""
    (target.test_job.find_checkpoint_folder() / "stop").touch()
