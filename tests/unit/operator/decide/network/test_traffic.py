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


def fabric(leaves: str = "abc", *, spines: int = 2, dead: Sequence[tuple[str, str]] = (), **changes: Any) -> Wiring:
    """Ten nodes a leaf: a0, a1, …"""
    nodes = [NodeView(f"{leaf}{n}", f"{leaf}{n}", labels={"leaf": leaf}) for leaf in leaves for n in range(10)]
    exceptions = tuple(LinkException(*link) for link in dead) + changes.pop("exceptions", ())
    return build_wiring(FabricSpec(spines, levels=(LevelSpec("leaf"),), exceptions=exceptions, **changes), nodes, {})


def job(name: str, *nodes: str, **changes: Any) -> JobTraffic:
    return JobTraffic(("team", name), tuple(NodeRanks(node, (n,)) for n, node in enumerate(nodes)), **changes)


def planned(wiring: Wiring, *jobs: JobTraffic) -> TrafficPlan:
    found = plan_joint_traffic(wiring, jobs)
    assert found is not None
    return found


def following(jobs: Sequence[JobTraffic], found: TrafficPlan, *, training: bool = True) -> list[JobTraffic]:
    """The jobs once their plans name what was planned."""
    seconds = 5.0 if training else 0.0
    return [replace(one, routes=found.routes[one.name], round_seconds=seconds) for one in jobs]


class TestEdges:
    def test_gloo_sends_through_all_ranks_each_to_the_one_before(self) -> None:
        two_each = (NodeRanks("a0", (0, 1)), NodeRanks("b0", (2, 3)))
        assert sorted(list_ring_edges(JobTraffic(("team", "x"), two_each))) == [(0, 3), (1, 0), (2, 1), (3, 2)]

    def test_nccl_through_each_place_of_the_workers_to_the_next_one(self) -> None:
        seats = (NodeRanks("a0", (0, 1)), NodeRanks("b0", (2, 3)), NodeRanks("c0", (4, 5)))
        found = list_ring_edges(JobTraffic(("team", "x"), seats, uses_nccl=True))
        assert found == [(0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1)]

    def test_of_two_both_ways_and_of_one_none(self) -> None:
        assert sorted(list_ring_edges(job("x", "a0", "b0"))) == [(0, 1), (1, 0)]
        assert list_ring_edges(job("x", "a0")) == list_ring_edges(job("x")) == []


class TestPlan:
    def test_two_jobs_that_would_collide_are_kept_apart(self) -> None:
        found = planned(fabric(), job("one", "a0", "b0"), job("two", "a1", "b1"))
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

    def test_what_stays_in_its_leaf_needs_no_way(self) -> None:
        found = planned(fabric(), job("one", "a0", "a1", "b0"), job("two", "c0", "c1"))
        assert found.routes["team", "two"] == {}
        assert set(found.routes["team", "one"]) == {(2, 1), (0, 2)}

    def test_neither_jobs_nor_a_fabric(self) -> None:
        assert planned(fabric()).routes == {}
        assert planned(fabric(), job("one")).flows == 0
        assert plan_joint_traffic(fabric(""), [job("one", "a0", "b0")]) is None

    def test_one_spine_leaves_no_choice(self) -> None:
        found = planned(fabric(spines=1), job("one", "a0", "b0"), job("two", "a1", "b1"))
        assert (found.max_load, found.lower_bound, set(found.routes["team", "one"].values())) == (2, 2, {0})

    def test_a_worker_whose_leaf_is_not_known_has_no_planned_flows(self) -> None:
        found = planned(fabric(), job("one", "a0", "nowhere", "b0"))
        assert set(found.routes["team", "one"]) == {(0, 2)}

    def test_what_is_planned_stays_when_it_is_looked_at_again(self) -> None:
        jobs = [job(f"j{n}", f"a{n}", f"b{n}", f"c{n}") for n in range(6)]
        first = planned(fabric(), *jobs)
        again = planned(fabric(), *following(jobs, first))
        assert (again.routes, again.moved_flows) == (first.routes, 0)

    def test_an_operator_that_dies_between_two_jobs_changes_nothing_about_the_end(self) -> None:
        """Some plans were written, the others not: the next operator plans these around those."""
        jobs = [job(f"j{n}", f"a{n}", f"b{n}", f"c{n}") for n in range(4)]
        first = planned(fabric(), *jobs)
        written = following(jobs[:2], first)
        next_one = planned(fabric(), *written, *jobs[2:])
        assert {name: next_one.routes[name] for name in (one.name for one in written)} == {
            one.name: one.routes for one in written
        }
        assert (next_one.max_load, next_one.moved_flows) == (first.max_load, 0)


