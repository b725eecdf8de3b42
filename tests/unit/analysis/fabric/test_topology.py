"""A fabric's links: what the flows between two groups can choose among."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pacekeeper_analysis.fabric.topology import NO_ROUTE, Topology, build_uniform_topology


def among(topology: Topology, *flows: Sequence[int]) -> list[int]:
    """Flows are (source, destination, way)."""
    source, destination, way = np.array(flows, dtype=np.int64).T
    return [int(number) for number in topology.fingerprint_live_routes(source, destination, way)]


def test_all_are_alive() -> None:
    assert among(build_uniform_topology(3, 4), (0, 1, 2), (1, 2, 0)) == [0, 0]


def test_a_dead_link_is_one_choice_less_for_all_flows_that_could_use_it() -> None:
    cut = build_uniform_topology(3, 4).with_dead_links(up=[(0, 1)])
    hit, by_another_way, back, elsewhere = among(cut, (0, 1, 1), (0, 1, 3), (1, 0, 3), (1, 2, 3))
    assert hit == by_another_way != 0
    assert (back, elsewhere) == (0, 0)


def test_it_is_the_same_choice_at_whichever_end_the_spine_is_cut_off() -> None:
    fabric = build_uniform_topology(3, 4)
    (sender,), (receiver,) = (
        among(fabric.with_dead_links(up=[(0, 1)]), (0, 1, 0)),
        among(fabric.with_dead_links(down=[(1, 1)]), (0, 1, 0)),
    )
    assert sender == receiver
    (other,) = among(fabric.with_dead_links(up=[(0, 2)]), (0, 1, 0))
    assert other not in (0, sender)


def test_planes_choose_by_themselves_and_who_has_no_way_does_not() -> None:
    cut = build_uniform_topology(2, 2, planes=2).with_dead_links(up=[(0, 3)])
    first, second, none = among(cut, (0, 1, 0), (0, 1, 2), (0, 1, NO_ROUTE))
    assert (first, none) == (0, 0)
    assert second
