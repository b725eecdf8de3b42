"""One job that trains on while one fault after the other is made, and an operator that is told of none."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from testcluster import faults
from tests.support.cluster import Cluster, scratch_namespace, wait_for
from tests.support.jobs import Job, small_gpt
from tests.support.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("resources")


@pytest.fixture(scope="module")
def job(cluster: Cluster, operator_process: OperatorProcess) -> Iterator[Job]:  # noqa: ARG001  # it serves the job
    """Three workers and a spare that train for as long as the tests want."""
    with scratch_namespace(cluster) as namespace:
        body = small_gpt(
            "long",
            steps=10_000_000,
            replicas=3,
            spares=1,
            checkpoint={"everySteps": 50, "volumeClaimName": "long"},
            detection={"stragglerSlowdown": 1.5},  # on two cores anybody is a little slow for a while
            remediation={"allow": ["RestartRanks", "ReplaceWorker", "Rebalance", "QuarantineNode"]},
        )
        job = Job.apply(cluster, namespace, body)
        yield job
        job.delete()


@pytest.fixture
def calm(job: Job) -> Job:
    job.until_calm(spares=1)
    return job


def status_of(incident: dict[str, Any]) -> dict[str, Any]:
    status: dict[str, Any] = incident["status"]
    assert status["outcome"] in ("Recovered", "Mitigated"), incident
    return status


def test_a_killed_rank_is_back_in_the_same_pods(calm: Job) -> None:
    known, pods = calm.incident_names(), {pod["metadata"]["uid"] for pod in calm.pods()}
    round_ = calm.status["round"]
    calm.crash(1)
    incident = calm.until_over("crash", known)
    status = status_of(incident)
    assert incident["spec"]["rank"] == 1
    assert status["remedy"] == "RestartRanks"
    assert {option["name"] for option in status["considered"]} == {"RestartRanks", "ReplaceWorker"}
    assert {pod["metadata"]["uid"] for pod in calm.pods()} == pods
    wait_for(lambda: calm.status["round"] == round_ + 1, timeout=20, what="one round later")


def test_a_stopped_rank_is_named_and_moved_when_it_happens_again(calm: Job) -> None:
    hung = {incident["spec"]["rank"] for incident in calm.incidents() if incident["spec"]["cause"] == "hang"}
    rank = next(rank for rank in (2, 1, 0) if rank not in hung)  # a second try needs one without a past
    for remedy in ("RestartRanks", "ReplaceWorker"):
        calm.until_calm(spares=1)
        known, worker = calm.incident_names(), calm.worker(rank)
        calm.hang(rank)
        incident = calm.until_over("hang", known)
        status = status_of(incident)
        assert (incident["spec"]["rank"], incident["spec"]["worker"]) == (rank, worker)
        assert status["remedy"] == remedy, incident
        assert (calm.worker(rank) == worker) == (remedy == "RestartRanks")


def test_a_rank_that_stops_in_the_first_steps_of_a_round_is_found_too(calm: Job) -> None:
    """Then no deadline is known from the round's own steps."""
    known = calm.incident_names()
    calm.crash(0)
    calm.until_over("crash", known)
    calm.hang(1)
    status_of(calm.until_over("hang", known))


def test_a_deleted_pod_is_replaced_by_the_spare_without_burning_the_budget(calm: Job) -> None:
    known, lost, spent = calm.incident_names(), calm.worker(0), calm.status["restarts"]
    calm.cluster.kubectl("delete", "pod", lost, "-n", calm.namespace, "--wait=false")
    incident = calm.until_over("worker-lost", known)
    assert incident["spec"]["worker"] == lost
    assert status_of(incident)["remedy"] == "ReplaceWorker"
    assert incident["spec"]["class"] == "Disruption"
    calm.until_calm(spares=1)
    assert calm.status["restarts"] == spent
    assert calm.worker(0) != lost


def test_an_evicted_pod_too(calm: Job) -> None:
    known, lost = calm.incident_names(), calm.worker(1)
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": lost, "namespace": calm.namespace},
    }
    path = f"/api/v1/namespaces/{calm.namespace}/pods/{lost}/eviction"
    calm.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    incident = calm.until_over("worker-lost", known)
    assert incident["spec"]["class"] == "Disruption"
    assert status_of(incident)["remedy"] == "ReplaceWorker"


def test_a_slow_rank_gets_fewer_samples_without_a_restart(calm: Job) -> None:
    known, worker = calm.incident_names(), calm.worker(1)
    round_ = calm.status["round"]
    faults.set_cpu_quota(calm.namespace, worker, "trainer", 100)
    incident = calm.until_over("straggler", known, 120)
    status = incident["status"]
    assert incident["spec"]["rank"] == 1
    assert {option["name"] for option in status["considered"]} == {"Rebalance", "LocalSGD", "ReplaceWorker"}
    if status["remedy"] == "Rebalance":
        shares = calm.plan()["shares"]
        assert shares[1] < shares[0]
        assert calm.status["round"] == round_
    else:  # beyond what shares can mend, by what was measured
        assert calm.worker(1) != worker
        return
    faults.set_cpu_quota(calm.namespace, worker, "trainer", 400)


def test_a_lost_node_is_left_within_seconds_and_quarantined(calm: Job, cluster: Cluster) -> None:
    known, worker = calm.incident_names(), calm.worker(2)
    node = calm.node(2)
    faults.node_down(node)
    try:
        incident = calm.until_over("node-lost", known)
        status_of(incident)
        assert (incident["spec"]["worker"], incident["spec"]["node"]) == (worker, node)
        quarantine = cluster.get("nodequarantine", node)
        assert quarantine["spec"]["incidentRef"]["name"] == incident["metadata"]["name"]
        assert cluster.get("pod", worker, calm.namespace) is None
        calm.until_calm(spares=1)
    finally:
        faults.node_up(node)
        cluster.kubectl("delete", "nodequarantine", "--all", "--timeout=60s")
    assert not cluster.get("node", node)["spec"].get("unschedulable")


@pytest.mark.parametrize("writes", [1, 2, 3, 4, 5, 6])
def test_an_operator_that_dies_in_a_recovery_loses_and_repeats_nothing(
    calm: Job, operator_process: OperatorProcess, writes: int
) -> None:
    """It ends itself right after its n-th write since the fault; the next one goes on."""
    known, lost = calm.incident_names(), calm.worker(0)
    membership = calm.plan()["membership"]
    names = {pod["metadata"]["name"] for pod in calm.pods()}
    operator_process.kill()
    operator_process.start(dies_after=writes)
    calm.cluster.kubectl("delete", "pod", lost, "-n", calm.namespace, "--wait=false")
    try:
        operator_process.wait_for_death()
    except subprocess.TimeoutExpired:
        operator_process.kill()  # the whole recovery took fewer writes
    operator_process.start()
    incident = calm.until_over("worker-lost", known)
    status_of(incident)
    calm.until_calm(spares=1)
    assert len(calm.incident_names() - known) == 1
    assert calm.plan()["membership"] == membership + 1
    assert len({pod["metadata"]["name"] for pod in calm.pods()} - names) == 1
    assert len(calm.pods()) == 4
