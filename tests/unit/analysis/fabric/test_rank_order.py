"""Rank slots in the fabric's order."""

from __future__ import annotations

import itertools
import random

import pytest

from pacekeeper_analysis.fabric.rank_order import (
    TopologyLocation,
    arrange_in_mesh,
    count_by_leaf,
    count_leaf_crossings,
    order_by_topology,
    sort_by_distance,
)

PLACES: dict[str, TopologyLocation] = {
    "a": ("leaf-1", "block-1"),
    "b": ("leaf-2", "block-1"),
    "c": ("leaf-1", "block-1"),
    "d": ("leaf-3", "block-2"),
    "e": ("leaf-2", "block-1"),
    "f": ("leaf-3", "block-2"),
}


def test_a_ring_leaves_each_leaf_once_and_each_block_once() -> None:
    order = order_by_topology("abcdef", PLACES)
    assert "".join(order) == "acbedf"
    assert count_leaf_crossings(order, PLACES) == (3, 3)
    assert count_leaf_crossings("abcdef", PLACES) == (6, 3)
    blocks = {name: place[1:] for name, place in PLACES.items()}
    assert count_leaf_crossings(order, blocks) == (2, 2)


@pytest.mark.parametrize("seed", range(10))
def test_no_order_has_fewer_crossings(seed: int) -> None:
    draws = random.Random(seed)
    places = {n: (f"l{draws.randrange(3)}", f"b{draws.randrange(2)}") for n in range(6)}
    found = count_leaf_crossings(order_by_topology(list(range(6)), places), places)
    assert (
        found[0]
        == found[1]
        == min(count_leaf_crossings(order, places)[0] for order in itertools.permutations(range(6)))
    )


def test_a_good_order_is_not_changed() -> None:
    assert order_by_topology("dfbeac", PLACES) == list("dfbeac")
    assert order_by_topology("abc", {}) == list("abc"), "no labels: as they stood"


def test_missing_and_partial_labels_are_supported() -> None:
    places = {**PLACES, "b": (), "e": ("leaf-1", "")}
    order = order_by_topology("abcdef", places)
    assert sorted(order) == sorted("abcdef")
    assert order[:4] == list("acdf")
    assert count_leaf_crossings("ab", {"a": ("l",)}) == (2, 2), "a worker without a leaf has no neighbor"
    assert count_leaf_crossings("a", {}) == (0, 0)


def test_the_nearest_spare_is_first() -> None:
    assert sort_by_distance("a", ["d", "b", "c"], PLACES) == ["c", "b", "d"]
    assert sort_by_distance("a", ["f", "b"], PLACES, peers=count_by_leaf(["d", "d"], PLACES)) == ["b", "f"]
    assert sort_by_distance("x", ["f", "b"], PLACES, peers=count_by_leaf(["e"], PLACES)) == ["b", "f"], (
        "by its peers, where it has no labels"
    )
    assert sort_by_distance("x", ["f", "b"], {}) == ["f", "b"]


def test_the_heaviest_axis_of_a_mesh_joins_neighbors() -> None:
    """Two stages of three replicas; the last axis varies fastest."""
    assert arrange_in_mesh("abcdef", (2, 3), (1, 5)) == list("abcdef"), "replicas 0-1-2, then 3-4-5"
    assert arrange_in_mesh("abcdef", (2, 3), (5, 1)) == list("acebdf"), "stages: slots 0 and 3, 1 and 4, 2 and 5"
    three = arrange_in_mesh(list(range(8)), (2, 2, 2), (1, 9, 4))
    assert abs(three.index(0) - three.index(1)) == 2, "the middle axis"
    with pytest.raises(ValueError, match="reshape"):
        arrange_in_mesh("abc", (2, 2), (1, 1))
