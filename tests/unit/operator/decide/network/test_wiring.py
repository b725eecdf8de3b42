"""What a Fabric's spec, nodes' labels and measured links come to."""

from __future__ import annotations

from typing import Any

import pytest

from pacekeeper_analysis.fabric.view import LinkState
from pacekeeper_operator.api.fabric import FabricSpec, LevelSpec, LinkException
from pacekeeper_operator.decide.network import wiring
from pacekeeper_operator.decide.network.link_state import DegradedLinks
from pacekeeper_operator.decide.network.wiring import MAX_PLANNED_LINKS, build_wiring, list_unknown_spines
from pacekeeper_operator.state.cluster_view import NodeView
from pacekeeper_operator.state.network import Wiring
from pacekeeper_operator.state.routes import format_spine_name, parse_spine_name


def nodes(**leaf: str) -> list[NodeView]:
    """By node; "": it has no label."""
    return [NodeView(name, f"uid-{name}", labels={"leaf": of} if of else {}) for name, of in leaf.items()]


def spec(**changes: Any) -> FabricSpec:
    values: dict[str, Any] = {"spines": 3, "levels": (LevelSpec("leaf"),)}
    return FabricSpec(**(values | changes))


def links(found: Wiring) -> list[list[int]]:
    """In units of 400 Gbit/s."""
    assert found.topology is not None
    assert (found.topology.up == found.topology.down).all()
    return (found.topology.up / 400_000).tolist()  # type: ignore[no-any-return]  # of two dimensions


def test_leaves_are_what_labels_name() -> None:
    found = build_wiring(spec(), nodes(a="l2", b="l1", c="l2", d=""), {})
    assert found.leaves == ("l1", "l2")
    assert found.leaf_of == {"a": 1, "b": 0, "c": 1}
    assert (links(found), found.dead_links, found.unknown_links) == ([[1, 1, 1], [1, 1, 1]], 0, ())


def test_leaves_of_one_name_under_two_rows_are_two() -> None:
    levels = (LevelSpec("rack"), LevelSpec("row"))
    where = {"a": {"rack": "1", "row": "x"}, "b": {"rack": "1", "row": "y"}, "c": {"row": "x"}, "d": {"rack": "1"}}
    found = build_wiring(
        spec(levels=levels), [NodeView(name, name, labels=labels) for name, labels in where.items()], {}
    )
    assert found.leaves == ("1", "x/1", "y/1")
    assert found.leaf_of == {"a": 1, "b": 2, "d": 0}, "a row alone is no leaf"


def test_without_levels_the_labels_that_are_known() -> None:
    labels = {"fabric.topograph.run/tier-0": "l"}
    assert build_wiring(spec(levels=()), [NodeView("a", "a", labels=labels)], {}).leaves == ("l",)


def test_a_fabric_whose_labels_nobody_has_has_no_leaves_whatever_else_nodes_say() -> None:
    labels = {"topology.kubernetes.io/zone": "z"}
    found = build_wiring(spec(), [NodeView("a", "a", labels=labels)], {})
    assert (found.leaves, found.topology, found.dead_links) == ((), None, 0)
    assert build_wiring(spec(), [], {}).topology is None


def test_planes_and_cables_side_by_side() -> None:
    found = build_wiring(spec(planes=2, spines=2), nodes(a="l"), {("l", "s4"): 0.0})
    assert links(found) == [[1, 1, 1, 0]]
    assert found.topology is not None
    assert (found.topology.planes, found.topology.spines) == (2, 2)


def test_what_is_measured_counts_below_what_is_built_and_exceptions_before_both() -> None:
    told = {("l1", "s1"): 200e9, ("l1", "s2"): 800e9, ("l2", "s1"): 0.0, ("l2", "s2"): 400e9}
    exceptions = (
        LinkException("l2", "s1", LinkState.SLOW, 100e9),
        LinkException("l2", "s2", LinkState.DOWN),
        LinkException("l1", "s3", LinkState.SLOW, 4000e9),
    )
    found = build_wiring(spec(exceptions=exceptions), nodes(a="l1", b="l2"), told)
    assert links(found) == [[0.5, 1, 1], [0.25, 0, 1]]
    assert found.dead_links == 1


