"""What is said of a Fabric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.fabric.view import FabricLink, FabricView, LinkState
from pacekeeper_operator.api.conditions import ConditionStatus, FabricCondition, FabricReason
from pacekeeper_operator.api.fabric import (
    Fabric,
    FabricSpec,
    FabricStatus,
    LevelSpec,
    LinkException,
    PathControl,
    PathControlSpec,
)
from pacekeeper_operator.decide.network import traffic
from pacekeeper_operator.decide.network.fabric_status import (
    MAX_REPORTED_LINKS,
    FabricState,
    build_fabric_status,
    build_inactive_status,
    build_planning_status,
    select_active_fabric,
)
from pacekeeper_operator.decide.network.link_state import DegradedLinks
from pacekeeper_operator.decide.network.wiring import build_wiring
from pacekeeper_operator.state.cluster_view import NodeView
from pacekeeper_operator.state.network import JobTraffic, NodeRanks
from testing.kubernetes.schema import find_schema_errors, read_schema

NOW = 1_000_000.0
HOPS = {"10.0.0.1": "s1", "10.0.0.2": "s2"}


def fabric(mode: PathControl = PathControl.PROBE, **changes: Any) -> Fabric:
    values: dict[str, Any] = {"spines": 2, "levels": (LevelSpec("leaf"),), "hops": HOPS}
    values |= changes
    return Fabric("f", "uid", 7, NOW - 100, FabricSpec(path_control=PathControlSpec(mode), **values))


def seen(of: Fabric, leaves: str = "ab", jobs: int = 1, **changes: Any) -> FabricState:
    nodes = [NodeView(f"{leaf}{n}", leaf, labels={"leaf": leaf}) for leaf in leaves for n in range(9)]
    wiring = build_wiring(of.spec, nodes, changes.pop("blocked_since", {}))
    each = [JobTraffic(("team", f"j{n}"), (NodeRanks(f"a{n}", (0,)), NodeRanks(f"b{n}", (1,)))) for n in range(jobs)]
    return FabricState(wiring, traffic.plan_joint_traffic(wiring, each), **changes)


def condition(status: FabricStatus, name: FabricCondition) -> tuple[str, str, str]:
    found = next(one for one in status.conditions if one.type == name)
    return found.status, found.reason, found.message


def test_a_fabric_whose_flows_have_all_their_ways() -> None:
    status = build_fabric_status(fabric(), seen(fabric(), jobs=3), NOW)
    assert (
        status.leaves,
        status.flows,
        status.max_load,
        status.lower_bound,
        status.dead_links,
        status.moved_flows,
    ) == (2, 6, 2, 2, 0, 0)
    assert status.observed_generation == 7
    assert condition(status, FabricCondition.IN_FORCE)[:2] == ("True", FabricReason.OLDEST)
    assert condition(status, FabricCondition.LEAVES_RESOLVED)[:2] == ("True", FabricReason.LABELED)
    assert condition(status, FabricCondition.LINKS_RESOLVED)[:2] == ("True", FabricReason.LINKS_CONSISTENT)
    assert condition(status, FabricCondition.PLANNED)[:2] == ("True", FabricReason.AT_LOWER_BOUND)
    loads = {(link.leaf, link.spine): (link.up, link.down) for link in status.links}
    assert sorted(loads) == [("a", "s1"), ("a", "s2"), ("b", "s1"), ("b", "s2")]
    assert sum(up for up, _ in loads.values()) == sum(down for _, down in loads.values()) == 6


def test_it_fits_the_schema_and_is_read_as_it_was_written() -> None:
    of = fabric(exceptions=(LinkException("a", "s1"), LinkException("b", "s2", LinkState.SLOW, 1e11)))
    status = build_fabric_status(of, seen(of), NOW)
    assert find_schema_errors(status.to_json(), read_schema("fabrics")["status"]) == []
    assert FabricStatus.parse(status.to_json()) == status
    assert {(link.leaf, link.spine): link.state for link in status.links} == {
        ("a", "s1"): LinkState.DOWN,
        ("a", "s2"): LinkState.UP,
        ("b", "s1"): LinkState.UP,
        ("b", "s2"): LinkState.SLOW,
    }
    assert status.dead_links == 1


def test_people_are_shown_what_was_written() -> None:
    of = fabric(exceptions=(LinkException("a", "s1"),))
    status = build_fabric_status(of, seen(of, jobs=3), NOW)
    body = {"metadata": {"name": "f"}, "spec": {"spines": 2, "planes": 1}, "status": status.to_json()}
    view = FabricView.from_json(body)
    assert (view.name, view.spines, view.leaves, view.flows) == ("f", 2, 2, 6)
    assert (view.max_load, view.lower_bound, view.dead_links, view.links) == (
        status.max_load,
        status.lower_bound,
        1,
        status.links,
    )
    assert (view.is_in_force, view.max_unlisted_load) == (True, None)
    (planned,) = [one for one in view.conditions if one.type == FabricCondition.PLANNED]
    assert (planned.status, planned.reason) == condition(status, FabricCondition.PLANNED)[:2]


def test_while_a_plan_takes_long_all_else_stays_as_it_was_said() -> None:
    of = fabric()
    before = build_fabric_status(of, seen(of, jobs=3), NOW)
    found = build_planning_status(replace(of, status=before, generation=8), "9 jobs", NOW + 5)
    assert condition(found, FabricCondition.PLANNED) == ("Unknown", FabricReason.PLANNING, "9 jobs")
    others = [one for one in before.conditions if one.type != FabricCondition.PLANNED]
    assert replace(found, conditions=()) == replace(before, conditions=())
    assert [one for one in found.conditions if one.type != FabricCondition.PLANNED] == others
    assert find_schema_errors(found.to_json(), read_schema("fabrics")["status"]) == []
    again = build_fabric_status(replace(of, status=found), seen(of, jobs=3), NOW + 9)
    (planned,) = [one for one in again.conditions if one.type == FabricCondition.PLANNED]
    assert (planned.status, planned.last_transition_time) == ("True", NOW + 9)


def test_without_path_control_nobody_knows_the_loads() -> None:
    of = fabric(PathControl.OFF)
    status = build_fabric_status(of, seen(of), NOW)
    assert (status.flows, status.max_load, status.lower_bound, status.moved_flows) == (2, None, 1, None)
    assert condition(status, FabricCondition.PLANNED)[:2] == ("Unknown", FabricReason.PATH_CONTROL_OFF)
    assert {(link.up, link.down) for link in status.links} == {(0, 0)}


def test_no_jobs() -> None:
    status = build_fabric_status(fabric(), seen(fabric(), jobs=0), NOW)
    assert (status.flows, status.max_load, status.lower_bound) == (0, 0, 0)
    assert condition(status, FabricCondition.PLANNED)[:2] == ("True", FabricReason.NO_FLOWS)


def test_all_spines_dead() -> None:
    dead = {(leaf, spine): 0.0 for leaf in "ab" for spine in ("s1", "s2")}
    status = build_fabric_status(fabric(), seen(fabric(), blocked_since=dead), NOW)
    assert status.dead_links == 4
    assert condition(status, FabricCondition.PLANNED) == (
        "False",
        FabricReason.NO_ROUTE,
        "no route is alive for 2 flows: team/j0 1 → 0, team/j0 0 → 1",
    )


def test_a_plan_that_is_not_at_the_bound_says_so() -> None:
    found = seen(fabric())
    assert found.traffic is not None
    above = replace(found, traffic=replace(found.traffic, max_load=3, lower_bound=2))
    assert condition(build_fabric_status(fabric(), above, NOW), FabricCondition.PLANNED) == (
        "True",
        FabricReason.ABOVE_LOWER_BOUND,
        "the fullest link carries 3, and no plan is below 2",
    )


def test_labels_that_nobody_has() -> None:
    status = build_fabric_status(fabric(), seen(fabric(), leaves=""), NOW)
    assert (status.leaves, status.flows, status.lower_bound, status.links) == (0, 0, None, ())
    assert condition(status, FabricCondition.LEAVES_RESOLVED)[:2] == ("False", FabricReason.NO_LEAVES)
    assert condition(status, FabricCondition.PLANNED)[:2] == ("False", FabricReason.NOT_PLANNED)


def test_a_fabric_that_is_too_large() -> None:
    of = fabric(spines=1024)
    nodes = [NodeView(f"n{n}", "u", labels={"leaf": f"l{n}"}) for n in range(300)]
    status = build_fabric_status(of, FabricState(build_wiring(of.spec, nodes, {}), None), NOW)
    assert condition(status, FabricCondition.LEAVES_RESOLVED)[:2] == ("False", FabricReason.TOO_MANY_LEAVES)


@pytest.mark.parametrize(
    ("changes", "name", "reason", "words"),
    [
        ({"unlabeled_nodes": ("n1",)}, FabricCondition.LEAVES_RESOLVED, FabricReason.NODES_UNLABELED, "n1"),
        ({"query_error": "away"}, FabricCondition.LINKS_RESOLVED, FabricReason.QUERY_FAILED, "away"),
        ({"blocked_since": {("z", "s1"): 0.0}}, FabricCondition.LINKS_RESOLVED, FabricReason.UNKNOWN_LINKS, "z–s1"),
    ],
)
def test_what_does_not_fit(changes: Any, name: FabricCondition, reason: FabricReason, words: str) -> None:
    status, why, message = condition(build_fabric_status(fabric(), seen(fabric(), **changes), NOW), name)
    assert (status, why) == ("False", reason)
    assert words in message


def test_hops_to_nowhere() -> None:
    of = fabric(hops={"10.0.0.1": "s9"})
    assert condition(build_fabric_status(of, seen(of), NOW), FabricCondition.LINKS_RESOLVED)[:2] == (
        "False",
        FabricReason.UNKNOWN_SPINES,
    )


def test_spines_that_nothing_answers_for() -> None:
    of = fabric(hops={"10.0.0.1": "s1"})
    status, reason, message = condition(build_fabric_status(of, seen(of), NOW), FabricCondition.LINKS_RESOLVED)
    assert (status, reason) == ("False", FabricReason.UNKNOWN_SPINES)
    assert "no address of s2" in message
    unprobed = fabric(PathControl.OFF, hops={})
    assert condition(build_fabric_status(unprobed, seen(unprobed), NOW), FabricCondition.LINKS_RESOLVED)[0] == "True"


def test_of_many_links_the_dead_and_the_full_ones_are_shown() -> None:
    of = fabric(spines=MAX_REPORTED_LINKS, exceptions=(LinkException("b", f"s{MAX_REPORTED_LINKS}"),))
    status = build_fabric_status(of, seen(of, jobs=5), NOW)
    assert len(status.links) == MAX_REPORTED_LINKS
    assert (status.links[0].spine, status.links[0].state) == (f"s{MAX_REPORTED_LINKS}", LinkState.DOWN)
    assert sum(link.up for link in status.links) == 10, "all that carry anything"


def test_times_of_transition_stay_while_nothing_changes() -> None:
    first = build_fabric_status(fabric(), seen(fabric()), NOW)
    later = build_fabric_status(replace(fabric(), status=first), seen(fabric()), NOW + 60)
    assert later == first
    changed = build_fabric_status(replace(fabric(), status=first), seen(fabric(), query_error="away"), NOW + 60)
    since = {one.type: one.last_transition_time for one in changed.conditions}
    assert (since[FabricCondition.LINKS_RESOLVED], since[FabricCondition.PLANNED]) == (NOW + 60, NOW)


class TestOfSeveral:
    def test_the_oldest_counts_and_the_others_say_so(self) -> None:
        old, young = fabric(), replace(fabric(), name="young", created_at=NOW)
        assert select_active_fabric([young, old]) == old
        assert select_active_fabric([]) is None
        status = build_inactive_status(young, old, NOW)
        assert condition(status, FabricCondition.IN_FORCE) == (
            "False",
            FabricReason.ANOTHER_IS_OLDER,
            "Fabric f is older: delete one of them",
        )
        assert (status.flows, status.links) == (None, ())

    def test_of_two_of_an_age_the_first_by_name(self) -> None:
        assert select_active_fabric([replace(fabric(), name="b"), replace(fabric(), name="a")]) == replace(
            fabric(), name="a"
        )

    def test_one_that_cannot_be_read_counts_for_nothing_and_says_why(self) -> None:
        body = {"metadata": {"name": "g", "uid": "u"}, "spec": {"spines": "many"}}
        broken = Fabric.parse(body)
        assert select_active_fabric([broken]) is None
        assert condition(build_inactive_status(broken, None, NOW), FabricCondition.IN_FORCE) == (
            "False",
            FabricReason.UNREADABLE,
            "spec.spines: 'many' must be of type int",
        )


class TestParse:
    def test_with_its_defaults(self) -> None:
        found = Fabric.parse({"metadata": {"name": "f", "uid": "u"}, "spec": {"spines": 4}})
        assert (found.spec, found.parse_error) == (FabricSpec(spines=4), "")

    def test_all_of_it(self) -> None:
        spec = {
            "spines": 4,
            "planes": 2,
            "levels": [{"nodeLabel": "leaf"}],
            "uplink": {"capacity": "1.6T", "parallel": 2},
            "exceptions": [
                {"leaf": "l", "spine": "s1"},
                {"leaf": "l", "spine": "s2", "state": "Slow", "capacity": "50M"},
            ],
            "linkQuery": "up",
            "hops": {"10.0.0.1": "s1"},
            "pathControl": {"mode": "Probe", "ports": "20000-20999"},
        }
        found = FabricSpec.parse(spec)
        assert (found.uplink.capacity, found.uplink.parallel, found.link_query) == (1.6e12, 2, "up")
        assert found.exceptions == (LinkException("l", "s1"), LinkException("l", "s2", LinkState.SLOW, 5e7))
        assert found.path_control == PathControlSpec(PathControl.PROBE, (20000, 20999))

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            ({}, "spec.spines: is missing"),
            ({"spines": 1, "uplink": {"capacity": "400"}}, "spec.uplink.capacity: '400' is no rate"),
            ({"spines": 1, "uplink": {"capacity": 400}}, "spec.uplink.capacity: 400 is no rate"),
            ({"spines": 1, "pathControl": {"ports": "9-10"}}, "spec.pathControl.ports: '9-10' must be two ports"),
            ({"spines": 1, "pathControl": {"ports": "2000-1999"}}, "spec.pathControl.ports"),
            ({"spines": 1, "pathControl": {"mode": "Magic"}}, "spec.pathControl.mode"),
            ({"spines": 1, "exceptions": [{"leaf": "l"}]}, "spec.exceptions[0]: spine must be given"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, spec: dict[str, Any], words: str) -> None:
        assert words in Fabric.parse({"metadata": {"name": "f", "uid": "u"}, "spec": spec}).parse_error

    def test_a_status_that_cannot_be_read_is_written_anew(self) -> None:
        body = {"metadata": {"name": "f", "uid": "u"}, "spec": {"spines": 4}, "status": {"flows": "many"}}
        assert Fabric.parse(body).status == FabricStatus()


def test_links_and_conditions_on_the_wire() -> None:
    status = FabricStatus(links=(FabricLink("l", "s1", 1, 2),), conditions=(ConditionStatus("Planned", "True", "R"),))
    assert status.to_json()["links"] == [{"leaf": "l", "spine": "s1", "up": 1, "down": 2, "state": "Up"}]
    assert "flows" not in status.to_json(), "what is not known is given up"


def test_moves_that_nobody_may_make_are_recommended_not_planned() -> None:
    of, found = fabric(), seen(fabric())
    ways = {(0, 1): 0, (1, 0): 0}
    seats = [(NodeRanks(f"a{n}", (0,)), NodeRanks(f"b{n}", (1,))) for n in range(2)]
    held = [JobTraffic(("team", f"j{n}"), seats[n], 1, ways, wait_share=0.5, round_seconds=5.0) for n in range(2)]
    for acts, moved, words in ((True, 2, "no plan is below that"), (False, 0, "recommended, but not taken")):
        plan = traffic.plan_joint_traffic(found.wiring, [replace(one, can_move=acts) for one in held])
        status = build_fabric_status(of, replace(found, traffic=plan), NOW)
        assert status.moved_flows == moved
        assert words in condition(status, FabricCondition.PLANNED)[2]
    assert condition(status, FabricCondition.PLANNED)[2].endswith("(mode Recommend): team/j0")


def test_links_that_flows_have_shown_to_be_slow_are_named() -> None:
    of = fabric()
    nodes = [NodeView(leaf, leaf, labels={"leaf": leaf}) for leaf in "ab"]
    wiring = build_wiring(of.spec, nodes, {}, DegradedLinks({("a", "s1"): 0.25, ("b", "s2"): 0.0}))
    status = build_fabric_status(of, FabricState(wiring, traffic.plan_joint_traffic(wiring, [])), NOW)
    assert {(link.leaf, link.spine): link.state for link in status.links if link.state is not LinkState.UP} == {
        ("a", "s1"): LinkState.SLOW,
        ("b", "s2"): LinkState.DOWN,
    }
    known = condition(status, FabricCondition.LINKS_RESOLVED)
    assert known[:2] == ("True", FabricReason.LINKS_CONSISTENT)
    assert known[2].endswith("a–s1 (25%), b–s2 (0%)")
