"""A slow way between workers on real nodes: told by the kernel's figures, then by a probe between their launchers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from testcluster import faults, placement
from tests.support.cluster import Cluster, scratch_namespace
from tests.support.jobs import Job, paced

pytestmark = pytest.mark.usefixtures("operator")

RATE = "40mbit"
"""A step sends 25 Mbit from each rank (two layers of 512 × 512, in a ring): at this rate it takes 0.6 s longer."""
EARLY_SECONDS = 40
"""A connection is held against its own first half minute (`sidecar.connections.EARLY_LOOKS`)."""
SENDER, RECEIVER = ("node-1", "node-2", "node-3"), ("node-4", "node-5", "node-6")
"""Of two jobs at a time. Of each the first node's side is slow: with three workers a probe tells that from a link."""


@contextmanager
def training(cluster: Cluster, *wanted: tuple[str, int, Collection[str]], step_seconds: float) -> Iterator[list[Job]]:
    """Jobs of (name, workers, nodes, each worker on one of its own), once their connections' usual pace is known.
    Nothing may be done about them: an incident then waits for its probe. The network is well again afterwards."""
    with scratch_namespace(cluster) as namespace:
        jobs = [
            Job.apply(
                cluster,
                namespace,
                paced(
                    name,
                    1_000_000,
                    environment={"WIDTH": "512", "SLEEP": str(step_seconds / 2)},
                    replicas=workers,
                    detection={"windowSteps": 16, "stragglerSlowdown": 1.3},
                    remediation={"allow": ["RestartRanks"]},
                    pod=placement.apart(name, nodes),
                ),
            )
            for name, workers, nodes in wanted
        ]
        for job in jobs:
            job.until_calm()
        for job in jobs:
            job.until_step(round(EARLY_SECONDS / step_seconds), timeout=120)
        used = {node for job in jobs for node in job.nodes().values()}
        try:
            yield jobs
        finally:
            for node in used:
                faults.clear_link(node)
        for job in jobs:
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


def test_a_slow_way_between_two_nodes_is_a_link(cluster: Cluster) -> None:
    with training(cluster, ("links", 4, ()), step_seconds=0.1) as (job,):
        faults.slow_pair(job.node(0), job.node(1), RATE)
        found = diagnosis(job)
        assert (found["fault"], found["culprit"]) in {("Network", "link 0 → 1"), ("Network", "link 1 → 0")}, found
        assert {witness["kind"] for witness in found["witnesses"]} >= {"Times", "Transport", "Probe"}


def test_a_node_that_sends_slowly_and_one_that_receives_slowly_are_told_apart(cluster: Cluster) -> None:
    """By a probe each, of two jobs side by side: most of what they need is the time before their faults."""
    wanted = ("sender", 3, SENDER), ("receiver", 3, RECEIVER)
    with training(cluster, *wanted, step_seconds=0.25) as (sender, receiver):
        faults.slow_egress(SENDER[0], RATE)
        faults.slow_ingress(RECEIVER[0], RATE)
        for job, node in ((sender, SENDER[0]), (receiver, RECEIVER[0])):
            (rank,) = (rank for rank in range(3) if job.node(rank) == node)
            found = diagnosis(job)
            assert found["culprit"] == f"the {job.name} side of rank {rank}'s worker", found["witnesses"]
            slowest = job.oncall("links", job.name).splitlines()[1].split()  # rank 2  rank 1  9.07 …
            assert str(rank) in (slowest[1], slowest[3]), "its acknowledgements wait for it, too"
