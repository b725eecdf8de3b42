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

from pacekeeper_operator.api import LABEL_JOB, SIDECAR, TRAINER
from pacekeeper_operator.state import Draft
from testcluster import faults as machine
from tests.support.cluster import Cluster, running_cluster, scratch_namespace
from tests.support.jobs import Job, paced
from tests.support.operator_process import OperatorProcess, operating
from tests.support.resources import without_operator

from ..faults import machines, people, ranks
from ..faults.fault import Fault, Heal, Missed, NodeFault, Role, WorkerFault
from ..faults.operators import OperatorKilled
from .disaster import GRACE_SECONDS, STEP_SECONDS, Disaster
from .performance import Entry, Object, perform

LONG = 10_000_000
RESOURCES = {"requests": {"cpu": "20m", "memory": "256Mi"}, "limits": {"cpu": "400m", "memory": "1200Mi"}}
"""Of a trainer: so little memory that a rank has filled it before it seems to hang."""
AT_ONCE = 3
"""Jobs that train at the same time, where they do not disturb each other."""


@contextmanager
def on_the_cluster() -> Iterator[tuple[Cluster, OperatorProcess]]:
    """It is up, and has no operator but this one."""
    with running_cluster() as cluster, without_operator(cluster), operating(cluster) as operator:
        yield cluster, operator


def play_all(
    cluster: Cluster,
    operator: OperatorProcess,
    disasters: Iterable[Disaster],
    told: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Disaster, tuple[Entry, ...]]]:
    """As they end: those that may be at the same time first, then one after the other. `told`: what happens, with the
    incidents' own words."""
    disasters = list(disasters)

    def play(disaster: Disaster) -> tuple[Disaster, tuple[Entry, ...]]:
        return disaster, play_one(cluster, operator, disaster, told)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(play, [each for each in disasters if not each.exclusive])
    yield from map(play, [each for each in disasters if each.exclusive])


def play_one(
    cluster: Cluster, operator: OperatorProcess, disaster: Disaster, told: Callable[[str], None] = lambda _: None
) -> tuple[Entry, ...]:
    with scratch_namespace(cluster) as namespace:
        stage = ClusterStage(operator, Job(cluster, namespace, disaster.job.name), disaster)
        try:
            return asyncio.run(perform(stage, disaster, told))
        finally:
            cluster.kubectl("delete", "trainingjobs", "--all", "-n", namespace, "--wait=false")
            if disaster.exclusive:
                cluster.kubectl("delete", "nodequarantines", "--all", "--timeout=60s", timeout=70)


