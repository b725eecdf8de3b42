"""Jobs survive faults of the operator, the API server, Prometheus, and of other jobs on the same nodes."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pacekeeper_operator.api.names import TAINT_QUARANTINE
from testcluster import api, faults, release
from testcluster.shell import ClusterError
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.kubernetes.jobs import ClusterJob, build_paced_job, unplug_node

pytestmark = pytest.mark.usefixtures("operator")

LONG = 100_000  # steps: until the test ends it


class TestLong:
    """One job that trains on through all of it."""

    @pytest.fixture(scope="class")
    @classmethod
    def job(cls, cluster: KubectlCluster) -> Iterator[ClusterJob]:
        with scratch_namespace(cluster) as namespace:
            yield ClusterJob.apply(cluster, namespace, build_paced_job("long", LONG, spares=1))

    @pytest.fixture
    def calm(self, job: ClusterJob) -> ClusterJob:
        job.wait_until_calm(spares=1)
        return job

    def test_the_api_server_restarts(self, calm: ClusterJob) -> None:
        known, membership, lives = calm.list_incident_names(), calm.read_plan()["membership"], count_operator_starts()
        led = wait_for(release.find_leading_pod, 120, "an operator leads")["metadata"]["uid"]

        faults.restart_api_server()
        calm.wait_for_more_steps(20)
        assert (calm.read_plan()["membership"], calm.list_incident_names()) == (membership, known), (
            "the ranks do not notice"
        )

        calm.crash_rank(0)
        calm.wait_until_incident_ended("crash", known)
        calm.delete_worker(1)
        calm.wait_until_incident_ended("worker-lost", known)
        calm.wait_for_more_steps()
        assert len(calm.list_incident_names() - known) == 2, "one each"
        # A leader whose Lease expired during the outage exits once another operator holds it, and becomes the standby.
        may_end = {led} if wait_for(release.find_leading_pod, 120, "one leads")["metadata"]["uid"] != led else set()
        after = count_operator_starts()
        assert after.keys() == lives.keys()
        restarted = {uid for uid in lives if after[uid] != lives[uid]}
        assert restarted <= may_end, "operators wait for the API server, and do not die of it"

    def test_prometheus_is_unavailable(self, cluster: KubectlCluster, calm: ClusterJob) -> None:
        known = calm.list_incident_names()
        calm.wait_until(lambda: calm.get_condition("MetricsAvailable")["status"] == "True", 120, "Prometheus answers")
        faults.stop_prometheus()
        try:
            calm.wait_until(
                lambda: calm.get_condition("MetricsAvailable")["status"] == "False", 120, "the condition reports it"
            )
            assert "GPU errors cannot be detected" in calm.get_condition("MetricsAvailable")["message"]
            calm.crash_rank(0)
            calm.wait_until_incident_ended("crash", known)
            calm.wait_for_more_steps(steps=20)  # a watch that has seen no steps accuses no rank
            calm.hang_rank(1)
            calm.wait_until_incident_ended("hang", known)
            calm.delete_worker(1)
            calm.wait_until_incident_ended("worker-lost", known)
            calm.wait_until(lambda: calm.status["workers"].get("spare"), 120, "the next spare is warm")
            with unplug_node(calm) as (worker, node):
                incident = calm.wait_until_incident_ended("node-lost", known)
                assert (incident["spec"]["worker"], incident["spec"]["node"]) == (worker, node)
                held = cluster.get("nodequarantine", node)
                assert held["spec"]["incidentRef"]["name"] == incident["metadata"]["name"]
                assert cluster.get("pod", worker, calm.namespace) is None
            calm.wait_for_more_steps()
        finally:
            faults.start_prometheus()
            cluster.kubectl("delete", "nodequarantine", "--all", "--timeout=120s")
        assert node not in list_cordoned(cluster)
        assert len(calm.list_incident_names() - known) == 4, "one each"
        calm.wait_until(
            lambda: calm.get_condition("MetricsAvailable")["status"] == "True", 120, "the condition reports it"
        )

    def test_an_upgrade_and_an_uninstall_do_not_touch_the_workers(
        self, cluster: KubectlCluster, calm: ClusterJob
    ) -> None:
        """The uninstall releases what is quarantined, waits for no user, and leaves others' cordons."""
        membership, round_ = calm.read_plan()["membership"], calm.status["round"]
        known, pods = calm.list_incident_names(), list_uids(calm)
        where = ["deployment", release.RELEASE, "-n", release.SYSTEM]
        first, second, *_ = sorted(
            api.list_ready_nodes() - set(calm.list_nodes().values())
        )  # its own workers would move

        cluster.kubectl("rollout", "restart", *where)
        cluster.kubectl("rollout", "status", *where, "--timeout=120s")
        calm.wait_for_more_steps()

        try:
            cluster.kubectl("cordon", first)
            for node in (first, second):
                quarantine_node(cluster, node)
            both = {first, second}
            wait_for(lambda: list_tainted(cluster) & list_cordoned(cluster) >= both, 120, "both nodes are quarantined")
            release.uninstall_release()
            assert not cluster.list("nodequarantines")
            assert cluster.get("configmap", "pacekeeper-pause", release.SYSTEM) is None, "the next installation acts"
            assert not list_tainted(cluster) & {first, second}
            assert first in list_cordoned(cluster), "a user had cordoned it before"
            assert second not in list_cordoned(cluster)
            calm.wait_for_more_steps(20)
            step_without_operator = calm.read_step()
        finally:
            cluster.kubectl("uncordon", first)
            release.install_release()

        calm.wait_until(
            lambda: calm.status["step"] >= step_without_operator and calm.phase == "Running",
            120,
            "the new operator has loaded the job",
        )
        calm.wait_for_more_steps()
        assert list_uids(calm) == pods
        assert (calm.read_plan()["membership"], calm.status["round"]) == (membership, round_)
        assert calm.list_incident_names() == known

    def test_the_job_is_deleted_during_a_recovery(self, calm: ClusterJob) -> None:
        """Last of all. Without a spare it takes a while to recover."""
        known = calm.list_incident_names()
        calm.patch(spares=0)
        calm.wait_until(lambda: not calm.status["workers"].get("spare"), 120, "the spare is gone")
        calm.delete_worker(1)
        calm.wait_for_phase("Recovering", timeout=120)
        calm.delete()
        (incident,) = (found for found in calm.list_incidents() if found["metadata"]["name"] not in known)
        assert (incident["spec"]["cause"], incident["status"]["outcome"]) == ("worker-lost", "Superseded")