class TestRepair:
    def test_a_dead_link_moves_what_was_on_it_and_nothing_else(self) -> None:
        jobs = [job(f"j{n}", f"a{n}", f"b{n}") for n in range(2)]
        wiring = fabric(spines=3)
        first = planned(wiring, *jobs)
        used = first.routes["team", "j0"][0, 1]
        cut = fabric(spines=3, dead=[("a", f"s{used + 1}")])
        mended = planned(cut, *following(jobs, first))
        assert used not in mended.routes["team", "j0"].values()
        assert (mended.max_load, mended.lower_bound, mended.unroutable_flows) == (1, 1, ())
        assert mended.routes["team", "j1"] == first.routes["team", "j1"]
        assert mended.moved_flows == 0, "nobody had to go from a way that is alive"

    def test_all_spines_dead(self) -> None:
        dead = [(leaf, spine) for leaf in "abc" for spine in ("s1", "s2")]
        found = planned(fabric(dead=dead), job("one", "a0", "b0"))
        assert (found.routes["team", "one"], found.max_load) == ({}, 0)
        assert sorted(found.unroutable_flows) == [(("team", "one"), (0, 1)), (("team", "one"), (1, 0))]

    def test_a_leaf_that_is_cut_off_costs_only_its_own_flows(self) -> None:
        dead = [("c", "s1"), ("c", "s2")]
        found = planned(fabric(dead=dead), job("one", "a0", "b0", "c0"))
        assert set(found.routes["team", "one"]) == {(1, 0)}
        assert len(found.unroutable_flows) == 2

    def test_a_way_that_there_is_no_more_is_planned_anew(self) -> None:
        found = planned(fabric(), job("one", "a0", "b0", routes={(0, 1): 7, (1, 0): -3}))
        assert set(found.routes["team", "one"].values()) <= {0, 1}


class TestDue:
    """Whether a job that trains begins a round for other ways."""

    def jobs(self, *, leaf: str = "a", **changes: Any) -> list[JobTraffic]:
        """The first between leaves a and b, the other between `leaf` and b."""
        values: dict[str, Any] = {"wait_share": 0.3, "round_seconds": 5.0} | changes
        one = job("one", "a0", "b0", routes={(0, 1): 0, (1, 0): 0}, **values)
        return [one, job("two", f"{leaf}1", "b1", routes={(0, 1): 1, (1, 0): 1}, **values)]

    def test_nobody_whose_ways_are_as_they_should_be(self) -> None:
        assert planned(fabric(spines=3), *self.jobs()).due == {}

    def test_whose_link_has_died_where_others_may_be_in_the_way(self) -> None:
        cut = planned(fabric(spines=3, dead=[("a", "s1")]), *self.jobs(leaf="c"))
        assert set(cut.due) == {("team", "one")}
        assert set(cut.routes["team", "one"].values()) == {2}
        due = cut.due["team", "one"]
        assert 1.05 < due.slowdown < 1 / 0.85 - 0.001, "somewhere between a way of its own and one that it shares"
        assert due.cost_seconds == 10.0

    def test_nobody_where_one_way_is_left_for_all(self) -> None:
        assert planned(fabric(spines=2, dead=[("a", "s1"), ("b", "s1")]), *self.jobs()).due == {}

    def test_nobody_who_does_not_wait_for_it(self) -> None:
        assert planned(fabric(spines=3, dead=[("a", "s1")]), *self.jobs(wait_share=0.0)).due == {}

    def test_nor_who_does_not_train_yet_it_begins_a_round_anyway(self) -> None:
        found = planned(fabric(spines=3, dead=[("a", "s1")]), *self.jobs(round_seconds=None))
        assert (found.due, set(found.routes["team", "one"].values())) == ({}, {2})

    def test_who_may_not_be_moved_holds_up_nobody_else(self) -> None:
        one, two = self.jobs()
        held = replace(two, round_seconds=math.inf)
        dead = [("a", "s1"), ("a", "s2")]
        found = planned(fabric(spines=4, dead=dead), one, held)
        assert set(found.due) == {("team", "one")}
        assert planned(fabric(spines=4, dead=dead), replace(one, round_seconds=math.inf), held).due == {}

    def test_who_has_tried_others_in_vain_leaves_dead_links_alone(self) -> None:
        slow = tuple(LinkException(leaf, "s1", LinkState.SLOW, 100e9) for leaf in "ab")
        stays = planned(fabric(spines=3, exceptions=slow), *self.jobs(keeps_routes=True))
        assert (stays.due, set(stays.routes["team", "one"].values())) == ({}, {0})
        cut = planned(fabric(spines=3, dead=[("a", "s1")]), *self.jobs(leaf="c", keeps_routes=True))
        assert set(cut.due) == {("team", "one")}

    def test_a_link_that_is_slow_is_left(self) -> None:
        slow = tuple(LinkException(leaf, "s1", LinkState.SLOW, 100e9) for leaf in "ab")
        found = planned(fabric(spines=3, exceptions=slow), *self.jobs())
        assert set(found.due) == {("team", "one")}
        assert found.due["team", "one"].slowdown == pytest.approx(1 / (1 - 0.3 * 0.75))
        assert set(found.routes["team", "one"].values()) == {2}


