"""Pacekeeper in the test cluster, as users install it: by Helm, from the checkout's chart."""

from __future__ import annotations

import hashlib
from typing import Any

from testcluster import api, programs
from testcluster.settings import KUBECONFIG, REPOSITORY
from testcluster.shell import run

RELEASE = "pacekeeper"
SYSTEM = "pacekeeper-system"
LEASE = "pacekeeper-operator"
CHART = REPOSITORY / "charts/pacekeeper"
VALUES = CHART / "ci/dev-values.yaml"
EXPORTER = REPOSITORY / "testcluster/dcgm-exporter.yaml"
OVER_OTHERS = ("--server-side=true", "--force-conflicts")
"""Conflicts are with tests, which write by kubectl what the chart has."""
SECONDS = 120
"""So long Helm waits for an operator that is ready, or for one that is gone."""


def install() -> None:
    """Install or upgrade; returns when an operator that runs the checkout's present sources is ready."""
    _helm(
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", SYSTEM, "--create-namespace",
        "--values", str(VALUES), "--set-string", rf"podAnnotations.pacekeeper\.dev/sources={_digest()}",
        *OVER_OTHERS, "--wait", f"--timeout={SECONDS}s",
    )  # fmt: skip


def install_exporter() -> None:
    """The stand-in for dcgm-exporter, whose GPU errors are set by `faults.set_xid`; returns when it runs."""
    kubectl = (programs.kubectl(), f"--kubeconfig={KUBECONFIG}")
    run(*kubectl, "apply", "-f", EXPORTER)
    rollout = ("rollout", "status", "daemonset/dcgm-exporter", "--namespace=gpu-monitoring")
    run(*kubectl, *rollout, f"--timeout={SECONDS}s", timeout=SECONDS + 30)


def uninstall() -> None:
    """As `helm uninstall` does it: resource definitions and jobs stay."""
    _helm("uninstall", RELEASE, "--namespace", SYSTEM, "--ignore-not-found", "--wait", f"--timeout={SECONDS}s")


def pods() -> list[dict[str, Any]]:
    """The operator's, those that are going left out."""
    found = api.get(f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/instance={RELEASE}")["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def leader() -> str:
    """Name of the pod that holds the operator's Lease; "": none does."""
    spec = api.get(f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{LEASE}")["spec"]
    return str(spec.get("holderIdentity") or "")


def leading_pod() -> dict[str, Any] | None:
    """None: nobody leads now, or who does is going."""
    name = leader()
    return next((pod for pod in pods() if pod["metadata"]["name"] == name), None)


def _digest() -> str:
    """Of the operator's sources: containers see the checkout itself, but a running operator keeps what it has read."""
    found = hashlib.sha256()
    for package in ("operator/pacekeeper_operator", "analysis/pacekeeper_analysis"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            found.update(f"{path.relative_to(REPOSITORY)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _helm(*arguments: str) -> None:
    run(programs.helm(), *arguments, f"--kubeconfig={KUBECONFIG}", timeout=SECONDS + 30)
