"""What processes and the cluster hold, from outside: the kernel's figures, metrics pages, and objects by kind."""

from __future__ import annotations

import os
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from pacekeeper_operator.api.names import SIDECAR_CONTAINER
from testcluster import cgroups, faults, release
from testcluster.shell import ClusterError
from testing.kubernetes.cluster import KubectlCluster
from testing.kubernetes.jobs import ClusterJob

from .growth import Growth, estimate_growth

METRICS_PORT = 9464
"""Of the operator's and the sidecars' metrics."""
RING_MB = 9.0
"""What the records of a worker's one rank come to at most: they fill it once, in an hour or two, and are counted to the
sidecar (decision 31)."""
TASKS_METRIC = "pacekeeper_tasks"
"""The operator's."""
COUNTED_KINDS = (
    "pods", "secrets", "configmaps", "services", "endpointslices", "leases", "networkpolicies", "serviceaccounts",
    "roles", "rolebindings", "controllerrevisions", "trainingjobs", "trainingjobstates", "nodequarantines",
)  # fmt: skip
"""That are counted. Events expire, and Incidents are kept for as long as the chart sets."""

MeterSubject = str
"""A process's life ("leader pacekeeper-x-y, start 0"), or CLUSTER."""
LEADER, STANDBY, SIDECARS, TRAINERS, CLUSTER = "leader", "standby", "sidecar of", "trainer of", "cluster"


@dataclass
class Meters:
    """All samples so far: (seconds, value) by subject and figure."""

    samples: dict[tuple[MeterSubject, str], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def take(self, at: float, cluster: KubectlCluster, bystander: ClusterJob) -> None:
        """One of everything. `at`: seconds since the soak began. What is starting or ending just now is left out."""
        for subject, metrics in _measure_subjects(cluster, bystander):
            for name, value in metrics.items():
                self.samples[subject, name].append((at, value))

    def compute_growth(self) -> dict[str, Growth]:
        """By subject and metric, where there are enough samples."""
        growths = {f"{subject}: {name}": estimate_growth(samples) for (subject, name), samples in self.samples.items()}
        return {name: growth for name, growth in growths.items() if growth is not None}

    def has_all_meters(self) -> bool:
        """Whether `compute_growth` covers each kind of process, and the cluster."""
        return all(
            any(name.startswith(kind) for name in self.compute_growth())
            for kind in (LEADER, STANDBY, SIDECARS, TRAINERS, CLUSTER)
        )


def _measure_subjects(
    cluster: KubectlCluster, bystander: ClusterJob
) -> Iterator[tuple[MeterSubject, dict[str, float]]]:
    leader = release.get_leader_name()
    for pod in release.list_operator_pods():
        role = LEADER if pod["metadata"]["name"] == leader else STANDBY
        yield from _measure_container(role, release.SYSTEM, pod, "operator", page=True)
    for pod in bystander.list_pods():
        yield from _measure_container(SIDECARS, bystander.namespace, pod, SIDECAR_CONTAINER, page=True)
        yield from _measure_container(TRAINERS, bystander.namespace, pod, "trainer", page=False)
    yield CLUSTER, {kind: float(len(cluster.list(kind, namespace=""))) for kind in COUNTED_KINDS}


def _measure_container(
    role: str, namespace: str, pod: Mapping[str, Any], name: str, page: bool
) -> Iterator[tuple[MeterSubject, dict[str, float]]]:
    """page: whether its pod's metrics are its own."""
    pod_name, status = pod["metadata"]["name"], pod["status"]
    states = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
    starts = next((state["restartCount"] for state in states if state["name"] == name), 0)
    with suppress(ClusterError, OSError, HTTPException, KeyError):
        container = faults.find_container(namespace, pod_name, name)
        pids = container.pids()
        ring = RING_MB if role == SIDECARS else 0.0
        metrics = {
            "MB": cgroups.read_memory_bytes(container.cgroup) / 1e6,
            "shared MB": max(0.0, cgroups.read_shared_bytes(container.cgroup) / 1e6 - ring),
            "descriptors": float(sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)),
            "threads": float(sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)),
        }
        if page:
            metrics |= _read_metrics_page(status["podIP"])
        yield f"{role} {pod_name}, start {starts}", metrics


def _read_metrics_page(address: str) -> dict[str, float]:
    """Of its metrics."""
    with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=5) as response:
        series = [line for line in response.read().decode().splitlines() if line and not line.startswith("#")]
    metrics = {"series": float(len(series))}
    for line in series:
        if line.startswith(f"{TASKS_METRIC} "):
            metrics["tasks"] = float(line.split()[1])
    return metrics
