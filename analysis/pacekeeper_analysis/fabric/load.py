"""What rate each flow gets on a fabric whose links are shared fairly (max–min, by progressive filling).

All that is not yet held up grows at the same pace until some link is full; what crosses it has its rate, and the others
go on (Bertsekas and Gallager, Data Networks, 6.5.2). What grows together is an *entity*: a flow by itself, or all flows
of a ring, which is as fast as its slowest edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .topology import NO_ROUTE, Ints, Topology

Floats = NDArray[np.float64]
MAX_EQUAL_RATE_DIFFERENCE = 1e-9
"""Part by which two links' rates differ without being different ones."""


@dataclass(frozen=True)
class HostPorts:
    """What each host's ports carry, one way, in the topology's unit: (hosts, planes)."""

    capacity: Floats
    sender: Ints  # host of each flow
    receiver: Ints


def compute_flow_rates(
    topology: Topology,
    source: Ints,
    destination: Ints,
    routes: Ints,
    demand: Floats | None = None,
    entity: Sequence[int] | None = None,
    ports: HostPorts | None = None,
) -> Floats:
    """Of each flow, in the topology's unit.

    source, destination: groups. ways: `WITHIN` for what stays in its group; between groups nothing flows without one.
    demand: by which a flow's rate is its entity's rate times so much; None: all alike. entity: 0, 1, …, of each flow;
    None: each is one. ports: None: links between groups alone hold up; then what stays in its group is endless (inf).
    """
    flows = len(source)
    share = np.ones(flows) if demand is None else np.asarray(demand, dtype=float)
    of = np.arange(flows) if entity is None else np.asarray(entity, dtype=np.int64)
    found = compute_link_usage(topology, source, destination, routes, share, of, ports).compute_rates()[of] * share
    nowhere = (np.asarray(routes) == NO_ROUTE) & (source != destination)
    found[nowhere] = 0.0
    return found


@dataclass(frozen=True)
class LinkUsage:
    """How much of which link each entity takes at a rate of 1; arrays of pairs (entity, link)."""

    entity: Ints
    link: Ints
    part: Floats
    capacity: Floats  # of each link
    entities: int

    def compute_rates(self, active: NDArray[np.bool_] | None = None) -> Floats:
        """Of each entity, while those are `active` (None: all); inf: nothing holds it up, or it is not active."""
        growing = np.ones(len(self.entity), bool) if active is None else active[self.entity]
        rate, left = np.full(self.entities, np.inf), self.capacity.copy()
        while growing.any():
            load = np.bincount(self.link[growing], self.part[growing], len(left))
            crossed = load > 0
            pace = np.full(len(left), np.inf)
            pace[crossed] = np.maximum(left[crossed], 0.0) / load[crossed]
            full = pace <= pace.min() * (1 + MAX_EQUAL_RATE_DIFFERENCE)
            ended = np.zeros(self.entities, bool)
            ended[self.entity[growing & full[self.link]]] = True
            rate[ended] = pace.min()
            ending = growing & ended[self.entity]
            left -= np.bincount(self.link[ending], self.part[ending] * pace.min(), len(left))
            growing &= ~ending
        return rate


def compute_link_usage(
    topology: Topology,
    source: Ints,
    destination: Ints,
    routes: Ints,
    demand: Floats,
    entity: Ints,
    ports: HostPorts | None = None,
) -> LinkUsage:
    """Arguments as those of `rates`."""
    capacity, flow, link = _build_incidence(topology, source, destination, routes, ports)
    pair, place = np.unique(entity[flow] * len(capacity) + link, return_inverse=True)
    part = np.bincount(place, demand[flow], len(pair)).astype(float)
    return LinkUsage(pair // len(capacity), pair % len(capacity), part, capacity, int(entity.max(initial=-1)) + 1)


def compute_link_loads(topology: Topology, source: Ints, destination: Ints, routes: Ints, rate: Floats) -> tuple[Floats, Floats]:
    """Of uplinks and downlinks, (groups, ways), in the unit of the rates."""
    crosses = np.asarray(routes) != NO_ROUTE
    shape, size = topology.up.shape, topology.up.size
    up = np.bincount(source[crosses] * topology.routes + routes[crosses], rate[crosses], size)
    down = np.bincount(destination[crosses] * topology.routes + routes[crosses], rate[crosses], size)
    return up.astype(float).reshape(shape), down.astype(float).reshape(shape)


def _build_incidence(
    topology: Topology, source: Ints, destination: Ints, ways: Ints, ports: HostPorts | None
) -> tuple[Floats, Ints, Ints]:
    """Capacity of each link, and pairs of a flow and a link that it crosses."""
    crosses = np.flatnonzero(np.asarray(ways) != NO_ROUTE)
    capacities: list[Floats] = [topology.up.ravel().astype(float), topology.down.ravel().astype(float)]
    flow = [crosses, crosses]
    link = [
        source[crosses] * topology.routes + ways[crosses],
        topology.up.size + destination[crosses] * topology.routes + ways[crosses],
    ]
    if ports is not None:
        first, planes = 2 * topology.up.size, ports.capacity.shape[1]
        plane = np.maximum(ways, 0) // topology.spines
        every = np.arange(len(source))
        capacities += [ports.capacity.ravel(), ports.capacity.ravel()]
        flow += [every, every]
        link += [
            first + ports.sender * planes + plane,
            first + ports.capacity.size + ports.receiver * planes + plane,
        ]
    return np.concatenate(capacities), np.concatenate(flow), np.concatenate(link)
