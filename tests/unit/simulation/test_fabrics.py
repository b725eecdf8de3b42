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
    """Eight nodes, in turns of two leaves, each with room for one worker.

    By this seed flows collide that have no ways.
    """
    world = World(1, WorldSettings(nodes=8, slots=1))
    until(world, lambda: len(world.api.list_all("nodes")) == 8)
    for n, leaf in enumerate(LEAVES):
        world.api.patch("nodes", f"node-{n}", "", {"metadata": {"labels": {LEAF: leaf}}})
    yield world
    world.loop.close()


def until(world: World, holds: Callable[[], object], seconds: float = 120.0) -> None:
    async def wait() -> None:
        began = world.now()
        while not holds():
            assert world.now() - began < seconds, f"not within {seconds} s: {world.log.lines[-10:]}"
            await asyncio.sleep(0.1)

    world.run(wait())


def make_jobs(world: World, *names: str) -> None:
    for name in names:
        world.api.create("trainingjobs", SimulatedJob(name, replicas=4, spares=0).build_manifest())


def plan(world: World, job: str) -> Plan:
    state = world.api.get("trainingjobstates", job, NAMESPACE)
    return Plan() if state is None else state_codec.decode_state(state, job).desired.plan


def status(world: World, kind: str, name: str, namespace: str = "") -> Mapping[str, Any]:
    found = world.api.get(kind, name, namespace)
    return {} if found is None else found.get("status", {})


def train(world: World, *jobs: str) -> bool:
    return all(status(world, "trainingjobs", job, NAMESPACE).get("phase") == "Running" for job in jobs)


def make_fabric(world: World, **changes: Any) -> None:
    world.api.create("fabrics", {"metadata": {"name": "f"}, "spec": SPEC | changes})


def leaves_of_seats(world: World, job: str) -> str:
    pods = {pod["metadata"]["name"]: pod for pod in world.api.list_all("pods", NAMESPACE)}
    nodes = [int(pods[member.worker]["spec"]["nodeName"].split("-")[1]) for member in plan(world, job).members]
    return "".join(LEAVES[node] for node in nodes)


def test_two_jobs_are_ordered_and_planned_apart(world: World) -> None:
    make_fabric(world)
    until(world, lambda: status(world, "fabrics", "f"))
    make_jobs(world, "one", "two")
    until(world, lambda: train(world, "one", "two"))
    for job in ("one", "two"):
        leaves = leaves_of_seats(world, job)
        changes = sum(a != b for a, b in zip(leaves, leaves[1:] + leaves[:1], strict=True))
        assert status(world, "trainingjobs", job, NAMESPACE)["leafCrossings"] == {"now": changes, "best": changes}
        assert len(get_planned_routes(plan(world, job))) == changes
    until(world, lambda: status(world, "fabrics", "f").get("flows", 0) > 0)
    shown = status(world, "fabrics", "f")
    assert shown["maxLoad"] == shown["lowerBound"]
    assert {one["type"]: one["status"] for one in shown["conditions"]} == {
        "InForce": "True",
        "LeavesResolved": "True",
        "LinksResolved": "True",
        "Planned": "True",
    }


def test_an_operator_that_is_killed_between_two_jobs_leaves_each_plan_whole_and_the_next_one_ends_the_same(
    world: World,
) -> None:
    make_fabric(world)
    make_jobs(world, "one", "two")
    until(world, lambda: any(plan(world, job).paths for job in ("one", "two")))
    (pod,) = world.deployment.pods
    pod.kill()
    first = {job: plan(world, job).paths for job in ("one", "two")}
    until(world, lambda: train(world, "one", "two"))
    until(world, lambda: status(world, "fabrics", "f").get("flows", 0) > 0)
    for job, paths in first.items():
        assert paths is None or plan(world, job).paths == paths, "what was written stays"
        assert plan(world, job).paths is not None
    shown = status(world, "fabrics", "f")
    assert shown["maxLoad"] == shown["lowerBound"]


def test_without_a_fabric_all_is_as_ever(world: World) -> None:
    make_jobs(world, "one")
    until(world, lambda: train(world, "one"))
    assert plan(world, "one").paths is None
    assert "leafCrossings" not in status(world, "trainingjobs", "one", NAMESPACE)
    members = [member.worker for member in plan(world, "one").members]
    assert members == [f"one-w{n}-0" for n in range(4)]


def test_labels_that_change_while_a_job_trains_move_nobody(world: World) -> None:
    make_fabric(world)
    make_jobs(world, "one")
    until(world, lambda: train(world, "one"))
    before = plan(world, "one")
    for n, leaf in enumerate(reversed(LEAVES[:4] + "cccc")):
        world.api.patch("nodes", f"node-{n}", "", {"metadata": {"labels": {LEAF: leaf}}})
    until(world, lambda: status(world, "fabrics", "f").get("leaves") == 3)
    world.run(asyncio.sleep(60))
    assert plan(world, "one").members == before.members
    assert train(world, "one")
    # Flows that cross leaves by now had no ways: one round for them pays, and no second one follows.
    causes = [found["spec"]["cause"] for found in world.api.list_all("incidents")]
    assert causes == ["slow-communication"]
    assert plan(world, "one").membership == before.membership + 1
