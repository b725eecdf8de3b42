"""A fabric's links: what the flows between two groups can choose among."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pacekeeper_analysis.fabric.topology import NO_ROUTE, Topology, build_uniform_topology


def count_choices(topology: Topology, *flows: Sequence[int]) -> list[int]:
    """Flows are (source, destination, route)."""
    source, destination, route = np.array(flows, dtype=np.int64).T
    return [int(number) for number in topology.fingerprint_live_routes(source, destination, route)]


def test_all_links_are_alive() -> None:
    assert count_choices(build_uniform_topology(3, 4), (0, 1, 2), (1, 2, 0)) == [0, 0]


def test_a_dead_link_is_one_choice_less_for_all_flows_that_could_use_it() -> None:
    cut = build_uniform_topology(3, 4).with_dead_links(up=[(0, 1)])
    hit, by_another_route, back, elsewhere = count_choices(cut, (0, 1, 1), (0, 1, 3), (1, 0, 3), (1, 2, 3))
    assert hit == by_another_route != 0
    assert (back, elsewhere) == (0, 0)


def test_a_spine_that_is_cut_off_at_either_end_is_the_same_choice() -> None:
    fabric = build_uniform_topology(3, 4)
    (sender,), (receiver,) = (
        count_choices(fabric.with_dead_links(up=[(0, 1)]), (0, 1, 0)),
        count_choices(fabric.with_dead_links(down=[(1, 1)]), (0, 1, 0)),
    )
    assert sender == receiver
    (other,) = count_choices(fabric.with_dead_links(up=[(0, 2)]), (0, 1, 0))
    assert other not in (0, sender)


def test_planes_choose_independently_and_a_flow_without_a_route_has_no_choice() -> None:
    cut = build_uniform_topology(2, 2, planes=2).with_dead_links(up=[(0, 3)])
    first, second, none = count_choices(cut, (0, 1, 0), (0, 1, 2), (0, 1, NO_ROUTE))
    assert (first, none) == (0, 0)
    assert second
