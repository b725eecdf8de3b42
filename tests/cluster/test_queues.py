"""A job that names a queue, on real nodes; the queue's part is played by a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testing.kubernetes.cluster import KubectlCluster, scratch_namespace
from testing.kubernetes.jobs import ClusterJob, build_paced_job
from testing.kubernetes.queue_stand_in import QueueStandIn, install_queue_stand_in

pytestmark = pytest.mark.usefixtures("operator")

POOL = {"example.com/pool": "a"}


@pytest.fixture(scope="module")
def queue(cluster: KubectlCluster) -> Iterator[QueueStandIn]:
    """With a flavor of three nodes."""
    names = [node["metadata"]["name"] for node in cluster.list("node", "")][:3]
    with install_queue_stand_in(cluster) as stand_in:
        stand_in.create_flavor("pool-a", POOL)
        cluster.kubectl("label", "node", *names, "example.com/pool=a", "--overwrite")
        try:
            yield stand_in
        finally:
            cluster.kubectl("label", "node", *names, "example.com/pool-")


def build_queued_job(name: str, steps: int, **spec: Any) -> dict[str, Any]:
    body = build_paced_job(name, steps, **spec)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    return body


def read_suspended_message(job: ClusterJob) -> str:
    """Of the condition with the reason why it is held."""
    return job.get_condition("Suspended").get("message", "")


def has_no_pods(job: ClusterJob, queue: QueueStandIn) -> bool:
    """Whether no pod is there any more. As long as one has not ended, it has its quota."""
    given_back, pods = queue.get_condition_status(job, "QuotaReserved") == "False", job.list_pods()
    assert not (given_back and any(pod["status"]["phase"] in ("Pending", "Running") for pod in pods))
    return not pods


def test_a_queue_without_a_controller_holds_the_job_and_its_condition_reports_it(cluster: KubectlCluster) -> None:
    """First: from the next test on there is a controller."""
    with scratch_namespace(cluster) as namespace:
        job = ClusterJob.apply(cluster, namespace, build_queued_job("unserved", 20, replicas=1))
        job.wait_until(
            lambda: "this cluster serves no Workloads" in read_suspended_message(job),
            30,
            "the job reports what is missing",
        )
        assert not job.list_pods()
        cluster.kubectl("label", "tj", "unserved", "-n", namespace, "kueue.x-k8s.io/queue-name-")
        job.wait_for_phase("Complete", timeout=120)


def test_a_job_is_admitted_preempted_and_admitted_again_with_fewer_workers(
    cluster: KubectlCluster, queue: QueueStandIn
) -> None:
    """Nothing runs before it is admitted; evicted, it keeps its steps, and its quota until its pods are gone."""
    pool = {node["metadata"]["name"] for node in cluster.list("node", "", "example.com/pool=a")}
    with scratch_namespace(cluster) as namespace:
        body = build_queued_job("queued", 10_000_000, replicas=2, spares=1, minReplicas=1)
        dear = f"dear-{namespace}"
        body["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = dear
        job = ClusterJob.apply(cluster, namespace, body)
        job.wait_until(
            lambda: "make it, or name another" in job.get_condition("ActionBlocked").get("message", ""),
            30,
            "what is missing",
        )
        queue.create_priority_class(dear, 100)
        assert job.wait_until(lambda: queue.get_workload(job), 30, "its Workload")["spec"]["priority"] == 100
        queue.keep_pending(job, "insufficient unused quota")
        job.wait_until(
            lambda: "insufficient unused quota" in read_suspended_message(job), 30, "the queue's message is in the job"
        )
        assert job.phase == "Suspended"
        assert job.get_condition("Reconciling")["reason"] == "Queued"
        assert not job.list_pods()

        queue.admit(job, "pool-a", workers=2, spares=1)
        job.wait_until_calm(spares=1)
        assert set(job.list_nodes().values()) <= pool
        job.wait_until(
            lambda: queue.get_condition_status(job, "PodsReady") == "True", 30, "the queue has received that it trains"
        )

        before = job.read_step()
        queue.evict(job, "Preempted", "to make room for another")
        job.wait_until(lambda: "to make room" in read_suspended_message(job), 30, "it is evicted")
        job.wait_until(lambda: has_no_pods(job, queue), 60, "its pods are gone")
        job.wait_until(
            lambda: queue.get_condition_status(job, "QuotaReserved") == "False", 30, "its quota is given back"
        )
        assert queue.get_condition(job, "Requeued")["status"] == "True"
        assert job.status["lastCheckpointStep"] >= before

        queue.admit(job, "pool-a", workers=1, spares=0)
        job.wait_for_phase("Running", timeout=90)
        job.wait_for_more_steps()
        assert len(job.read_plan()["members"]) == len(job.list_pods()) == 1
        assert job.list_start_steps()[-1] >= before
        job.delete()
        job.wait_until(lambda: queue.get_workload(job) is None, 30, "its Workload goes with it")


def test_a_job_that_is_sent_to_another_cluster_reports_its_end_in_both(
    cluster: KubectlCluster, queue: QueueStandIn
) -> None:
    """MultiKueue's two clusters are two namespaces here: it sees to it that they have the same names."""
    with scratch_namespace(cluster) as here, scratch_namespace(cluster) as there:
        job = ClusterJob.apply(
            cluster, here, build_queued_job("sent", 20, replicas=1, managedBy="kueue.x-k8s.io/multikueue")
        )
        job.wait_until(lambda: queue.get_workload(job), 30, "its Workload")
        queue.admit(job, "pool-a", workers=1)

        copy = queue.send_to_worker_cluster(job, there)
        copy.wait_for_phase("Complete", timeout=120)
        copy.wait_until(
            lambda: queue.get_condition_status(copy, "Finished") == "True",
            40,
            "the queue there has received that it has ended",
        )
        assert queue.get_condition(copy, "Finished")["reason"] == "Succeeded"
        assert not job.list_pods()
        assert not job.phase, "its status is the other controller's to write"
        queue.copy_status_back(copy, job)
        job.wait_until(lambda: queue.get_condition_status(job, "Finished") == "True", 40, "and the queue here, too")
