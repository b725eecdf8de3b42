"""Rates under max–min fairness."""

from __future__ import annotations

import numpy as np
import pytest

from pacekeeper_analysis.fabric.load import HostPorts, compute_flow_rates, compute_link_loads, compute_link_usage
from pacekeeper_analysis.fabric.topology import NO_ROUTE, Ints, build_uniform_topology


def build_ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def test_the_third_flow_gets_what_the_shared_link_leaves() -> None:
    """Two share the uplink of group 0; one of them meets a third one on a downlink."""
    found = compute_flow_rates(
        build_uniform_topology(4, 2, capacity=12), build_ints(0, 0, 1), build_ints(2, 3, 3), build_ints(0, 0, 0)
    )
    assert found.tolist() == [6.0, 6.0, 6.0]
    apart = compute_flow_rates(
        build_uniform_topology(4, 2, capacity=12), build_ints(0, 0, 1), build_ints(2, 3, 3), build_ints(0, 1, 0)
    )
    assert apart.tolist() == [12.0, 12.0, 12.0]
    uneven = compute_flow_rates(
        build_uniform_topology(4, 2, capacity=12),
        build_ints(0, 0, 0, 1),
        build_ints(2, 2, 3, 3),
        build_ints(0, 0, 0, 0),
    )
    assert uneven.tolist() == [4.0, 4.0, 4.0, 8.0]


def test_a_ring_is_as_fast_as_its_slowest_edge_and_leaves_the_rest_to_others() -> None:
    source, destination, routes = build_ints(0, 1, 0, 1), build_ints(1, 0, 1, 0), build_ints(0, 0, 0, 1)
    single = compute_flow_rates(build_uniform_topology(2, 2, capacity=10), source, destination, routes)
    assert single.tolist() == [5.0, 10.0, 5.0, 10.0]
    tied = compute_flow_rates(
        build_uniform_topology(2, 2, capacity=10), source, destination, routes, entity=[0, 0, 1, 1]
    )
    assert tied.tolist() == [5.0, 5.0, 5.0, 5.0]
    third = compute_flow_rates(
        build_uniform_topology(2, 2, capacity=10),
        build_ints(0, 1, 0, 1),
        build_ints(1, 0, 1, 0),
        build_ints(0, 0, 0, 0),
        entity=[0, 0, 1, 2],
    )
    assert third.tolist() == [5.0, 5.0, 5.0, 5.0]


def test_a_silent_flow_leaves_the_link_to_others() -> None:
    ends = build_ints(0, 0), build_ints(1, 1), build_ints(0, 0)
    used = compute_link_usage(
        build_uniform_topology(2, 1, capacity=6), *ends, demand=np.array([1.0, 2.0]), entity=build_ints(0, 1)
    )
    assert used.compute_rates().tolist() == [2.0, 2.0]
    assert used.compute_rates(np.array([True, False])).tolist() == [6.0, float("inf")]
    assert used.compute_rates(np.array([False, True])).tolist() == [float("inf"), 3.0]


def test_a_flow_with_more_weight_gets_more_of_a_link() -> None:
    found = compute_flow_rates(
        build_uniform_topology(2, 1, capacity=9),
        build_ints(0, 0),
        build_ints(1, 1),
        build_ints(0, 0),
        demand=np.array([2.0, 1.0]),
    )
    assert found.tolist() == [6.0, 3.0]


def test_ports_limit_what_the_fabric_does_not() -> None:
    ports = HostPorts(np.array([[4.0], [4.0], [4.0]]), sender=build_ints(0, 0, 1), receiver=build_ints(1, 2, 2))
    found = compute_flow_rates(
        build_uniform_topology(2, 2, capacity=100),
        build_ints(0, 0, 0),
        build_ints(0, 1, 1),
        build_ints(NO_ROUTE, 0, 1),
        ports=ports,
    )
    assert found.tolist() == [2.0, 2.0, 2.0]


def test_a_flow_without_a_route_has_no_rate_and_limits_no_neighbor() -> None:
    found = compute_flow_rates(
        build_uniform_topology(2, 2), build_ints(0, 0), build_ints(1, 0), build_ints(NO_ROUTE, NO_ROUTE)
    )
    assert found.tolist() == [0.0, float("inf")]


@pytest.mark.parametrize("seed", range(20))
def test_no_flow_can_be_faster_without_a_slower_one_losing(seed: int) -> None:
    """This is the meaning of max–min fair: each flow crosses a full link on which no flow is faster."""
    draws = np.random.default_rng(seed)
    topology, count = build_uniform_topology(6, 3, capacity=10), 60
    source, destination = draws.integers(6, size=count), draws.integers(6, size=count)
    routes = np.where(source == destination, NO_ROUTE, draws.integers(3, size=count))
    entity = draws.integers(12, size=count)
    found = compute_flow_rates(topology, source, destination, routes, entity=entity.tolist())
    up, down = compute_link_loads(topology, source, destination, routes, found)
    assert up.max() <= 10 + 1e-6
    assert down.max() <= 10 + 1e-6
    fastest_up, fastest_down = np.zeros(up.shape), np.zeros(down.shape)
    going = routes != NO_ROUTE
    np.maximum.at(fastest_up, (source[going], routes[going]), found[going])
    np.maximum.at(fastest_down, (destination[going], routes[going]), found[going])
    for each in set(entity[going].tolist()):
        its = np.flatnonzero((entity == each) & going)
        full = [
            (load[ends[its], routes[its]] >= 10 - 1e-6) & (fastest[ends[its], routes[its]] <= found[its[0]] + 1e-6)
            for load, fastest, ends in ((up, fastest_up, source), (down, fastest_down, destination))
        ]
        assert np.any(full)
