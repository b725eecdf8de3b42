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


def build_spec(mode: PathControl = PathControl.PROBE, **changes: Any) -> FabricSpec:
    control = PathControlSpec(mode, changes.pop("ports", (20000, 29999)))
    values: dict[str, Any] = {"spines": 2, "levels": (LevelSpec("leaf"),), "hops": HOPS, "path_control": control}
    return FabricSpec(**(values | changes))


def build_network(*others: JobTraffic, leaves: str = "abab", planned: bool = False, **changes: Any) -> NetworkState:
    """Build a network: node-0 is in the leaf of the first letter. `planned`: joint planning covers the job."""
    nodes = [NodeView(f"node-{n}", f"u{n}", labels={"leaf": leaf}) for n, leaf in enumerate(leaves)]
    fabric = build_spec(**changes)
    wiring = build_wiring(fabric, nodes, {})
    jobs = [*others, *([JobTraffic(("ns", "j"), build_node_ranks(4))] if planned else [])]
    return NetworkState(
        fabric, wiring, {job.name: job for job in jobs}, traffic.plan_joint_traffic(wiring, jobs) if planned else None
    )


def build_node_ranks(count: int) -> tuple[NodeRanks, ...]:
    return tuple(NodeRanks(f"node-{n}", (n,)) for n in range(count))


def with_network(found: NetworkState | None, observation: Observation | None = None) -> Observation:
    observation = observation or build_training(4, 1)
    return replace(observation, cluster_view=replace(observation.cluster_view, network=found))


def build_starting(found: NetworkState | None, observation: Observation | None = None) -> Observation:
    """Build a job before its first step."""
    return change_members(with_network(found, observation), start={"first_step_at": None})


def apply_step(observation: Observation) -> DesiredState:
    return paths.update_planned_paths(observation, build_policy())


def get_routes(desired: DesiredState) -> Mapping[RankPair, int]:
    return get_planned_routes(desired.plan)


def with_routes(observation: Observation, desired: DesiredState, changes: Mapping[RankPair, str]) -> Observation:
    """Return the observation with other spines for some pairs in the plan."""
    found = desired.plan.paths
    assert found is not None
    changed = tuple(
        replace(path, spine=changes.get((path.source, path.destination), path.spine)) for path in found.wanted
    )
    return observation.with_desired(desired.with_plan(paths=replace(found, wanted=changed)))


class TestWanted:
    def test_each_flow_between_leaves_has_a_path_with_hops_and_ports(self) -> None:
        found = apply_step(build_starting(build_network())).plan.paths
        assert found is not None
        assert {(path.source, path.destination) for path in found.wanted} == {(1, 0), (2, 1), (3, 2), (0, 3)}
        assert found.hops == (Hop("10.98.1.1", "s1"), Hop("10.98.1.2", "s2"), Hop("10.98.2.2", "s2"))
        assert (found.first_port, found.last_port) == (20000, 20000 + PORTS_PER_JOB - 1)
        up_of_a = [path.spine for path in found.wanted if path.source in (0, 2)]
        assert sorted(up_of_a) == ["s1", "s2"], "each flow has its own spine"

    def test_routes_of_joint_planning_are_used(self) -> None:
        network = build_network(planned=True)
        assert network.traffic is not None
        assert get_routes(apply_step(build_starting(network))) == network.traffic.routes["ns", "j"]

    def test_a_second_pass_changes_nothing(self) -> None:
        observation = build_starting(build_network(planned=True))
        written = observation.with_desired(apply_step(observation))
        assert apply_step(written) is written.desired

    @pytest.mark.parametrize("mode", [PathControl.OFF, PathControl.REROLL])
    def test_without_probing_there_are_no_paths(self, mode: PathControl) -> None:
        observation = build_starting(build_network())
        written = observation.with_desired(apply_step(observation))
        assert apply_step(build_starting(build_network(mode=mode), written)).plan.paths is None
        assert apply_step(build_starting(NO_FABRIC, written)).plan.paths is None

    def test_paths_stay_while_the_network_is_not_known_yet(self) -> None:
        observation = build_starting(build_network())
        written = observation.with_desired(apply_step(observation))
        assert apply_step(build_starting(None, written)) is written.desired

    def test_a_spine_without_an_address_is_not_used(self) -> None:
        observation = build_starting(build_network(hops={"10.98.1.1": "s1", "not an address": "s2", "10.98.1.9": "s9"}))
        found = apply_step(observation).plan.paths
        assert found is not None
        assert {path.spine for path in found.wanted} == {"s1"}
        assert found.hops == (Hop("10.98.1.1", "s1"),)
        assert apply_step(build_starting(build_network(hops={"10.98.1.9": "s9"}))).plan.paths is None
        assert list_spine_hops(build_spec(hops={"FE80::0:1": "s1", "fe80::1": "s1"})) == (Hop("fe80::1", "s1"),), (
            "as the kernel writes the address"
        )

    @pytest.mark.parametrize("leaves", ["aaaa", "", "a"])
    def test_there_are_no_paths_without_flows_between_known_leaves(self, leaves: str) -> None:
        assert apply_step(build_starting(build_network(leaves=leaves))).plan.paths is None

    def test_there_are_no_paths_with_all_spines_dead(self) -> None:
        dead = tuple(LinkException(leaf, spine) for leaf in "ab" for spine in ("s1", "s2"))
        assert apply_step(build_starting(build_network(exceptions=dead))).plan.paths is None