class TestAdrift:
    """Leaves choose by a hash among the spines that are alive: where one dies or comes back, all flows of that leaf may
    leave the ways that their ports led to."""

    def jobs(self, wiring: Wiring | None = None, **changes: Any) -> list[JobTraffic]:
        """Four that have been planned apart over this fabric, two of them between other leaves; all train."""
        wiring = wiring or fabric(spines=3)
        ends = {"one": "ab", "two": "ab", "three": "bc", "four": "bc"}
        jobs = [job(name, *(f"{leaf}{n}" for leaf in leaves)) for n, (name, leaves) in enumerate(ends.items())]
        found = planned(wiring, *jobs)
        values: dict[str, Any] = {"wait_share": 0.3, "round_seconds": 5.0} | changes
        ways = found.routes
        return [
            replace(
                one, routes=ways[one.name], route_choices=fingerprint_live_routes(wiring, one, ways[one.name]), **values
            )
            for one in jobs
        ]

    def cut(self, jobs: Sequence[JobTraffic]) -> Wiring:
        """Of the first job's link."""
        return fabric(spines=3, dead=[("a", f"s{jobs[0].routes[0, 1] + 1}")])

    def test_who_is_on_another_spine_of_the_leaf_begins_a_round_as_well(self) -> None:
        jobs = self.jobs()
        found = planned(self.cut(jobs), *jobs)
        assert set(found.due) == {("team", "one"), ("team", "two")}, "the others' leaves have what they had"
        assert found.routes["team", "two"] == jobs[1].routes, "by the ways that it had, for which it finds ports anew"
        assert found.moved_flows == 0
        assert found.due["team", "two"].cost_seconds == 20.0

    def test_but_not_where_that_costs_more_than_it_wins(self) -> None:
        one, two, *others = self.jobs()
        assert set(planned(self.cut([one]), one, replace(two, round_seconds=200.0), *others).due) == {("team", "one")}

    def test_nobody_is_led_around_what_may_be_anywhere(self) -> None:
        """Beside a flow that stays adrift, one way is as good as another."""
        one, two, *_ = self.jobs()
        assert planned(self.cut([one]), one, replace(two, round_seconds=math.inf)).due == {}

    def test_nor_who_may_not_be_moved(self) -> None:
        one, two, *others = self.jobs()
        assert set(planned(self.cut([one]), one, replace(two, keeps_routes=True), *others).due) == {("team", "one")}

    def test_after_its_round_it_is_where_it_should_be(self) -> None:
        jobs = self.jobs()
        cut = self.cut(jobs)
        assert planned(cut, *self.jobs(cut)).due == {}

    def test_a_link_that_comes_back_does_the_same(self) -> None:
        jobs = self.jobs(fabric(spines=3, dead=[("a", "s1")]))
        assert set(planned(fabric(spines=3), *jobs).due) == {("team", "one"), ("team", "two")}

    def test_what_only_flows_have_shown_no_leaf_goes_by(self) -> None:
        jobs = self.jobs()
        nodes = [NodeView(f"{leaf}{n}", f"{leaf}{n}", labels={"leaf": leaf}) for leaf in "abc" for n in range(10)]
        dead = ("a", f"s{jobs[0].routes[0, 1] + 1}")
        black_hole = build_wiring(
            FabricSpec(3, levels=(LevelSpec("leaf"),)), nodes, {}, DegradedLinks(agreed_shares={dead: 0.0})
        )
        assert set(planned(black_hole, *jobs).due) == {("team", "one")}


