"""Who sends to whom."""

from __future__ import annotations

from collections import defaultdict

import pytest

from pacekeeper_analysis.fabric.patterns import Edge, all_to_all, double_binary_tree, pipeline, ring


def sent(edges: list[Edge]) -> dict[int, float]:
    found = defaultdict[int, float](float)
    for edge in edges:
        found[edge.source] += edge.part
    return dict(found)


def test_a_ring_sends_twice_all_but_one_part() -> None:
    assert ring([4, 5, 6, 7]) == [Edge(4, 5, 1.5), Edge(5, 6, 1.5), Edge(6, 7, 1.5), Edge(7, 4, 1.5)]
    assert set(ring([0, 1, 2], backwards=True)) == {Edge(2, 1, 4 / 3), Edge(1, 0, 4 / 3), Edge(0, 2, 4 / 3)}
    assert ring([3]) == []


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 13, 16, 64])
def test_both_trees_reach_everybody_and_load_nobody_twice(count: int) -> None:
    edges = double_binary_tree(range(count))
    assert len(edges) == 4 * (count - 1), "up and down each tree's edges"
    assert max(sent(edges).values()) <= 2.0
    for tree in (edges[: 2 * (count - 1)], edges[2 * (count - 1) :]):
        met, left = {tree[0].source}, list(tree)
        while any(edge.source in met and edge.destination not in met for edge in left):
            met |= {edge.destination for edge in left if edge.source in met}
        assert met == set(range(count))


def test_stages_send_on_and_back() -> None:
    assert set(pipeline([2, 5, 3])) == {Edge(2, 5, 1), Edge(5, 3, 1), Edge(5, 2, 1), Edge(3, 5, 1)}
    assert pipeline([2]) == []


def test_all_to_all() -> None:
    assert sent(all_to_all([0, 1, 2, 3])) == dict.fromkeys(range(4), 0.75)