class TestTraining:
    def test_nothing_changes_while_the_ranks_train(self) -> None:
        """Other routes need a new round, which this step does not begin: `replan` decides on it."""
        observation = build_starting(build_network(planned=True))
        desired = apply_step(observation)
        changes = {(1, 0): "s2" if get_routes(desired)[1, 0] == 0 else "s1"}
        moved = change_members(with_routes(observation, desired, changes), start={"first_step_at": NOW})
        assert apply_step(moved) is moved.desired
        cut = with_network(build_network(exceptions=(LinkException("b", "s1"),)), moved)
        assert apply_step(cut) is cut.desired
        untouched = with_network(build_network())
        assert apply_step(untouched) is untouched.desired, "a new Fabric gives a running job no paths at once"

    def test_before_the_first_step_planned_routes_replace_others(self) -> None:
        observation = build_starting(build_network(planned=True))
        desired = apply_step(observation)
        changes = {(1, 0): "s2" if get_routes(desired)[1, 0] == 0 else "s1"}
        assert get_routes(apply_step(with_routes(observation, desired, changes))) == get_routes(desired)

    def test_a_dead_route_is_replaced_in_the_next_round(self) -> None:
        observation = build_starting(build_network())
        desired = apply_step(observation)
        spine = get_routes(desired)[1, 0]
        cut = build_starting(
            build_network(exceptions=(LinkException("b", f"s{spine + 1}"),)), observation.with_desired(desired)
        )
        after = apply_step(cut)
        assert get_routes(after)[1, 0] == 1 - spine
        assert get_routes(after)[2, 1] == get_routes(desired)[2, 1]

    def test_route_fingerprints_record_the_spines_that_leaves_lack(self) -> None:
        intact = apply_step(build_starting(build_network()))
        assert not get_route_fingerprints(intact.plan)
        cut = apply_step(build_starting(build_network(exceptions=(LinkException("b", "s1"),))))
        assert get_route_fingerprints(cut.plan).keys() == get_routes(cut).keys(), (
            "both leaves of each flow lack the same spine"
        )
        assert len(set(get_route_fingerprints(cut.plan).values())) == 1


class TestChangedMembers:
    def test_members_that_stay_keep_their_routes(self) -> None:
        """Joint planning does not cover this membership yet."""
        observation = build_starting(build_network())
        desired = apply_step(observation)
        changes = {pair: "s2" if spine == 0 else "s1" for pair, spine in get_routes(desired).items()}
        rerouted = with_routes(observation, desired, changes)
        assert apply_step(rerouted) is rerouted.desired

    def test_a_job_without_joint_planning_is_planned_alone(self) -> None:
        network = build_network(planned=True)
        assert network.traffic is not None
        assert get_routes(apply_step(build_starting(replace(network, traffic=replace(network.traffic, routes={})))))


