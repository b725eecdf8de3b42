"""A job's NetworkPolicy, enforced: who reaches a worker, and who does not.

The test cluster's own rules stand in for a network plug-in (testcluster/network_policies.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from pacekeeper_operator.api.names import LABEL_JOB, METRICS_PORT
from pacekeeper_operator.api.training_job import JobSpec, TrainingJob
from pacekeeper_operator.pods.network_policies import build_network_policy, derive_peers_from_url
from testcluster.images import DEV_IMAGE
from testcluster.settings import PROMETHEUS_URL
from testcluster.shell import run_command
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for

JOB = "gpt"
FREE_PORT = 29500
"""One that gloo or NCCL might have taken."""
PORTS = (METRICS_PORT, FREE_PORT)
IDLE = "exec sleep 1000"
SERVE = f"python -m http.server {FREE_PORT} & exec python -m http.server {METRICS_PORT}"
CONNECT = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=0.7).close()
        print(port)
    except OSError:
        pass
"""
Reached = dict[str, tuple[int, ...]]
"""By client: the first worker's ports that admit it."""
ALL_CLIENTS: Reached = dict.fromkeys(("peer", "stranger", "operator", "prometheus"), PORTS)


@dataclass(frozen=True)
class Place:
    """Two workers on two nodes, and the clients that try to reach the first."""

    cluster: KubectlCluster
    namespace: str
    operators: str  # the namespace where the operator would be
    address: str  # of the first worker

    def reached(self) -> Reached:
        pods = {"peer": self.namespace, "stranger": self.namespace, "operator": self.operators}
        connect = ["python", "-c", CONNECT, self.address, *map(str, PORTS)]
        commands = {pod: ["exec", pod, "--namespace", where, "--", *connect] for pod, where in pods.items()}
        with ThreadPoolExecutor() as pool:
            answers = {pod: pool.submit(self.cluster.kubectl, *command) for pod, command in commands.items()}
            # Prometheus is on the machine itself.
            answers["prometheus"] = pool.submit(run_command, sys.executable, *connect[1:])
        return {client: (*map(int, answer.result().split()),) for client, answer in answers.items()}

    def wait_until_reached(self, expected: Reached) -> None:
        wait_for(lambda: self.reached() == expected, 120, f"{expected}", situation=lambda: f"it is {self.reached()}")


@pytest.fixture(scope="module")
def pods(cluster: KubectlCluster) -> Iterator[Place]:
    """The stranger is on the worker's node, the operator on another and so bold as to wear the job's label."""
    if not cluster.is_testcluster:
        pytest.skip("the pods need the images of the cluster of `make cluster`")
    with scratch_namespace(cluster) as namespace, scratch_namespace(cluster) as operators:
        cluster.apply(_build_pod("worker", "node-1", SERVE, worker=True), namespace)
        cluster.apply(_build_pod("peer", "node-2", IDLE, worker=True), namespace)
        cluster.apply(_build_pod("stranger", "node-1", IDLE, worker=False), namespace)
        cluster.apply(_build_pod("operator", "node-2", IDLE, worker=True), operators)
        for where in (namespace, operators):
            cluster.kubectl("wait", "pods", "--all", "--namespace", where, "--for=condition=Ready", "--timeout=120s")
        address = cluster.get("pod", "worker", namespace)["status"]["podIP"]
        yield Place(cluster, namespace, operators, address)


@pytest.fixture
def place(pods: Place) -> Iterator[Place]:
    """Open before each test: what follows is the doing of its policy."""
    pods.wait_until_reached(ALL_CLIENTS)
    yield pods
    pods.cluster.kubectl("delete", "networkpolicy", "--all", "--namespace", pods.namespace)


def test_a_worker_is_reached_by_its_own_job_and_its_metrics_by_prometheus(place: Place) -> None:
    job = TrainingJob(place.namespace, JOB, "", 1, JobSpec({}))
    policy = build_network_policy(job, place.operators, derive_peers_from_url(PROMETHEUS_URL))
    del policy["metadata"]["ownerReferences"]  # there is no such job: its policy would be collected as garbage
    place.cluster.apply(policy, place.namespace)
    metrics = (METRICS_PORT,)
    place.wait_until_reached({"peer": PORTS, "stranger": (), "operator": metrics, "prometheus": metrics})


def test_a_tenants_own_policy_limits_the_egress_of_their_pods(place: Place) -> None:
    """Of the test cluster's rules: egress, and the last policy's end."""
    spec = {
        "podSelector": {"matchExpressions": [{"key": LABEL_JOB, "operator": "DoesNotExist"}]},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"podSelector": {}}], "ports": [{"port": FREE_PORT}]}],
    }
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "egress"}}
    place.cluster.apply(kind | {"spec": spec}, place.namespace)
    place.wait_until_reached(ALL_CLIENTS | {"stranger": (FREE_PORT,)})


def _build_pod(name: str, node: str, command: str, *, worker: bool) -> dict[str, Any]:
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
