"""Flows on routes of their own: the largest load as small as possible, and few moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.fabric.route_assignment import Flows, RouteAssignment, assign_routes, compute_load_bound
from pacekeeper_analysis.fabric.topology import NO_ROUTE, Topology, build_uniform_topology


def build_flows(*pairs: tuple[int, int], weight: Sequence[int] | None = None) -> Flows:
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    weights = np.ones(len(ends), dtype=np.int64) if weight is None else np.array(weight, dtype=np.int64)
    return Flows(ends[:, 0], ends[:, 1], weights)


def draw_flows(seed: int, groups: int, count: int) -> Flows:
    draws = np.random.default_rng(seed)
    return build_flows(*draws.integers(groups, size=(count, 2)).tolist())


def check_assignment(topology: Topology, of: Flows, found: RouteAssignment) -> RouteAssignment:
    """Check that no dead link is used, and that no link carries more than the level."""
    up, down = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for source, destination, weight, way in zip(of.source, of.destination, of.weight, found.routes, strict=True):
        if way != NO_ROUTE:
            up[int(source), int(way)] += int(weight)
            down[int(destination), int(way)] += int(weight)
    for links, loads in ((topology.up, up), (topology.down, down)):
        for (group, way), load in loads.items():
            assert links[group, way] > 0
            assert load * topology.unit <= found.level * links[group, way]
    within = of.source == of.destination
    assert (found.routes[within] == NO_ROUTE).all()
    assert set(np.flatnonzero((found.routes == NO_ROUTE) & ~within).tolist()) == set(found.lost)
    assert found.level >= found.bound == compute_load_bound(topology, of) or found.lost
    return found


def build_damaged_topology(seed: int, groups: int, spines: int, dead: int) -> Topology:
    draws = np.random.default_rng(seed)
    links = draws.integers((groups, spines), size=(2 * dead, 2)).tolist()
    return build_uniform_topology(groups, spines).with_dead_links(
        up=map(tuple, links[:dead]), down=map(tuple, links[dead:])
    )


class TestBySymmetry:
    @pytest.mark.parametrize("seed", range(100))
    def test_the_level_is_optimal(self, seed: int) -> None:
        draws = np.random.default_rng(1000 + seed)
        groups, spines = int(draws.integers(2, 12)), int(draws.integers(1, 9))
        of, topology = draw_flows(seed, groups, int(draws.integers(1, 200))), build_uniform_topology(groups, spines)
        found = check_assignment(topology, of, assign_routes(topology, of))
        crosses = of.source != of.destination
        degree = max(
            np.bincount(of.source[crosses]).max(initial=0), np.bincount(of.destination[crosses]).max(initial=0)
        )
        assert found.level == -(-degree // spines)

    def test_two_jobs_that_collide_are_separated(self) -> None:
        of = build_flows((0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0))
        found = check_assignment(
            build_uniform_topology(3, 3), of, assign_routes(build_uniform_topology(3, 3), of, previous_routes=[0] * 6)
        )
        assert found.level == 1
        assert len(found.moved) == 3, "one job's"

    def test_a_chain_of_two_moves_makes_room(self) -> None:
        """0→0' is on route 0 and 1→1' on route 1; for 0→1' neither is free at both ends until one has changed."""
        of = build_flows((0, 2), (1, 3), (0, 3))
        found = check_assignment(
            build_uniform_topology(4, 2),
            of,
            assign_routes(build_uniform_topology(4, 2), of, previous_routes=[0, 1, NO_ROUTE]),
        )
        assert found.level == 1
        assert len(found.moved) == 1


class TestDamaged:
    @pytest.mark.parametrize("seed", range(60))
    def test_the_level_is_at_most_one_above_the_bound(self, seed: int) -> None:
        topology = build_damaged_topology(seed, 8, 6, 6)
        of = draw_flows(seed, 8, 120)
        found = check_assignment(topology, of, assign_routes(topology, of))
        assert found.level <= found.bound + 1

    @pytest.mark.parametrize("seed", range(10))
    def test_links_of_half_the_capacity_carry_half(self, seed: int) -> None:
        links = np.full((6, 4), 4, dtype=np.int64)
        links[:, 0] = 2
        topology, of = Topology(links, links.copy()), draw_flows(seed, 6, 150)
        found = check_assignment(topology, of, assign_routes(topology, of))
        assert found.level <= found.bound + 1

    @pytest.mark.parametrize("seed", range(10))
    def test_one_more_link_moves_few_flows(self, seed: int) -> None:
        topology = build_damaged_topology(seed, 64, 32, 47)
        of = draw_flows(seed, 64, 10_000)
        before = assign_routes(topology, of)
        way = int(before.routes[of.source == 7][0])
        worse = topology.with_dead_links(up=[(7, way)])
        after = check_assignment(worse, of, assign_routes(worse, of, before.routes.tolist()))
        assert len(after.moved) <= 8
        assert after.level <= after.bound + 1
        stays = (before.routes == after.routes) | ((of.source == 7) & (before.routes == way))
        assert len(stays) - stays.sum() == len(after.moved)

    def test_room_is_made_at_both_ends_of_a_flow(self) -> None:
        """0→2 has only route 0, which 0→1 has taken where it leaves, and 1→2 where it arrives: both have another."""
        topology = build_uniform_topology(3, 3).with_dead_links(up=[(0, 2)], down=[(2, 1)])
        of = build_flows((0, 1), (1, 2), (0, 2))
        found = check_assignment(topology, of, assign_routes(topology, of, previous_routes=[0, 0, NO_ROUTE]))
        assert found.routes.tolist() == [1, 2, 0]
        assert (found.level, found.moved) == (1, (0, 1))

    def test_few_common_routes_bound_the_level(self) -> None:
        """All four leave group 0 by route 0, though its cut has two and each pair needs only two."""
        topology = build_uniform_topology(3, 2).with_dead_links(down=[(1, 1), (2, 1)])
        of = build_flows((0, 1), (0, 1), (0, 2), (0, 2))
        assert compute_load_bound(topology, of) == 4
        assert check_assignment(topology, of, assign_routes(topology, of)).level == 4

    def test_a_flow_without_a_route_raises_no_bound(self) -> None:
        topology = build_uniform_topology(3, 2).with_dead_links(up=[(0, 1)], down=[(1, 0)])
        of = build_flows(*[(0, 1)] * 5, (2, 1))
        assert compute_load_bound(topology, of) == 1
        found = assign_routes(topology, of)
        assert (found.level, found.lost) == (1, (0, 1, 2, 3, 4))

    def test_only_flows_without_a_remaining_route_are_lost(self) -> None:
        topology = build_uniform_topology(3, 2).with_dead_links(up=[(0, 0), (0, 1)])
        of = build_flows((0, 1), (1, 2), (2, 0), (1, 1))
        found = check_assignment(topology, of, assign_routes(topology, of, previous_routes=[0, 1, 0, NO_ROUTE]))
        assert found.lost == (0,)
        assert found.routes.tolist()[1:] == [1, 0, NO_ROUTE]


