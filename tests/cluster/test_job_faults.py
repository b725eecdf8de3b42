"""One job that trains on while faults are injected, and an operator that is informed of none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.kubernetes.jobs import ClusterJob, build_paced_job
from testing.operators.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("resources")


@pytest.fixture(scope="module")
def job(cluster: KubectlCluster, operator_process: OperatorProcess) -> Iterator[ClusterJob]:  # noqa: ARG001  # it serves the job
    """Three workers and a spare that train for as long as the tests want."""
    with scratch_namespace(cluster) as namespace:
        job = ClusterJob.apply(cluster, namespace, build_paced_job("long", steps=10_000_000, replicas=3, spares=1))
        yield job
        job.delete()


@pytest.fixture
def calm(job: ClusterJob) -> ClusterJob:
    job.wait_until_calm(spares=1)
    return job


def read_status(incident: dict[str, Any]) -> dict[str, Any]:
    status: dict[str, Any] = incident["status"]
    assert status["outcome"] in ("Recovered", "Mitigated"), incident
    return status


def test_a_killed_rank_is_back_in_the_same_pods_and_one_that_stops_in_its_first_steps_is_found(
    calm: ClusterJob,
) -> None:
    """No deadline is known from the round's own steps yet."""
    known, pods, round_ = calm.list_incident_names(), list_uids(calm), calm.status["round"]
    calm.crash_rank(0)
    incident = calm.wait_until_incident_ended("crash", known)
    status = read_status(incident)
    assert incident["spec"]["rank"] == 0
    assert status["remedy"] == "RestartRanks"
    restart = status["restart"]
    names = ["Teardown", "Wait", "Process", "Communicators", "Script", "Load", "FirstStep"]
    assert [part["name"] for part in restart["parts"]] == names
    assert sum(part["seconds"] for part in restart["parts"]) == pytest.approx(status["recoveredSeconds"], abs=0.01)
    assert restart["restoredFrom"] in ("Memory", "Peer"), "no pod has gone"
    assert {option["name"] for option in status["considered"]} == {"RestartRanks", "ReplaceWorker"}
    assert list_uids(calm) == pods
    calm.hang_rank(1)
    assert read_status(calm.wait_until_incident_ended("hang", known))["remedy"] == "RestartRanks"
    wait_for(lambda: calm.status["round"] == round_ + 2, timeout=120, what="one round each")


def test_a_stopped_rank_is_named_and_moved_when_it_happens_again(calm: ClusterJob) -> None:
    hung = {incident["spec"]["rank"] for incident in calm.list_incidents() if incident["spec"]["cause"] == "hang"}
    rank = next(rank for rank in (2, 1, 0) if rank not in hung)  # a second try needs one without a past
    for remedy in ("RestartRanks", "ReplaceWorker"):
        calm.wait_until_calm(spares=1)
        known, worker = calm.list_incident_names(), calm.find_worker(rank)
        calm.hang_rank(rank)
        incident = calm.wait_until_incident_ended("hang", known)
        status = read_status(incident)
        assert (incident["spec"]["rank"], incident["spec"]["worker"]) == (rank, worker)
        assert status["remedy"] == remedy, incident
        assert (calm.find_worker(rank) == worker) == (remedy == "RestartRanks")


def test_an_evicted_pod_is_replaced_by_the_spare_without_burning_the_budget(calm: ClusterJob) -> None:
    known, lost, spent = calm.list_incident_names(), calm.find_worker(1), calm.status["restarts"]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": lost, "namespace": calm.namespace},
    }
    path = f"/api/v1/namespaces/{calm.namespace}/pods/{lost}/eviction"
    calm.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    incident = calm.wait_until_incident_ended("worker-lost", known)
    assert incident["spec"]["worker"] == lost
    assert incident["spec"]["class"] == "Disruption"
    assert read_status(incident)["remedy"] == "ReplaceWorker"
    calm.wait_until_calm(spares=1)
    assert calm.status["restarts"] == spent
    assert calm.find_worker(1) != lost


def test_a_cordoned_node_is_left_with_a_checkpoint_before_an_eviction(calm: ClusterJob) -> None:
    known, lost, spent = calm.list_incident_names(), calm.find_worker(1), calm.status["restarts"]
    node = calm.list_nodes()[lost]
    calm.cluster.kubectl("cordon", node)
    try:
        incident = calm.wait_until_incident_ended("node-leaving", known)
        assert (incident["spec"]["worker"], incident["spec"]["node"]) == (lost, node)
        assert incident["spec"]["class"] == "Disruption"
        status = read_status(incident)
        assert (status["remedy"], status["stepsLost"]) == ("ReplaceWorker", 0)
        calm.wait_until_calm(spares=1)
        calm.wait_until(lambda: node not in calm.list_nodes().values(), 120, f"{node} is empty")
        assert calm.status["restarts"] == spent
    finally:
        calm.cluster.kubectl("uncordon", node)


def test_an_unresponsive_worker_is_replaced_and_its_node_is_not_blamed(calm: ClusterJob) -> None:
    """Its sidecar polls on, so only that sidecar can report it; its peers could not begin a round without it."""
    known, stopped, spent = calm.list_incident_names(), calm.find_worker(1), calm.status["restarts"]
    calm.stop_trainer(1)
    incident = calm.wait_until_incident_ended("worker-unresponsive", known)
    assert (incident["spec"]["worker"], incident["spec"]["class"]) == (stopped, "Unknown")
    assert read_status(incident)["remedy"] == "ReplaceWorker"
    calm.wait_until(
        lambda: stopped not in {pod["metadata"]["name"] for pod in calm.list_pods()}, 60, f"{stopped} has gone"
    )
    calm.wait_until_calm(spares=1)
    assert calm.status["restarts"] == spent + 1, "its peers' complaints cost nothing more"
    assert len(calm.list_incident_names() - known) == 1


def test_an_operator_that_dies_after_each_write_of_a_recovery_loses_and_repeats_nothing(
    calm: ClusterJob, operator_process: OperatorProcess
) -> None:
    """Each of its lives ends right after the first write; were one repeated, no life would come any further."""
    known, lost = calm.list_incident_names(), calm.find_worker(0)
    membership = calm.read_plan()["membership"]
    names = {pod["metadata"]["name"] for pod in calm.list_pods()}
    operator_process.kill()
    calm.delete_worker(0)
    while calm.find_ended_incident("worker-lost", known) is None:
        operator_process.start(crash_after_writes=1)
        operator_process.wait_for_exit(or_=lambda: calm.find_ended_incident("worker-lost", known) is not None)
    operator_process.kill()
    operator_process.start()
    incident = calm.wait_until_incident_ended("worker-lost", known)
    assert (incident["spec"]["worker"], incident["spec"]["class"]) == (lost, "Disruption")
    assert read_status(incident)["remedy"] == "ReplaceWorker"
    calm.wait_until_calm(spares=1)
    assert len(calm.list_incident_names() - known) == 1
    assert calm.read_plan()["membership"] == membership + 1
    assert len({pod["metadata"]["name"] for pod in calm.list_pods()} - names) == 1
    assert len(calm.list_pods()) == 4


def list_uids(job: ClusterJob) -> set[str]:
    return {pod["metadata"]["uid"] for pod in job.list_pods()}