class TestOthers:
    """Two jobs that train share a spine, beside one that is empty."""

    def training(
        self, name: str, *nodes: str, ranks: int = 8, waiting: float = 0.5, seconds: float = 5.0
    ) -> JobTraffic:
        half = ranks // 2
        seats = (NodeRanks(nodes[0], tuple(range(half))), NodeRanks(nodes[1], tuple(range(half, ranks))))
        ways = {(half, half - 1): 0, (0, ranks - 1): 0}
        return JobTraffic(("team", name), seats, 1, ways, wait_share=waiting, round_seconds=seconds)

    def jobs(self, **changes: Any) -> list[JobTraffic]:
        return [self.training("one", "a0", "b0", **changes), self.training("two", "a1", "b1", **changes)]

    def test_who_waits_long_enough_for_its_ranks_is_moved(self) -> None:
        found = planned(fabric(), *self.jobs())
        assert (found.max_load, found.lower_bound) == (1, 1)
        assert found.moved_flows == 2
        (due,) = found.due.values()
        assert due.gain_seconds == pytest.approx(2 * 600 * 8 * 0.5 * 0.5)
        assert due.cost_seconds == 8 * 5
        assert due.slowdown == pytest.approx(1 / 0.75), "of half a step that is waited half is left"

    @pytest.mark.parametrize("changes", [{"waiting": 0.0}, {"seconds": 700.0}])
    def test_where_the_round_costs_more_everybody_stays(self, changes: dict[str, float]) -> None:
        found = planned(fabric(), *self.jobs(**changes))
        assert (found.max_load, found.moved_flows, found.due) == (2, 0, {})

    def test_a_new_job_goes_around_those_that_train(self) -> None:
        found = planned(fabric(), *self.jobs(waiting=0.0), job("new", "a5", "b5"))
        assert set(found.routes["team", "new"].values()) == {1}
        assert found.routes["team", "one"] == self.jobs()[0].routes

    def test_a_large_job_is_not_disturbed_for_a_small_one(self) -> None:
        small = self.training("two", "a1", "b1")
        large = self.training("one", "a0", "b0", ranks=1000, waiting=0.0, seconds=60.0)
        for jobs in ((large, small), (small, large)):
            found = planned(fabric(), *jobs)
            assert (found.max_load, found.moved_flows) == (1, 2)
            assert found.routes["team", "one"] == large.routes, "the small one goes out of its way"


class TestRecommended:
    """Jobs that nobody may move, in mode Recommend."""

    def jobs(self, *acting: str) -> list[JobTraffic]:
        nodes = {"one": ("a0", "b0"), "two": ("a1", "b1")}
        values: dict[str, Any] = {"routes": {(0, 1): 0, (1, 0): 0}, "wait_share": 0.5, "round_seconds": 5.0}
        return [job(name, *ends, can_move=name in acting, **values) for name, ends in nodes.items()]

    def test_their_moves_are_no_part_of_the_plan(self) -> None:
        found = planned(fabric(), *self.jobs())
        assert (found.due, found.moved_flows, found.max_load, found.lower_bound) == ({}, 0, 2, 1)
        assert all(set(ways.values()) == {0} for ways in found.routes.values())
        (recommended,) = found.recommended.values()
        assert recommended.gain_seconds == pytest.approx(2 * 600 * 2 * 0.5 * 0.5)

    def test_who_may_be_moved_is(self) -> None:
        found = planned(fabric(), *self.jobs("two"))
        assert set(found.due) == {("team", "two")}
        assert set(found.routes["team", "two"].values()) == {1}

    def test_nothing_is_recommended_where_nothing_is_won(self) -> None:
        apart = self.jobs()
        apart[1] = replace(apart[1], routes={(0, 1): 1, (1, 0): 1})
        assert planned(fabric(), *apart).recommended == {}


