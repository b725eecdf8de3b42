"""The status of a Fabric."""

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


def build_fabric(mode: PathControl = PathControl.PROBE, **changes: Any) -> Fabric:
    values: dict[str, Any] = {"spines": 2, "levels": (LevelSpec("leaf"),), "hops": HOPS}
    values |= changes
    return Fabric("f", "uid", 7, NOW - 100, FabricSpec(path_control=PathControlSpec(mode), **values))


def build_state(fabric: Fabric, leaves: str = "ab", jobs: int = 1, **changes: Any) -> FabricState:
    nodes = [NodeView(f"{leaf}{n}", leaf, labels={"leaf": leaf}) for leaf in leaves for n in range(9)]
    wiring = build_wiring(fabric.spec, nodes, changes.pop("blocked_since", {}))
    jobs_traffic = [
        JobTraffic(("team", f"j{n}"), (NodeRanks(f"a{n}", (0,)), NodeRanks(f"b{n}", (1,)))) for n in range(jobs)
    ]
    return FabricState(wiring, traffic.plan_joint_traffic(wiring, jobs_traffic), **changes)


def find_condition(status: FabricStatus, name: FabricCondition) -> tuple[str, str, str]:
    found = next(condition for condition in status.conditions if condition.type == name)
    return found.status, found.reason, found.message


def test_the_status_of_a_fabric_with_routes_for_all_flows() -> None:
    status = build_fabric_status(build_fabric(), build_state(build_fabric(), jobs=3), NOW)
    assert (
        status.leaves,
        status.flows,
        status.max_load,
        status.lower_bound,
        status.dead_links,
        status.moved_flows,
    ) == (2, 6, 2, 2, 0, 0)
    assert status.observed_generation == 7
    assert find_condition(status, FabricCondition.IN_FORCE)[:2] == ("True", FabricReason.OLDEST)
    assert find_condition(status, FabricCondition.LEAVES_RESOLVED)[:2] == ("True", FabricReason.LABELED)
    assert find_condition(status, FabricCondition.LINKS_RESOLVED)[:2] == ("True", FabricReason.LINKS_CONSISTENT)
    assert find_condition(status, FabricCondition.PLANNED)[:2] == ("True", FabricReason.AT_LOWER_BOUND)
    loads = {(link.leaf, link.spine): (link.up, link.down) for link in status.links}
    assert sorted(loads) == [("a", "s1"), ("a", "s2"), ("b", "s1"), ("b", "s2")]
    assert sum(up for up, _ in loads.values()) == sum(down for _, down in loads.values()) == 6


def test_the_status_fits_the_schema_and_survives_a_round_trip() -> None:
    fabric = build_fabric(exceptions=(LinkException("a", "s1"), LinkException("b", "s2", LinkState.SLOW, 1e11)))
    status = build_fabric_status(fabric, build_state(fabric), NOW)
    assert find_schema_errors(status.to_json(), read_schema("fabrics")["status"]) == []
    assert FabricStatus.parse(status.to_json()) == status
    assert {(link.leaf, link.spine): link.state for link in status.links} == {
        ("a", "s1"): LinkState.DOWN,
        ("a", "s2"): LinkState.UP,
        ("b", "s1"): LinkState.UP,
        ("b", "s2"): LinkState.SLOW,
    }
    assert status.dead_links == 1


def test_the_view_of_the_command_line_shows_the_status() -> None:
    fabric = build_fabric(exceptions=(LinkException("a", "s1"),))
    status = build_fabric_status(fabric, build_state(fabric, jobs=3), NOW)
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
    (planned,) = [condition for condition in view.conditions if condition.type == FabricCondition.PLANNED]
    assert (planned.status, planned.reason) == find_condition(status, FabricCondition.PLANNED)[:2]


