"""A slow route between workers on real nodes: found by the kernel's counters, then by a probe of the launchers."""

from __future__ import annotations

from typing import Any

import pytest

from testcluster import faults, placement
from testing.kubernetes.cluster import KubectlCluster
from testing.kubernetes.jobs import ClusterJob, build_paced_job

pytestmark = pytest.mark.usefixtures("operator")

RATE = "40mbit"
"""A step sends 25 Mbit from each rank (two layers of 512 × 512, in a ring): at this rate it takes 0.6 s longer."""
STEP_SECONDS = 0.1
EARLY_SECONDS = 40
"""A connection is held against its own first half minute (`sidecar.connections.EARLY_CONNECTION_SAMPLES`)."""


def wait_for_diagnosis(job: ClusterJob) -> dict[str, Any]:
    """Of the first incident of slow communication, once its probe has been answered."""

    def probed() -> dict[str, Any] | None:
        for incident in job.list_incidents():
            found: dict[str, Any] = incident.get("status", {}).get("diagnosis") or {}
            kinds = {witness["kind"] for witness in found.get("signals", ())}
            if incident["spec"]["cause"] == "slow-communication" and "Probe" in kinds:
                return found
        return None

    return job.wait_until(probed, 120, "an incident of slow communication with a probe as its witness")


def test_a_slow_route_between_two_nodes_is_diagnosed_as_a_link(cluster: KubectlCluster, namespace: str) -> None:
    """tests/distributed/test_links.py covers the sending and the receiving side of a node with the same probe."""
    body = build_paced_job(
        "links",
        1_000_000,
        environment={"WIDTH": "512", "SLEEP": str(STEP_SECONDS / 2)},
        replicas=4,
        detection={"windowSteps": 16, "stragglerSlowdown": 1.3},
        remediation={"allow": ["RestartRanks"]},  # nothing to be done about links: the incident waits for its probe
        pod=placement.spread_over_nodes("links"),
    )
    job = ClusterJob.apply(cluster, namespace, body)
    job.wait_until_calm()
    job.wait_for_step(round(EARLY_SECONDS / STEP_SECONDS), timeout=120)
    nodes = set(job.list_nodes().values())
    try:
        faults.slow_pair(job.find_node(0), job.find_node(1), RATE)
        found = wait_for_diagnosis(job)
        assert (found["fault"], found["culprit"]) in {("Network", "link 0 → 1"), ("Network", "link 1 → 0")}, found
        assert {witness["kind"] for witness in found["signals"]} >= {"Times", "Transport", "Probe"}
    finally:
        for node in nodes:
            faults.clear_link(node)
