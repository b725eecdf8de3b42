"""Workers that the cluster's own scheduler places together or not at all: the alpha PodGroups of Kubernetes 1.36."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import testcluster.cluster
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.kubernetes.jobs import ClusterJob, build_paced_job

THREE = ["node-2", "node-3", "node-4"]


@pytest.fixture(scope="module")
def gangs(cluster: KubectlCluster, operator: None) -> Iterator[None]:  # noqa: ARG001  # it goes on through both restarts
    """The cluster's second profile: API server and scheduler start again, with the features on."""
    testcluster.cluster.bring_up(gangs=True)
    yield
    testcluster.cluster.bring_up(gangs=False)


def build_tight_job(name: str, steps: int, replicas: int) -> dict[str, Any]:
    """On three nodes with capacity for one worker each."""
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": THREE}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return build_paced_job(name, steps, replicas=replicas, cpu="1300m", pod={"affinity": {"nodeAffinity": required}})


def is_unplaced(pod: dict[str, Any]) -> bool:
    """By the scheduler's condition."""
    conditions = {each["type"]: each["status"] for each in pod.get("status", {}).get("conditions", ())}
    return not pod["spec"].get("nodeName") and conditions.get("PodScheduled") == "False"


@pytest.mark.usefixtures("gangs")
def test_no_pod_is_placed_before_all_pods_fit(cluster: KubectlCluster) -> None:
    with scratch_namespace(cluster) as namespace:
        older = ClusterJob.apply(cluster, namespace, build_tight_job("older", 100_000, replicas=2))
        older.wait_for_phase("Running", timeout=120)
        older.delete_worker(0)
        older.wait_until_healed("worker-lost")
        assert [pod["spec"].get("schedulingGroup") for pod in older.list_pods()].count(None) == 1, (
            "it is placed by itself"
        )

        younger = ClusterJob.apply(cluster, namespace, build_tight_job("younger", 20, replicas=2))
        younger.wait_until(
            lambda: len(younger.list_pods()) == 2 and all(map(is_unplaced, younger.list_pods())),
            120,
            "none of both is placed",
        )
        named = {pod["spec"]["schedulingGroup"]["podGroupName"] for pod in younger.list_pods()}
        assert named == {"younger"}

        small = ClusterJob.apply(cluster, namespace, build_tight_job("small", 5, replicas=1))
        small.wait_for_phase("Complete", timeout=120)  # on the node that half of the younger would have taken
        assert all(map(is_unplaced, younger.list_pods()))

        older.delete()
        younger.wait_for_phase("Complete", timeout=120)
        assert not younger.list_incidents()
        younger.delete()
        kept = ["get", "podgroups.scheduling.k8s.io", "younger", "-n", namespace, "--ignore-not-found", "-o", "name"]
        wait_for(lambda: not cluster.kubectl(*kept), 120, "its PodGroup is gone with it")
