"""Pacekeeper in the test cluster, as users install it: by Helm, from the checkout's chart."""

from __future__ import annotations

import hashlib
from typing import Any

from testcluster import api, programs
from testcluster.settings import KUBECONFIG, REPOSITORY
from testcluster.shell import run_command

RELEASE = "pacekeeper"
SYSTEM = "pacekeeper-system"
LEASE = "pacekeeper-operator"
CHART = REPOSITORY / "charts/pacekeeper"
VALUES = CHART / "ci/dev-values.yaml"
EXPORTER = REPOSITORY / "testcluster/dcgm-exporter.yaml"
FORCE_OPTIONS = ("--server-side=true", "--force-conflicts")
"""Conflicts are with tests, which write by kubectl what the chart has."""
HELM_TIMEOUT_SECONDS = 120
"""So long Helm waits for an operator that is ready, or for one that is gone."""


def install_release() -> None:
    """Install or upgrade; returns when an operator that runs the checkout's present sources is ready."""
    _run_helm(
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", SYSTEM, "--create-namespace",
        "--values", str(VALUES), "--set-string", rf"podAnnotations.pacekeeper\.dev/sources={_compute_source_digest()}",
        *FORCE_OPTIONS, "--wait", f"--timeout={HELM_TIMEOUT_SECONDS}s",
    )  # fmt: skip


def install_exporter() -> None:
    """The stand-in for dcgm-exporter, whose GPU errors are set by `faults.set_xid`; returns when it runs."""
    kubectl = (programs.find_kubectl(), f"--kubeconfig={KUBECONFIG}")
    run_command(*kubectl, "apply", "-f", EXPORTER)
    rollout = ("rollout", "status", "daemonset/dcgm-exporter", "--namespace=gpu-monitoring")
    run_command(*kubectl, *rollout, f"--timeout={HELM_TIMEOUT_SECONDS}s", timeout=HELM_TIMEOUT_SECONDS + 30)


def uninstall_release() -> None:
    """As `helm uninstall` does it: resource definitions and jobs stay."""
    _run_helm("uninstall", RELEASE, "--namespace", SYSTEM, "--ignore-not-found", "--wait", f"--timeout={HELM_TIMEOUT_SECONDS}s")


def list_operator_pods() -> list[dict[str, Any]]:
    """The operator's, those that are going left out."""
    found = api.get_path(f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/instance={RELEASE}")["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def get_leader_name() -> str:
    """Name of the pod that holds the operator's Lease; "": none does."""
    spec = api.get_path(f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{LEASE}")["spec"]
    return str(spec.get("holderIdentity") or "")


def find_leading_pod() -> dict[str, Any] | None:
    """None: nobody leads now, or who does is going."""
    name = get_leader_name()
    return next((pod for pod in list_operator_pods() if pod["metadata"]["name"] == name), None)


def _compute_source_digest() -> str:
    """Of the operator's sources: containers see the checkout itself, but a running operator keeps what it has read."""
    found = hashlib.sha256()
    for package in ("operator/pacekeeper_operator", "analysis/pacekeeper_analysis"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            found.update(f"{path.relative_to(REPOSITORY)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _run_helm(*arguments: str) -> None:
    run_command(programs.find_helm(), *arguments, f"--kubeconfig={KUBECONFIG}", timeout=HELM_TIMEOUT_SECONDS + 30)
