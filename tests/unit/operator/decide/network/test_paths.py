"""Paths in a job's plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Hop
from pacekeeper_operator.api.fabric import FabricSpec, LevelSpec, LinkException, PathControl, PathControlSpec
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.network import paths, traffic
from pacekeeper_operator.decide.network.paths import PORTS_PER_JOB, list_spine_hops
from pacekeeper_operator.decide.network.wiring import build_wiring
from pacekeeper_operator.state.cluster_view import NodeView
from pacekeeper_operator.state.desired_state import DesiredState
from pacekeeper_operator.state.network import NO_FABRIC, JobName, JobTraffic, NetworkState, NodeRanks, RankPair
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.routes import get_planned_routes, get_route_fingerprints
from testing.operators.observations import NOW, build_job, build_policy, build_training, change_members, change_worker

HOPS = {"10.98.1.1": "s1", "10.98.1.2": "s2", "10.98.2.2": "s2"}


def spec(mode: PathControl = PathControl.PROBE, **changes: Any) -> FabricSpec:
    control = PathControlSpec(mode, changes.pop("ports", (20000, 29999)))
    values: dict[str, Any] = {"spines": 2, "levels": (LevelSpec("leaf"),), "hops": HOPS, "path_control": control}
    return FabricSpec(**(values | changes))


def network(*others: JobTraffic, leaves: str = "abab", planned: bool = False, **changes: Any) -> NetworkState:
    """node-0 is in the leaf of the first letter. `planned`: the job of `training` has been looked at, too."""
    nodes = [NodeView(f"node-{n}", f"u{n}", labels={"leaf": leaf}) for n, leaf in enumerate(leaves)]
    fabric = spec(**changes)
    wiring = build_wiring(fabric, nodes, {})
    known = [*others, *([JobTraffic(("ns", "j"), seats(4))] if planned else [])]
    return NetworkState(
        fabric, wiring, {one.name: one for one in known}, traffic.plan_joint_traffic(wiring, known) if planned else None
    )


def seats(count: int) -> tuple[NodeRanks, ...]:
    return tuple(NodeRanks(f"node-{n}", (n,)) for n in range(count))


def under(found: NetworkState | None, world: Observation | None = None) -> Observation:
    world = world or build_training(4, 1)
    return replace(world, cluster_view=replace(world.cluster_view, network=found))


def starting(found: NetworkState | None, world: Observation | None = None) -> Observation:
    """Before its first step."""
    return change_members(under(found, world), start={"first_step_at": None})


def step(world: Observation) -> DesiredState:
    return paths.update_planned_paths(world, build_policy())


def ways(draft: DesiredState) -> Mapping[RankPair, int]:
    return get_planned_routes(draft.plan)


def with_ways(world: Observation, draft: DesiredState, changes: Mapping[RankPair, str]) -> Observation:
    """The plan names other spines for some pairs."""
    found = draft.plan.paths
    assert found is not None
    wanted = tuple(replace(one, spine=changes.get((one.source, one.destination), one.spine)) for one in found.wanted)
    return world.with_desired(draft.with_plan(paths=replace(found, wanted=wanted)))


class TestWanted:
    def test_each_flow_between_leaves_has_its_path_and_launchers_what_they_need_for_it(self) -> None:
        found = step(starting(network())).plan.paths
        assert found is not None
        assert {(one.source, one.destination) for one in found.wanted} == {(1, 0), (2, 1), (3, 2), (0, 3)}
        assert found.hops == (Hop("10.98.1.1", "s1"), Hop("10.98.1.2", "s2"), Hop("10.98.2.2", "s2"))
        assert (found.first_port, found.last_port) == (20000, 20000 + PORTS_PER_JOB - 1)
        up_of_a = [one.spine for one in found.wanted if one.source in (0, 2)]
        assert sorted(up_of_a) == ["s1", "s2"], "each its own"

    def test_what_joint_planning_has_found_is_taken(self) -> None:
        seen = network(planned=True)
        assert seen.traffic is not None
        assert ways(step(starting(seen))) == seen.traffic.routes["ns", "j"]

    def test_it_is_the_same_again(self) -> None:
        world = starting(network(planned=True))
        written = world.with_desired(step(world))
        assert step(written) is written.desired

    @pytest.mark.parametrize("mode", [PathControl.OFF, PathControl.REROLL])
    def test_without_probes_there_are_none(self, mode: PathControl) -> None:
        world = starting(network())
        written = world.with_desired(step(world))
        assert step(starting(network(mode=mode), written)).plan.paths is None
        assert step(starting(NO_FABRIC, written)).plan.paths is None

    def test_an_operator_that_has_not_looked_yet_takes_nothing_away(self) -> None:
        world = starting(network())
        written = world.with_desired(step(world))
        assert step(starting(None, written)) is written.desired

    def test_a_spine_that_answers_to_no_address_cannot_be_found(self) -> None:
        world = starting(network(hops={"10.98.1.1": "s1", "not an address": "s2", "10.98.1.9": "s9"}))
        found = step(world).plan.paths
        assert found is not None
        assert {one.spine for one in found.wanted} == {"s1"}
        assert found.hops == (Hop("10.98.1.1", "s1"),)
        assert step(starting(network(hops={"10.98.1.9": "s9"}))).plan.paths is None
        assert list_spine_hops(spec(hops={"FE80::0:1": "s1", "fe80::1": "s1"})) == (Hop("fe80::1", "s1"),), (
            "as the kernel says it"
        )

    @pytest.mark.parametrize("leaves", ["aaaa", "", "a"])
    def test_nothing_crosses_or_nobody_knows(self, leaves: str) -> None:
        assert step(starting(network(leaves=leaves))).plan.paths is None

    def test_all_spines_dead(self) -> None:
        dead = tuple(LinkException(leaf, spine) for leaf in "ab" for spine in ("s1", "s2"))
        assert step(starting(network(exceptions=dead))).plan.paths is None


class TestTraining:
    def test_nothing_changes_while_the_ranks_train(self) -> None:
        """Other ways take a new round, which is not for this step to begin: `replan` weighs it."""
        world = starting(network(planned=True))
        draft = step(world)
        other = {(1, 0): "s2" if ways(draft)[1, 0] == 0 else "s1"}
        moved = change_members(with_ways(world, draft, other), start={"first_step_at": NOW})
        assert step(moved) is moved.desired
        cut = under(network(exceptions=(LinkException("b", "s1"),)), moved)
        assert step(cut) is cut.desired
        untouched = under(network())
        assert step(untouched) is untouched.desired, "nor has a job paths at once where a Fabric is made"

    def test_before_the_first_step_what_is_planned_counts(self) -> None:
        world = starting(network(planned=True))
        draft = step(world)
        other = {(1, 0): "s2" if ways(draft)[1, 0] == 0 else "s1"}
        assert ways(step(with_ways(world, draft, other))) == ways(draft)

    def test_a_dead_way_gets_another_in_the_next_round(self) -> None:
        world = starting(network())
        draft = step(world)
        way = ways(draft)[1, 0]
        cut = starting(network(exceptions=(LinkException("b", f"s{way + 1}"),)), world.with_desired(draft))
        after = step(cut)
        assert ways(after)[1, 0] == 1 - way
        assert ways(after)[2, 1] == ways(draft)[2, 1]

    def test_it_is_written_down_what_the_leaves_could_choose_among(self) -> None:
        whole = step(starting(network()))
        assert not get_route_fingerprints(whole.plan)
        cut = step(starting(network(exceptions=(LinkException("b", "s1"),))))
        assert get_route_fingerprints(cut.plan).keys() == ways(cut).keys(), (
            "both leaves of each flow lack the same spine"
        )
        assert len(set(get_route_fingerprints(cut.plan).values())) == 1


class TestChangedMembers:
    def test_who_stays_keeps_the_way_that_it_has(self) -> None:
        """Joint planning has not looked at this membership yet."""
        world = starting(network())
        draft = step(world)
        other = {pair: "s2" if way == 0 else "s1" for pair, way in ways(draft).items()}
        turned = with_ways(world, draft, other)
        assert step(turned) is turned.desired

    def test_a_job_that_was_heard_of_since_is_planned_by_itself(self) -> None:
        seen = network(planned=True)
        assert seen.traffic is not None
        assert ways(step(starting(replace(seen, traffic=replace(seen.traffic, routes={})))))


class TestOthers:
    def other(self, name: JobName = ("ns", "a"), **changes: Any) -> JobTraffic:
        return JobTraffic(name, seats(4), **changes)

    def test_a_new_job_goes_around_the_others(self) -> None:
        busy = self.other(routes={(1, 0): 0, (2, 1): 0, (3, 2): 0, (0, 3): 0})
        assert set(ways(step(starting(network(busy)))).values()) == {1}

    def test_jobs_that_share_a_node_have_ports_of_their_own(self) -> None:
        first, second = (20000, 20000 + PORTS_PER_JOB - 1), (20000 + PORTS_PER_JOB, 20000 + 2 * PORTS_PER_JOB - 1)
        found = step(starting(network(self.other(ports=first)))).plan.paths
        assert found is not None
        assert (found.first_port, found.last_port) == second
        apart = replace(self.other(ports=first), node_ranks=(NodeRanks("node-9", (0,)),))
        elsewhere = step(starting(network(apart))).plan.paths
        assert elsewhere is not None
        assert elsewhere.first_port == 20000

    def test_of_two_that_have_taken_the_same_at_once_one_gives_way(self) -> None:
        world = starting(network())
        written = world.with_desired(step(world))
        ports = (20000, 20000 + PORTS_PER_JOB - 1)
        later = step(starting(network(self.other(("ns", "z"), ports=ports)), written)).plan.paths
        earlier = step(starting(network(self.other(("ns", "a"), ports=ports)), written)).plan.paths
        assert later is not None
        assert earlier is not None
        assert (later.first_port, earlier.first_port) == (20000, 20000 + PORTS_PER_JOB)

    def test_where_no_port_is_left_there_are_no_paths(self) -> None:
        busy = self.other(ports=(20000, 20000 + PORTS_PER_JOB - 1))
        assert step(starting(network(busy, ports=(20000, 20000 + 2 * PORTS_PER_JOB - 2)))).plan.paths is None
        assert step(starting(network(ports=(20000, 20000 + PORTS_PER_JOB - 2)))).plan.paths is None


class TestMembers:
    """Whoever writes other members into a plan leaves no path of those before."""

    def test_a_spare_takes_over(self) -> None:
        world = starting(network(leaves="ababb"))
        world = world.with_desired(step(world))
        thought = evaluate_job(change_worker(world, "j-w3-0", gone=True), build_policy())
        assert [member.worker for member in thought.desired.plan.members][3] == "j-w4-0"
        assert set(ways(thought.desired)) == {(1, 0), (2, 1), (3, 2), (0, 3)}

    def test_a_job_that_shrinks(self) -> None:
        world = starting(network(), build_training(4, 0, job=build_job(4, 0, min_replicas=2)))
        world = world.with_desired(step(world))
        gone = change_worker(world, "j-w3-0", gone=True)
        waits = gone.with_desired(evaluate_job(gone, build_policy()).desired)
        late = replace(waits, now=waits.now + 400)
        thought = evaluate_job(late, build_policy())
        assert not thought.failed_steps
        assert len(thought.desired.plan.members) == 3
        assert all(max(pair) < 3 for pair in ways(thought.desired))

    def test_a_job_that_is_suspended_and_goes_on(self) -> None:
        world = starting(network(), build_training(4, 1, job=build_job(4, 1, suspend=True)))
        world = world.with_desired(step(world))
        thought = evaluate_job(world, build_policy())
        assert not thought.failed_steps
        stopped = world.with_desired(thought.desired)
        for view in stopped.workers:
            stopped = change_worker(stopped, view.name, gone=True)
        resumed = evaluate_job(replace(stopped, job=build_job(4, 1)), build_policy())
        assert not resumed.failed_steps
        assert (resumed.desired.plan.members, resumed.desired.plan.paths) == ((), None)