class TestOneTenantsWord:
    """A link that one namespace alone calls slow."""

    def fabric(self, *slow: tuple[str, str], share: float = 0.25, spines: int = 3, tenant: str = "team") -> Wiring:
        nodes = [NodeView(f"{leaf}{n}", f"{leaf}{n}", labels={"leaf": leaf}) for leaf in "abc" for n in range(10)]
        doubts = DegradedLinks(shares_by_namespace={tenant: dict.fromkeys(slow, share)})
        return build_wiring(FabricSpec(spines, levels=(LevelSpec("leaf"),)), nodes, {}, doubts)

    def job(self, name: JobName, *nodes: str, way: int, **changes: Any) -> JobTraffic:
        values: dict[str, Any] = {"wait_share": 0.5, "round_seconds": 5.0} | changes
        seats = tuple(NodeRanks(node, (n,)) for n, node in enumerate(nodes))
        return JobTraffic(name, seats, 1, {(0, 1): way, (1, 0): way}, **values)

    def test_its_own_flows_go_around_it(self) -> None:
        mine, other = self.job(("team", "x"), "a0", "b0", way=0), self.job(("z", "y"), "a1", "b1", way=1)
        found = planned(self.fabric(("a", "s1")), mine, other)
        assert set(found.routes["team", "x"].values()) == {2}, "the one that is empty"
        assert found.routes["z", "y"] == other.routes
        due = found.due["team", "x"]
        assert set(found.due) == {("team", "x")}
        assert due.gain_seconds == pytest.approx(600 * 2 * 0.5 * 0.75)
        assert due.cost_seconds == 10.0
        assert due.slowdown == pytest.approx(1 / (1 - 0.5 * 0.75))
        assert (due.recovered_share, found.moved_flows) == (1.0, 2)

    def test_others_go_by_it_as_ever(self) -> None:
        other = self.job(("z", "y"), "a1", "b1", way=0)
        found = planned(self.fabric(("a", "s1")), other)
        assert (found.routes["z", "y"], found.due, found.max_load) == (other.routes, {}, 1)
        new = planned(
            self.fabric(("a", "s2"), ("a", "s3")), self.job(("z", "new"), "a1", "b1", way=7, round_seconds=None)
        )
        assert set(new.routes["z", "new"].values()) == {0}

    def test_a_liar_slows_nobody_else(self) -> None:
        """All other ways are somebody's: it stays where it is, or shares with its own."""
        liar = self.job(("team", "x"), "a0", "b0", way=0)
        others = [self.job(("z", f"y{way}"), f"a{way}", f"b{way}", way=way) for way in (1, 2)]
        found = planned(self.fabric(("a", "s1"), share=0.0), liar, *others)
        assert found.routes == {one.name: one.routes for one in (liar, *others)}
        assert found.due == {}
        own = self.job(("team", "o"), "a1", "b1", way=1, wait_share=0.1)
        shared = planned(self.fabric(("a", "s1"), share=0.0), liar, own, others[1])
        assert set(shared.routes["team", "x"].values()) == {1}, "where only its own namespace pays for it"
        assert shared.routes["z", "y2"] == others[1].routes

    def test_it_stays_there_when_it_is_looked_at_again(self) -> None:
        mine, other = self.job(("team", "x"), "a0", "b0", way=0), self.job(("z", "y"), "a1", "b1", way=1)
        jobs = [mine, other]
        first = planned(self.fabric(("a", "s1")), *jobs)
        again = planned(self.fabric(("a", "s1")), *following(jobs, first))
        assert (again.routes, again.due, again.moved_flows) == (first.routes, {}, 0)

    def test_what_all_others_see_does_not_bring_it_back(self) -> None:
        """Both its jobs share a spine, while the one that it calls slow is empty."""
        jobs = [self.job(("team", name), f"a{n}", f"b{n}", way=1) for n, name in enumerate("xy")]
        assert planned(fabric(), *jobs).due
        found = planned(self.fabric(("a", "s1"), spines=2), *jobs)
        assert (found.due, found.routes) == ({}, {one.name: one.routes for one in jobs})

    def test_a_round_has_to_pay_here_too(self) -> None:
        poor = self.job(("team", "x"), "a0", "b0", way=0, wait_share=0.0)
        found = planned(self.fabric(("a", "s1")), poor, self.job(("z", "y"), "a1", "b1", way=1))
        assert (found.due, found.routes["team", "x"]) == ({}, poor.routes)

    @pytest.mark.parametrize("changes", [{"can_move": False}, {"keeps_routes": True}, {"round_seconds": math.inf}])
    def test_who_may_not_be_moved_is_not(self, changes: dict[str, Any]) -> None:
        held = self.job(("team", "x"), "a0", "b0", way=0, **changes)
        found = planned(self.fabric(("a", "s1")), held, self.job(("z", "y"), "a1", "b1", way=1))
        assert (found.due, found.routes["team", "x"]) == ({}, held.routes)

    def test_a_job_of_it_that_is_founded_goes_around_it(self) -> None:
        new = job("new", "a0", "b0")
        wiring = self.fabric(("a", "s1"), ("a", "s2"))
        assert set(plan_job_routes(wiring, [], new).values()) == {2}
        assert set(plan_job_routes(wiring, [], replace(new, name=("z", "new"))).values()) == {0}

    def test_a_dead_end_is_no_end(self) -> None:
        """It calls all of them slow: as slow as each other, so it stays."""
        mine = self.job(("team", "x"), "a0", "b0", way=0)
        found = planned(self.fabric(*(("a", f"s{n}") for n in (1, 2, 3))), mine)
        assert (found.routes["team", "x"], found.due) == (mine.routes, {})


