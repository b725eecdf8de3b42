"""Watched jobs under the real loops of an operator, over a simulated API server that checks every object's schema."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pacekeeper_analysis.protocol.reports import FaultReport
from pacekeeper_operator.endpoint.sidecars import Caller, RetryLater, SidecarService
from pacekeeper_operator.endpoint.token_review import PodIdentity
from pacekeeper_operator.kube.client import Cluster
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.runtime.watched_jobs import run_watched_jobs
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings
from simulation.kubernetes.api.connection import SimulatedApiConnection
from simulation.loop import Process
from simulation.operators.runtime import SimulatedRuntime
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.observations import build_crash
from testing.operators.watched_pods import build_pod_body, build_watched_heartbeat, describe_ranks
from testing.simulated.simulated_api import NAMESPACE, ApiServerOnlyWorld

PODS = {"train-a": [0, 1], "train-b": [2, 3]}


class WatchedCluster:
    """Two pods of a Job, their sidecars, and the operator that leads."""

    def __init__(self) -> None:
        self.world = ApiServerOnlyWorld()
        self.step = 0
        self.restarted_at: float | None = None
        self.operators = 0
        self.faults: list[FaultReport] = []
        self.start_operator()
        pods = Process(self.world.loop, "pods")
        pods.spawn(self.run_sidecars(), "sidecars")

    def start_operator(self) -> None:
        """Start the next operator."""
        self.operators += 1
        name = f"operator-{self.operators}"
        self.process = Process(self.world.loop, name)
        runtime = SimulatedRuntime(self.world, name, name)
        cluster = Cluster(SimulatedApiConnection(self.world.api, name, self.process))
        registry = JobRegistry(runtime.now())
        settings = Settings(watch_enabled=True, grace_after_start=5.0)
        self.operator = Operator(
            settings, cluster, registry, INSTALLATION, PrometheusClient("", "", ""), runtime, paused=""
        )
        self.sidecars = SidecarService(cluster, registry, runtime, watched=self.operator.watched)
        self.process.spawn(run_watched_jobs(self.operator), "watched jobs")

    def kill_operator(self) -> None:
        self.process.kill()
        self.start_operator()

    def create_pods(self, names: dict[str, list[int]]) -> None:
        for name in names:
            body = build_pod_body(name)
            body["metadata"] |= {"namespace": NAMESPACE, "ownerReferences": []}  # the API server knows no Jobs
            body["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/name"] = "train"
            body["spec"]["containers"] = [{"name": "train", "image": "train"}]
            self.world.api.create("pods", body)

    async def run_sidecars(self) -> None:
        """Report every second, as long as the pods exist."""
        while True:
            await asyncio.sleep(1.0)
            self.step += 10
            for pod, numbers in PODS.items():
                stored = self.world.api.get("pods", pod, NAMESPACE)
                if stored is not None:
                    await self.report(pod, numbers, stored["metadata"]["uid"])

    async def report(self, pod: str, numbers: list[int], uid: str) -> None:
        started_at = self.restarted_at or 1000.0
        ranks = describe_ranks(numbers, 4, started_at=started_at, pid=100 if self.restarted_at is None else 900)
        heartbeat = build_watched_heartbeat(pod, ranks, self.step, sent_at=self.world.wall_time())
        try:
            caller = self.sidecars._identify_worker(PodIdentity(NAMESPACE, pod, uid))
            await self.sidecars.poll(caller, heartbeat, 0, 0.0)
            await self.send_faults(caller)
        except RetryLater:
            return

    async def send_faults(self, caller: Caller) -> None:
        for fault in [fault for fault in self.faults if fault.worker == caller.worker]:
            await self.sidecars.receive_fault(caller, fault)
            self.faults.remove(fault)

    def list_objects(self, plural: str) -> list[dict[str, Any]]:
        return list(self.world.api.list_all(plural))

    def wait_until(self, holds: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        began = self.world.now()
        while not holds():
            assert self.world.now() - began < seconds, f"{what}: {self.list_objects('watchedjobs')}"
            self.world.pass_time(0.5)

    def find_phase(self) -> str:
        jobs = self.list_objects("watchedjobs")
        return jobs[0].get("status", {}).get("phase", "") if jobs else ""


@pytest.fixture
def cluster() -> Iterator[WatchedCluster]:
    cluster = WatchedCluster()
    yield cluster
    cluster.world.loop.close()


@pytest.mark.parametrize("killed_after", [None, *(0.2 * tick for tick in range(30))])
def test_an_operator_that_is_killed_at_any_moment_is_followed_by_one_that_goes_on(
    killed_after: float | None, cluster: WatchedCluster
) -> None:
    """A rank crashes, the operator is killed, the job's controller restarts the ranks, and at last the job ends."""
    cluster.create_pods(PODS)
    cluster.wait_until(lambda: cluster.find_phase() == "Watched", "all ranks are watched")
    now = cluster.world.wall_time()
    cluster.faults.append(build_crash("train-b", 3, exit_code=1, noticed_at=now, membership=0, sent_at=now))
    if killed_after is not None:
        cluster.world.pass_time(killed_after)
        cluster.kill_operator()
    cluster.wait_until(lambda: cluster.list_objects("incidents"), "the crash is reported")
    cluster.restarted_at, cluster.step = cluster.world.wall_time(), 0
    cluster.wait_until(
        lambda: cluster.list_objects("incidents")[0]["status"].get("outcome") == "Observed", "the ranks train again"
    )
    for pod in PODS:
        cluster.world.api.patch("pods", pod, NAMESPACE, {"status": {"phase": "Succeeded"}}, subresource="status")
    cluster.wait_until(lambda: cluster.find_phase() == "Ended", "the job has ended")
    (job,) = cluster.list_objects("watchedjobs")
    (incident,) = cluster.list_objects("incidents")
    assert incident["spec"]["rank"] == 3
    assert [round_["round"] for round_ in job["status"]["rounds"]] == [1, 2]
    assert len(cluster.list_objects("trainingjobstates")) == 1
    assert {kind: len(cluster.list_objects(kind)) for kind in ("pods", "trainingjobs", "nodequarantines")} == {
        "pods": 2,
        "trainingjobs": 0,
        "nodequarantines": 0,
    }
