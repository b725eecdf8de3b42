"""Which of its host's two ports each flow leaves by, and comes in by: both ports of every host are to carry half.

Flows are put in pairs that must take different planes: at the sending side those of one host, and what a host has too
many with what another host of its group has; at the receiving side likewise. So each flow is in two pairs at most, and
pairs form paths and circles on which the sides take turns: two planes are enough for all of them. Each host's ports
then differ by one flow, and so do each group's (an Euler split, on two levels at once).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .assign import RouteAssignment, Flows, assign_routes, keep_live_routes
from .topology import NO_ROUTE, Ints, Topology

UNPAIRED = -1


def split_across_planes(sender: Ints, sending_group: Ints, receiver: Ints, receiving_group: Ints, weight: Ints) -> Ints:
    """The plane, 0 or 1, of each flow: by hosts and their groups. Flows alike in weight are paired."""
    count = len(sender)
    mates = [_find_mates(sender, sending_group, weight), _find_mates(receiver, receiving_group, weight)]
    plane = np.full(count, UNPAIRED, dtype=np.int64)
    for first in range(count):
        for side in (0, 1):  # from the first both ways, until the path ends or comes back
            flow, at = first, 0 if plane[first] == UNPAIRED else int(plane[first])
            while flow != UNPAIRED and (plane[flow] == UNPAIRED or flow == first):
                plane[flow] = at
                flow, side, at = int(mates[side][flow]), 1 - side, 1 - at
                if flow == first:
                    break
    return plane


def assign_planes(
    topology: Topology,
    flows: Flows,
    plane: Ints,
    present: Sequence[int] | None = None,
    fixed: Sequence[bool] | None = None,
) -> RouteAssignment:
    """As `assign`, with the plane of each flow given: for which no way of its plane is alive, it takes the other one's.

    Who is fixed has a present way of its plane.
    """
    before = keep_live_routes(topology, flows, present)
    held = np.zeros(len(flows), bool) if fixed is None else np.array(fixed, bool)
    plane = plane.copy()
    for _ in range(topology.planes):
        found = _assign_within_planes(topology, flows, plane, before, held)
        plane[list(found.lost)] = (plane[list(found.lost)] + 1) % topology.planes
        if not found.lost:
            break
    return found


def _assign_within_planes(topology: Topology, flows: Flows, plane: Ints, before: Ints, held: NDArray[np.bool_]) -> RouteAssignment:
    ways = np.full(len(flows), NO_ROUTE, dtype=np.int64)
    levels, bounds, lost = [0], [0], list[int]()
    for number in range(topology.planes):
        first, its = number * topology.spines, np.flatnonzero(plane == number)
        own = slice(first, first + topology.spines)
        part = Topology(topology.up[:, own], topology.down[:, own])
        stays = before[its] // topology.spines == number
        found = assign_routes(
            part,
            Flows(flows.source[its], flows.destination[its], flows.weight[its]),
            np.where(stays, before[its] - first, NO_ROUTE).tolist(),
            (held[its] & stays).tolist(),
        )
        ways[its] = np.where(found.ways == NO_ROUTE, NO_ROUTE, found.ways + first)
        levels.append(found.level)
        bounds.append(found.bound)
        lost += its[list(found.lost)].tolist()
    moved = (before != NO_ROUTE) & (ways != NO_ROUTE) & (ways != before)
    return RouteAssignment(ways, max(levels), max(bounds), tuple(np.flatnonzero(moved).tolist()), lost=tuple(sorted(lost)))


def _find_mates(host: Ints, group: Ints, weight: Ints) -> Ints:
    """Of each flow, the one that it is paired with; NOBODY: it is one too many."""
    mate = np.full(len(host), UNPAIRED, dtype=np.int64)
    left = list(_pair_flows(mate, np.lexsort((weight, host, group)).tolist(), host))
    for _ in _pair_flows(mate, left, group):
        pass
    return mate


def _pair_flows(mate: Ints, flows: list[int], of: Ints) -> Iterator[int]:
    """Pairs neighbours that are of the same; gives those that are left."""
    waiting = UNPAIRED
    for flow in flows:
        if waiting == UNPAIRED:
            waiting = flow
        elif of[waiting] == of[flow]:
            mate[waiting], mate[flow] = flow, waiting
            waiting = UNPAIRED
        else:
            yield waiting
            waiting = flow
    if waiting != UNPAIRED:
        yield waiting