class TestDemand:
    def test_measured_flows_count_by_what_they_carry(self) -> None:
        heavy = {(0, 1): 16e6, (1, 0): 16e6}
        light = [
            job(name, f"a{n}", f"b{n}", bytes_sent={(0, 1): 1e6, (1, 0): 1e6}) for n, name in ((1, "two"), (2, "six"))
        ]
        found = planned(fabric(), job("one", "a0", "b0", bytes_sent=heavy), *light)
        way = found.routes["team", "one"][0, 1]
        assert found.routes["team", "two"][0, 1] == found.routes["team", "six"][0, 1] != way
        assert found.max_load == 16

    def test_who_was_not_measured_counts_as_the_middle(self) -> None:
        sent = {(0, 1): 4e6, (1, 0): 1e6}
        found = planned(fabric(spines=1), job("one", "a0", "b0", bytes_sent=sent), job("two", "a1", "b1"))
        assert found.up.tolist() == [[8], [5], [0]], "4 + 4 from a to b, 1 + 4 back"

    def test_alike_is_one_whatever_was_measured(self) -> None:
        sent = {(0, 1): 3e6, (1, 0): 3e6}
        assert planned(fabric(), job("one", "a0", "b0", bytes_sent=sent)).max_load == 1


class TestPlanes:
    def test_both_ports_of_a_host_carry_half(self) -> None:
        jobs = [job(f"j{n}", "a0", "b0", "c0") for n in range(8)]
        found = planned(fabric(planes=2, spines=4), *jobs)
        by_plane = Counter(way // 4 for of in found.routes.values() for way in of.values())
        assert (by_plane, found.max_load, found.lower_bound) == ({0: 12, 1: 12}, 1, 1)
        again = planned(fabric(planes=2, spines=4), *following(jobs, found))
        assert (again.routes, again.moved_flows) == (found.routes, 0)

    def test_a_dead_plane_leaves_the_other_one(self) -> None:
        dead = [(leaf, f"s{n}") for leaf in "abc" for n in (1, 2)]
        found = planned(fabric(planes=2, spines=2, dead=dead), job("one", "a0", "b0", "c0"))
        assert set(found.routes["team", "one"].values()) <= {2, 3}
        assert (len(found.routes["team", "one"]), found.unroutable_flows) == (3, ())


def test_a_slow_link_carries_less() -> None:
    slow = (LinkException("a", "s1", LinkState.SLOW, 100e9),)
    jobs = [job(f"j{n}", f"a{n}", f"b{n}") for n in range(4)]
    found = planned(fabric(exceptions=slow), *jobs)
    assert found.up[0].tolist() == [1, 3]
    assert (found.max_load, found.lower_bound) == (4, 4), (
        "as one flow on a quarter of a link; three there are as twelve"
    )
