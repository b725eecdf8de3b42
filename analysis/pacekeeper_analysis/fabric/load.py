"""Rates of flows on a fabric whose links are shared fairly (max–min, by progressive filling).

All rates that are not yet limited grow at the same speed until a link is full. Flows over it then have their rate, and
the others continue (Bertsekas and Gallager, Data Networks, 6.5.2). An *entity* grows together: a single flow, or all
flows of a ring, which is as fast as its slowest edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .topology import NO_ROUTE, Ints, Topology

Floats = NDArray[np.float64]
MAX_EQUAL_RATE_DIFFERENCE = 1e-9
"""Relative difference up to which rates of two links count as equal."""


@dataclass(frozen=True)
class HostPorts:
    """The ports of hosts, with their capacity in one direction in the topology's unit: (hosts, planes)."""

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
    """Return the rate of each flow in the topology's unit.

    `source` and `destination` are groups. `routes` is NO_ROUTE for flows within a group; between groups such a flow has
    rate
    0. A flow's rate is its entity's rate times `demand`. None means all equal. `entity` is 0, 1, … for each flow. None
      means
    that each flow is its own. If `ports` is None, only links between groups are limits, and flows within a group have
    an infinite rate.
    """
    flows = len(source)
    share = np.ones(flows) if demand is None else np.asarray(demand, dtype=float)
    entities = np.arange(flows) if entity is None else np.asarray(entity, dtype=np.int64)
    rates = (
        compute_link_usage(topology, source, destination, routes, share, entities, ports).compute_rates()[entities]
        * share
    )
    unrouted = (np.asarray(routes) == NO_ROUTE) & (source != destination)
    rates[unrouted] = 0.0
    return rates


@dataclass(frozen=True)
class LinkUsage:
    """The use of links by each entity at a rate of 1, as arrays of pairs (entity, link)."""

    entity: Ints
    link: Ints
    part: Floats
    capacity: Floats  # of each link
    entities: int

    def compute_rates(self, active: NDArray[np.bool_] | None = None) -> Floats:
        """Return the rate of each entity, with only those in `active` (None: all). inf: unlimited, or not active."""
        growing = np.ones(len(self.entity), bool) if active is None else active[self.entity]
        rate, remaining = np.full(self.entities, np.inf), self.capacity.copy()
        while growing.any():
            load = np.bincount(self.link[growing], self.part[growing], len(remaining))
            crossed = load > 0
            limit = np.full(len(remaining), np.inf)
            limit[crossed] = np.maximum(remaining[crossed], 0.0) / load[crossed]
            full = limit <= limit.min() * (1 + MAX_EQUAL_RATE_DIFFERENCE)
            ended = np.zeros(self.entities, bool)
            ended[self.entity[growing & full[self.link]]] = True
            rate[ended] = limit.min()
            ending = growing & ended[self.entity]
            remaining -= np.bincount(self.link[ending], self.part[ending] * limit.min(), len(remaining))
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
    """Compute the usage. The arguments are those of `compute_flow_rates`."""
    capacity, flow, link = _build_incidence(topology, source, destination, routes, ports)
    pair, index = np.unique(entity[flow] * len(capacity) + link, return_inverse=True)
    part = np.bincount(index, demand[flow], len(pair)).astype(float)
    return LinkUsage(pair // len(capacity), pair % len(capacity), part, capacity, int(entity.max(initial=-1)) + 1)


def compute_link_loads(
    topology: Topology, source: Ints, destination: Ints, routes: Ints, rate: Floats
) -> tuple[Floats, Floats]:
    """Return the loads of uplinks and downlinks, (groups, routes), in the unit of the rates."""
    crosses = np.asarray(routes) != NO_ROUTE
    shape, size = topology.up.shape, topology.up.size
    up = np.bincount(source[crosses] * topology.routes + routes[crosses], rate[crosses], size)
    down = np.bincount(destination[crosses] * topology.routes + routes[crosses], rate[crosses], size)
    return up.astype(float).reshape(shape), down.astype(float).reshape(shape)


def _build_incidence(
    topology: Topology, source: Ints, destination: Ints, routes: Ints, ports: HostPorts | None
) -> tuple[Floats, Ints, Ints]:
    """Return the capacity of each link, and pairs of a flow and a link that it crosses."""
    crosses = np.flatnonzero(np.asarray(routes) != NO_ROUTE)
    capacities: list[Floats] = [topology.up.ravel().astype(float), topology.down.ravel().astype(float)]
    flow = [crosses, crosses]
    link = [
        source[crosses] * topology.routes + routes[crosses],
        topology.up.size + destination[crosses] * topology.routes + routes[crosses],
    ]
    if ports is not None:
        first_port, planes = 2 * topology.up.size, ports.capacity.shape[1]
        plane = np.maximum(routes, 0) // topology.spines
        all_flows = np.arange(len(source))
        capacities += [ports.capacity.ravel(), ports.capacity.ravel()]
        flow += [all_flows, all_flows]
        link += [
            first_port + ports.sender * planes + plane,
            first_port + ports.capacity.size + ports.receiver * planes + plane,
        ]
    return np.concatenate(capacities), np.concatenate(flow), np.concatenate(link)
