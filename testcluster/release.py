"""Installs Pacekeeper in the test cluster as users do: with Helm, from the checkout's chart."""

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
"""Conflicts are with tests, which write fields of the chart by kubectl."""
HELM_TIMEOUT_SECONDS = 120
"""Seconds for which Helm waits until an operator is ready, or deleted."""


def install_release() -> None:
    """Install or upgrade. Wait until an operator that runs the checkout's present sources is ready."""
    _run_helm(
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", SYSTEM, "--create-namespace",
        "--values", str(VALUES), "--set-string", rf"podAnnotations.pacekeeper\.dev/sources={_compute_source_digest()}",
        *FORCE_OPTIONS, "--wait", f"--timeout={HELM_TIMEOUT_SECONDS}s",
    )  # fmt: skip


def install_exporter() -> None:
    """Install the stand-in for dcgm-exporter, and wait until it runs. `faults.set_xid` sets its GPU errors."""
    kubectl = (programs.find_kubectl(), f"--kubeconfig={KUBECONFIG}")
    run_command(*kubectl, "apply", "-f", EXPORTER)
    rollout = ("rollout", "status", "daemonset/dcgm-exporter", "--namespace=gpu-monitoring")
    run_command(*kubectl, *rollout, f"--timeout={HELM_TIMEOUT_SECONDS}s", timeout=HELM_TIMEOUT_SECONDS + 30)


def uninstall_release() -> None:
    """Uninstall as `helm uninstall` does: resource definitions and jobs stay."""
    _run_helm(
        "uninstall",
        RELEASE,
        "--namespace",
        SYSTEM,
        "--ignore-not-found",
        "--wait",
        f"--timeout={HELM_TIMEOUT_SECONDS}s",
    )


def list_operator_pods() -> list[dict[str, Any]]:
    """Return the operator's pods, except those that are being deleted."""
    pods = api.get_path(f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/instance={RELEASE}")["items"]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def get_leader_name() -> str:
    """Return the name of the pod that holds the operator's Lease; "": none does."""
    spec = api.get_path(f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{LEASE}")["spec"]
    return str(spec.get("holderIdentity") or "")


def find_leading_pod() -> dict[str, Any] | None:
    """Return the leader's pod; None: no pod leads at present, or the leader is being deleted."""
    name = get_leader_name()
    return next((pod for pod in list_operator_pods() if pod["metadata"]["name"] == name), None)


def _compute_source_digest() -> str:
    """Compute a digest of the operator's sources.

    Containers see the checkout, but a running operator does not reload.
    """
    digest = hashlib.sha256()
    for package in ("operator/pacekeeper_operator", "analysis/pacekeeper_analysis"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            digest.update(f"{path.relative_to(REPOSITORY)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _run_helm(*arguments: str) -> None:
    run_command(programs.find_helm(), *arguments, f"--kubeconfig={KUBECONFIG}", timeout=HELM_TIMEOUT_SECONDS + 30)