def test_an_operator_that_is_killed_at_random_moments_does_each_action_once(
    cluster: KubectlCluster, namespace: str
) -> None:
    job = ClusterJob.apply(
        cluster, namespace, build_paced_job("chaos", LONG, environment={"STOP_EVERY": "20"}, replicas=2, spares=1)
    )
    with kill_operator_repeatedly(cluster, random.Random(1)) as killed:
        job.wait_for_step(20, timeout=120)
        job.crash_rank(1)
        job.wait_until_healed("crash", timeout=120)
        job.wait_for_more_steps()
        job.delete_worker(0)
        job.wait_until_healed("crash", "worker-lost", timeout=120)
        job.wait_until(lambda: len(killed) >= 3, 120, "the operator has been away at many moments")
        (job.find_checkpoint_folder() / "stop").touch()
        job.wait_for_phase("Complete", timeout=120)

    assert len(job.list_start_steps()) == 3, "one round an incident"
    assert job.status["restarts"] == 1, "a deleted pod burns no budget"
    draft = job.read_desired()
    assert draft is not None
    made = sum(highest + 1 for highest in draft.state.placement.incarnations.values())
    assert made == 4, "two workers, a spare, and one replacement"
    assert list_tainted(cluster) == set()
    steps = [entry["step"] for entry in job.read_diary() if "step" in entry]
    assert set(steps) == set(range(1, max(steps) + 1)), "no step is left out"


