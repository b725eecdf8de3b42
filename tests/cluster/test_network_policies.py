"""A job's NetworkPolicy, enforced: who reaches a worker, and who does not.

The test cluster's own rules stand in for a network plug-in (testcluster/network_policies.py); on a cluster of your own it
is the plug-in that is tested.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pacekeeper_operator.api import LABEL_JOB, METRICS_PORT, Job, JobSpec
from pacekeeper_operator.policies import network_policy, peers_of_url
from testcluster.images import DEV_IMAGE
from testcluster.settings import PROMETHEUS_URL
from tests.support.cluster import Cluster, scratch_namespace, wait_for

JOB = "gpt"
FREE_PORT = 29500
"""One that gloo or NCCL might have taken."""
PORTS = (METRICS_PORT, FREE_PORT)
SERVE = f"python -m http.server {FREE_PORT} & exec python -m http.server {METRICS_PORT}"
CONNECT = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=0.7).close()
        print(port)
    except TimeoutError:
        pass
"""


@dataclass(frozen=True)
class Place:
    """Two workers on two nodes, and whoever may want to reach the first."""

    cluster: Cluster
    namespace: str
    operators: str  # the namespace where the operator would be
    address: str  # of the first worker

    def reached(self) -> dict[str, list[int]]:
        """The ports of the first worker that each can connect to."""
        asking = {"worker-1": self.namespace, "stranger": self.namespace, "operator": self.operators}
        command = ["python", "-c", CONNECT, self.address, *map(str, PORTS)]
        exec_in = {pod: ["exec", pod, "--namespace", namespace, "--"] for pod, namespace in asking.items()}
        return {pod: [*map(int, self.cluster.kubectl(*where, *command).split())] for pod, where in exec_in.items()}


@pytest.fixture
def place(cluster: Cluster, namespace: str) -> Iterator[Place]:
    """The stranger is on the worker's node, the operator on another and so bold as to wear the job's label."""
    if not cluster.is_testcluster:
        pytest.skip("the pods need the images of the cluster of `make cluster`")
    with scratch_namespace(cluster) as operators:
        cluster.apply(_pod("worker-0", "node-1", SERVE, worker=True), namespace)
        cluster.apply(_pod("worker-1", "node-2", "sleep 1000", worker=True), namespace)
        cluster.apply(_pod("stranger", "node-1", "sleep 1000", worker=False), namespace)
        cluster.apply(_pod("operator", "node-2", "sleep 1000", worker=True), operators)
        for where in (namespace, operators):
            cluster.kubectl("wait", "pods", "--all", "--namespace", where, "--for=condition=Ready", "--timeout=40s")
        address = cluster.get("pod", "worker-0", namespace)["status"]["podIP"]
        yield Place(cluster, namespace, operators, address)


def test_a_worker_is_reached_by_its_own_job_and_its_metrics_by_who_reads_them(place: Place) -> None:
    everybody = {"worker-1": [*PORTS], "stranger": [*PORTS], "operator": [*PORTS]}
    assert place.reached() == everybody, "no policy yet: what follows is the policy's doing"

    job = Job(place.namespace, JOB, "", 1, JobSpec({}))
    policy = network_policy(job, place.operators, peers_of_url(PROMETHEUS_URL))
    del policy["metadata"]["ownerReferences"]  # there is no such job: its policy would be collected as garbage
    place.cluster.apply(policy, place.namespace)
    wanted = {"worker-1": [*PORTS], "stranger": [], "operator": [METRICS_PORT]}
    wait_for(lambda: place.reached() == wanted, 20, f"{wanted}", situation=lambda: f"{place.reached()}")

    place.cluster.kubectl("delete", "networkpolicy", "--all", "--namespace", place.namespace)
    wait_for(lambda: place.reached() == everybody, 20, "open again", situation=lambda: f"{place.reached()}")


def _pod(name: str, node: str, command: str, *, worker: bool) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "main",
        "image": DEV_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", command],
    }
    if command == SERVE:
        container["readinessProbe"] = {"tcpSocket": {"port": FREE_PORT}, "periodSeconds": 1}
    metadata = {"name": name, "labels": {LABEL_JOB: JOB} if worker else {}}
    spec = {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