@dataclass(frozen=True)
class ClusterStage:
    """One job in a namespace of its own."""

    operator: OperatorProcess
    on: Job
    disaster: Disaster

    def make_job(self) -> None:
        settings = self.disaster.job
        apart = {
            "labelSelector": {"matchLabels": {LABEL_JOB: settings.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        body = paced(
            settings.name,
            LONG,
            trainer={"resources": RESOURCES},
            environment={"STOP_EVERY": "20", "SLEEP": str(STEP_SECONDS)},
            pod={
                "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
                "terminationGracePeriodSeconds": GRACE_SECONDS,
            },
            replicas=settings.replicas,
            spares=settings.spares,
            **settings.spec,
        )
        Job.apply(self.on.cluster, self.on.namespace, body)

    def strike(self, fault: Fault) -> Heal | None:
        return _strike(fault, self)

    def kill_operator(self) -> None:
        self.operator.kill()

    def revive_operator(self) -> None:
        self.operator.start()

    def job(self) -> Object:
        return self.on.read()

    def draft(self) -> Draft | None:
        return self.on.draft()

    def incidents(self) -> list[Object]:
        return list(self.on.incidents())

    def pods(self) -> frozenset[str]:
        return frozenset(pod["metadata"]["name"] for pod in self.on.pods())

    def rank(self, fault: WorkerFault | NodeFault) -> int:
        """Of the member that a fault strikes: each has one, in the order of the plan."""
        return fault.index % len(self.on.plan()["members"])

    def worker(self, fault: WorkerFault) -> str:
        """Its pod."""
        if fault.role is Role.MEMBER:
            return self.on.worker(self.rank(fault))
        seated = [member["worker"] for member in self.on.plan()["members"]]
        spares = sorted(self.pods() - set(seated))
        if not spares:
            raise Missed(f"job {self.on.name} has no spare")
        return spares[fault.index % len(spares)]

    def ask(self, fault: WorkerFault, word: str) -> None:
        """The script of the rank that it strikes does it, in its next step."""
        file = self.on.folder() / f"fault-{self.rank(fault)}"
        written = file.with_suffix(".new")
        written.write_text(word)
        written.rename(file)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> None:
        self.on.cluster.kubectl(*arguments, stdin=stdin)


@singledispatch
def _strike(fault: Fault, stage: ClusterStage) -> Heal | None:
    raise NotImplementedError(f"nobody can do this to the test cluster: {fault}")


@_strike.register
def _(fault: ranks.RankCrashes, stage: ClusterStage) -> None:
    if fault.code < 0:
        stage.on.crash(stage.rank(fault))
    else:
        stage.ask(fault, "raise")


@_strike.register
def _(fault: ranks.RankRunsOutOfMemory, stage: ClusterStage) -> None:
    stage.ask(fault, "fill")


@_strike.register
def _(fault: ranks.RankHangs, stage: ClusterStage) -> None:
    stage.ask(fault, "hang")


@_strike.register
def _(fault: ranks.RankStopped, stage: ClusterStage) -> None:
    stage.on.hang(stage.rank(fault))


@_strike.register
def _(fault: ranks.Frozen, stage: ClusterStage) -> Heal:
    """The launcher alone, or all processes of the pod."""
    namespace, worker = stage.on.namespace, stage.worker(fault)
    launcher, *others = machine.container_pids(namespace, worker, TRAINER)
    stopped = [launcher]
    if fault.part is ranks.Part.POD:
        stopped += [*others, *machine.container_pids(namespace, worker, SIDECAR)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    def heal() -> None:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return heal


@_strike.register
def _(fault: ranks.ProcessKilled, stage: ClusterStage) -> None:
    container = SIDECAR if fault.part is ranks.Part.SIDECAR else TRAINER
    first, *_ = machine.container_pids(stage.on.namespace, stage.worker(fault), container)
    os.kill(first, signal.SIGKILL)


@_strike.register
def _(fault: machines.PodDeleted, stage: ClusterStage) -> None:
    by_force = ["--force", "--grace-period=0"] if fault.force else []
    stage.kubectl("delete", "pod", stage.worker(fault), "-n", stage.on.namespace, "--wait=false", *by_force)


@_strike.register
def _(fault: machines.NodeDrained, stage: ClusterStage) -> Heal:
    rank = stage.rank(fault)
    worker, node, namespace = stage.on.worker(rank), stage.on.node(rank), stage.on.namespace
    stage.kubectl("cordon", node)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": worker, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{worker}/eviction"
    stage.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    return lambda: stage.kubectl("uncordon", node)


@_strike.register
def _(fault: machines.NodeTainted, stage: ClusterStage) -> Heal:
    node = stage.on.node(stage.rank(fault))
    stage.kubectl("taint", "node", node, f"{machines.MAINTENANCE}:{fault.effect}", "--overwrite")
    return lambda: stage.kubectl("taint", "node", node, f"{machines.MAINTENANCE}-")


@_strike.register
def _(fault: machines.NodeIsCutOff, stage: ClusterStage) -> Heal:
    node = stage.on.node(stage.rank(fault))
    machine.node_down(node)
    return lambda: machine.node_up(node)


@_strike.register
def _(_: OperatorKilled, stage: ClusterStage) -> None:
    stage.kill_operator()
    stage.revive_operator()


@_strike.register
def _(_: people.JobSuspended, stage: ClusterStage) -> Heal:
    stage.on.patch(suspend=True)
    return lambda: stage.on.patch(suspend=False)


@_strike.register
def _(fault: people.JobScaled, stage: ClusterStage) -> None:
    stage.on.patch(replicas=fault.replicas)


@_strike.register
def _(_: people.JobFinishes, stage: ClusterStage) -> None:
    """As soon as its ranks look."""
    (stage.on.folder() / "stop").touch()
