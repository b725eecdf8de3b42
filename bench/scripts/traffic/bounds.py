"""Bounds of all plans where flows are split at will: by cuts, and by a linear program of pairs of leaves and routes."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from pacekeeper_analysis.fabric.load import Floats
from pacekeeper_analysis.fabric.topology import Topology

from .clusters import SimulatedFabric, Traffic

MAX_VARIABLES = 20_000
"""Of a linear program. Larger ones take minutes; cuts by themselves are a bound, too, and no looser one."""


def compute_speed_bound(fabric: SimulatedFabric, traffic: Traffic) -> float:
    """Of the slowest job, at most, as a part of what it reaches where no job is held up."""
    topology, groups = fabric.topology, fabric.topology.groups
    pair = traffic.source * groups + traffic.destination
    demand = np.bincount(pair, traffic.demand * fabric.port, groups**2).astype(float).reshape(groups, groups)
    sides = ((topology.up, demand.sum(axis=1)), (topology.down, demand.sum(axis=0)))
    cuts = min(
        float((links.sum(axis=1)[demanded > 0] / demanded[demanded > 0]).min(initial=1.0)) for links, demanded in sides
    )
    if topology.is_symmetric or np.count_nonzero(demand) * topology.routes > MAX_VARIABLES:
        return cuts  # where all links are alike it is the best: flows spread evenly reach it
    return min(cuts, _solve_linear_program(topology, demand))


def _solve_linear_program(topology: Topology, demand: Floats) -> float:
    """Maximizes the speed: what each pair sends over its routes is its demand × speed, and no link carries more than
    it carries. demand: (groups, groups), in the topology's unit."""
    routes = topology.routes
    source, destination = np.nonzero(demand)
    pair, route = np.nonzero((topology.up[source] > 0) & (topology.down[destination] > 0))
    variable, speed = np.arange(len(pair)), len(pair)
    up, down = source[pair] * routes + route, topology.up.size + destination[pair] * routes + route
    on_links = coo_array(
        (np.ones(2 * speed), (np.concatenate([up, down]), np.concatenate([variable, variable]))),
        shape=(2 * topology.up.size, speed + 1),
    )
    sent = coo_array(
        (
            np.concatenate([np.ones(speed), -demand[source, destination]]),
            (np.concatenate([pair, np.arange(len(source))]), np.concatenate([variable, np.full(len(source), speed)])),
        ),
        shape=(len(source), speed + 1),
    )
    solution = linprog(
        np.append(np.zeros(speed), -1.0),
        A_ub=on_links.tocsr(),
        b_ub=np.concatenate([topology.up.ravel(), topology.down.ravel()]),
        A_eq=sent.tocsr(),
        b_eq=np.zeros(len(source)),
        bounds=np.array([[0.0, np.inf]] * speed + [[0.0, 1.0]]),
        method="highs",
    )
    if not solution.success:
        raise RuntimeError(f"no bound: {solution.message}")
    return float(-solution.fun)
