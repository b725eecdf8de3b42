"""A job that names a queue, on real nodes; the queue's part is played by a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import Cluster, scratch_namespace
from tests.support.jobs import Job, paced
from tests.support.queue_stand_in import QueueStandIn, queues_served

pytestmark = pytest.mark.usefixtures("operator")

POOL = {"example.com/pool": "a"}


@pytest.fixture(scope="module")
def queue(cluster: Cluster) -> Iterator[QueueStandIn]:
    """With a flavour of three nodes."""
    names = [node["metadata"]["name"] for node in cluster.list("node", "")][:3]
    with queues_served(cluster) as stand_in:
        stand_in.make_flavor("pool-a", POOL)
        cluster.kubectl("label", "node", *names, "example.com/pool=a", "--overwrite")
        try:
            yield stand_in
        finally:
            cluster.kubectl("label", "node", *names, "example.com/pool-")


def queued(name: str, steps: int, **spec: Any) -> dict[str, Any]:
    body = paced(name, steps, **spec)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    return body


def words(job: Job) -> str:
    """Of the condition that says why it is held."""
    return job.condition("Suspended").get("message", "")


def left(job: Job, queue: QueueStandIn) -> bool:
    """Whether no pod is there any more. As long as one has not ended, it has its quota."""
    given_back, pods = queue.says(job, "QuotaReserved") == "False", job.pods()
    assert not (given_back and any(pod["status"]["phase"] in ("Pending", "Running") for pod in pods))
    return not pods


def test_a_queue_that_nobody_serves_holds_it_and_says_so(cluster: Cluster) -> None:
    """First: from the next test on somebody does."""
    with scratch_namespace(cluster) as namespace:
        job = Job.apply(cluster, namespace, queued("nobody", 20, replicas=1))
        job.until(lambda: "this cluster serves no Workloads" in words(job), 30, "the job says what is missing")
        assert not job.pods()
        cluster.kubectl("label", "tj", "nobody", "-n", namespace, "kueue.x-k8s.io/queue-name-")
        job.until_phase("Complete", timeout=120)


def test_let_in_taken_out_and_let_in_again_with_fewer(cluster: Cluster, queue: QueueStandIn) -> None:
    """Nothing runs before it is admitted; evicted, it keeps its steps, and its quota until its pods are gone."""
    pool = {node["metadata"]["name"] for node in cluster.list("node", "", "example.com/pool=a")}
    with scratch_namespace(cluster) as namespace:
        body = queued("queued", 10_000_000, replicas=2, spares=1, minReplicas=1)
        dear = f"dear-{namespace}"
        body["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = dear
        job = Job.apply(cluster, namespace, body)
        job.until(
            lambda: "make it, or name another" in job.condition("Hindered").get("message", ""), 30, "what is missing"
        )
        queue.make_priority_class(dear, 100)
        assert job.until(lambda: queue.workload(job), 30, "its Workload")["spec"]["priority"] == 100
        queue.keep_waiting(job, "insufficient unused quota")
        job.until(lambda: "insufficient unused quota" in words(job), 30, "the queue's words stand in the job")
        assert job.phase == "Suspended"
        assert job.condition("Reconciling")["reason"] == "Queued"
        assert not job.pods()

        queue.admit(job, "pool-a", workers=2, spares=1)
        job.until_calm(spares=1)
        assert set(job.nodes().values()) <= pool
        job.until(lambda: queue.says(job, "PodsReady") == "True", 30, "the queue knows that it trains")

        before = job.step()
        queue.evict(job, "Preempted", "to make room for another")
        job.until(lambda: "to make room" in words(job), 30, "it is told to leave")
        job.until(lambda: left(job, queue), 60, "its pods are gone")
        job.until(lambda: queue.says(job, "QuotaReserved") == "False", 30, "its quota is given back")
        assert queue.condition(job, "Requeued")["status"] == "True"
        assert job.status["lastCheckpointStep"] >= before

        queue.admit(job, "pool-a", workers=1, spares=0)
        job.until_phase("Running", timeout=90)
        job.until_trained_on()
        assert len(job.plan()["members"]) == len(job.pods()) == 1
        assert job.began_behind()[-1] >= before
        job.delete()
        job.until(lambda: queue.workload(job) is None, 30, "its Workload goes with it")


def test_sent_to_another_cluster_and_its_end_told_in_both(cluster: Cluster, queue: QueueStandIn) -> None:
    """MultiKueue's two clusters are two namespaces here: it sees to it that they have the same names."""
    with scratch_namespace(cluster) as here, scratch_namespace(cluster) as there:
        job = Job.apply(cluster, here, queued("sent", 20, replicas=1, managedBy="kueue.x-k8s.io/multikueue"))
        job.until(lambda: queue.workload(job), 30, "its Workload")
        queue.admit(job, "pool-a", workers=1)

        copy = queue.send(job, there)
        copy.until_phase("Complete", timeout=120)
        copy.until(lambda: queue.says(copy, "Finished") == "True", 40, "the queue there knows that it has ended")
        assert queue.condition(copy, "Finished")["reason"] == "Succeeded"
        assert not job.pods()
        assert not job.phase, "what it says is the other controller's to write"
        queue.bring_back(copy, job)
        job.until(lambda: queue.says(job, "Finished") == "True", 40, "and the queue here, too")
