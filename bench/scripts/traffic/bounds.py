"""What no plan can beat where flows are split at will: the linear program by pairs of leaves and ways."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import coo_array  # type: ignore[import-untyped]

from pacekeeper_analysis.fabric.topology import Topology

from .clusters import Fabric, Traffic


def speed_bound(fabric: Fabric, traffic: Traffic) -> float:
    """Of the slowest job, at most, as a part of what it reaches where nobody is held up."""
    topology, groups = fabric.topology, fabric.topology.groups
    demand = np.bincount(
        traffic.source * groups + traffic.destination, traffic.demand * fabric.port, groups**2
    ).reshape(groups, groups)
    if not topology.symmetric:
        return _by_linear_program(topology, demand)
    busiest = max(demand.sum(axis=0).max(), demand.sum(axis=1).max())  # spread evenly over all ways, none has more
    return min(1.0, topology.ways * topology.unit / busiest) if busiest else 1.0


def _by_linear_program(topology: Topology, demand: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> float:
    """Maximises the speed: what each pair sends over its ways is its demand × speed, and no link is asked for more than
    it carries. demand: (groups, groups), in the topology's unit."""
    ways = topology.ways
    source, destination = np.nonzero(demand)
    pair, way = np.nonzero((topology.up[source] > 0) & (topology.down[destination] > 0))
    variable, speed = np.arange(len(pair)), len(pair)
    up, down = source[pair] * ways + way, topology.up.size + destination[pair] * ways + way
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
    found = linprog(
        np.append(np.zeros(speed), -1.0),
        A_ub=on_links.tocsr(),
        b_ub=np.concatenate([topology.up.ravel(), topology.down.ravel()]),
        A_eq=sent.tocsr(),
        b_eq=np.zeros(len(source)),
        bounds=np.array([[0.0, np.inf]] * speed + [[0.0, 1.0]]),
        method="highs",
    )
    if not found.success:
        raise RuntimeError(f"no bound: {found.message}")
    return float(-found.fun)
