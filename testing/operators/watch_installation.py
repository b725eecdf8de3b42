"""The watch of pods of other controllers, as the chart installs it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pacekeeper_operator.api.names import LABEL_WATCH, WATCH_CONFIG_MAP
from pacekeeper_operator.decide.injection_gate import build_binding_patch
from pacekeeper_operator.endpoint.admission_webhook import WEBHOOK_PATH
from testcluster.settings import HOST_ADDRESS
from testing.kubernetes.chart import SYSTEM, render_chart
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.operators.operator_process import OperatorProcess, run_operator_process

WATCH_KINDS = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding", "MutatingWebhookConfiguration")
FIRST_SECONDS = 120
"""Within which the API server applies a policy, or a change of its parameters."""


def render_watch(image: str, mode: str) -> list[dict[str, Any]]:
    repository, _, tag = image.partition(":")
    values = {"enabled": True, "mode": mode, "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"}}
    objects = render_chart("--kube-version", "1.36.0", "--set-json", f"watch={json.dumps(values)}")
    return [found for found in objects if found["kind"] in WATCH_KINDS and "-watch" in found["metadata"]["name"]]


@contextmanager
def apply_watch(cluster: KubectlCluster, image: str, mode: str, url: str = "") -> Iterator[None]:
    """Apply the chart's objects of the watch. `url`: where the webhook is, instead of the operator's Service."""
    if cluster.get("namespace", SYSTEM) is None:
        cluster.kubectl("create", "namespace", SYSTEM)
    objects = render_watch(image, mode)
    for found in objects:
        for webhook in found.get("webhooks") or ():
            webhook["clientConfig"] = {"url": url}
        cluster.apply(found, found["metadata"].get("namespace", "default"))
    try:
        yield
    finally:
        for found in objects:
            cluster.kubectl("delete", found["kind"].lower(), found["metadata"]["name"], "--ignore-not-found")
        # No upgrade deletes the state. The next test begins as an installation.
        cluster.kubectl("delete", "configmap", WATCH_CONFIG_MAP, "-n", SYSTEM, "--ignore-not-found")


def write_state(cluster: KubectlCluster, **data: str) -> None:
    """Write the state as the operator does, which creates it."""
    if cluster.get("configmap", WATCH_CONFIG_MAP, SYSTEM) is None:
        cluster.kubectl("create", "configmap", WATCH_CONFIG_MAP, "-n", SYSTEM)
    patch = json.dumps({"data": data})
    cluster.kubectl("patch", "configmap", WATCH_CONFIG_MAP, "-n", SYSTEM, "--type=merge", "-p", patch)


def set_gate(cluster: KubectlCluster, *, is_open: bool) -> None:
    """Open or close the bindings as the operator does."""
    for name in ("pacekeeper-watch", "pacekeeper-watch-pods"):
        binding = cluster.get("mutatingadmissionpolicybinding", name)
        patch = build_binding_patch(binding, is_open=is_open)
        if patch is not None:
            cluster.kubectl("patch", "mutatingadmissionpolicybinding", name, "--type=merge", "-p", json.dumps(patch))


def read_state(cluster: KubectlCluster) -> dict[str, str]:
    return dict((cluster.get("configmap", WATCH_CONFIG_MAP, SYSTEM) or {}).get("data") or {})


@contextmanager
def labeled_namespace(cluster: KubectlCluster, **labels: str) -> Iterator[str]:
    with scratch_namespace(cluster) as name:
        cluster.kubectl("label", "namespace", name, *(f"{key}={value}" for key, value in labels.items()))
        wait_for(lambda: cluster.get("serviceaccount", "default", name), 30, "the namespace is ready")
        yield name


def watch_label(value: str) -> dict[str, str]:
    return {LABEL_WATCH: value}


def build_settings(mode: str, image: str, port: int = 8444) -> dict[str, str]:
    rules = {"image": image, "pullPolicy": "Never"}
    return {
        "PACEKEEPER_WATCH_MODE": mode,
        "PACEKEEPER_WATCH_RULES": json.dumps(rules),
        "PACEKEEPER_WATCH_PORT": str(port),
    }


@contextmanager
def run_injecting_operator(cluster: KubectlCluster, image: str, **settings: str) -> Iterator[OperatorProcess]:
    """Run an operator on the machine, whose webhook injects the watch. `settings`: its variables in addition."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    url = f"https://{HOST_ADDRESS}:{port}{WEBHOOK_PATH}"
    variables = build_settings("Webhook", image, port) | settings
    with apply_watch(cluster, image, "Webhook", url), run_operator_process(cluster, settings=variables) as operator:
        yield operator