def test_while_planning_takes_long_the_rest_of_the_status_stays() -> None:
    fabric = build_fabric()
    before = build_fabric_status(fabric, build_state(fabric, jobs=3), NOW)
    found = build_planning_status(replace(fabric, status=before, generation=8), "9 jobs", NOW + 5)
    assert find_condition(found, FabricCondition.PLANNED) == ("Unknown", FabricReason.PLANNING, "9 jobs")
    others = [condition for condition in before.conditions if condition.type != FabricCondition.PLANNED]
    assert replace(found, conditions=()) == replace(before, conditions=())
    assert [condition for condition in found.conditions if condition.type != FabricCondition.PLANNED] == others
    assert find_schema_errors(found.to_json(), read_schema("fabrics")["status"]) == []
    final = build_fabric_status(replace(fabric, status=found), build_state(fabric, jobs=3), NOW + 9)
    (planned,) = [condition for condition in final.conditions if condition.type == FabricCondition.PLANNED]
    assert (planned.status, planned.last_transition_time) == ("True", NOW + 9)


def test_without_path_control_loads_are_unknown() -> None:
    fabric = build_fabric(PathControl.OFF)
    status = build_fabric_status(fabric, build_state(fabric), NOW)
    assert (status.flows, status.max_load, status.lower_bound, status.moved_flows) == (2, None, 1, None)
    assert find_condition(status, FabricCondition.PLANNED)[:2] == ("Unknown", FabricReason.PATH_CONTROL_OFF)
    assert {(link.up, link.down) for link in status.links} == {(0, 0)}


def test_the_status_without_jobs() -> None:
    status = build_fabric_status(build_fabric(), build_state(build_fabric(), jobs=0), NOW)
    assert (status.flows, status.max_load, status.lower_bound) == (0, 0, 0)
    assert find_condition(status, FabricCondition.PLANNED)[:2] == ("True", FabricReason.NO_FLOWS)


def test_the_status_with_all_spines_dead() -> None:
    dead = {(leaf, spine): 0.0 for leaf in "ab" for spine in ("s1", "s2")}
    status = build_fabric_status(build_fabric(), build_state(build_fabric(), blocked_since=dead), NOW)
    assert status.dead_links == 4
    assert find_condition(status, FabricCondition.PLANNED) == (
        "False",
        FabricReason.NO_ROUTE,
        "no route is alive for 2 flows: team/j0 1 → 0, team/j0 0 → 1",
    )


def test_a_plan_above_the_lower_bound_is_reported() -> None:
    found = build_state(build_fabric())
    assert found.traffic is not None
    above_bound = replace(found, traffic=replace(found.traffic, max_load=3, lower_bound=2))
    assert find_condition(build_fabric_status(build_fabric(), above_bound, NOW), FabricCondition.PLANNED) == (
        "True",
        FabricReason.ABOVE_LOWER_BOUND,
        "the fullest link carries 3, and no plan is below 2",
    )


def test_labels_that_no_node_has_are_reported() -> None:
    status = build_fabric_status(build_fabric(), build_state(build_fabric(), leaves=""), NOW)
    assert (status.leaves, status.flows, status.lower_bound, status.links) == (0, 0, None, ())
    assert find_condition(status, FabricCondition.LEAVES_RESOLVED)[:2] == ("False", FabricReason.NO_LEAVES)
    assert find_condition(status, FabricCondition.PLANNED)[:2] == ("False", FabricReason.NOT_PLANNED)


def test_a_fabric_that_is_too_large_is_reported() -> None:
    fabric = build_fabric(spines=1024)
    nodes = [NodeView(f"n{n}", "u", labels={"leaf": f"l{n}"}) for n in range(300)]
    status = build_fabric_status(fabric, FabricState(build_wiring(fabric.spec, nodes, {}), None), NOW)
    assert find_condition(status, FabricCondition.LEAVES_RESOLVED)[:2] == ("False", FabricReason.TOO_MANY_LEAVES)


