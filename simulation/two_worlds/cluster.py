"""A disaster on the test cluster. Its workers train PACED, under an operator that runs as a process of this machine."""

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

from pacekeeper_operator.api import LABEL_JOB, SIDECAR_CONTAINER, TRAINER_CONTAINER
from pacekeeper_operator.state import DesiredState
from testcluster import faults as machine
from tests.support.cluster import KubectlCluster, running_cluster, scratch_namespace
from tests.support.jobs import ClusterJob, build_paced_job
from tests.support.operator_process import OperatorProcess, run_operator_process
from tests.support.resources import run_without_operator

from ..faults import machines, people, ranks
from ..faults.fault import Fault, HealCallback, TargetMissing, NodeFault, TargetRole, WorkerFault
from ..faults.operators import OperatorKilled
from .disaster import WORKER_GRACE_SECONDS, CONFORMANCE_STEP_SECONDS, ConformanceScenario
from .performance import SequenceEntry, Object, run_scenario

MAX_TRAINING_STEPS = 10_000_000
TRAINER_RESOURCES = {"requests": {"cpu": "20m", "memory": "256Mi"}, "limits": {"cpu": "400m", "memory": "1200Mi"}}
"""Of a trainer: so little memory that a rank has filled it before it seems to hang."""
MAX_CONCURRENT_JOBS = 3
"""Jobs that train at the same time, where they do not disturb each other."""


@contextmanager
def prepare_cluster() -> Iterator[tuple[KubectlCluster, OperatorProcess]]:
    """It is up, and has no operator but this one."""
    with running_cluster() as cluster, run_without_operator(cluster), run_operator_process(cluster) as operator:
        yield cluster, operator


def run_all_on_cluster(
    cluster: KubectlCluster,
    operator: OperatorProcess,
    scenarios: Iterable[ConformanceScenario],
    told: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[ConformanceScenario, tuple[SequenceEntry, ...]]]:
    """As they end: those that may be at the same time first, then one after the other. `told`: what happens, with the
    incidents' own words."""
    scenarios = list(scenarios)

    def play(disaster: ConformanceScenario) -> tuple[ConformanceScenario, tuple[SequenceEntry, ...]]:
        return disaster, run_one_on_cluster(cluster, operator, disaster, told)

    with ThreadPoolExecutor(MAX_CONCURRENT_JOBS) as pool:
        yield from pool.map(play, [each for each in scenarios if not each.is_exclusive])
    yield from map(play, [each for each in scenarios if each.is_exclusive])


def run_one_on_cluster(
    cluster: KubectlCluster, operator: OperatorProcess, scenario: ConformanceScenario, told: Callable[[str], None] = lambda _: None
) -> tuple[SequenceEntry, ...]:
    with scratch_namespace(cluster) as namespace:
        stage = ClusterTarget(operator, ClusterJob(cluster, namespace, scenario.job.name), scenario)
        try:
            return asyncio.run(run_scenario(stage, scenario, told))
        finally:
            cluster.kubectl("delete", "trainingjobs", "--all", "-n", namespace, "--wait=false")
            if scenario.is_exclusive:
                cluster.kubectl("delete", "nodequarantines", "--all", "--timeout=60s", timeout=70)


