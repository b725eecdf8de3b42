"""Nodes that are slow from the start are found before ranks start on them, and healthy ones are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testcluster import faults
from testing.kubernetes.chart import SYSTEM
from testing.kubernetes.cluster import KubectlCluster, wait_for
from testing.kubernetes.jobs import ClusterJob, build_paced_job

BAD = "node-3"
CPU = "1500m"
"""Requested of a node's two cores: one worker a node."""


@pytest.fixture(autouse=True)
def forgotten(cluster: KubectlCluster, operator: None) -> Iterator[None]:  # noqa: ARG001  # it serves jobs
    """No node has been met before, and none is held afterwards."""
    cluster.kubectl("delete", "nodeprobes", "--all")
    yield
    faults.clear_link(BAD)
    faults.throttle_node(BAD, None)
    cluster.kubectl("delete", "nodequarantines", "--all", "--timeout=120s")


def build_preflight_job(replicas: int, **spec: Any) -> dict[str, Any]:
    return build_paced_job("careful", 10_000_000, replicas=replicas, preflight={"enabled": True}, cpu=CPU, **spec)


def list_probes(cluster: KubectlCluster) -> dict[str, dict[str, Any]]:
    return {body["metadata"]["name"]: body["spec"] for body in cluster.list("nodeprobes")}


def test_a_healthy_cluster_passes_and_is_probed_once(cluster: KubectlCluster, namespace: str) -> None:
    job = ClusterJob.apply(cluster, namespace, build_preflight_job(6))
    job.wait_for_phase("Running", timeout=120)
    found = list_probes(cluster)
    assert len(found) == 6
    assert all(probe["passed"] for probe in found.values()), found
    assert all(len(probe["metrics"].get("links", ())) in (0, 1, 2) for probe in found.values())
    assert job.get_condition("Preflight")["status"] == "True"
    assert namespace not in str(cluster.list("nodequarantines"))
    assert not cluster.list("pods", SYSTEM, "pacekeeper.dev/probe-group,pacekeeper.dev/probe-group!=known-good")
    job.delete()
    again = ClusterJob.apply(cluster, namespace, build_preflight_job(3))
    again.wait_for_phase("Running", timeout=120)
    assert list_probes(cluster) == found
    again.delete()


@pytest.mark.parametrize("fault", ["slow link", "throttled"])
def test_a_node_that_is_slow_from_the_start_gets_no_rank(cluster: KubectlCluster, namespace: str, fault: str) -> None:
    if fault == "slow link":
        faults.slow_link(BAD, "50mbit")
    else:
        faults.throttle_node(BAD, 120)  # less than what is left of this machine while others work on it
    preferred = {"key": "kubernetes.io/hostname", "operator": "In", "values": [BAD, "node-1", "node-2"]}
    preference = [{"weight": 100, "preference": {"matchExpressions": [preferred]}}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preference}}
    job = ClusterJob.apply(cluster, namespace, build_preflight_job(3, pod={"affinity": affinity}))
    job.wait_for_phase("Running", timeout=240)
    ranked = {member["worker"] for member in job.read_plan()["members"]}
    nodes = {pod["spec"]["nodeName"] for pod in job.list_pods() if pod["metadata"]["name"] in ranked}
    assert len(nodes) == 3
    assert BAD not in nodes
    assert not list_probes(cluster)[BAD].get("passed")
    assert [name for name, probe in list_probes(cluster).items() if probe.get("passed") is False] == [BAD]
    condition = job.get_condition("Preflight")
    assert (condition["status"], condition["reason"]) == ("False", "NodesFailed")
    wait_for(lambda: cluster.get("nodequarantine", BAD), 120, "the node is suspected")
    held = wait_for(lambda: (cluster.get("nodequarantine", BAD).get("status") or {}).get("cordonedAt"), 120, "held")
    assert held
    job.delete()