class TestDoubts:
    """What jobs' flows have shown."""

    def test_of_all_only_ever_takes_from_what_is_known(self) -> None:
        told = {("l1", "s1"): 40e9, ("l1", "s2"): 400e9}
        doubts = DegradedLinks({("l1", "s1"): 0.5, ("l1", "s2"): 0.25, ("l2", "s3"): 0.0})
        found = build_wiring(spec(), nodes(a="l1", b="l2"), told, doubts)
        assert links(found) == [[0.1, 0.25, 1], [1, 1, 0]]
        assert (found.dead_links, found.namespace_topologies, found.slow_links) == (1, {}, doubts.agreed_shares)

    def test_exceptions_go_before_it(self) -> None:
        exceptions = (LinkException("l1", "s1", LinkState.SLOW, 200e9),)
        found = build_wiring(spec(exceptions=exceptions), nodes(a="l1"), {}, DegradedLinks({("l1", "s1"): 0.0}))
        assert (links(found), found.slow_links) == ([[0.5, 1, 1]], {})

    def test_of_one_namespace_is_its_own_view(self) -> None:
        doubts = DegradedLinks({("l1", "s1"): 0.5}, {"team": {("l1", "s2"): 0.25}, "liar": {("l9", "s1"): 0.0}})
        found = build_wiring(spec(), nodes(a="l1"), {}, doubts)
        assert links(found) == [[0.5, 1, 1]]
        assert set(found.namespace_topologies) == {"team"}, "what is no link of ours is nobody's view"
        assert (found.namespace_topologies["team"].up / 400_000).tolist() == [[0.5, 0.25, 1]]

    def test_links_that_have_gone_meanwhile_are_no_trouble(self) -> None:
        found = build_wiring(spec(), nodes(a="l1"), {}, DegradedLinks({("l9", "s1"): 0.0}))
        assert (found.unknown_links, found.dead_links) == ((), 0)


def test_a_trickle_is_not_dead() -> None:
    assert build_wiring(spec(), nodes(a="l"), {("l", "s1"): 1.0}).dead_links == 0


def test_what_is_said_of_links_that_there_are_not_is_told_once() -> None:
    told = {("l9", "s1"): 0.0, ("l1", "s4"): 0.0, ("l1", "one"): 0.0, ("l1", "s0"): 0.0, ("l1", "s1"): 0.0}
    found = build_wiring(spec(exceptions=(LinkException("l9", "s1"),)), nodes(a="l1"), told)
    assert found.unknown_links == ("l9–s1", "l1–s4", "l1–one", "l1–s0")
    assert found.dead_links == 1
    assert wiring.describe_unknown_links(found.unknown_links) == "there is no link l9–s1, l1–s4, l1–one, l1–s0"


def test_one_that_is_too_large_is_not_planned() -> None:
    many = nodes(**{f"n{n}": f"l{n}" for n in range(MAX_PLANNED_LINKS // 1024 + 1)})
    found = build_wiring(spec(spines=1024), many, {})
    assert (found.topology, len(found.leaves)) == (None, MAX_PLANNED_LINKS // 1024 + 1)
    assert build_wiring(spec(spines=1024), many[:-1], {}).topology is not None


@pytest.mark.parametrize(
    ("name", "way"), [("s1", 0), ("s12", 11), ("s0", None), ("s01", None), ("1", None), ("s١", None)]
)
def test_names_of_spines(name: str, way: int | None) -> None:
    assert parse_spine_name(name) == way
    assert way is None or format_spine_name(way) == name


def test_hops_to_spines_that_there_are_not() -> None:
    hops = {"10.0.0.1": "s1", "10.0.0.2": "s6", "10.0.0.3": "s7", "10.0.0.4": "core"}
    assert list_unknown_spines(spec(planes=2, hops=hops)) == ("core", "s7")
