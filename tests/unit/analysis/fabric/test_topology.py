"""A fabric's links: what the flows between two groups can choose among."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pacekeeper_analysis.fabric.topology import WITHIN, Topology, uniform


def among(topology: Topology, *flows: Sequence[int]) -> list[int]:
    """Flows are (source, destination, way)."""
    source, destination, way = np.array(flows, dtype=np.int64).T
    return [int(number) for number in topology.among(source, destination, way)]


def test_all_are_alive() -> None:
    assert among(uniform(3, 4), (0, 1, 2), (1, 2, 0)) == [0, 0]


def test_a_dead_link_is_one_choice_less_for_all_flows_that_could_use_it() -> None:
    cut = uniform(3, 4).without(up=[(0, 1)])
    hit, by_another_way, back, elsewhere = among(cut, (0, 1, 1), (0, 1, 3), (1, 0, 3), (1, 2, 3))
    assert hit == by_another_way != 0
    assert (back, elsewhere) == (0, 0)


def test_it_is_the_same_choice_at_whichever_end_the_spine_is_cut_off() -> None:
    fabric = uniform(3, 4)
    (sender,), (receiver,) = (
        among(fabric.without(up=[(0, 1)]), (0, 1, 0)),
        among(fabric.without(down=[(1, 1)]), (0, 1, 0)),
    )
    assert sender == receiver
    (other,) = among(fabric.without(up=[(0, 2)]), (0, 1, 0))
    assert other not in (0, sender)


def test_planes_choose_by_themselves_and_who_has_no_way_does_not() -> None:
    cut = uniform(2, 2, planes=2).without(up=[(0, 3)])
    first, second, none = among(cut, (0, 1, 0), (0, 1, 2), (0, 1, WITHIN))
    assert (first, none) == (0, 0)
    assert second
