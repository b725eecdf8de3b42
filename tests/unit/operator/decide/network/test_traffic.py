"""Joint planning of all jobs' flows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.fabric.view import LinkState
from pacekeeper_operator.api.fabric import FabricSpec, LevelSpec, LinkException
from pacekeeper_operator.decide.network.link_state import DegradedLinks
from pacekeeper_operator.decide.network.traffic import (
    fingerprint_live_routes,
    list_ring_edges,
    plan_job_routes,
    plan_joint_traffic,
)
from pacekeeper_operator.decide.network.wiring import build_wiring
from pacekeeper_operator.state.cluster_view import NodeView
from pacekeeper_operator.state.network import JobName, JobTraffic, NodeRanks, TrafficPlan, Wiring


def build_fabric(
    leaves: str = "abc", *, spines: int = 2, dead: Sequence[tuple[str, str]] = (), **changes: Any
) -> Wiring:
    """Build a fabric with ten nodes a leaf: a0, a1, …"""
    nodes = [NodeView(f"{leaf}{n}", f"{leaf}{n}", labels={"leaf": leaf}) for leaf in leaves for n in range(10)]
    exceptions = tuple(LinkException(*link) for link in dead) + changes.pop("exceptions", ())
    return build_wiring(FabricSpec(spines, levels=(LevelSpec("leaf"),), exceptions=exceptions, **changes), nodes, {})


def build_job(name: str, *nodes: str, **changes: Any) -> JobTraffic:
    return JobTraffic(("team", name), tuple(NodeRanks(node, (n,)) for n, node in enumerate(nodes)), **changes)


def plan_traffic(wiring: Wiring, *jobs: JobTraffic) -> TrafficPlan:
    found = plan_joint_traffic(wiring, jobs)
    assert found is not None
    return found


def with_planned_routes(jobs: Sequence[JobTraffic], found: TrafficPlan, *, training: bool = True) -> list[JobTraffic]:
    """Return the jobs with the planned routes in their plans."""
    seconds = 5.0 if training else 0.0
    return [replace(job, routes=found.routes[job.name], round_seconds=seconds) for job in jobs]


class TestEdges:
    def test_gloo_sends_from_each_rank_to_the_previous_one(self) -> None:
        pairs_of_ranks = (NodeRanks("a0", (0, 1)), NodeRanks("b0", (2, 3)))
        assert sorted(list_ring_edges(JobTraffic(("team", "x"), pairs_of_ranks))) == [(0, 3), (1, 0), (2, 1), (3, 2)]

    def test_nccl_sends_from_each_local_rank_to_that_of_the_next_worker(self) -> None:
        node_ranks = (NodeRanks("a0", (0, 1)), NodeRanks("b0", (2, 3)), NodeRanks("c0", (4, 5)))
        found = list_ring_edges(JobTraffic(("team", "x"), node_ranks, uses_nccl=True))
        assert found == [(0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1)]

    def test_edges_of_two_ranks_and_of_one(self) -> None:
        assert sorted(list_ring_edges(build_job("x", "a0", "b0"))) == [(0, 1), (1, 0)]
        assert list_ring_edges(build_job("x", "a0")) == list_ring_edges(build_job("x")) == []


class TestPlan:
    def test_two_jobs_that_would_collide_use_separate_spines(self) -> None:
        found = plan_traffic(build_fabric(), build_job("one", "a0", "b0"), build_job("two", "a1", "b1"))
        assert (found.flows, found.max_load, found.lower_bound, found.moved_flows, found.unroutable_flows) == (
            4,
            1,
            1,
            0,
            (),
        )
        for end in (0, 1):
            assert {found.routes["team", name][end, 1 - end] for name in ("one", "two")} == {0, 1}
        assert found.up.tolist() == [[1, 1], [1, 1], [0, 0]]

    def test_flows_within_a_leaf_need_no_route(self) -> None:
        found = plan_traffic(build_fabric(), build_job("one", "a0", "a1", "b0"), build_job("two", "c0", "c1"))
        assert found.routes["team", "two"] == {}
        assert set(found.routes["team", "one"]) == {(2, 1), (0, 2)}

    def test_plans_without_jobs_or_leaves(self) -> None:
        assert plan_traffic(build_fabric()).routes == {}
        assert plan_traffic(build_fabric(), build_job("one")).flows == 0
        assert plan_joint_traffic(build_fabric(""), [build_job("one", "a0", "b0")]) is None

    def test_one_spine_leaves_no_choice(self) -> None:
        found = plan_traffic(build_fabric(spines=1), build_job("one", "a0", "b0"), build_job("two", "a1", "b1"))
        assert (found.max_load, found.lower_bound, set(found.routes["team", "one"].values())) == (2, 2, {0})

    def test_a_worker_whose_leaf_is_not_known_has_no_planned_flows(self) -> None:
        found = plan_traffic(build_fabric(), build_job("one", "a0", "nowhere", "b0"))
        assert set(found.routes["team", "one"]) == {(0, 2)}

    def test_planned_routes_stay_when_planned_again(self) -> None:
        jobs = [build_job(f"j{n}", f"a{n}", f"b{n}", f"c{n}") for n in range(6)]
        first = plan_traffic(build_fabric(), *jobs)
        repeated = plan_traffic(build_fabric(), *with_planned_routes(jobs, first))
        assert (repeated.routes, repeated.moved_flows) == (first.routes, 0)

    def test_a_restart_of_the_operator_between_two_jobs_does_not_change_the_result(self) -> None:
        """Only some plans were written: the next operator plans the other jobs around them."""
        jobs = [build_job(f"j{n}", f"a{n}", f"b{n}", f"c{n}") for n in range(4)]
        first = plan_traffic(build_fabric(), *jobs)
        written = with_planned_routes(jobs[:2], first)
        resumed = plan_traffic(build_fabric(), *written, *jobs[2:])
        assert {name: resumed.routes[name] for name in (job.name for job in written)} == {
            job.name: job.routes for job in written
        }
        assert (resumed.max_load, resumed.moved_flows) == (first.max_load, 0)


class TestRepair:
    def test_a_dead_link_moves_only_its_own_flows(self) -> None:
        jobs = [build_job(f"j{n}", f"a{n}", f"b{n}") for n in range(2)]
        wiring = build_fabric(spines=3)
        first = plan_traffic(wiring, *jobs)
        used = first.routes["team", "j0"][0, 1]
        cut = build_fabric(spines=3, dead=[("a", f"s{used + 1}")])
        repaired = plan_traffic(cut, *with_planned_routes(jobs, first))
        assert used not in repaired.routes["team", "j0"].values()
        assert (repaired.max_load, repaired.lower_bound, repaired.unroutable_flows) == (1, 1, ())
        assert repaired.routes["team", "j1"] == first.routes["team", "j1"]
        assert repaired.moved_flows == 0, "no flow had to leave a route that is alive"

    def test_with_all_spines_dead_no_flow_is_routable(self) -> None:
        dead = [(leaf, spine) for leaf in "abc" for spine in ("s1", "s2")]
        found = plan_traffic(build_fabric(dead=dead), build_job("one", "a0", "b0"))
        assert (found.routes["team", "one"], found.max_load) == ({}, 0)
        assert sorted(found.unroutable_flows) == [(("team", "one"), (0, 1)), (("team", "one"), (1, 0))]

    def test_only_flows_of_an_isolated_leaf_are_unroutable(self) -> None:
        dead = [("c", "s1"), ("c", "s2")]
        found = plan_traffic(build_fabric(dead=dead), build_job("one", "a0", "b0", "c0"))
        assert set(found.routes["team", "one"]) == {(1, 0)}
        assert len(found.unroutable_flows) == 2

    def test_a_route_over_an_unknown_spine_is_planned_again(self) -> None:
        found = plan_traffic(build_fabric(), build_job("one", "a0", "b0", routes={(0, 1): 7, (1, 0): -3}))
        assert set(found.routes["team", "one"].values()) <= {0, 1}


class TestDue:
    """Whether a job that trains begins a round for other routes."""

    def build_jobs(self, *, leaf: str = "a", **changes: Any) -> list[JobTraffic]:
        """Build two jobs: the first between leaves a and b, the other between `leaf` and b."""
        values: dict[str, Any] = {"wait_share": 0.3, "round_seconds": 5.0} | changes
        first = build_job("one", "a0", "b0", routes={(0, 1): 0, (1, 0): 0}, **values)
        return [first, build_job("two", f"{leaf}1", "b1", routes={(0, 1): 1, (1, 0): 1}, **values)]

    def test_no_job_is_due_if_all_routes_are_as_planned(self) -> None:
        assert plan_traffic(build_fabric(spines=3), *self.build_jobs()).due == {}

    def test_a_job_is_due_if_its_link_is_dead(self) -> None:
        cut = plan_traffic(build_fabric(spines=3, dead=[("a", "s1")]), *self.build_jobs(leaf="c"))
        assert set(cut.due) == {("team", "one")}
        assert set(cut.routes["team", "one"].values()) == {2}
        due = cut.due["team", "one"]
        assert 1.05 < due.slowdown < 1 / 0.85 - 0.001, "between that of a separate and that of a shared route"
        assert due.cost_seconds == 10.0

    def test_no_job_is_due_if_only_one_route_is_left(self) -> None:
        assert plan_traffic(build_fabric(spines=2, dead=[("a", "s1"), ("b", "s1")]), *self.build_jobs()).due == {}

    def test_a_job_that_does_not_wait_for_communication_is_not_due(self) -> None:
        assert plan_traffic(build_fabric(spines=3, dead=[("a", "s1")]), *self.build_jobs(wait_share=0.0)).due == {}

    def test_a_job_that_does_not_train_yet_is_not_due(self) -> None:
        found = plan_traffic(build_fabric(spines=3, dead=[("a", "s1")]), *self.build_jobs(round_seconds=None))
        assert (found.due, set(found.routes["team", "one"].values())) == ({}, {2})

    def test_an_immovable_job_does_not_block_another(self) -> None:
        first, second = self.build_jobs()
        immovable = replace(second, round_seconds=math.inf)
        dead = [("a", "s1"), ("a", "s2")]
        found = plan_traffic(build_fabric(spines=4, dead=dead), first, immovable)
        assert set(found.due) == {("team", "one")}
        assert (
            plan_traffic(build_fabric(spines=4, dead=dead), replace(first, round_seconds=math.inf), immovable).due == {}
        )

    def test_a_job_that_keeps_its_routes_leaves_only_dead_links(self) -> None:
        slow = tuple(LinkException(leaf, "s1", LinkState.SLOW, 100e9) for leaf in "ab")
        unmoved = plan_traffic(build_fabric(spines=3, exceptions=slow), *self.build_jobs(keeps_routes=True))
        assert (unmoved.due, set(unmoved.routes["team", "one"].values())) == ({}, {0})
        cut = plan_traffic(build_fabric(spines=3, dead=[("a", "s1")]), *self.build_jobs(leaf="c", keeps_routes=True))
        assert set(cut.due) == {("team", "one")}

    def test_a_job_on_a_slow_link_is_due(self) -> None:
        slow = tuple(LinkException(leaf, "s1", LinkState.SLOW, 100e9) for leaf in "ab")
        found = plan_traffic(build_fabric(spines=3, exceptions=slow), *self.build_jobs())
        assert set(found.due) == {("team", "one")}
        assert found.due["team", "one"].slowdown == pytest.approx(1 / (1 - 0.3 * 0.75))
        assert set(found.routes["team", "one"].values()) == {2}


class TestChangedHash:
    """Leaves choose by a hash among the spines that are alive. If one dies or recovers, all flows of that leaf may
    leave their planned routes."""

    def build_jobs(self, wiring: Wiring | None = None, **changes: Any) -> list[JobTraffic]:
        """Build four jobs with separate routes over this fabric, two of them between other leaves; all train."""
        wiring = wiring or build_fabric(spines=3)
        ends = {"one": "ab", "two": "ab", "three": "bc", "four": "bc"}
        jobs = [build_job(name, *(f"{leaf}{n}" for leaf in leaves)) for n, (name, leaves) in enumerate(ends.items())]
        found = plan_traffic(wiring, *jobs)
        values: dict[str, Any] = {"wait_share": 0.3, "round_seconds": 5.0} | changes
        routes = found.routes
        return [
            replace(
                job,
                routes=routes[job.name],
                route_choices=fingerprint_live_routes(wiring, job, routes[job.name]),
                **values,
            )
            for job in jobs
        ]

    def build_cut_fabric(self, jobs: Sequence[JobTraffic]) -> Wiring:
        """Build the fabric without the link of the first job."""
        return build_fabric(spines=3, dead=[("a", f"s{jobs[0].routes[0, 1] + 1}")])

    def test_a_job_on_another_spine_of_the_leaf_is_due_as_well(self) -> None:
        jobs = self.build_jobs()
        found = plan_traffic(self.build_cut_fabric(jobs), *jobs)
        assert set(found.due) == {("team", "one"), ("team", "two")}, "the leaves of the others are unchanged"
        assert found.routes["team", "two"] == jobs[1].routes, "the routes are the same, with new ports"
        assert found.moved_flows == 0
        assert found.due["team", "two"].cost_seconds == 20.0

    def test_a_job_is_not_due_if_the_round_costs_more_than_it_gains(self) -> None:
        first, second, *others = self.build_jobs()
        assert set(
            plan_traffic(self.build_cut_fabric([first]), first, replace(second, round_seconds=200.0), *others).due
        ) == {("team", "one")}

    def test_no_job_is_due_next_to_a_flow_of_unknown_route(self) -> None:
        """Next to a flow whose route stays unknown, all routes are equally good."""
        first, second, *_ = self.build_jobs()
        assert plan_traffic(self.build_cut_fabric([first]), first, replace(second, round_seconds=math.inf)).due == {}

    def test_a_job_that_keeps_its_routes_is_not_due(self) -> None:
        first, second, *others = self.build_jobs()
        assert set(
            plan_traffic(self.build_cut_fabric([first]), first, replace(second, keeps_routes=True), *others).due
        ) == {("team", "one")}

    def test_no_job_is_due_after_the_round(self) -> None:
        jobs = self.build_jobs()
        cut = self.build_cut_fabric(jobs)
        assert plan_traffic(cut, *self.build_jobs(cut)).due == {}

    def test_a_link_that_recovers_has_the_same_effect(self) -> None:
        jobs = self.build_jobs(build_fabric(spines=3, dead=[("a", "s1")]))
        assert set(plan_traffic(build_fabric(spines=3), *jobs).due) == {("team", "one"), ("team", "two")}

    def test_links_that_only_flows_show_to_be_dead_do_not_change_the_hash(self) -> None:
        jobs = self.build_jobs()
        nodes = [NodeView(f"{leaf}{n}", f"{leaf}{n}", labels={"leaf": leaf}) for leaf in "abc" for n in range(10)]
        dead = ("a", f"s{jobs[0].routes[0, 1] + 1}")
        doubted = build_wiring(
            FabricSpec(3, levels=(LevelSpec("leaf"),)), nodes, {}, DegradedLinks(agreed_shares={dead: 0.0})
        )
        assert set(plan_traffic(doubted, *jobs).due) == {("team", "one")}


class TestOthers:
    """Two jobs that train share a spine, next to one that is empty."""

    def build_training(
        self, name: str, *nodes: str, ranks: int = 8, waiting: float = 0.5, seconds: float = 5.0
    ) -> JobTraffic:
        half = ranks // 2
        node_ranks = (NodeRanks(nodes[0], tuple(range(half))), NodeRanks(nodes[1], tuple(range(half, ranks))))
        routes = {(half, half - 1): 0, (0, ranks - 1): 0}
        return JobTraffic(("team", name), node_ranks, 1, routes, wait_share=waiting, round_seconds=seconds)

    def build_jobs(self, **changes: Any) -> list[JobTraffic]:
        return [self.build_training("one", "a0", "b0", **changes), self.build_training("two", "a1", "b1", **changes)]

    def test_a_job_that_waits_long_enough_is_moved(self) -> None:
        found = plan_traffic(build_fabric(), *self.build_jobs())
        assert (found.max_load, found.lower_bound) == (1, 1)
        assert found.moved_flows == 2
        (due,) = found.due.values()
        assert due.gain_seconds == pytest.approx(2 * 600 * 8 * 0.5 * 0.5)
        assert due.cost_seconds == 8 * 5
        assert due.slowdown == pytest.approx(1 / 0.75), "half of the step is waiting, and half of that remains"

    @pytest.mark.parametrize("changes", [{"waiting": 0.0}, {"seconds": 700.0}])
    def test_no_job_moves_if_the_round_costs_more_than_it_gains(self, changes: dict[str, float]) -> None:
        found = plan_traffic(build_fabric(), *self.build_jobs(**changes))
        assert (found.max_load, found.moved_flows, found.due) == (2, 0, {})

    def test_a_new_job_avoids_jobs_that_train(self) -> None:
        found = plan_traffic(build_fabric(), *self.build_jobs(waiting=0.0), build_job("new", "a5", "b5"))
        assert set(found.routes["team", "new"].values()) == {1}
        assert found.routes["team", "one"] == self.build_jobs()[0].routes

    def test_a_large_job_is_not_disturbed_for_a_small_one(self) -> None:
        small = self.build_training("two", "a1", "b1")
        large = self.build_training("one", "a0", "b0", ranks=1000, waiting=0.0, seconds=60.0)
        for jobs in ((large, small), (small, large)):
            found = plan_traffic(build_fabric(), *jobs)
            assert (found.max_load, found.moved_flows) == (1, 2)
            assert found.routes["team", "one"] == large.routes, "the small one moves"


class TestRecommended:
    """Jobs that may not be moved, in mode Recommend."""

    def build_jobs(self, *movable: str) -> list[JobTraffic]:
        nodes = {"one": ("a0", "b0"), "two": ("a1", "b1")}
        values: dict[str, Any] = {"routes": {(0, 1): 0, (1, 0): 0}, "wait_share": 0.5, "round_seconds": 5.0}
        return [build_job(name, *ends, can_move=name in movable, **values) for name, ends in nodes.items()]

    def test_moves_of_immovable_jobs_are_recommended_but_not_planned(self) -> None:
        found = plan_traffic(build_fabric(), *self.build_jobs())
        assert (found.due, found.moved_flows, found.max_load, found.lower_bound) == ({}, 0, 2, 1)
        assert all(set(routes.values()) == {0} for routes in found.routes.values())
        (recommended,) = found.recommended.values()
        assert recommended.gain_seconds == pytest.approx(2 * 600 * 2 * 0.5 * 0.5)

    def test_a_movable_job_is_moved(self) -> None:
        found = plan_traffic(build_fabric(), *self.build_jobs("two"))
        assert set(found.due) == {("team", "two")}
        assert set(found.routes["team", "two"].values()) == {1}

    def test_nothing_is_recommended_without_a_gain(self) -> None:
        separate = self.build_jobs()
        separate[1] = replace(separate[1], routes={(0, 1): 1, (1, 0): 1})
        assert plan_traffic(build_fabric(), *separate).recommended == {}


class TestOneNamespace:
    """A link that only one namespace reports as slow."""

    def build_doubted_fabric(
        self, *slow: tuple[str, str], share: float = 0.25, spines: int = 3, tenant: str = "team"
    ) -> Wiring:
        nodes = [NodeView(f"{leaf}{n}", f"{leaf}{n}", labels={"leaf": leaf}) for leaf in "abc" for n in range(10)]
        doubts = DegradedLinks(shares_by_namespace={tenant: dict.fromkeys(slow, share)})
        return build_wiring(FabricSpec(spines, levels=(LevelSpec("leaf"),)), nodes, {}, doubts)

    def build_routed_job(self, name: JobName, *nodes: str, spine: int, **changes: Any) -> JobTraffic:
        values: dict[str, Any] = {"wait_share": 0.5, "round_seconds": 5.0} | changes
        node_ranks = tuple(NodeRanks(node, (n,)) for n, node in enumerate(nodes))
        return JobTraffic(name, node_ranks, 1, {(0, 1): spine, (1, 0): spine}, **values)

    def test_flows_of_the_namespace_avoid_the_link(self) -> None:
        own_job, other_job = (
            self.build_routed_job(("team", "x"), "a0", "b0", spine=0),
            self.build_routed_job(("z", "y"), "a1", "b1", spine=1),
        )
        found = plan_traffic(self.build_doubted_fabric(("a", "s1")), own_job, other_job)
        assert set(found.routes["team", "x"].values()) == {2}, "the empty spine"
        assert found.routes["z", "y"] == other_job.routes
        due = found.due["team", "x"]
        assert set(found.due) == {("team", "x")}
        assert due.gain_seconds == pytest.approx(600 * 2 * 0.5 * 0.75)
        assert due.cost_seconds == 10.0
        assert due.slowdown == pytest.approx(1 / (1 - 0.5 * 0.75))
        assert (due.recovered_share, found.moved_flows) == (1.0, 2)

    def test_flows_of_other_namespaces_use_the_link(self) -> None:
        other_job = self.build_routed_job(("z", "y"), "a1", "b1", spine=0)
        found = plan_traffic(self.build_doubted_fabric(("a", "s1")), other_job)
        assert (found.routes["z", "y"], found.due, found.max_load) == (other_job.routes, {}, 1)
        new = plan_traffic(
            self.build_doubted_fabric(("a", "s2"), ("a", "s3")),
            self.build_routed_job(("z", "new"), "a1", "b1", spine=7, round_seconds=None),
        )
        assert set(new.routes["z", "new"].values()) == {0}

    def test_a_false_report_slows_no_other_namespace(self) -> None:
        """All other routes are in use: the job stays, or shares a route with its own namespace."""
        doubter = self.build_routed_job(("team", "x"), "a0", "b0", spine=0)
        others = [self.build_routed_job(("z", f"y{spine}"), f"a{spine}", f"b{spine}", spine=spine) for spine in (1, 2)]
        found = plan_traffic(self.build_doubted_fabric(("a", "s1"), share=0.0), doubter, *others)
        assert found.routes == {job.name: job.routes for job in (doubter, *others)}
        assert found.due == {}
        same_namespace = self.build_routed_job(("team", "o"), "a1", "b1", spine=1, wait_share=0.1)
        shared = plan_traffic(self.build_doubted_fabric(("a", "s1"), share=0.0), doubter, same_namespace, others[1])
        assert set(shared.routes["team", "x"].values()) == {1}, "where only its own namespace pays for it"
        assert shared.routes["z", "y2"] == others[1].routes

    def test_the_routes_stay_when_planned_again(self) -> None:
        own_job, other_job = (
            self.build_routed_job(("team", "x"), "a0", "b0", spine=0),
            self.build_routed_job(("z", "y"), "a1", "b1", spine=1),
        )
        jobs = [own_job, other_job]
        first = plan_traffic(self.build_doubted_fabric(("a", "s1")), *jobs)
        repeated = plan_traffic(self.build_doubted_fabric(("a", "s1")), *with_planned_routes(jobs, first))
        assert (repeated.routes, repeated.due, repeated.moved_flows) == (first.routes, {}, 0)

    def test_jobs_do_not_move_to_the_link_that_their_namespace_reports(self) -> None:
        """Both jobs of the namespace share a spine, while the one that it reports as slow is empty."""
        jobs = [self.build_routed_job(("team", name), f"a{n}", f"b{n}", spine=1) for n, name in enumerate("xy")]
        assert plan_traffic(build_fabric(), *jobs).due
        found = plan_traffic(self.build_doubted_fabric(("a", "s1"), spines=2), *jobs)
        assert (found.due, found.routes) == ({}, {job.name: job.routes for job in jobs})

    def test_a_round_for_one_namespace_has_to_pay_too(self) -> None:
        idle = self.build_routed_job(("team", "x"), "a0", "b0", spine=0, wait_share=0.0)
        found = plan_traffic(
            self.build_doubted_fabric(("a", "s1")), idle, self.build_routed_job(("z", "y"), "a1", "b1", spine=1)
        )
        assert (found.due, found.routes["team", "x"]) == ({}, idle.routes)

    @pytest.mark.parametrize("changes", [{"can_move": False}, {"keeps_routes": True}, {"round_seconds": math.inf}])
    def test_an_immovable_job_of_the_namespace_stays(self, changes: dict[str, Any]) -> None:
        immovable = self.build_routed_job(("team", "x"), "a0", "b0", spine=0, **changes)
        found = plan_traffic(
            self.build_doubted_fabric(("a", "s1")), immovable, self.build_routed_job(("z", "y"), "a1", "b1", spine=1)
        )
        assert (found.due, found.routes["team", "x"]) == ({}, immovable.routes)

    def test_a_new_job_of_the_namespace_avoids_the_link(self) -> None:
        new = build_job("new", "a0", "b0")
        wiring = self.build_doubted_fabric(("a", "s1"), ("a", "s2"))
        assert set(plan_job_routes(wiring, [], new).values()) == {2}
        assert set(plan_job_routes(wiring, [], replace(new, name=("z", "new"))).values()) == {0}

    def test_a_job_stays_if_its_namespace_reports_all_links_as_slow(self) -> None:
        """The namespace reports all links as equally slow, so the job stays."""
        own_job = self.build_routed_job(("team", "x"), "a0", "b0", spine=0)
        found = plan_traffic(self.build_doubted_fabric(*(("a", f"s{n}") for n in (1, 2, 3))), own_job)
        assert (found.routes["team", "x"], found.due) == (own_job.routes, {})


class TestDemand:
    def test_measured_flows_count_by_their_traffic(self) -> None:
        heavy = {(0, 1): 16e6, (1, 0): 16e6}
        light = [
            build_job(name, f"a{n}", f"b{n}", bytes_sent={(0, 1): 1e6, (1, 0): 1e6})
            for n, name in ((1, "two"), (2, "six"))
        ]
        found = plan_traffic(build_fabric(), build_job("one", "a0", "b0", bytes_sent=heavy), *light)
        spine = found.routes["team", "one"][0, 1]
        assert found.routes["team", "two"][0, 1] == found.routes["team", "six"][0, 1] != spine
        assert found.max_load == 16

    def test_unmeasured_flows_count_as_the_median(self) -> None:
        bytes_sent = {(0, 1): 4e6, (1, 0): 1e6}
        found = plan_traffic(
            build_fabric(spines=1), build_job("one", "a0", "b0", bytes_sent=bytes_sent), build_job("two", "a1", "b1")
        )
        assert found.up.tolist() == [[8], [5], [0]], "4 + 4 from a to b, 1 + 4 back"

    def test_equal_flows_count_as_one_each(self) -> None:
        bytes_sent = {(0, 1): 3e6, (1, 0): 3e6}
        assert plan_traffic(build_fabric(), build_job("one", "a0", "b0", bytes_sent=bytes_sent)).max_load == 1


class TestPlanes:
    def test_both_ports_of_a_host_carry_half(self) -> None:
        jobs = [build_job(f"j{n}", "a0", "b0", "c0") for n in range(8)]
        found = plan_traffic(build_fabric(planes=2, spines=4), *jobs)
        by_plane = Counter(spine // 4 for routes in found.routes.values() for spine in routes.values())
        assert (by_plane, found.max_load, found.lower_bound) == ({0: 12, 1: 12}, 1, 1)
        repeated = plan_traffic(build_fabric(planes=2, spines=4), *with_planned_routes(jobs, found))
        assert (repeated.routes, repeated.moved_flows) == (found.routes, 0)

    def test_a_dead_plane_leaves_the_other_one(self) -> None:
        dead = [(leaf, f"s{n}") for leaf in "abc" for n in (1, 2)]
        found = plan_traffic(build_fabric(planes=2, spines=2, dead=dead), build_job("one", "a0", "b0", "c0"))
        assert set(found.routes["team", "one"].values()) <= {2, 3}
        assert (len(found.routes["team", "one"]), found.unroutable_flows) == (3, ())


def test_a_slow_link_carries_less() -> None:
    slow = (LinkException("a", "s1", LinkState.SLOW, 100e9),)
    jobs = [build_job(f"j{n}", f"a{n}", f"b{n}") for n in range(4)]
    found = plan_traffic(build_fabric(exceptions=slow), *jobs)
    assert found.up[0].tolist() == [1, 3]
    assert (found.max_load, found.lower_bound) == (4, 4), (
        "one flow on a quarter of a link counts as four; three would count as twelve"
    )
