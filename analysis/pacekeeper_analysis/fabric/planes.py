"""Assigns flows to the two ports of their hosts, for sending and receiving: each port of a host should carry half.

Flows are put in pairs that must take different planes: at the sending side flows of one host, and a host's unpaired
flow with that of another host of its group. The receiving side does the same. So each flow is in at most two pairs, and
pairs form paths and cycles on which the sides alternate: two planes are sufficient for all of them. Then each host's
ports differ by at most one flow, and so do each group's (an Euler split, on two levels at once).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .route_assignment import Flows, RouteAssignment, assign_routes, keep_live_routes
from .topology import NO_ROUTE, Ints, Topology

UNPAIRED = -1


def split_across_planes(sender: Ints, sending_group: Ints, receiver: Ints, receiving_group: Ints, weight: Ints) -> Ints:
    """Return the plane, 0 or 1, of each flow, from hosts and their groups. Flows of equal weight are paired."""
    count = len(sender)
    mates = [_find_mates(sender, sending_group, weight), _find_mates(receiver, receiving_group, weight)]
    plane = np.full(count, UNPAIRED, dtype=np.int64)
    for first in range(count):
        for side in (0, 1):  # from the first flow in both directions, until the path ends or returns
            flow, current_plane = first, 0 if plane[first] == UNPAIRED else int(plane[first])
            while flow != UNPAIRED and (plane[flow] == UNPAIRED or flow == first):
                plane[flow] = current_plane
                flow, side, current_plane = int(mates[side][flow]), 1 - side, 1 - current_plane
                if flow == first:
                    break
    return plane


def assign_planes(
    topology: Topology,
    flows: Flows,
    plane: Ints,
    previous_routes: Sequence[int] | None = None,
    fixed: Sequence[bool] | None = None,
) -> RouteAssignment:
    """Assign routes as `assign_routes` does, with the plane of each flow given.

    If no route of its plane is alive, a flow takes one of the other plane. A fixed flow has a present route of its
    plane.
    """
    live_routes = keep_live_routes(topology, flows, previous_routes)
    is_fixed = np.zeros(len(flows), bool) if fixed is None else np.array(fixed, bool)
    plane = plane.copy()
    for _ in range(topology.planes):
        assignment = _assign_within_planes(topology, flows, plane, live_routes, is_fixed)
        plane[list(assignment.lost)] = (plane[list(assignment.lost)] + 1) % topology.planes
        if not assignment.lost:
            break
    return assignment


def _assign_within_planes(
    topology: Topology, flows: Flows, plane: Ints, live_routes: Ints, is_fixed: NDArray[np.bool_]
) -> RouteAssignment:
    routes = np.full(len(flows), NO_ROUTE, dtype=np.int64)
    levels, bounds, lost = [0], [0], list[int]()
    for number in range(topology.planes):
        first_route, plane_flows = number * topology.spines, np.flatnonzero(plane == number)
        plane_routes = slice(first_route, first_route + topology.spines)
        plane_topology = Topology(topology.up[:, plane_routes], topology.down[:, plane_routes])
        in_plane = live_routes[plane_flows] // topology.spines == number
        assignment = assign_routes(
            plane_topology,
            Flows(flows.source[plane_flows], flows.destination[plane_flows], flows.weight[plane_flows]),
            np.where(in_plane, live_routes[plane_flows] - first_route, NO_ROUTE).tolist(),
            (is_fixed[plane_flows] & in_plane).tolist(),
        )
        routes[plane_flows] = np.where(assignment.routes == NO_ROUTE, NO_ROUTE, assignment.routes + first_route)
        levels.append(assignment.level)
        bounds.append(assignment.bound)
        lost += plane_flows[list(assignment.lost)].tolist()
    moved = (live_routes != NO_ROUTE) & (routes != NO_ROUTE) & (routes != live_routes)
    return RouteAssignment(
        routes, max(levels), max(bounds), tuple(np.flatnonzero(moved).tolist()), lost=tuple(sorted(lost))
    )


def _find_mates(host: Ints, group: Ints, weight: Ints) -> Ints:
    """Return the mate of each flow. UNPAIRED means that it has none."""
    mate = np.full(len(host), UNPAIRED, dtype=np.int64)
    unpaired = list(_pair_flows(mate, np.lexsort((weight, host, group)).tolist(), host))
    for _ in _pair_flows(mate, unpaired, group):
        pass
    return mate


def _pair_flows(mate: Ints, flows: list[int], keys: Ints) -> Iterator[int]:
    """Pair adjacent flows with the same value in `keys`. Yield the flows that are left."""
    waiting = UNPAIRED
    for flow in flows:
        if waiting == UNPAIRED:
            waiting = flow
        elif keys[waiting] == keys[flow]:
            mate[waiting], mate[flow] = flow, waiting
            waiting = UNPAIRED
        else:
            yield waiting
            waiting = flow
    if waiting != UNPAIRED:
        yield waiting