class TestPresent:
    def test_a_good_assignment_is_not_changed(self) -> None:
        of = draw_flows(3, 8, 200)
        first = assign_routes(build_uniform_topology(8, 4), of)
        again = assign_routes(build_uniform_topology(8, 4), of, first.routes.tolist())
        assert again.moved == ()
        assert (again.routes == first.routes).all()

    @pytest.mark.parametrize("seed", range(40))
    def test_no_flow_moves_without_a_gain(self, seed: int) -> None:
        """Also where the best level cannot be reached."""
        draws = np.random.default_rng(seed)
        up, down = draws.choice([0, 1, 2, 4], p=[0.1, 0.1, 0.2, 0.6], size=(2, 5, 4))
        topology, ends = Topology(up, down), draw_flows(seed, 5, 100)
        of = Flows(ends.source, ends.destination, draws.integers(1, 5, size=100))
        first = assign_routes(topology, of)
        again = assign_routes(topology, of, first.routes.tolist())
        assert again.moved == () or again.level < first.level

    def test_a_new_job_finds_its_place_next_to_the_others(self) -> None:
        topology, of = build_uniform_topology(8, 4), draw_flows(4, 8, 150)
        first = assign_routes(topology, Flows(of.source[:120], of.destination[:120], of.weight[:120]))
        found = check_assignment(topology, of, assign_routes(topology, of, [*first.routes.tolist(), *[NO_ROUTE] * 30]))
        assert found.level == found.bound
        assert len(found.moved) <= 30

    def test_a_fixed_flow_is_moved_only_from_a_dead_link(self) -> None:
        of = build_flows((0, 1), (0, 1), (0, 1), (0, 1))
        fixed = [True, True, False, False]
        found = check_assignment(
            build_uniform_topology(2, 4), of, assign_routes(build_uniform_topology(2, 4), of, [0, 0, 0, 0], fixed)
        )
        assert found.routes.tolist()[:2] == [0, 0]
        assert found.level == 2
        assert sorted(found.routes.tolist()[2:]) != [0, 0]
        dead = build_uniform_topology(2, 5).with_dead_links(up=[(0, 0)])
        assert check_assignment(dead, of, assign_routes(dead, of, [0, 0, 1, 2], fixed)).level == 1

    def test_an_invalid_route_is_no_route(self) -> None:
        of = build_flows((0, 1), (1, 0))
        assert (
            check_assignment(
                build_uniform_topology(2, 2), of, assign_routes(build_uniform_topology(2, 2), of, [7, -3])
            ).level
            == 1
        )


def test_heavy_flows_are_placed_first() -> None:
    of = build_flows((0, 1), (0, 1), (0, 1), weight=[1, 1, 2])
    assert (
        check_assignment(build_uniform_topology(2, 2), of, assign_routes(build_uniform_topology(2, 2), of)).level == 2
    )


def test_a_heavy_flow_and_a_lighter_one_exchange_routes() -> None:
    """Heaviest first, both routes have 7 + 6 + 5, and 4 is left; 7 + 7 + 6 and 6 + 5 + 5 + 4 fit."""
    of = build_flows(*[(0, 1)] * 7, weight=[7, 7, 6, 6, 5, 5, 4])
    assert (
        check_assignment(build_uniform_topology(2, 2), of, assign_routes(build_uniform_topology(2, 2), of)).level == 20
    )


def test_without_flows_nothing_is_planned() -> None:
    empty = assign_routes(build_uniform_topology(2, 2), build_flows())
    assert (empty.level, empty.bound, empty.routes.tolist()) == (0, 0, [])


def test_bad_input_is_rejected() -> None:
    with pytest.raises(InputError, match="below 1"):
        build_flows((0, 1), weight=[0])
    with pytest.raises(InputError, match="differ in number"):
        Flows(np.array([0]), np.array([1, 2]), np.array([1]))
    with pytest.raises(InputError, match="each must be at least 1"):
        build_uniform_topology(0, 3)
    with pytest.raises(InputError, match="cannot be divided into 3 planes"):
        Topology(np.ones((2, 4), int), np.ones((2, 4), int), planes=3)
    with pytest.raises(InputError, match="negative"):
        Topology(-np.ones((2, 4), int), np.ones((2, 4), int))
