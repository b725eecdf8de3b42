"""The operator's real process in a simulated pod: what it does about its Lease, its own end, and what kopf promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.names import FINALIZER_JOB, Object
from pacekeeper_operator.pods.node_health import DEFAULT_LEAVE_TAINTS
from pacekeeper_operator.state import state_codec
from simulation.operators.pod import OperatorPod
from simulation.simulated_job import SimulatedJob
from simulation.world import NAMESPACE, World, WorldSettings

Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes worlds of a seed, and closes them."""
    worlds: list[World] = []

    def made(seed: int = 1, operators: int = 1) -> World:
        worlds.append(World(seed, WorldSettings(nodes=5, operators=operators)))
        return worlds[-1]

    yield made
    for world in worlds:
        world.loop.close()


@pytest.fixture
def world(make: Make) -> World:
    return make()


def until(world: World, holds: Callable[[], object], seconds: float) -> float:
    """Return when it holds, in virtual seconds. It is an error if it takes longer than the limit."""

    async def wait() -> float:
        began = world.now()
        while not holds():
            assert world.now() - began < seconds, f"not within {seconds} s: {world.log.lines[-10:]}"
            await asyncio.sleep(0.1)
        return world.now() - began

    return world.run(wait())


def wait(world: World, seconds: float) -> None:
    world.run(asyncio.sleep(seconds))


def leads(pod: OperatorPod) -> bool:
    return pod.operator is not None and pod.operator.is_leader()


def trains(world: World) -> bool:
    job = world.api.get("trainingjobs", "a", NAMESPACE)
    return job is not None and job.get("status", {}).get("phase") == "Running"


def make_job(world: World) -> None:
    world.api.create("trainingjobs", SimulatedJob(replicas=2).build_manifest())


def test_a_job_trains_and_goes_with_all_that_it_had(world: World) -> None:
    make_job(world)
    until(world, lambda: trains(world), 60)
    job = world.api.get("trainingjobs", "a", NAMESPACE)
    assert job is not None
    assert FINALIZER_JOB in job["metadata"]["finalizers"]
    world.api.delete("trainingjobs", "a", NAMESPACE)
    until(world, lambda: not world.api.list_all("trainingjobs") and not world.api.list_all("pods"), 60)
    until(world, lambda: not world.api.list_all("trainingjobstates"), 60)


def test_who_cannot_renew_the_lease_leads_no_more_and_goes_on_when_it_can(world: World) -> None:
    (pod,) = world.deployment.pods
    until(world, lambda: leads(pod), 30)
    world.network.cut(pod.name, "api")
    until(world, lambda: not leads(pod), 12)
    world.network.mend(pod.name, "api")
    until(world, lambda: leads(pod), 10)
    assert not pod.process.dead


def test_of_a_frozen_operator_and_its_successor_one_leads(make: Make) -> None:
    world = make(operators=2)
    until(world, lambda: any(map(leads, world.deployment.pods)), 30)
    (first,) = filter(leads, world.deployment.pods)
    first.pause()
    (second,) = (pod for pod in world.deployment.pods if pod is not first)
    until(world, lambda: leads(second), 30)
    process = first.process
    first.resume()
    until(world, lambda: process.dead, 10)
    assert leads(second)
    until(world, lambda: not first.process.dead and first.process is not process, 10)
    wait(world, 30)
    assert not leads(first)


def test_a_killed_operator_is_back_in_seconds_and_its_job_has_trained_on(world: World) -> None:
    make_job(world)
    until(world, lambda: trains(world), 60)
    (pod,) = world.deployment.pods
    pod.kill()
    assert until(world, lambda: leads(pod), 10) < 5
    wait(world, 30)
    assert trains(world)
    assert not world.api.list_all("incidents")


def test_an_operator_that_leaves_in_order_lets_the_next_one_begin_at_once(world: World) -> None:
    (pod,) = world.deployment.pods
    until(world, lambda: leads(pod), 30)
    world.deployment.replace(pod, OperatorPod.end)
    until(world, lambda: bool(world.deployment.pods) and world.deployment.pods[0] is not pod, 5)
    (successor,) = world.deployment.pods
    assert until(world, lambda: leads(successor), 10) < 3


@pytest.mark.parametrize("gone", [False, True])
def test_a_watch_that_breaks_begins_anew(world: World, gone: bool) -> None:
    (pod,) = world.deployment.pods
    until(world, lambda: leads(pod), 30)
    world.api.end_watches(history_lost=gone)
    wait(world, 1)
    make_job(world)
    until(world, lambda: trains(world), 30)


def test_two_runs_of_a_seed_are_the_same_and_two_seeds_are_not(make: Make) -> None:
    def digest(seed: int) -> str:
        world = make(seed)
        make_job(world)
        wait(world, 60)
        return world.log.digest()

    assert digest(1) == digest(1) != digest(2)


