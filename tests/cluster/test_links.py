"""A slow way between workers on real nodes: told by the kernel's figures, then by a probe between their launchers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testcluster import faults, placement
from tests.support.cluster import Cluster, scratch_namespace
from tests.support.jobs import Job, paced

pytestmark = pytest.mark.usefixtures("operator")

RATE = "40mbit"
"""A step sends 22 Mbit from each rank (two layers of 512 × 512, in a ring of three): it takes three times as long."""
STEP_SECONDS = 0.2
EARLY_STEPS = 200
"""A connection is held against its own first half minute (`sidecar.connections.EARLY_LOOKS`)."""
NODES = {
    "sender": ("node-1", "node-2", "node-3"),
    "receiver": ("node-4", "node-5", "node-6"),
    "link": ("node-2", "node-5", "node-3", "node-6"),
}
"""Of each job: the first node's way is slow, to or from all others, or to the second one. No other job uses it."""
FAULTS: dict[str, Callable[[tuple[str, ...]], None]] = {
    "sender": lambda nodes: faults.slow_egress(nodes[0], RATE),
    "receiver": lambda nodes: faults.slow_ingress(nodes[0], RATE),
    "link": lambda nodes: faults.slow_pair(nodes[0], nodes[1], RATE),
}


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> Iterator[dict[str, Job]]:
    """Side by side, for most of what each needs is the time before its fault. Nothing may be done about them: an
    incident then waits for its probe."""
    with scratch_namespace(cluster) as namespace:
        found = {name: Job.apply(cluster, namespace, body(name)) for name in NODES}
        for job in found.values():
            job.until_phase("Running", timeout=120)
        for job in found.values():
            job.until_step(EARLY_STEPS, timeout=120)
            job.until_calm()
        for name, nodes in NODES.items():
            FAULTS[name](nodes)
        yield found
        for node in {node for nodes in NODES.values() for node in nodes}:
            faults.clear_link(node)
        for job in found.values():
            job.delete()


def body(name: str) -> dict[str, Any]:
    """Workers on nodes of their own: three at least, by which a probe tells a link from a side."""
    return paced(
        name,
        1_000_000,
        environment={"WIDTH": "512", "SLEEP": str(STEP_SECONDS)},
        replicas=len(NODES[name]),
        detection={"windowSteps": 16, "stragglerSlowdown": 1.3},
        remediation={"allow": ["RestartRanks"]},
        pod=placement.apart(name, NODES[name]),
    )


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


def rank_on(job: Job, node: str) -> int:
    return next(rank for rank in range(len(NODES[job.name])) if job.node(rank) == node)


def test_a_slow_way_between_two_nodes_is_a_link(jobs: dict[str, Job]) -> None:
    job, (one, other, *_) = jobs["link"], NODES["link"]
    ranks = rank_on(job, one), rank_on(job, other)
    links = {f"link {source} → {destination}" for source, destination in (ranks, ranks[::-1])}
    found = diagnosis(job)
    assert found["fault"] == "Network"
    assert found["culprit"] in links, found["witnesses"]
    assert {witness["kind"] for witness in found["witnesses"]} >= {"Times", "Transport", "Probe"}


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_node_that_sends_or_receives_slowly_is_told_by_that_side(jobs: dict[str, Job], side: str) -> None:
    job = jobs[side]
    found = diagnosis(job)
    assert found["culprit"] == f"the {side} side of rank {rank_on(job, NODES[side][0])}'s worker", found["witnesses"]
