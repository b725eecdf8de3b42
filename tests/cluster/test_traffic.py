"""Traffic over leaves and spines between real nodes: two jobs across the same leaves, links of 50 Mbit/s.

Each test leaves the network whole and both jobs training.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

import testcluster.cluster
from demo import kube
from testcluster import fabric, faults, placement
from testcluster.leaf_spine import LeafSpine
from testcluster.shell import run_command
from testing.kubernetes.cluster import KubectlCluster, scratch_namespace, wait_for
from testing.kubernetes.dashboards import DASHBOARDS, list_queries
from testing.kubernetes.jobs import ClusterJob, build_paced_job

pytestmark = pytest.mark.usefixtures("operator", "network")

RATE = "50mbit"
WIDTH = 384
"""A step sends 1.2 MB from each of two ranks: with 0.19 s on a link of its own, most of a step."""
NODES = {"one": ["node-1", "node-2"], "two": ["node-4", "node-5"]}
"""Of each job: one below leaf l1, one below l2."""
REPLANNED_SECONDS = 120.0
LONG = 1_000_000  # steps: until the test ends it


@pytest.fixture(scope="module")
def network(cluster: KubectlCluster) -> Iterator[LeafSpine]:
    """With its Fabric."""
    testcluster.cluster.bring_up(ports=1)
    try:
        faults.shape_uplinks(RATE)
        cluster.apply(fabric.build_manifest())
        wait_for(lambda: is_true(cluster, "LeavesResolved"), 120, "the operator has resolved the leaves")
        yield fabric.get_network()
    finally:
        cluster.kubectl("delete", "fabric", fabric.NAME, "--ignore-not-found")
        testcluster.cluster.bring_up(ports=0)


@pytest.fixture(scope="module")
def jobs(cluster: KubectlCluster) -> Iterator[list[ClusterJob]]:
    with scratch_namespace(cluster) as namespace:
        made: list[ClusterJob] = []
        for name in NODES:  # the second is planned around the first
            job = ClusterJob.apply(cluster, namespace, build_job_across_leaves(name))
            job.wait_for_phase("Running", timeout=120)
            job.wait_until(partial(are_paths_in_force, job), 120, f"the flows of {name} are on their routes")
            made.append(job)
        yield made
        for job in made:
            job.delete()


def build_job_across_leaves(name: str) -> dict[str, Any]:
    return build_paced_job(
        name,
        LONG,
        environment={"WIDTH": str(WIDTH)},
        replicas=2,
        detection={"windowSteps": 16, "stragglerSlowdown": 10},
        remediation={"allow": ["RestartRanks", "PlanTraffic"]},
        pod=placement.spread_over_nodes(name, NODES[name]),
    )


def test_jobs_across_the_same_leaves_have_spines_of_their_own(
    cluster: KubectlCluster, network: LeafSpine, jobs: list[ClusterJob]
) -> None:
    status = wait_for(lambda: find_planned_status(cluster, 4), 120, "all flows are planned")
    assert (status["maxLoad"], status["lowerBound"], status["deadLinks"]) == (1, 1, 0)
    assert read_condition(cluster, "Planned")["reason"] == "AtLowerBound"
    described = cluster.kubectl("describe", "fabric", fabric.NAME)
    for pattern in (
        r"Max Load: +1",
        r"Bound: +1",
        r"Reason: +AtLowerBound",
        r"Node Label: +" + re.escape(fabric.LABEL),
    ):
        assert re.search(pattern, described), described
    routes = [list_planned_spines(job) for job in jobs]
    for pair in (("l1", "l2"), ("l2", "l1")):
        assert len({route[pair] for route in routes}) == 2, routes

    assert list_used_spines(network, jobs) == {route["l1", "l2"] for route in routes}


def test_the_dashboards_show_it(jobs: list[ClusterJob]) -> None:
    names = {"namespace": jobs[0].namespace, "trainingjob": jobs[0].name}
    of_fabrics = [
        query for name in DASHBOARDS for query in list_queries(name, **names) if "pacekeeper_fabric_" in query
    ]
    assert of_fabrics
    for query in of_fabrics:
        wait_for(partial(has_answers, query), 120, f"Prometheus answers {query}")


def test_labels_that_are_removed_and_restored_move_no_flow(cluster: KubectlCluster, jobs: list[ClusterJob]) -> None:
    job = jobs[0]
    members, round_ = job.read_plan()["members"], job.status["round"]
    cluster.kubectl("label", "node", "node-1", f"{fabric.LABEL}-")
    try:
        missed = wait_for(lambda: find_condition(cluster, "LeavesResolved", "NodesUnlabeled"), 120, "it is missed")
        assert "node-1" in missed["message"]
        job.wait_for_more_steps()
    finally:
        cluster.kubectl("label", "node", "node-1", f"{fabric.LABEL}=l1", "--overwrite")
    wait_for(lambda: is_true(cluster, "LeavesResolved"), 120, "it is known again")
    job.wait_for_more_steps()
    assert (job.read_plan()["members"], job.status["round"]) == (members, round_)
    assert are_paths_in_force(job)


def test_all_links_of_a_node_are_cut_and_slowed(network: LeafSpine) -> None:
    where = ["-n", "pacekeeper-node-6", "qdisc", "show", "dev"]
    try:
        faults.slow_link("node-6", "20mbit")
        assert all("tbf" in run_command("tc", *where, device) for device in ("eth0", "fab0"))
        faults.disconnect_node("node-6")
        assert network.find_broken().ports == {("pacekeeper-node-6", 0)}
    finally:
        faults.reconnect_node("node-6")
        faults.clear_link("node-6")
    assert not network.find_broken().ports
    assert not any("tbf" in run_command("tc", *where, device) for device in ("eth0", "fab0"))


def test_a_link_that_dies_is_planned_around_while_training_goes_on(
    cluster: KubectlCluster, network: LeafSpine, jobs: list[ClusterJob]
) -> None:
    """The other job's routes are alive, but its leaf chooses among two spines now, so its ports may lead elsewhere."""
    for job in jobs:
        job.wait_for_more_steps(20)
    dying = list_planned_spines(jobs[0])["l1", "l2"]
    rounds = {job.name: job.status["round"] for job in jobs}
    known = {job.name: job.list_incident_names() for job in jobs}

    faults.cut_uplink("l1", dying)
    try:
        cluster.apply(fabric.build_manifest())
        for job in jobs:
            replanned = partial(is_replanned, job, dying, rounds[job.name])
            job.wait_until(replanned, REPLANNED_SECONDS, f"the flows of {job.name} are on their routes")
        status = find_planned_status(cluster, 4)
        assert status is not None
        assert (status["maxLoad"], status["lowerBound"], status["deadLinks"]) == (1, 1, 1)
        assert list_used_spines(network, jobs) == {list_planned_spines(job)["l1", "l2"] for job in jobs}
        for job in jobs:
            (incident,) = (i for i in job.list_incidents() if i["metadata"]["name"] not in known[job.name])
            assert (incident["spec"]["cause"], incident["status"]["remedy"]) == ("slow-communication", "PlanTraffic")
    finally:
        faults.heal_uplink("l1", dying)
        cluster.apply(fabric.build_manifest())
    wait_for(lambda: (find_planned_status(cluster, 4) or {}).get("deadLinks") == 0, 120, "the link counts again")