class TestOthers:
    def build_other(self, name: JobName = ("ns", "a"), **changes: Any) -> JobTraffic:
        return JobTraffic(name, build_node_ranks(4), **changes)

    def test_a_new_job_avoids_routes_of_other_jobs(self) -> None:
        other = self.build_other(routes={(1, 0): 0, (2, 1): 0, (3, 2): 0, (0, 3): 0})
        assert set(get_routes(apply_step(build_starting(build_network(other)))).values()) == {1}

    def test_jobs_that_share_a_node_have_separate_ports(self) -> None:
        first, second = (20000, 20000 + PORTS_PER_JOB - 1), (20000 + PORTS_PER_JOB, 20000 + 2 * PORTS_PER_JOB - 1)
        found = apply_step(build_starting(build_network(self.build_other(ports=first)))).plan.paths
        assert found is not None
        assert (found.first_port, found.last_port) == second
        other_node = replace(self.build_other(ports=first), node_ranks=(NodeRanks("node-9", (0,)),))
        elsewhere = apply_step(build_starting(build_network(other_node))).plan.paths
        assert elsewhere is not None
        assert elsewhere.first_port == 20000

    def test_of_two_jobs_with_the_same_ports_one_changes_them(self) -> None:
        observation = build_starting(build_network())
        written = observation.with_desired(apply_step(observation))
        ports = (20000, 20000 + PORTS_PER_JOB - 1)
        later = apply_step(
            build_starting(build_network(self.build_other(("ns", "z"), ports=ports)), written)
        ).plan.paths
        earlier = apply_step(
            build_starting(build_network(self.build_other(("ns", "a"), ports=ports)), written)
        ).plan.paths
        assert later is not None
        assert earlier is not None
        assert (later.first_port, earlier.first_port) == (20000, 20000 + PORTS_PER_JOB)

    def test_without_free_ports_there_are_no_paths(self) -> None:
        other = self.build_other(ports=(20000, 20000 + PORTS_PER_JOB - 1))
        assert (
            apply_step(build_starting(build_network(other, ports=(20000, 20000 + 2 * PORTS_PER_JOB - 2)))).plan.paths
            is None
        )
        assert apply_step(build_starting(build_network(ports=(20000, 20000 + PORTS_PER_JOB - 2)))).plan.paths is None


class TestMembers:
    """A plan with other members has no paths of the previous members."""

    def test_paths_stay_valid_when_a_spare_takes_over(self) -> None:
        observation = build_starting(build_network(leaves="ababb"))
        observation = observation.with_desired(apply_step(observation))
        result = evaluate_job(change_worker(observation, "j-w3-0", gone=True), build_policy())
        assert [member.worker for member in result.desired.plan.members][3] == "j-w4-0"
        assert set(get_routes(result.desired)) == {(1, 0), (2, 1), (3, 2), (0, 3)}

    def test_paths_stay_valid_when_a_job_shrinks(self) -> None:
        observation = build_starting(build_network(), build_training(4, 0, job=build_job(4, 0, min_replicas=2)))
        observation = observation.with_desired(apply_step(observation))
        gone = change_worker(observation, "j-w3-0", gone=True)
        waiting = gone.with_desired(evaluate_job(gone, build_policy()).desired)
        late = replace(waiting, now=waiting.now + 400)
        result = evaluate_job(late, build_policy())
        assert not result.failed_steps
        assert len(result.desired.plan.members) == 3
        assert all(max(pair) < 3 for pair in get_routes(result.desired))

    def test_paths_are_removed_when_a_suspended_job_resumes(self) -> None:
        observation = build_starting(build_network(), build_training(4, 1, job=build_job(4, 1, suspend=True)))
        observation = observation.with_desired(apply_step(observation))
        result = evaluate_job(observation, build_policy())
        assert not result.failed_steps
        stopped = observation.with_desired(result.desired)
        for view in stopped.workers:
            stopped = change_worker(stopped, view.name, gone=True)
        resumed = evaluate_job(replace(stopped, job=build_job(4, 1)), build_policy())
        assert not resumed.failed_steps
        assert (resumed.desired.plan.members, resumed.desired.plan.paths) == ((), None)