@pytest.mark.parametrize(
    ("changes", "name", "reason", "message_part"),
    [
        ({"unlabeled_nodes": ("n1",)}, FabricCondition.LEAVES_RESOLVED, FabricReason.NODES_UNLABELED, "n1"),
        ({"query_error": "away"}, FabricCondition.LINKS_RESOLVED, FabricReason.QUERY_FAILED, "away"),
        ({"blocked_since": {("z", "s1"): 0.0}}, FabricCondition.LINKS_RESOLVED, FabricReason.UNKNOWN_LINKS, "z–s1"),
    ],
)
def test_an_inconsistent_fabric_is_reported(
    changes: Any, name: FabricCondition, reason: FabricReason, message_part: str
) -> None:
    status, actual_reason, message = find_condition(
        build_fabric_status(build_fabric(), build_state(build_fabric(), **changes), NOW), name
    )
    assert (status, actual_reason) == ("False", reason)
    assert message_part in message


def test_hops_to_unknown_spines_are_reported() -> None:
    fabric = build_fabric(hops={"10.0.0.1": "s9"})
    assert find_condition(build_fabric_status(fabric, build_state(fabric), NOW), FabricCondition.LINKS_RESOLVED)[
        :2
    ] == (
        "False",
        FabricReason.UNKNOWN_SPINES,
    )


def test_spines_without_an_address_are_reported() -> None:
    fabric = build_fabric(hops={"10.0.0.1": "s1"})
    status, reason, message = find_condition(
        build_fabric_status(fabric, build_state(fabric), NOW), FabricCondition.LINKS_RESOLVED
    )
    assert (status, reason) == ("False", FabricReason.UNKNOWN_SPINES)
    assert "no address of s2" in message
    unprobed = build_fabric(PathControl.OFF, hops={})
    assert (
        find_condition(build_fabric_status(unprobed, build_state(unprobed), NOW), FabricCondition.LINKS_RESOLVED)[0]
        == "True"
    )


def test_of_many_links_the_dead_and_the_loaded_ones_are_listed() -> None:
    fabric = build_fabric(spines=MAX_REPORTED_LINKS, exceptions=(LinkException("b", f"s{MAX_REPORTED_LINKS}"),))
    status = build_fabric_status(fabric, build_state(fabric, jobs=5), NOW)
    assert len(status.links) == MAX_REPORTED_LINKS
    assert (status.links[0].spine, status.links[0].state) == (f"s{MAX_REPORTED_LINKS}", LinkState.DOWN)
    assert sum(link.up for link in status.links) == 10, "all that carry anything"


def test_links_up_to_the_limit_are_listed_in_the_order_of_leaves_and_spines() -> None:
    spines = MAX_REPORTED_LINKS // 2
    fabric = build_fabric(spines=spines, exceptions=(LinkException("b", f"s{spines}"),))
    status = build_fabric_status(fabric, build_state(fabric, jobs=5), NOW)
    expected = [(leaf, f"s{number}") for leaf in "ab" for number in range(1, spines + 1)]
    assert [(link.leaf, link.spine) for link in status.links] == expected
    assert status.links[-1].state is LinkState.DOWN


def test_times_of_transition_stay_while_nothing_changes() -> None:
    first = build_fabric_status(build_fabric(), build_state(build_fabric()), NOW)
    later = build_fabric_status(replace(build_fabric(), status=first), build_state(build_fabric()), NOW + 60)
    assert later == first
    changed = build_fabric_status(
        replace(build_fabric(), status=first), build_state(build_fabric(), query_error="away"), NOW + 60
    )
    since = {condition.type: condition.last_transition_time for condition in changed.conditions}
    assert (since[FabricCondition.LINKS_RESOLVED], since[FabricCondition.PLANNED]) == (NOW + 60, NOW)