def test_the_fabric_reports_that_it_has_no_spine_and_jobs_resume_once_it_has_one(
    cluster: KubectlCluster, network: LeafSpine, jobs: list[ClusterJob]
) -> None:
    """Last of all: it may cost the jobs a round."""
    steps = {job.name: job.read_step() for job in jobs}
    links = [(fabric.format_leaf_name(leaf), fabric.format_spine_name(spine)) for leaf, spine in network.links]
    for link in links:
        faults.cut_uplink(*link)
    try:
        cluster.apply(fabric.build_manifest())
        condition = wait_for(
            lambda: find_condition(cluster, "Planned", "NoRoute"), 120, "there is no route for any flow"
        )
        assert condition["status"] == "False"
        assert all(job.name in condition["message"] for job in jobs), condition
    finally:
        for link in links:
            faults.heal_uplink(*link)
        cluster.apply(fabric.build_manifest())
    for job in jobs:
        job.wait_for_step(steps[job.name] + 10, timeout=120)
    wait_for(lambda: is_true(cluster, "Planned"), 120, "all flows have routes again")


def has_answers(query: str) -> bool:
    return kube.has_answers(query, time.time() - 10, time.time())


def list_used_spines(network: LeafSpine, jobs: Sequence[ClusterJob]) -> set[str]:
    """By which leaf l1 sends while all jobs train on."""
    before = network.read_sent_bytes(0)
    for job in jobs:
        job.wait_for_more_steps(10)
    sent = [now - was for now, was in zip(network.read_sent_bytes(0), before, strict=True)]
    return {fabric.format_spine_name(spine) for spine, count in enumerate(sent) if count > 3e6}


def list_planned_spines(job: ClusterJob) -> dict[tuple[str, str], str]:
    """Spines that the job's plan names, by the leaves of sender and receiver."""
    draft = job.read_desired()
    assert draft is not None
    leaves = {rank: fabric.get_leaf(job.find_node(rank)) for rank in range(draft.plan.world_size)}
    expected = draft.plan.paths.wanted if draft.plan.paths is not None else ()
    return {(leaves[path.source], leaves[path.destination]): path.spine for path in expected}


def is_replanned(job: ClusterJob, dead: str, round_: int) -> bool:
    """Its flows are on their routes in a later round, and none by that spine."""
    return dead not in list_planned_spines(job).values() and job.status["round"] > round_ and are_paths_in_force(job)


def are_paths_in_force(job: ClusterJob) -> bool:
    return job.get_condition("PathsInForce").get("status") == "True"


def find_planned_status(cluster: KubectlCluster, count: int) -> dict[str, Any] | None:
    """The Fabric's status, once `count` flows have routes; None: not yet."""
    found: dict[str, Any] = (cluster.get("fabric", fabric.NAME) or {}).get("status", {})
    return found if found.get("flows") == count and is_true(cluster, "Planned") else None


def read_condition(cluster: KubectlCluster, kind: str) -> dict[str, str]:
    """Of the Fabric; {} where it has not been written yet."""
    found = (cluster.get("fabric", fabric.NAME) or {}).get("status", {}).get("conditions", ())
    return next((one for one in found if one["type"] == kind), {})


def find_condition(cluster: KubectlCluster, kind: str, reason: str) -> dict[str, str]:
    """The condition, for this reason; {}: there is none, or another."""
    found = read_condition(cluster, kind)
    return found if found.get("reason") == reason else {}


def is_true(cluster: KubectlCluster, kind: str) -> bool:
    return read_condition(cluster, kind).get("status") == "True"
