"""A Fabric in a simulated cluster: the operator orders ranks by its leaves, plans all jobs' flows together and writes
each job's part into that job's plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.routes import get_planned_routes
from simulation.simulated_job import SimulatedJob
from simulation.world import NAMESPACE, World, WorldSettings

LEAF = "example.com/leaf"
LEAVES = "abababab"
SPEC = {
    "levels": [{"nodeLabel": LEAF}],
    "spines": 2,
    "hops": {"10.0.0.1": "s1", "10.0.0.2": "s2"},
    "pathControl": {"mode": "Probe"},
}


@pytest.fixture
def world() -> Iterator[World]:
    """Eight nodes, alternately of two leaves, each with room for one worker.

    With this seed, flows without routes collide.
    """
    world = World(1, WorldSettings(nodes=8, slots=1))
    wait_until(world, lambda: len(world.api.list_all("nodes")) == 8)
    for n, leaf in enumerate(LEAVES):
        world.api.patch("nodes", f"node-{n}", "", {"metadata": {"labels": {LEAF: leaf}}})
    yield world
    world.loop.close()


def wait_until(world: World, holds: Callable[[], object], seconds: float = 120.0) -> None:
    async def wait() -> None:
        began = world.now()
        while not holds():
            assert world.now() - began < seconds, f"not within {seconds} s: {world.log.lines[-10:]}"
            await asyncio.sleep(0.1)

    world.run(wait())


def make_jobs(world: World, *names: str) -> None:
    for name in names:
        world.api.create("trainingjobs", SimulatedJob(name, replicas=4, spares=0).build_manifest())


def read_plan(world: World, job: str) -> Plan:
    state = world.api.get("trainingjobstates", job, NAMESPACE)
    return Plan() if state is None else state_codec.decode_state(state, job).desired.plan


def read_status(world: World, kind: str, name: str, namespace: str = "") -> Mapping[str, Any]:
    found = world.api.get(kind, name, namespace)
    return {} if found is None else found.get("status", {})


def wait_for_training(world: World, *jobs: str) -> bool:
    return all(read_status(world, "trainingjobs", job, NAMESPACE).get("phase") == "Running" for job in jobs)


def make_fabric(world: World, **changes: Any) -> None:
    world.api.create("fabrics", {"metadata": {"name": "f"}, "spec": SPEC | changes})


def list_leaves_of_ranks(world: World, job: str) -> str:
    pods = {pod["metadata"]["name"]: pod for pod in world.api.list_all("pods", NAMESPACE)}
    nodes = [int(pods[member.worker]["spec"]["nodeName"].split("-")[1]) for member in read_plan(world, job).members]
    return "".join(LEAVES[node] for node in nodes)


def test_two_jobs_are_ordered_and_planned_apart(world: World) -> None:
    make_fabric(world)
    wait_until(world, lambda: read_status(world, "fabrics", "f"))
    make_jobs(world, "one", "two")
    wait_until(world, lambda: wait_for_training(world, "one", "two"))
    for job in ("one", "two"):
        leaves = list_leaves_of_ranks(world, job)
        changes = sum(a != b for a, b in zip(leaves, leaves[1:] + leaves[:1], strict=True))
        assert read_status(world, "trainingjobs", job, NAMESPACE)["leafCrossings"] == {"now": changes, "best": changes}
        assert len(get_planned_routes(read_plan(world, job))) == changes
    wait_until(world, lambda: read_status(world, "fabrics", "f").get("flows", 0) > 0)
    shown = read_status(world, "fabrics", "f")
    assert shown["maxLoad"] == shown["lowerBound"]
    assert {one["type"]: one["status"] for one in shown["conditions"]} == {
        "InForce": "True",
        "LeavesResolved": "True",
        "LinksResolved": "True",
        "Planned": "True",
    }


def test_an_operator_killed_between_two_jobs_leaves_whole_plans_and_its_successor_converges(
    world: World,
) -> None:
    make_fabric(world)
    make_jobs(world, "one", "two")
    wait_until(world, lambda: any(read_plan(world, job).paths for job in ("one", "two")))
    (pod,) = world.deployment.pods
    pod.kill()
    first = {job: read_plan(world, job).paths for job in ("one", "two")}
    wait_until(world, lambda: wait_for_training(world, "one", "two"))
    wait_until(world, lambda: read_status(world, "fabrics", "f").get("flows", 0) > 0)
    for job, paths in first.items():
        assert paths is None or read_plan(world, job).paths == paths, "what was written stays"
        assert read_plan(world, job).paths is not None
    shown = read_status(world, "fabrics", "f")
    assert shown["maxLoad"] == shown["lowerBound"]


def test_without_a_fabric_nothing_changes(world: World) -> None:
    make_jobs(world, "one")
    wait_until(world, lambda: wait_for_training(world, "one"))
    assert read_plan(world, "one").paths is None
    assert "leafCrossings" not in read_status(world, "trainingjobs", "one", NAMESPACE)
    members = [member.worker for member in read_plan(world, "one").members]
    assert members == [f"one-w{n}-0" for n in range(4)]


def test_labels_that_change_while_a_job_trains_move_no_worker(world: World) -> None:
    make_fabric(world)
    make_jobs(world, "one")
    wait_until(world, lambda: wait_for_training(world, "one"))
    before = read_plan(world, "one")
    for n, leaf in enumerate(reversed(LEAVES[:4] + "cccc")):
        world.api.patch("nodes", f"node-{n}", "", {"metadata": {"labels": {LEAF: leaf}}})
    wait_until(world, lambda: read_status(world, "fabrics", "f").get("leaves") == 3)
    world.run(asyncio.sleep(60))
    assert read_plan(world, "one").members == before.members
    assert wait_for_training(world, "one")
    # Flows that now cross leaves had no routes: one round for them pays, and no second one follows.
    causes = [found["spec"]["cause"] for found in world.api.list_all("incidents")]
    assert causes == ["slow-communication"]
    assert read_plan(world, "one").membership == before.membership + 1
