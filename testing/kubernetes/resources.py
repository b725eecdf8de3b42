"""The chart's custom resources on a real cluster, with no operator that answers to what a test writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from testing.kubernetes.chart import RELEASE, SYSTEM, render_chart
from testing.kubernetes.cluster import KubectlCluster, wait_for


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
    scale_operator(cluster, deployment, 0)
    yield
    scale_operator(cluster, deployment, deployment["spec"]["replicas"])


def _apply_definitions(cluster: KubectlCluster) -> None:
    helm_annotations = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": SYSTEM}
    definitions = [body for body in render_chart() if body["kind"] == "CustomResourceDefinition"]
    for definition in definitions:
        definition["metadata"]["annotations"] |= helm_annotations  # so that `helm install` takes over what it finds
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(definition))
    names = [f"crd/{definition['metadata']['name']}" for definition in definitions]
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", *names)
    for definition in definitions:  # kubectl waits while the API server still prepares to store them
        cluster.kubectl(
            "get", f"{definition['spec']['names']['plural']}.{definition['spec']['group']}", "--all-namespaces"
        )


def scale_operator(cluster: KubectlCluster, deployment: dict[str, Any], replicas: int) -> None:
    """Until exactly this many pods are there: one that is terminating would answer, too."""
    labels = deployment["spec"]["selector"]["matchLabels"]
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    cluster.kubectl("scale", "deployment", RELEASE, "--namespace", SYSTEM, f"--replicas={replicas}")
    wait_for(
        lambda: len(cluster.list("pod", SYSTEM, selector)) == replicas,
        timeout=90,
        what=f"operator at {replicas} replicas",
    )