def test_two_nodes_that_others_want_empty_are_left_one_after_the_other(world: World) -> None:
    """By one spare: the second worker goes when the first one's successor is warm."""
    make_job(world)
    until(world, lambda: trains(world), 90)
    first, second = (world.nodes[node] for node in seats(world))
    first.cordon()
    second.taint(DEFAULT_LEAVE_TAINTS[0], "NoSchedule")
    until(world, lambda: first.name not in seats(world), 90)
    assert second.name in seats(world), "the spare is one"
    until(world, lambda: second.name not in seats(world) and trains(world), 120)
    assert not {first.name, second.name} & set(seats(world))
    until(world, lambda: len(ended := leavings(world)) == 2 and all(one["outcome"] for one in ended), 60)
    assert [one["outcome"] for one in leavings(world)] == ["Recovered"] * 2
    job = world.api.get("trainingjobs", "a", NAMESPACE)
    assert job is not None
    assert job["status"].get("restarts", 0) == 0


def seats(world: World) -> list[str]:
    """Nodes of the workers that hold ranks, by rank."""
    stored = world.api.get("trainingjobstates", "a", NAMESPACE)
    members = () if stored is None else state_codec.decode_state(stored, "a").desired.plan.members
    nodes = {worker.name: worker.node for worker in world.workers.values()}
    return [nodes[member.worker] for member in members]


def leavings(world: World) -> list[Object]:
    """What was written of nodes that are to be empty."""
    found = [body for body in world.api.list_all("incidents") if body["spec"]["cause"] == IncidentCause.NODE_LEAVING]
    return [{"outcome": None} | body.get("status", {}) for body in found]


class TestTwo:
    """One leads, and the other stands by."""

    @pytest.fixture
    def both(self, make: Make) -> World:
        """Their job trains."""
        world = make(operators=2)
        make_job(world)
        until(world, lambda: trains(world), 60)
        wait(world, 30)
        return world

    def test_a_killed_leader_is_followed_and_nobody_notices(self, both: World) -> None:
        """By the other, or by itself where its container is faster."""
        first, second = leader(both), standby(both)
        first.remove()
        assert until(both, lambda: leads(second), 12) < 6 + 3
        until(both, lambda: contact(both) < 3.5, 10)  # each is answered once a poll, of three seconds
        wait(both, 60)
        assert trains(both)
        assert not both.api.list_all("incidents")
        assert rounds(both) == 1

    def test_a_leader_that_is_told_to_end_hands_over_at_once(self, both: World) -> None:
        first, second = leader(both), standby(both)
        both.deployment.replace(first, OperatorPod.end)
        assert until(both, lambda: leads(second), 5) < 1
        until(both, lambda: contact(both) < 0.5, 3)
        wait(both, 60)
        assert not both.api.list_all("incidents")
        assert rounds(both) == 1

    def test_one_that_stands_by_leaves_unnoticed(self, both: World) -> None:
        first, second = leader(both), standby(both)
        process = second.process
        both.deployment.replace(second, OperatorPod.end)
        until(both, lambda: process.dead, 2)
        wait(both, 30)
        assert leads(first)

    def test_sidecars_leave_a_leader_that_is_cut_off_for_its_successor(self, both: World) -> None:
        """It runs on, and they reach it: without being sent away they would be lost to the one that decides."""
        first, second = leader(both), standby(both)
        both.network.cut(first.name, "api")
        until(both, lambda: leads(second), 12)
        assert not first.process.dead
        until(both, lambda: all(heard_by(second, worker.name) for worker in both.workers.values()), 10)
        wait(both, 60)
        assert not first.process.dead, "it waits"
        assert not both.api.list_all("incidents")
        both.network.mend(first.name, "api")
        process = first.process
        until(both, lambda: process.dead, 10)
        until(both, lambda: not first.process.dead, 10)
        wait(both, 30)
        assert leads(second)
        assert not leads(first)

    def test_a_fault_is_dealt_with_by_the_one_that_takes_over(self, both: World) -> None:
        first = leader(both)
        first.remove()
        next(worker for worker in both.workers.values() if worker.launcher.ranks).crash_rank(code=-9)
        until(both, lambda: [i for i in both.api.list_all("incidents") if i.get("status", {}).get("outcome")], 60)
        (incident,) = both.api.list_all("incidents")
        assert incident["spec"]["cause"] == IncidentCause.CRASH


def leader(world: World) -> OperatorPod:
    (pod,) = filter(leads, world.deployment.pods)
    return pod


def standby(world: World) -> OperatorPod:
    (pod,) = (pod for pod in world.deployment.pods if not leads(pod))
    return pod


def contact(world: World) -> float:
    """Seconds since the worker that has waited longest was answered."""
    return max(world.now() - worker.folder.operator_contact_at for worker in world.workers.values())


def heard_by(pod: OperatorPod, worker: str) -> bool:
    job = None if pod.operator is None else pod.operator.jobs.find(NAMESPACE, "a")
    return job is not None and worker in job.contacts


def rounds(world: World) -> int:
    job = world.api.get("trainingjobs", "a", NAMESPACE)
    assert job is not None
    return int(job["status"]["round"])