def test_two_jobs_that_do_not_both_fit(cluster: KubectlCluster, namespace: str) -> None:
    """Three nodes with capacity for one worker each, and two workers a job."""
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": THREE}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    tight: dict[str, Any] = {
        "cpu": "1300m",
        "pod": {"affinity": {"nodeAffinity": required}},
        "schedulingTimeout": "10s",
    }
    older = ClusterJob.apply(cluster, namespace, build_paced_job("older", LONG, **tight))
    older.wait_for_phase("Running", timeout=120)
    younger = ClusterJob.apply(cluster, namespace, build_paced_job("younger", 20, **tight))
    younger.wait_until(lambda: any(is_placed(pod) for pod in younger.list_pods()), 120, "half of the younger is placed")

    def waits() -> bool:
        return younger.get_condition("Running").get("reason") == "SchedulingTimeout" and not younger.list_pods()

    younger.wait_until(waits, 120, "the younger gives back what it holds")
    assert "not all 2 workers could be placed within 10 s" in younger.get_condition("Running")["message"]
    assert (older.status["round"], len(older.list_pods())) == (1, 2)
    older.delete()
    younger.wait_for_phase("Complete", timeout=120)
    assert not younger.list_incidents()


THREE = ["node-2", "node-3", "node-4"]


@contextmanager
def kill_operator_repeatedly(cluster: KubectlCluster, rng: random.Random) -> Iterator[list[str]]:
    """Again and again, up to six seconds after it is ready; yields how it was killed each time."""
    killed: list[str] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(rng.uniform(0, 6)):
            pod = release.find_leading_pod()
            if pod is None or not is_ready(pod):
                continue
            name = pod["metadata"]["name"]
            method = rng.choice(list(KILL_METHODS))
            try:
                KILL_METHODS[method](cluster, name)
                killed.append(method)
            except (ClusterError, ProcessLookupError, subprocess.CalledProcessError):
                continue  # it was going anyway

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join(timeout=120)
        where = ["deployment", release.RELEASE, "-n", release.SYSTEM]
        cluster.kubectl("rollout", "status", *where, "--timeout=120s")


def kill_process(_cluster: KubectlCluster, pod: str) -> None:
    faults.kill_container(release.SYSTEM, pod, "operator")


def delete_pod(cluster: KubectlCluster, pod: str) -> None:
    cluster.kubectl("delete", "pod", pod, "-n", release.SYSTEM, "--wait=false")


def delete_by_force(cluster: KubectlCluster, pod: str) -> None:
    cluster.kubectl("delete", "pod", pod, "-n", release.SYSTEM, "--force", "--grace-period=0")


KILL_METHODS: dict[str, Callable[[KubectlCluster, str], None]] = {
    "killed": kill_process,
    "deleted": delete_pod,
    "deleted by force": delete_by_force,
}


def count_operator_starts() -> dict[str, int]:
    """Of each of its pods, by UID, how often its container has been restarted."""
    return {
        pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"]
        for pod in release.list_operator_pods()
    }


def is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def is_placed(pod: dict[str, Any]) -> bool:
    return bool(pod["spec"].get("nodeName"))


def list_uids(job: ClusterJob) -> set[str]:
    return {pod["metadata"]["uid"] for pod in job.list_pods()}


def quarantine_node(cluster: KubectlCluster, node: str) -> None:
    spec = {"reason": "a test", "approved": True}
    cluster.apply(
        {"apiVersion": "pacekeeper.dev/v1alpha1", "kind": "NodeQuarantine", "metadata": {"name": node}, "spec": spec}
    )


def list_tainted(cluster: KubectlCluster) -> set[str]:
    """Nodes with our taint."""
    nodes = cluster.list("nodes")
    return {
        str(node["metadata"]["name"])
        for node in nodes
        if any(taint["key"] == TAINT_QUARANTINE for taint in node["spec"].get("taints", ()))
    }


def list_cordoned(cluster: KubectlCluster) -> set[str]:
    return {str(node["metadata"]["name"]) for node in cluster.list("nodes") if node["spec"].get("unschedulable")}
