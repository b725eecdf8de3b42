"""The chart's custom resources on a real cluster, with no operator that answers to what a test writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from testing.kubernetes.chart import RELEASE, SYSTEM, render_chart
from testing.kubernetes.cluster import KubectlCluster, wait_for

_PODS = f"app.kubernetes.io/name=pacekeeper,app.kubernetes.io/instance={RELEASE}"


@pytest.fixture(scope="session")
def resources(cluster: KubectlCluster) -> Iterator[None]:
    with run_without_operator(cluster):
        yield


@contextmanager
def run_without_operator(cluster: KubectlCluster) -> Iterator[None]:
    """The chart's CRDs are there, and no operator answers to what these tests write.

    Tests that want an operator come later (see conftest.py) and install it again; where there are none, it comes back.
    """
    _apply_definitions(cluster)
    deployment = cluster.get("deployment", RELEASE, SYSTEM)
    if deployment is None:
        yield
        return
    scale_operator(cluster, 0)
    yield
    scale_operator(cluster, deployment["spec"]["replicas"])


def _apply_definitions(cluster: KubectlCluster) -> None:
    helm_annotations = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": SYSTEM}
    definitions = [body for body in render_chart() if body["kind"] == "CustomResourceDefinition"]
    for definition in definitions:
        definition["metadata"]["annotations"] |= helm_annotations  # so that `helm install` takes over what it finds
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(definition))
    names = [f"crd/{definition['metadata']['name']}" for definition in definitions]
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=120s", *names)
    for definition in definitions:  # kubectl waits while the API server still prepares to store them
        cluster.kubectl(
            "get", f"{definition['spec']['names']['plural']}.{definition['spec']['group']}", "--all-namespaces"
        )


def scale_operator(cluster: KubectlCluster, replicas: int) -> None:
    cluster.kubectl("scale", "deployment", RELEASE, "--namespace", SYSTEM, f"--replicas={replicas}")
    wait_for_operator_pods(cluster, replicas)


def wait_for_operator_pods(cluster: KubectlCluster, count: int) -> None:
    """Until exactly this many are there, and none is about to be created: one that is terminating would answer, too."""

    def is_reached() -> bool:
        owners = [owner for kind in ("deployment", "replicaset") for owner in cluster.list(kind, SYSTEM, _PODS)]
        are_settled = all(
            owner["status"].get("observedGeneration") == owner["metadata"]["generation"] for owner in owners
        )
        return are_settled and len(cluster.list("pod", SYSTEM, _PODS)) == count

    wait_for(is_reached, timeout=120, what=f"{count} pods of the operator")
