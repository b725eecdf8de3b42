"""The wiring that results from a Fabric's spec, the labels of nodes, and measured links."""

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


def build_nodes(**leaf: str) -> list[NodeView]:
    """Build nodes with leaf labels by node name; "": no label."""
    return [NodeView(name, f"uid-{name}", labels={"leaf": label} if label else {}) for name, label in leaf.items()]


def build_spec(**changes: Any) -> FabricSpec:
    values: dict[str, Any] = {"spines": 3, "levels": (LevelSpec("leaf"),)}
    return FabricSpec(**(values | changes))


def list_links(found: Wiring) -> list[list[int]]:
    """Return the links' capacities in units of 400 Gbit/s."""
    assert found.topology is not None
    assert (found.topology.up == found.topology.down).all()
    return (found.topology.up / 400_000).tolist()  # type: ignore[no-any-return]  # of two dimensions


def test_leaves_are_named_by_labels() -> None:
    found = build_wiring(build_spec(), build_nodes(a="l2", b="l1", c="l2", d=""), {})
    assert found.leaves == ("l1", "l2")
    assert found.leaf_of == {"a": 1, "b": 0, "c": 1}
    assert (list_links(found), found.dead_links, found.unknown_links) == ([[1, 1, 1], [1, 1, 1]], 0, ())


def test_leaves_of_the_same_name_in_two_rows_are_two() -> None:
    levels = (LevelSpec("rack"), LevelSpec("row"))
    labels_by_node = {
        "a": {"rack": "1", "row": "x"},
        "b": {"rack": "1", "row": "y"},
        "c": {"row": "x"},
        "d": {"rack": "1"},
    }
    found = build_wiring(
        build_spec(levels=levels), [NodeView(name, name, labels=labels) for name, labels in labels_by_node.items()], {}
    )
    assert found.leaves == ("1", "x/1", "y/1")
    assert found.leaf_of == {"a": 1, "b": 2, "d": 0}, "a row alone is no leaf"


def test_without_levels_known_labels_are_used() -> None:
    labels = {"fabric.topograph.run/tier-0": "l"}
    assert build_wiring(build_spec(levels=()), [NodeView("a", "a", labels=labels)], {}).leaves == ("l",)


def test_a_fabric_whose_labels_no_node_has_has_no_leaves() -> None:
    labels = {"topology.kubernetes.io/zone": "z"}
    found = build_wiring(build_spec(), [NodeView("a", "a", labels=labels)], {})
    assert (found.leaves, found.topology, found.dead_links) == ((), None, 0)
    assert build_wiring(build_spec(), [], {}).topology is None


def test_planes_are_separate_spines() -> None:
    found = build_wiring(build_spec(planes=2, spines=2), build_nodes(a="l"), {("l", "s4"): 0.0})
    assert list_links(found) == [[1, 1, 1, 0]]
    assert found.topology is not None
    assert (found.topology.planes, found.topology.spines) == (2, 2)


def test_measurements_only_reduce_capacity_and_exceptions_take_precedence() -> None:
    measured = {("l1", "s1"): 200e9, ("l1", "s2"): 800e9, ("l2", "s1"): 0.0, ("l2", "s2"): 400e9}
    exceptions = (
        LinkException("l2", "s1", LinkState.SLOW, 100e9),
        LinkException("l2", "s2", LinkState.DOWN),
        LinkException("l1", "s3", LinkState.SLOW, 4000e9),
    )
    found = build_wiring(build_spec(exceptions=exceptions), build_nodes(a="l1", b="l2"), measured)
    assert list_links(found) == [[0.5, 1, 1], [0.25, 0, 1]]
    assert found.dead_links == 1


class TestDoubts:
    """Slow links that the flows of jobs have shown."""

    def test_doubts_of_all_namespaces_only_reduce_capacity(self) -> None:
        measured = {("l1", "s1"): 40e9, ("l1", "s2"): 400e9}
        doubts = DegradedLinks({("l1", "s1"): 0.5, ("l1", "s2"): 0.25, ("l2", "s3"): 0.0})
        found = build_wiring(build_spec(), build_nodes(a="l1", b="l2"), measured, doubts)
        assert list_links(found) == [[0.1, 0.25, 1], [1, 1, 0]]
        assert (found.dead_links, found.namespace_topologies, found.slow_links) == (1, {}, doubts.agreed_shares)

    def test_exceptions_take_precedence_over_doubts(self) -> None:
        exceptions = (LinkException("l1", "s1", LinkState.SLOW, 200e9),)
        found = build_wiring(
            build_spec(exceptions=exceptions), build_nodes(a="l1"), {}, DegradedLinks({("l1", "s1"): 0.0})
        )
        assert (list_links(found), found.slow_links) == ([[0.5, 1, 1]], {})

    def test_doubts_of_one_namespace_are_a_separate_topology(self) -> None:
        doubts = DegradedLinks({("l1", "s1"): 0.5}, {"team": {("l1", "s2"): 0.25}, "liar": {("l9", "s1"): 0.0}})
        found = build_wiring(build_spec(), build_nodes(a="l1"), {}, doubts)
        assert list_links(found) == [[0.5, 1, 1]]
        assert set(found.namespace_topologies) == {"team"}, "an unknown link is in no topology"
        assert (found.namespace_topologies["team"].up / 400_000).tolist() == [[0.5, 0.25, 1]]

    def test_doubts_about_removed_links_are_ignored(self) -> None:
        found = build_wiring(build_spec(), build_nodes(a="l1"), {}, DegradedLinks({("l9", "s1"): 0.0}))
        assert (found.unknown_links, found.dead_links) == ((), 0)


def test_a_link_of_minimal_capacity_is_not_dead() -> None:
    assert build_wiring(build_spec(), build_nodes(a="l"), {("l", "s1"): 1.0}).dead_links == 0


def test_unknown_links_are_listed_once() -> None:
    measured = {("l9", "s1"): 0.0, ("l1", "s4"): 0.0, ("l1", "one"): 0.0, ("l1", "s0"): 0.0, ("l1", "s1"): 0.0}
    found = build_wiring(build_spec(exceptions=(LinkException("l9", "s1"),)), build_nodes(a="l1"), measured)
    assert found.unknown_links == ("l9–s1", "l1–s4", "l1–one", "l1–s0")
    assert found.dead_links == 1
    assert wiring.describe_unknown_links(found.unknown_links) == "there is no link l9–s1, l1–s4, l1–one, l1–s0"


def test_a_fabric_that_is_too_large_is_not_planned() -> None:
    many = build_nodes(**{f"n{n}": f"l{n}" for n in range(MAX_PLANNED_LINKS // 1024 + 1)})
    found = build_wiring(build_spec(spines=1024), many, {})
    assert (found.topology, len(found.leaves)) == (None, MAX_PLANNED_LINKS // 1024 + 1)
    assert build_wiring(build_spec(spines=1024), many[:-1], {}).topology is not None


@pytest.mark.parametrize(
    ("name", "index"), [("s1", 0), ("s12", 11), ("s0", None), ("s01", None), ("1", None), ("s١", None)]
)
def test_names_of_spines_are_parsed_and_formatted(name: str, index: int | None) -> None:
    assert parse_spine_name(name) == index
    assert index is None or format_spine_name(index) == name


def test_hops_to_unknown_spines_are_listed() -> None:
    hops = {"10.0.0.1": "s1", "10.0.0.2": "s6", "10.0.0.3": "s7", "10.0.0.4": "core"}
    assert list_unknown_spines(build_spec(planes=2, hops=hops)) == ("core", "s7")