class TestSeveralFabrics:
    def test_the_oldest_fabric_is_active_and_the_others_report_it(self) -> None:
        old, young = build_fabric(), replace(build_fabric(), name="young", created_at=NOW)
        assert select_active_fabric([young, old]) == old
        assert select_active_fabric([]) is None
        status = build_inactive_status(young, old, NOW)
        assert find_condition(status, FabricCondition.IN_FORCE) == (
            "False",
            FabricReason.ANOTHER_IS_OLDER,
            "Fabric f is older: delete one of them",
        )
        assert (status.flows, status.links) == (None, ())

    def test_of_two_fabrics_of_the_same_age_the_first_by_name_is_active(self) -> None:
        assert select_active_fabric([replace(build_fabric(), name="b"), replace(build_fabric(), name="a")]) == replace(
            build_fabric(), name="a"
        )

    def test_an_unreadable_fabric_is_inactive_and_reports_the_error(self) -> None:
        body = {"metadata": {"name": "g", "uid": "u"}, "spec": {"spines": "many"}}
        broken = Fabric.parse(body)
        assert select_active_fabric([broken]) is None
        assert find_condition(build_inactive_status(broken, None, NOW), FabricCondition.IN_FORCE) == (
            "False",
            FabricReason.UNREADABLE,
            "spec.spines: 'many' must be of type int",
        )


class TestParse:
    def test_defaults_are_applied(self) -> None:
        found = Fabric.parse({"metadata": {"name": "f", "uid": "u"}, "spec": {"spines": 4}})
        assert (found.spec, found.parse_error) == (FabricSpec(spines=4), "")

    def test_all_fields_are_parsed(self) -> None:
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
        ("spec", "message_part"),
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
    def test_the_error_names_the_invalid_field(self, spec: dict[str, Any], message_part: str) -> None:
        assert message_part in Fabric.parse({"metadata": {"name": "f", "uid": "u"}, "spec": spec}).parse_error

    def test_an_unreadable_status_is_replaced(self) -> None:
        body = {"metadata": {"name": "f", "uid": "u"}, "spec": {"spines": 4}, "status": {"flows": "many"}}
        assert Fabric.parse(body).status == FabricStatus()


def test_links_and_conditions_as_json() -> None:
    status = FabricStatus(links=(FabricLink("l", "s1", 1, 2),), conditions=(ConditionStatus("Planned", "True", "R"),))
    assert status.to_json()["links"] == [{"leaf": "l", "spine": "s1", "up": 1, "down": 2, "state": "Up"}]
    assert "flows" not in status.to_json(), "an unknown value is omitted"


def test_moves_that_are_not_allowed_are_recommended_not_planned() -> None:
    fabric, found = build_fabric(), build_state(build_fabric())
    routes = {(0, 1): 0, (1, 0): 0}
    node_ranks = [(NodeRanks(f"a{n}", (0,)), NodeRanks(f"b{n}", (1,))) for n in range(2)]
    jobs = [
        JobTraffic(("team", f"j{n}"), node_ranks[n], 1, routes, wait_share=0.5, round_seconds=5.0) for n in range(2)
    ]
    for can_move, moved, message_part in ((True, 2, "no plan is below that"), (False, 0, "recommended, but not taken")):
        plan = traffic.plan_joint_traffic(found.wiring, [replace(job, can_move=can_move) for job in jobs])
        status = build_fabric_status(fabric, replace(found, traffic=plan), NOW)
        assert status.moved_flows == moved
        assert message_part in find_condition(status, FabricCondition.PLANNED)[2]
    assert find_condition(status, FabricCondition.PLANNED)[2].endswith("(mode Recommend): team/j0")


def test_links_that_flows_show_to_be_slow_are_named() -> None:
    fabric = build_fabric()
    nodes = [NodeView(leaf, leaf, labels={"leaf": leaf}) for leaf in "ab"]
    wiring = build_wiring(fabric.spec, nodes, {}, DegradedLinks({("a", "s1"): 0.25, ("b", "s2"): 0.0}))
    status = build_fabric_status(fabric, FabricState(wiring, traffic.plan_joint_traffic(wiring, [])), NOW)
    assert {(link.leaf, link.spine): link.state for link in status.links if link.state is not LinkState.UP} == {
        ("a", "s1"): LinkState.SLOW,
        ("b", "s2"): LinkState.DOWN,
    }
    resolved = find_condition(status, FabricCondition.LINKS_RESOLVED)
    assert resolved[:2] == ("True", FabricReason.LINKS_CONSISTENT)
    assert resolved[2].endswith("a–s1 (25%), b–s2 (0%)")
