"""Plans compared with the best ones, which an integer program finds: small fabrics, whole, damaged, and uneven."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from pacekeeper_analysis.fabric.route_assignment import Flows, assign_routes, compute_load_bound
from pacekeeper_analysis.fabric.topology import Topology, build_uniform_topology


def compute_best_level(topology: Topology, flows: Flows) -> int:
    """The least largest load of a link, in units of weight on a link of the best capacity.

    Flows of one weight between one pair of groups are alike: variables are how many of them take which way, and last
    the level. Who has no way that is alive counts nowhere.
    """
    rows: list[tuple[int, int, float]] = []  # constraint, variable, coefficient
    alike, variables, constraints = Counter[tuple[int, int, int]](), 0, 2 * topology.up.size
    alike.update(zip(flows.source.tolist(), flows.destination.tolist(), flows.weight.tolist(), strict=True))
    counts: list[int] = []
    for (source, destination, weight), count in alike.items():
        ways = np.flatnonzero((topology.up[source] > 0) & (topology.down[destination] > 0)).tolist()
        if source == destination or not ways:
            continue
        for way in ways:
            rows += [
                (source * topology.routes + way, variables, weight * topology.unit),
                (topology.up.size + destination * topology.routes + way, variables, weight * topology.unit),
                (constraints + len(counts), variables, 1),
            ]
            variables += 1
        counts.append(count)
    if not counts:
        return 0
    capacities = np.concatenate([topology.up.ravel(), topology.down.ravel()])
    rows += [(link, variables, -float(capacity)) for link, capacity in enumerate(capacities)]
    constraint, variable, coefficient = zip(*rows, strict=True)
    found = milp(
        np.append(np.zeros(variables), 1.0),
        integrality=np.ones(variables + 1),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(
            coo_array((coefficient, (constraint, variable))).tocsr(),
            np.concatenate([np.full(constraints, -np.inf), counts]),
            np.concatenate([np.zeros(constraints), counts]),
        ),
    )
    assert found.success, found.message
    return round(float(found.fun))


def draw_flows(draws: np.random.Generator, groups: int, heaviest: int) -> Flows:
    count = int(draws.integers(1, 301))
    source, destination = draws.integers(groups, size=(2, count))
    return Flows(source, destination, draws.integers(1, heaviest + 1, size=count))


def draw_sizes(draws: np.random.Generator) -> tuple[int, int]:
    return int(draws.integers(2, 7)), int(draws.integers(1, 6))


@pytest.mark.parametrize("seed", range(100))
def test_the_plan_of_a_whole_fabric_is_optimal(seed: int) -> None:
    draws = np.random.default_rng(seed)
    topology = build_uniform_topology(*draw_sizes(draws))
    flows = draw_flows(draws, topology.groups, heaviest=1)
    assert (
        assign_routes(topology, flows).level
        == compute_load_bound(topology, flows)
        == compute_best_level(topology, flows)
    )


@pytest.mark.parametrize("seed", range(100))
def test_the_plan_of_a_damaged_fabric_is_at_most_one_above_the_best(seed: int) -> None:
    draws = np.random.default_rng(1000 + seed)
    shape = draw_sizes(draws)
    up, down = (draws.random((2, *shape)) > draws.uniform(0.05, 0.4)).astype(np.int64)
    up[0, 0] = 1
    flows = draw_flows(draws, shape[0], heaviest=1)
    _compare_with_best(Topology(up, down), flows)


@pytest.mark.parametrize("seed", range(100))
def test_the_plan_of_uneven_links_and_flows_is_at_most_one_above_the_best(seed: int) -> None:
    draws = np.random.default_rng(2000 + seed)
    up, down = draws.choice([0, 1, 2, 4], p=[0.1, 0.1, 0.2, 0.6], size=(2, *draw_sizes(draws)))
    up[0, 0] = 4
    flows = draw_flows(draws, up.shape[0], heaviest=int(draws.integers(1, 5)))
    _compare_with_best(Topology(up, down), flows)


def _compare_with_best(topology: Topology, flows: Flows) -> None:
    best = compute_best_level(topology, flows)
    found = assign_routes(topology, flows)
    assert compute_load_bound(topology, flows) <= best <= found.level <= best + 1
