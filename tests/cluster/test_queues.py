"""A job that names a queue, on real nodes: Kueue's controller admits, preempts, and places it.

MultiKueue takes two clusters. A stand-in plays its part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from testcluster.images import TRAINER_IMAGE, UNPRIVILEGED_USER_ID
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace
from testing.kubernetes.jobs import ClusterJob, build_paced_job
from testing.kubernetes.queue_stand_in import (
    QueueStandIn,
    find_workload,
    find_workload_condition,
    install_queue_stand_in,
)

pytestmark = pytest.mark.usefixtures("operator")

KUEUE_VERSION = "kueue.x-k8s.io/v1beta2"
QUEUE, URGENT = "team", "urgent"
RACK, HOSTNAME = "example.com/rack", "kubernetes.io/hostname"
POOL_NODES = 4
PODS = 3
"""Quota of the queue: what the job asks for, and no more."""
MORE_THAN_HALF_A_NODE = f"{0.6 * (os.cpu_count() or 1):.1f}"


@pytest.fixture
def stand_in(cluster: KubectlCluster) -> Iterator[QueueStandIn]:
    with install_queue_stand_in(cluster) as queue:
        yield queue


@pytest.fixture(scope="module")
def racks(cluster: KubectlCluster, kueue: None) -> Iterator[dict[str, str]]:  # noqa: ARG001  # Kueue serves the flavor
    """The racks of the nodes of a flavor with a topology: two racks of two nodes."""
    names = [node["metadata"]["name"] for node in cluster.list("node", "")][:POOL_NODES]
    racks_by_node = {name: f"rack-{index % 2}" for index, name in enumerate(names)}
    for name, rack in racks_by_node.items():
        cluster.kubectl("label", "node", name, "example.com/pool=a", f"{RACK}={rack}", "--overwrite")
    levels = [{"nodeLabel": RACK}, {"nodeLabel": HOSTNAME}]
    create_object(cluster, "Topology", "racks", {"spec": {"levels": levels}})
    flavor = {"nodeLabels": {"example.com/pool": "a"}, "topologyName": "racks"}
    create_object(cluster, "ResourceFlavor", "pool-a", {"spec": flavor})
    quota = {"cpu": str(PODS * (os.cpu_count() or 1)), "memory": "64Gi", "pods": str(PODS)}
    resources = [{"name": name, "nominalQuota": quantity} for name, quantity in quota.items()]
    cluster_queue = {
        "namespaceSelector": {},
        "stopPolicy": "Hold",
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": list(quota), "flavors": [{"name": "pool-a", "resources": resources}]}],
    }
    create_object(cluster, "ClusterQueue", QUEUE, {"spec": cluster_queue})
    try:
        yield racks_by_node
    finally:
        cluster.kubectl("label", "node", *names, "example.com/pool-", f"{RACK}-")


def create_object(cluster: KubectlCluster, kind: str, name: str, content: dict[str, Any], namespace: str = "") -> None:
    body = {"apiVersion": KUEUE_VERSION, "kind": kind, "metadata": {"name": name}, **content}
    cluster.apply(body, namespace or "default")


def build_queued_job(name: str, steps: int, **spec: Any) -> dict[str, Any]:
    body = build_paced_job(name, steps, **spec)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": QUEUE}
    return body


def build_urgent_job() -> dict[str, Any]:
    """Build a Job of one pod that preempts others and stays."""
    container = {
        "name": "sleep",
        "image": TRAINER_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "600"],
        "resources": {"requests": {"cpu": "20m", "memory": "32Mi"}},
        "securityContext": {"runAsUser": UNPRIVILEGED_USER_ID},
    }
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    labels = {"kueue.x-k8s.io/queue-name": QUEUE, "kueue.x-k8s.io/priority-class": URGENT}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": URGENT, "labels": labels},
        "spec": {"suspend": True, "template": {"spec": spec}},
    }


def read_suspended_message(job: ClusterJob) -> str:
    """Of the condition with the reason why it is held."""
    return job.get_condition("Suspended").get("message", "")


def has_no_pods(job: ClusterJob) -> bool:
    """Whether no pod is there any more. As long as one has not ended, it has its quota."""
    given_back, pods = find_workload_condition(job, "QuotaReserved")["status"] == "False", job.list_pods()
    assert not (given_back and any(pod["status"]["phase"] in ("Pending", "Running") for pod in pods))
    return not pods


def test_a_queue_without_a_controller_holds_the_job_and_its_condition_reports_it(cluster: KubectlCluster) -> None:
    """First: from the next test on there is a controller."""
    with scratch_namespace(cluster) as namespace:
        job = ClusterJob.apply(cluster, namespace, build_queued_job("unserved", 20, replicas=1))
        job.wait_until(
            lambda: "this cluster serves no Workloads" in read_suspended_message(job),
            120,
            "the job reports what is missing",
        )
        assert not job.list_pods()
        cluster.kubectl("label", "tj", "unserved", "-n", namespace, "kueue.x-k8s.io/queue-name-")
        job.wait_for_phase("Complete", timeout=120)


def test_a_job_that_is_sent_to_another_cluster_reports_its_end_in_both(
    cluster: KubectlCluster, stand_in: QueueStandIn
) -> None:
    """MultiKueue's two clusters are two namespaces here: it sees to it that they have the same names."""
    with scratch_namespace(cluster) as here, scratch_namespace(cluster) as there:
        job = ClusterJob.apply(
            cluster, here, build_queued_job("sent", 20, replicas=1, managedBy="kueue.x-k8s.io/multikueue")
        )
        job.wait_until(lambda: find_workload(job), 120, "its Workload")
        stand_in.admit(job, workers=1)

        copy = stand_in.send_to_worker_cluster(job, there)
        copy.wait_for_phase("Complete", timeout=120)
        copy.wait_until(
            lambda: find_workload_condition(copy, "Finished"), 120, "the queue there has received that it has ended"
        )
        assert find_workload_condition(copy, "Finished")["reason"] == "Succeeded"
        assert not job.list_pods()
        assert not job.phase, "its status is the other controller's to write"
        stand_in.copy_status_back(copy, job)
        job.wait_until(lambda: find_workload_condition(job, "Finished"), 120, "and the queue here, too")


