"""A slow way between workers on real nodes: told by the kernel's figures, then by a probe between their launchers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testcluster import faults, placement
from tests.support.cluster import Cluster, scratch_namespace
from tests.support.jobs import Job, paced

pytestmark = pytest.mark.usefixtures("operator")

RATE = "40mbit"
"""A step sends 25 Mbit from each rank (two layers of 512 × 512, in a ring of four): it takes ten times as long."""
RANKS = 4
EARLY_STEPS = 400
"""Of 0.1 s: a connection is held against its own first half minute (`sidecar.connections.EARLY_LOOKS`)."""


@pytest.fixture
def job(cluster: Cluster) -> Iterator[Job]:
    """Four workers on nodes of their own. Nothing may be done about them: an incident then waits for its probe."""
    with scratch_namespace(cluster) as namespace:
        body = paced(
            "links",
            1_000_000,
            environment={"WIDTH": "512"},
            replicas=RANKS,
            detection={"windowSteps": 16, "stragglerSlowdown": 1.3},
            remediation={"allow": ["RestartRanks"]},
            pod=placement.apart("links"),
        )
        job = Job.apply(cluster, namespace, body)
        job.until_calm()
        job.until_step(EARLY_STEPS, timeout=120)
        nodes = [job.node(rank) for rank in range(RANKS)]
        yield job
        for node in nodes:
            faults.clear_link(node)
        job.delete()


def diagnosis(job: Job) -> dict[str, Any]:
    """Of the first incident of slow communication, once its probe has been answered."""

    def probed() -> dict[str, Any] | None:
        for incident in job.incidents():
            found: dict[str, Any] = incident.get("status", {}).get("diagnosis") or {}
            kinds = {witness["kind"] for witness in found.get("witnesses", ())}
            if incident["spec"]["cause"] == "slow-communication" and "Probe" in kinds:
                return found
        return None

    return job.until(probed, 120, "an incident of slow communication with a probe as its witness")


def test_a_slow_way_between_two_nodes_is_a_link(job: Job) -> None:
    faults.slow_pair(job.node(0), job.node(1), RATE)
    found = diagnosis(job)
    assert (found["fault"], found["culprit"]) in {("Network", "link 0 → 1"), ("Network", "link 1 → 0")}, found
    assert {witness["kind"] for witness in found["witnesses"]} >= {"Times", "Transport", "Probe"}


def test_a_node_that_sends_slowly_is_told_by_its_sender_side(job: Job) -> None:
    faults.slow_egress(job.node(1), RATE)
    found = diagnosis(job)
    assert found["culprit"] == "the sender side of rank 1's worker", found
