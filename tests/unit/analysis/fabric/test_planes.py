"""Two ports per host: both carry half."""

from __future__ import annotations

import numpy as np
import pytest

from pacekeeper_analysis.fabric.planes import assign_planes, split_across_planes
from pacekeeper_analysis.fabric.route_assignment import Flows
from pacekeeper_analysis.fabric.topology import NO_ROUTE, Ints, build_uniform_topology


def compute_imbalance(of: Ints, plane: Ints) -> int:
    """Return the largest difference between what one host (group) has on one plane and on the other."""
    return int(np.abs(np.bincount(of[plane == 0], minlength=500) - np.bincount(of[plane == 1], minlength=500)).max())


@pytest.mark.parametrize("seed", range(50))
def test_ports_of_a_host_and_links_of_a_group_differ_by_one_flow(seed: int) -> None:
    draws = np.random.default_rng(seed)
    hosts, count = int(draws.integers(2, 40)), int(draws.integers(1, 300))
    sender, receiver = draws.integers(hosts, size=count), draws.integers(hosts, size=count)
    plane = split_across_planes(sender, sender // 4, receiver, receiver // 4, np.ones(count, dtype=np.int64))
    assert set(plane.tolist()) <= {0, 1}
    assert max(compute_imbalance(of, plane) for of in (sender, receiver, sender // 4, receiver // 4)) <= 1


def test_both_planes_are_at_their_bound() -> None:
    draws = np.random.default_rng(0)
    sender, receiver = draws.integers(64, size=600), draws.integers(64, size=600)
    flows = Flows(sender // 8, receiver // 8, np.ones(600, dtype=np.int64))
    plane = split_across_planes(sender, sender // 8, receiver, receiver // 8, flows.weight)
    topology = build_uniform_topology(8, 4, planes=2)
    found = assign_planes(topology, flows, plane)
    crosses = flows.source != flows.destination
    degree = max(np.bincount(ends[crosses]).max() for ends in (flows.source, flows.destination))
    assert found.level == found.bound
    assert found.level <= -(-degree // 8) + 1
    assert (found.routes[crosses] // topology.spines == plane[crosses]).all()
    assert found.lost == ()


def test_a_flow_that_cannot_use_its_plane_takes_the_other_one() -> None:
    topology = build_uniform_topology(2, 1, planes=2).with_dead_links(up=[(0, 1)])
    flows = Flows(np.array([0, 0]), np.array([1, 1]), np.array([1, 1]))
    found = assign_planes(topology, flows, np.array([0, 1]))
    assert (found.routes.tolist(), found.lost, found.level) == ([0, 0], (), 2)
    cut_off = assign_planes(topology.with_dead_links(down=[(1, 0)]), flows, np.array([0, 1]))
    assert (cut_off.routes.tolist(), cut_off.lost) == ([NO_ROUTE, NO_ROUTE], (0, 1))


def test_a_fixed_flow_stays_and_moved_flows_are_reported() -> None:
    topology = build_uniform_topology(2, 2, planes=2)
    flows = Flows(np.array([0, 0, 0]), np.array([1, 1, 1]), np.array([1, 1, 1]))
    plane, present = np.array([0, 0, 1]), [1, 1, 3]
    kept = assign_planes(topology, flows, plane, present, [True] * 3)
    assert (kept.routes.tolist(), kept.level, kept.moved) == ([1, 1, 3], 2, ())
    free = assign_planes(topology, flows, plane, present)
    assert (sorted(free.routes[:2].tolist()), int(free.routes[2]), free.level) == ([0, 1], 3, 1)
    assert len(free.moved) == 1
    other = assign_planes(topology, flows, np.array([0, 0, 0]), present)
    assert 2 in other.moved, "another plane is another way"