def test_kueue_places_preempts_and_resumes_a_job(cluster: KubectlCluster, racks: Mapping[str, str]) -> None:
    """Nothing runs before it is admitted; evicted, it keeps its steps, and its quota until its pods are gone."""
    with scratch_namespace(cluster) as namespace:
        create_object(cluster, "LocalQueue", QUEUE, {"spec": {"clusterQueue": QUEUE}}, namespace)
        body = build_queued_job("queued", 10_000_000, replicas=2, spares=1, minReplicas=1, cpu=MORE_THAN_HALF_A_NODE)
        body["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = "normal"
        body["spec"]["template"]["metadata"] = {"annotations": {"kueue.x-k8s.io/podset-required-topology": RACK}}
        job = ClusterJob.apply(cluster, namespace, body)
        job.wait_until(
            lambda: "make it, or name another" in job.get_condition("ActionBlocked").get("message", ""),
            120,
            "what is missing",
        )
        for name, value in (("normal", 10), (URGENT, 100)):
            create_object(cluster, "WorkloadPriorityClass", name, {"value": value})
        job.wait_until(lambda: "is inactive" in read_suspended_message(job), 120, "the queue's message is in the job")
        assert job.phase == "Suspended"
        assert job.get_condition("Reconciling")["reason"] == "Queued"
        assert not job.list_pods()

        cluster.kubectl("patch", "clusterqueue", QUEUE, "--type=merge", "-p", '{"spec": {"stopPolicy": "None"}}')
        job.wait_until_calm(spares=1)
        check_placement(job, racks, workers=2)
        job.wait_until(
            lambda: find_workload_condition(job, "PodsReady").get("status") == "True", 120, "Kueue sees that it runs"
        )

        # A pod that replaces another takes its place: the former spare keeps its own.
        cluster.kubectl("delete", "pod", job.find_worker(1), "-n", namespace, "--wait=false")
        job.wait_until_healed("worker-lost")
        job.wait_until_calm(spares=1)
        check_placement(job, racks, workers=2)

        # A job of higher priority takes one of the three pods: there is room for one worker and the spare.
        before = job.read_step()
        cluster.apply(build_urgent_job(), namespace)
        job.wait_until(lambda: find_workload_condition(job, "Preempted"), 120, "it is evicted")
        job.wait_until(lambda: has_no_pods(job), 120, "its pods are gone")
        job.wait_until(
            lambda: find_workload_condition(job, "Evicted")["status"] == "False", 120, "it is admitted with fewer"
        )
        assert job.status["lastCheckpointStep"] >= before
        job.wait_for_phase("Running", timeout=120)
        job.wait_for_more_steps()
        assert len(job.read_plan()["members"]) == 1
        check_placement(job, racks, workers=1)
        assert job.list_start_steps()[-1] >= before
        job.delete()
        job.wait_until(lambda: find_workload(job) is None, 120, "its Workload goes with it")
        cluster.kubectl("delete", f"job/{URGENT}", f"localqueue/{QUEUE}", "-n", namespace, "--timeout=120s")


def check_placement(job: ClusterJob, racks: Mapping[str, str], workers: int) -> None:
    """Check that each pod runs where Kueue has assigned it: the workers in one rack."""
    pods = job.list_pods()
    nodes: dict[str, list[str]] = {}
    for pod in pods:
        nodes.setdefault(pod["metadata"]["labels"]["kueue.x-k8s.io/podset"], []).append(pod["spec"]["nodeName"])
    assert {pod_set: sorted(names) for pod_set, names in nodes.items()} == list_assigned_nodes(job)
    assert {name: len(names) for name, names in nodes.items()} == {"workers": workers, "spares": 1}
    assert len({racks[name] for name in nodes["workers"]}) == 1


def list_assigned_nodes(job: ClusterJob) -> dict[str, list[str]]:
    """Return the nodes of the Workload's topology assignments, one for each pod, by pod set."""
    workload = find_workload(job)
    assert workload is not None
    assigned: dict[str, list[str]] = {}
    for assignment in workload["status"]["admission"]["podSetAssignments"]:
        nodes = assigned.setdefault(assignment["name"], [])
        for domain in assignment["topologyAssignment"]["domains"]:
            (node,) = domain["values"]
            nodes += [node] * domain["count"]
    return {name: sorted(nodes) for name, nodes in assigned.items()}
