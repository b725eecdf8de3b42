"""One job that trains on while one fault after the other is made, and an operator that is told of none."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from testcluster import faults
from tests.support.cluster import Cluster, scratch_namespace, wait_for
from tests.support.jobs import JobOnCluster, claim, manifest, submit
from tests.support.operators import OperatorProcess, log_file, running

pytestmark = pytest.mark.usefixtures("resources")


@pytest.fixture(scope="module")
def operator(cluster: Cluster, resources: None) -> Iterator[OperatorProcess]:  # noqa: ARG001  # the kinds must exist
    if not cluster.is_testcluster:
        pytest.skip("faults are made on the test cluster's machine")
    with running(cluster, log_file()) as operator:
        yield operator


@pytest.fixture(scope="module")
def job(cluster: Cluster, operator: OperatorProcess) -> Iterator[JobOnCluster]:  # noqa: ARG001  # it serves the job
    """Three workers and a spare that train for as long as the tests want."""
    with scratch_namespace(cluster) as namespace:
        cluster.apply(claim("work"), namespace)
        checkpoint = {"path": "/checkpoints", "everySteps": 50, "volumeClaimName": "work"}
        limits = {"resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"cpu": "400m"}}}
        body = manifest("long", replicas=3, spares=1, steps=10_000_000, checkpoint=checkpoint, container=limits)
        job = submit(cluster, namespace, body)
        job.wait_until_calm(spares=1)
        yield job
        cluster.kubectl("delete", "trainingjob", "long", "-n", namespace, "--timeout=60s")
        assert not job.pods()


@pytest.fixture
def calm(job: JobOnCluster) -> JobOnCluster:
    job.wait_until_calm(spares=1)
    return job


def status_of(incident: dict[str, Any]) -> dict[str, Any]:
    status: dict[str, Any] = incident["status"]
    assert status["outcome"] in ("Recovered", "Mitigated"), incident
    return status


def test_a_killed_rank_is_back_in_the_same_pods(calm: JobOnCluster) -> None:
    known, pods = calm.incidents(), {pod["metadata"]["uid"] for pod in calm.pods()}
    round_ = calm.status()["round"]
    faults.signal_process(calm.rank_process(calm.worker(1)), signal.SIGKILL)
    incident = calm.wait_for_incident("crash", known)
    status = status_of(incident)
    assert incident["spec"]["rank"] == 1
    assert status["remedy"] == "RestartRanks"
    assert {option["name"] for option in status["considered"]} == {"RestartRanks", "ReplaceWorker"}
    assert {pod["metadata"]["uid"] for pod in calm.pods()} == pods
    wait_for(lambda: calm.status()["round"] == round_ + 1, timeout=20, what="one round later")


def test_a_stopped_rank_is_named_and_moved_when_it_happens_again(calm: JobOnCluster) -> None:
    for remedy in ("RestartRanks", "ReplaceWorker"):
        calm.wait_until_calm(spares=1)
        known, worker = calm.incidents(), calm.worker(2)
        faults.signal_process(calm.rank_process(worker), signal.SIGSTOP)
        incident = calm.wait_for_incident("hang", known)
        status = status_of(incident)
        assert (incident["spec"]["rank"], incident["spec"]["worker"]) == (2, worker)
        assert status["remedy"] == remedy
        assert (calm.worker(2) == worker) == (remedy == "RestartRanks")


def test_a_deleted_pod_is_replaced_by_the_spare_without_burning_the_budget(calm: JobOnCluster) -> None:
    known, lost, spent = calm.incidents(), calm.worker(0), calm.status()["restarts"]
    calm.cluster.kubectl("delete", "pod", lost, "-n", calm.namespace, "--wait=false")
    incident = calm.wait_for_incident("worker-lost", known)
    assert incident["spec"]["worker"] == lost
    assert status_of(incident)["remedy"] == "ReplaceWorker"
    assert incident["spec"]["class"] == "Disruption"
    calm.wait_until_calm(spares=1)
    assert calm.status()["restarts"] == spent
    assert calm.worker(0) != lost


def test_an_evicted_pod_too(calm: JobOnCluster) -> None:
    known, lost = calm.incidents(), calm.worker(1)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": lost, "namespace": calm.namespace},
    }
    path = f"/api/v1/namespaces/{calm.namespace}/pods/{lost}/eviction"
    calm.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    incident = calm.wait_for_incident("worker-lost", known)
    assert incident["spec"]["class"] == "Disruption"
    assert status_of(incident)["remedy"] == "ReplaceWorker"


def test_a_slow_rank_gets_fewer_samples_without_a_restart(calm: JobOnCluster) -> None:
    known, worker = calm.incidents(), calm.worker(1)
    round_ = calm.status()["round"]
    faults.set_cpu_quota(calm.namespace, worker, "trainer", 100)
    incident = calm.wait_for_incident("straggler", known, 120)
    status = incident["status"]
    assert incident["spec"]["rank"] == 1
    assert {option["name"] for option in status["considered"]} == {"Rebalance", "ReplaceWorker"}
    if status["remedy"] == "Rebalance":
        shares = calm.plan()["shares"]
        assert shares[1] < shares[0]
        assert calm.status()["round"] == round_
    else:  # beyond what shares can mend, by what was measured
        assert calm.worker(1) != worker
        return
    faults.set_cpu_quota(calm.namespace, worker, "trainer", 400)


def test_a_lost_node_is_left_within_seconds_and_quarantined(calm: JobOnCluster, cluster: Cluster) -> None:
    known, worker = calm.incidents(), calm.worker(2)
    node = calm.node(worker)
    faults.node_down(node)
    try:
        incident = calm.wait_for_incident("node-lost", known)
        status_of(incident)
        assert (incident["spec"]["worker"], incident["spec"]["node"]) == (worker, node)
        quarantine = cluster.get("nodequarantine", node)
        assert quarantine["spec"]["incidentRef"]["name"] == incident["metadata"]["name"]
        assert cluster.get("pod", worker, calm.namespace) is None
        calm.wait_until_calm(spares=1)
    finally:
        faults.node_up(node)
        cluster.kubectl("delete", "nodequarantine", "--all", "--timeout=60s")
    assert not cluster.get("node", node)["spec"].get("unschedulable")


@pytest.mark.parametrize("writes", [1, 2, 3, 4, 5, 6])
def test_an_operator_that_dies_in_a_recovery_loses_and_repeats_nothing(
    calm: JobOnCluster, operator: OperatorProcess, writes: int
) -> None:
    """It ends itself right after its n-th write since the fault; the next one goes on."""
    known, lost = calm.incidents(), calm.worker(0)
    membership = calm.plan()["membership"]
    names = {pod["metadata"]["name"] for pod in calm.pods()}
    operator.kill()
    operator.start(dies_after=writes)
    calm.cluster.kubectl("delete", "pod", lost, "-n", calm.namespace, "--wait=false")
    try:
        operator.wait_for_death()
    except subprocess.TimeoutExpired:
        operator.kill()  # the whole recovery took fewer writes
    operator.start()
    incident = calm.wait_for_incident("worker-lost", known)
    status_of(incident)
    calm.wait_until_calm(spares=1)
    fresh = {i["metadata"]["name"] for i in calm.incidents()} - {i["metadata"]["name"] for i in known}
    assert len(fresh) == 1
    assert calm.plan()["membership"] == membership + 1
    assert len({pod["metadata"]["name"] for pod in calm.pods()} - names) == 1
    assert len(calm.pods()) == 4