@dataclass(frozen=True)
class ClusterTarget:
    """One job in a namespace of its own."""

    operator: OperatorProcess
    test_job: ClusterJob
    scenario: ConformanceScenario

    def create_job(self) -> None:
        settings = self.scenario.job
        apart = {
            "labelSelector": {"matchLabels": {LABEL_JOB: settings.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        body = build_paced_job(
            settings.name,
            MAX_TRAINING_STEPS,
            trainer={"resources": TRAINER_RESOURCES},
            environment={"STOP_EVERY": "20", "SLEEP": str(CONFORMANCE_STEP_SECONDS)},
            pod={
                "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
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
        """Of the member that a fault strikes: each has one, in the order of the plan."""
        return fault.index % len(self.test_job.read_plan()["members"])

    def find_worker(self, fault: WorkerFault) -> str:
        """Its pod."""
        if fault.role is TargetRole.MEMBER:
            return self.test_job.find_worker(self.find_rank(fault))
        seated = [member["worker"] for member in self.test_job.read_plan()["members"]]
        spares = sorted(self.list_pods() - set(seated))
        if not spares:
            raise TargetMissing(f"job {self.test_job.name} has no spare")
        return spares[fault.index % len(spares)]

    def command_script(self, fault: WorkerFault, word: str) -> None:
        """The script of the rank that it strikes does it, in its next step."""
        file = self.test_job.find_checkpoint_folder() / f"fault-{self.find_rank(fault)}"
        written = file.with_suffix(".new")
        written.write_text(word)
        written.rename(file)

    def run_kubectl(self, *arguments: str, stdin: str | None = None) -> None:
        self.test_job.cluster.kubectl(*arguments, stdin=stdin)


@singledispatch
def _inject_fault(fault: Fault, stage: ClusterTarget) -> HealCallback | None:
    raise NotImplementedError(f"nobody can do this to the test cluster: {fault}")


@_inject_fault.register
def _(fault: ranks.RankCrashes, stage: ClusterTarget) -> None:
    if fault.code < 0:
        stage.test_job.crash_rank(stage.find_rank(fault))
    else:
        stage.command_script(fault, "raise")


@_inject_fault.register
def _(fault: ranks.RankRunsOutOfMemory, stage: ClusterTarget) -> None:
    stage.command_script(fault, "fill")


@_inject_fault.register
def _(fault: ranks.RankHangs, stage: ClusterTarget) -> None:
    stage.command_script(fault, "hang")


@_inject_fault.register
def _(fault: ranks.RankStopped, stage: ClusterTarget) -> None:
    stage.test_job.hang_rank(stage.find_rank(fault))


@_inject_fault.register
def _(fault: ranks.ProcessPaused, stage: ClusterTarget) -> HealCallback:
    """The launcher alone, or all processes of the pod."""
    namespace, worker = stage.test_job.namespace, stage.find_worker(fault)
    launcher, *others = machine.list_container_pids(namespace, worker, TRAINER_CONTAINER)
    stopped = [launcher]
    if fault.part is ranks.WorkerProcess.POD:
        stopped += [*others, *machine.list_container_pids(namespace, worker, SIDECAR_CONTAINER)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    def heal() -> None:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return heal


@_inject_fault.register
def _(fault: ranks.ProcessKilled, stage: ClusterTarget) -> None:
    container = SIDECAR_CONTAINER if fault.part is ranks.WorkerProcess.SIDECAR else TRAINER_CONTAINER
    first, *_ = machine.list_container_pids(stage.test_job.namespace, stage.find_worker(fault), container)
    os.kill(first, signal.SIGKILL)


@_inject_fault.register
def _(fault: machines.PodDeleted, stage: ClusterTarget) -> None:
    by_force = ["--force", "--grace-period=0"] if fault.force else []
    stage.run_kubectl("delete", "pod", stage.find_worker(fault), "-n", stage.test_job.namespace, "--wait=false", *by_force)


@_inject_fault.register
def _(fault: machines.NodeDrained, stage: ClusterTarget) -> HealCallback:
    rank = stage.find_rank(fault)
    worker, node, namespace = stage.test_job.find_worker(rank), stage.test_job.find_node(rank), stage.test_job.namespace
    stage.run_kubectl("cordon", node)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": worker, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{worker}/eviction"
    stage.run_kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    return lambda: stage.run_kubectl("uncordon", node)


@_inject_fault.register
def _(fault: machines.NodeTainted, stage: ClusterTarget) -> HealCallback:
    node = stage.test_job.find_node(stage.find_rank(fault))
    stage.run_kubectl("taint", "node", node, f"{machines.MAINTENANCE_TAINT}:{fault.effect}", "--overwrite")
    return lambda: stage.run_kubectl("taint", "node", node, f"{machines.MAINTENANCE_TAINT}-")


@_inject_fault.register
def _(fault: machines.NodeIsCutOff, stage: ClusterTarget) -> HealCallback:
    node = stage.test_job.find_node(stage.find_rank(fault))
    machine.disconnect_node(node)
    return lambda: machine.reconnect_node(node)


@_inject_fault.register
def _(_: OperatorKilled, stage: ClusterTarget) -> None:
    stage.kill_operator()
    stage.restart_operator()


@_inject_fault.register
def _(_: people.JobSuspended, stage: ClusterTarget) -> HealCallback:
    stage.test_job.patch(suspend=True)
    return lambda: stage.test_job.patch(suspend=False)


@_inject_fault.register
def _(fault: people.JobScaled, stage: ClusterTarget) -> None:
    stage.test_job.patch(replicas=fault.replicas)


@_inject_fault.register
def _(_: people.JobFinishes, stage: ClusterTarget) -> None:
    """As soon as its ranks look."""
    (stage.test_job.find_checkpoint_folder() / "stop").touch()
