"""Which way each flow takes: the largest load of a link as small as can be, and few flows moved.

Equal flows over equal spines are edges of a bipartite multigraph, sending groups on one side and receiving ones on the
other; ways are colours. An equitable edge colouring loads no link with more than ⌈degree / ways⌉ flows, and nothing can
do better (König 1916; de Werra 1971). A flow gets the way with most room; where none has any, one is made free along an
alternating chain of two ways, the shortest one (breadth first); where there is no such chain, the level rises by one.
The same routine adds the flows of a new job and mends what a dead link has cut off, so that one flow moves one chain.

With dead links, or unequal capacities or flows, the colouring is no theorem any more. Then chains may go over any ways,
and start at both ends of a flow; and `Assignment.level` beside `bound` says how far it is from what no plan can beat.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from .topology import NO_ROUTE, Ints, Topology

MAX_ROUTE_PAIRS_SEARCHED = 64
"""Pairs of ways along which a chain is looked for."""
MAX_LINKS_SEARCHED = 2_000
"""Looked at for chains over any ways, before the level rises."""


@dataclass(frozen=True)
class Flows:
    """Arrays, one entry a flow."""

    source: Ints  # group
    destination: Ints  # group
    weight: Ints  # demand, in whole units of the smallest that counts

    def __post_init__(self) -> None:
        if not len(self.source) == len(self.destination) == len(self.weight):
            raise InputError("flows: sources, destinations and weights differ in number")
        if len(self.weight) and self.weight.min() < 1:
            raise InputError("flows: a weight is below 1; leave out who sends nothing")

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class RouteAssignment:
    """`level`: the largest load of a link, in units of weight on a link of the best capacity; `bound`: below which no
    plan comes; `moved`: flows that had a way which is alive, and have another."""

    ways: Ints  # of each flow; WITHIN: it needs none, or there is none (`lost`)
    level: int
    bound: int
    moved: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


def assign_routes(
    topology: Topology, flows: Flows, present: Sequence[int] | None = None, fixed: Sequence[bool] | None = None
) -> RouteAssignment:
    """`present`: each flow's way so far, WITHIN where it has none. `fixed`: those that may not be moved while their way
    is alive: they are another job's, to whom the new round would cost more than it brings."""
    stays = _plan_routes(_RoutePlanner(topology, flows, present, fixed), anew=False)
    if stays.level == stays.bound or present is None:
        return stays
    better = _plan_routes(_RoutePlanner(topology, flows, present, fixed), anew=True)
    return min(stays, better, key=lambda found: (found.level, len(found.moved)))


def _plan_routes(planner: _RoutePlanner, anew: bool) -> RouteAssignment:
    """`anew`: what is above the level that may be reached looks for another way; else nobody moves but to make room."""
    if anew:
        planner.free_overloaded_links()
    else:
        planner.raise_level()
    planner.place()
    return planner.build_assignment()


def compute_load_bound(topology: Topology, flows: Flows) -> int:
    """A level below which no plan comes: by cuts, and by what has to share a few ways."""
    pairs = _collect_group_pairs(topology, flows)
    return max(_compute_cut_bound(topology, flows, pairs), 0 if topology.is_symmetric else _compute_narrow_pairs_bound(topology, pairs))


class _GroupPairs(NamedTuple):
    """Of groups between which flows go that have a way; arrays, one entry a pair."""

    source: Ints
    destination: Ints
    weight: Ints
    ways: Ints  # (pairs, ways): what each carries at most


def _collect_group_pairs(topology: Topology, flows: Flows) -> _GroupPairs:
    crosses = flows.source != flows.destination
    place = flows.source[crosses] * topology.groups + flows.destination[crosses]
    weight = _sum_weights(place, flows.weight[crosses], topology.groups**2)
    source, destination = np.divmod(np.flatnonzero(weight), topology.groups)
    ways = np.minimum(topology.up[source], topology.down[destination])
    alive = ways.any(axis=1)
    return _GroupPairs(source[alive], destination[alive], weight[weight > 0][alive], ways[alive])


def _compute_cut_bound(topology: Topology, flows: Flows, pairs: _GroupPairs) -> int:
    """By the largest flow, by all links of each group, and by those of each pair."""
    best = np.zeros((topology.groups, topology.groups), dtype=np.int64)
    best[pairs.source, pairs.destination] = pairs.ways.max(axis=1, initial=0)
    of_flows = best[flows.source, flows.destination]
    weight = flows.weight[of_flows > 0] * topology.unit
    level = int((-(-weight // of_flows[of_flows > 0])).max(initial=0))
    for links, ends in ((topology.up, pairs.source), (topology.down, pairs.destination)):
        level = max(level, _compute_min_level(links, topology.unit, _sum_weights(ends, pairs.weight, topology.groups)))
    return max(level, _compute_min_level(pairs.ways, topology.unit, pairs.weight))


def _compute_narrow_pairs_bound(topology: Topology, pairs: _GroupPairs) -> int:
    """By those ways of a group that a pair has: what has no others shares them."""
    level, alive = 0, pairs.ways > 0
    for links, ends in ((topology.up, pairs.source), (topology.down, pairs.destination)):
        for group in np.unique(ends).tolist():
            its = ends == group
            inside = alive[its].astype(np.int64) @ ~alive[its].T == 0
            level = max(level, _compute_min_level(links[group] * alive[its], topology.unit, pairs.weight[its] @ inside))
    return level


def keep_live_routes(topology: Topology, flows: Flows, present: Sequence[int] | None) -> Ints:
    """The ways so far, as far as they are alive and needed; WITHIN for the others."""
    if present is None:
        return np.full(len(flows), NO_ROUTE, dtype=np.int64)
    found = np.array(present, dtype=np.int64)
    found[(found < 0) | (found >= topology.routes) | (flows.source == flows.destination)] = NO_ROUTE
    at = np.maximum(found, 0)
    alive = (topology.up[flows.source, at] > 0) & (topology.down[flows.destination, at] > 0)
    return np.where(alive, found, NO_ROUTE)


def _compute_min_level(capacities: Ints, unit: int, weight: Ints) -> int:
    """At which the links of each row together hold its weight; a row whose links are all dead bounds nobody."""
    total = capacities.sum(axis=1)
    capacities, weight, total = capacities[total > 0], weight[total > 0], total[total > 0]
    level = -(-weight * unit // total)
    while (short := (level[:, None] * capacities // unit).sum(axis=1) < weight).any():
        level[short] += 1
    return int(level.max(initial=0))


def _sum_weights(place: Ints, weight: Ints, places: int) -> Ints:
    return np.bincount(place, weight, places).astype(np.int64)


class _RoutePlanner:
    """Links are numbered group × ways + way, uplinks and downlinks each by themselves."""

    def __init__(
        self, topology: Topology, flows: Flows, present: Sequence[int] | None, fixed: Sequence[bool] | None
    ) -> None:
        self._topology, self._flows = topology, flows
        self._source: list[int] = flows.source.tolist()
        self._destination: list[int] = flows.destination.tolist()
        self._weight: list[int] = flows.weight.tolist()
        self._alive_up: list[bool] = (topology.up > 0).ravel().tolist()
        self._alive_down: list[bool] = (topology.down > 0).ravel().tolist()
        self._before = keep_live_routes(topology, flows, present)
        held = np.zeros(len(flows), bool) if fixed is None else np.array(fixed, bool)
        self._fixed = held & (self._before != NO_ROUTE)
        self._way: list[int] = self._before.tolist()
        self._on_links: tuple[list[list[int]], list[list[int]]] | None = None
        self._pairs = _collect_group_pairs(topology, flows)
        self._bound, self._bound_is_final = _compute_cut_bound(topology, flows, self._pairs), topology.is_symmetric
        self._set_level(self._bound)

    def free_overloaded_links(self) -> None:
        """Takes what is too much at the level that can be reached from its way."""
        rooms_now = self._compute_free_capacity(self._level)
        for side, rooms in enumerate((self._room_up, self._room_down)):
            for link in np.flatnonzero(rooms_now[side] < 0).tolist():
                for flow in reversed(self._get_flows_by_link()[side][link].copy()):
                    if rooms[link] < 0 and not self._fixed[flow]:
                        self._take(flow)

    def raise_level(self) -> None:
        """The level at which nothing has to move."""
        level = self._compute_largest_load(self._before)
        if level > self._level:
            self._set_level(level)

    def place(self) -> None:
        """All that have no way, the heaviest first: they find room hardest."""
        waiting = [flow for flow in self._list_unrouted() if any(self._find_live_routes(flow))]
        for flow in sorted(waiting, key=lambda flow: -self._weight[flow]):
            while not (self._put_on_freest_route(flow) or self._put_by_chain(flow) or self._put_by_force(flow)):
                self._sharpen_bound()
                self._set_level(max(self._bound, self._level + 1))

    def build_assignment(self) -> RouteAssignment:
        ways = np.array(self._way, dtype=np.int64)
        level = self._compute_largest_load(ways)
        if level > self._bound:
            self._sharpen_bound()
        moved = (self._before != NO_ROUTE) & (ways != NO_ROUTE) & (ways != self._before)
        return RouteAssignment(
            ways=ways,
            level=level,
            bound=self._bound,
            moved=tuple(np.flatnonzero(moved).tolist()),
            lost=tuple(self._list_unrouted()),
        )

    def _list_unrouted(self) -> list[int]:
        crosses = self._flows.source != self._flows.destination
        return np.flatnonzero(crosses & (np.array(self._way, dtype=np.int64) == NO_ROUTE)).tolist()

    def _find_live_routes(self, flow: int) -> list[bool]:
        """Which are alive for it."""
        ways = self._topology.routes
        up, down = self._source[flow] * ways, self._destination[flow] * ways
        pairs = zip(self._alive_up[up : up + ways], self._alive_down[down : down + ways], strict=True)
        return [leaves and comes for leaves, comes in pairs]

    def _compute_largest_load(self, ways: Ints) -> int:
        largest = 0
        for capacities, load in zip((self._topology.up, self._topology.down), self._compute_loads(ways), strict=True):
            used = load > 0
            if used.any():
                largest = max(largest, int((-(-load[used] * self._topology.unit // capacities.ravel()[used])).max()))
        return largest

    def _compute_loads(self, ways: Ints) -> tuple[Ints, Ints]:
        """Of all uplinks, of all downlinks."""
        flows, size = self._flows, self._topology.up.size
        going = ways != NO_ROUTE
        up, down = (
            _sum_weights(ends[going] * self._topology.routes + ways[going], flows.weight[going], size)
            for ends in (flows.source, flows.destination)
        )
        return up, down

    def _set_level(self, level: int) -> None:
        """Rooms anew, at this level."""
        self._level = level
        up, down = self._compute_free_capacity(level)
        self._room_up: list[int] = up.tolist()
        self._room_down: list[int] = down.tolist()

    def _compute_free_capacity(self, level: int) -> tuple[Ints, Ints]:
        """What all uplinks, and downlinks, carry at a level beside what is on them; below 0: there is too much."""
        up, down = self._compute_loads(np.array(self._way, dtype=np.int64))
        topology = self._topology
        return level * topology.up.ravel() // topology.unit - up, level * topology.down.ravel() // topology.unit - down

    def _sharpen_bound(self) -> None:
        """To `bound`'s. It takes longer, and is seldom needed."""
        if not self._bound_is_final:
            self._bound = max(self._bound, _compute_narrow_pairs_bound(self._topology, self._pairs))
            self._bound_is_final = True

    def _get_flows_by_link(self) -> tuple[list[list[int]], list[list[int]]]:
        """The flows on each uplink, on each downlink. Only chains need them, and most flows no chain."""
        if self._on_links is None:
            size = self._topology.up.size
            self._on_links = [[] for _ in range(size)], [[] for _ in range(size)]
            for flow, way in enumerate(self._way):
                if way != NO_ROUTE:
                    self._on_links[0][self._source[flow] * self._topology.routes + way].append(flow)
                    self._on_links[1][self._destination[flow] * self._topology.routes + way].append(flow)
        return self._on_links

    def _put(self, flow: int, way: int) -> None:
        up = self._source[flow] * self._topology.routes + way
        down = self._destination[flow] * self._topology.routes + way
        self._way[flow] = way
        self._room_up[up] -= self._weight[flow]
        self._room_down[down] -= self._weight[flow]
        if self._on_links is not None:
            self._on_links[0][up].append(flow)
            self._on_links[1][down].append(flow)

    def _take(self, flow: int) -> None:
        on_up, on_down = self._get_flows_by_link()
        up = self._source[flow] * self._topology.routes + self._way[flow]
        down = self._destination[flow] * self._topology.routes + self._way[flow]
        self._way[flow] = NO_ROUTE
        self._room_up[up] += self._weight[flow]
        self._room_down[down] += self._weight[flow]
        on_up[up].remove(flow)
        on_down[down].remove(flow)

    def _get_free_capacity(self, flow: int) -> tuple[list[int], list[int]]:
        """By way, at its two ends. A dead link has room for nothing."""
        ways = self._topology.routes
        up, down = self._source[flow] * ways, self._destination[flow] * ways
        return self._room_up[up : up + ways], self._room_down[down : down + ways]

    def _put_on_freest_route(self, flow: int) -> bool:
        rooms = list(map(min, *self._get_free_capacity(flow)))
        most = max(rooms)
        if most < self._weight[flow]:
            return False
        self._put(flow, rooms.index(most))
        return True

    def _put_by_chain(self, flow: int) -> bool:
        weight, alive = self._weight[flow], self._find_live_routes(flow)
        leaving, coming = ([way for way, room in enumerate(rooms) if room >= weight] for rooms in self._get_free_capacity(flow))
        pairs = ((a, b) for a in leaving for b in coming if alive[a])
        for a, b in islice(pairs, MAX_ROUTE_PAIRS_SEARCHED):
            chain = self._find_chain(flow, a, b)
            if chain is not None:
                for moved, way in chain:
                    self._take(moved)
                    self._put(moved, way)
                self._put(flow, a)
                return True
        return False

    def _find_chain(self, new: int, a: int, b: int) -> list[tuple[int, int]] | None:
        """What has to move for `new` to fit on `a`: flows of its weight, from a to b at receiving groups and back at
        sending ones, until one ends where there is room. Its source has room on a, its destination on b."""
        ways, weight = self._topology.routes, self._weight[new]
        on_up, on_down = self._get_flows_by_link()
        first = _GroupSide(True, self._destination[new])
        came: dict[_GroupSide, tuple[int, _GroupSide] | None] = {first: None}
        queue = deque([first])
        while queue:
            place = queue.popleft()
            if place.receives:
                on_link, ends, to = on_down[place.group * ways + a], self._source, b
                rooms, alive = self._room_up, self._alive_up
            else:
                on_link, ends, to = on_up[place.group * ways + b], self._destination, a
                rooms, alive = self._room_down, self._alive_down
            for flow in on_link:
                end = _GroupSide(not place.receives, ends[flow])
                link = end.group * ways + to
                if self._weight[flow] != weight or self._fixed[flow] or end in came or not alive[link]:
                    continue
                came[end] = flow, place
                if rooms[link] >= weight:
                    return list(_trace_chain(came, end, a, b))
                queue.append(end)
        return None

    def _put_by_force(self, flow: int) -> bool:
        """Where no two ways are enough: on a way that is full, and what is too much at its two ends moves on."""
        ways, links_left = self._topology.routes, iter(range(MAX_LINKS_SEARCHED))
        room = [min(one, other) for one, other in zip(*self._get_free_capacity(flow), strict=True)]
        alive = [way for way, alive in enumerate(self._find_live_routes(flow)) if alive]
        for way in sorted(alive, key=lambda way: -room[way]):
            moves: list[tuple[int, int]] = []
            self._put(flow, way)
            ends = (self._source[flow], self._destination[flow])
            if all(self._relieve(_DirectedLink(side, ends[side] * ways + way), links_left, moves) for side in (0, 1)):
                return True
            for moved, before in reversed(moves):
                self._take(moved)
                self._put(moved, before)
            self._take(flow)
        return False

    def _relieve(self, link: _DirectedLink, links_left: Iterator[int], moves: list[tuple[int, int]]) -> bool:
        """Until it has not too much. moves: (flow, its way before) of all that had to move for it."""
        rooms = (self._room_up, self._room_down)
        while rooms[link.side][link.number] < 0:
            found = self._find_detours(link, links_left) or self._find_exchange(link)
            if found is None:
                return False
            for flow, way in found:
                moves.append((flow, self._way[flow]))
                self._take(flow)
                self._put(flow, way)
        return True

    def _find_exchange(self, link: _DirectedLink) -> list[tuple[int, int]] | None:
        """(flow, its new way), for a flow to leave a link and a lighter one of its group to take its way."""
        ways, on_links = self._topology.routes, self._get_flows_by_link()[link.side]
        group, way = divmod(link.number, ways)
        for to in (to for to in range(ways) if to != way):
            for flow, lighter in product(on_links[link.number], on_links[group * ways + to]):
                if self._weight[lighter] < self._weight[flow] and not (self._fixed[flow] or self._fixed[lighter]):
                    exchange = [(flow, to), (lighter, way)]
                    if self._fits(exchange):
                        return exchange
        return None

    def _find_detours(self, first: _DirectedLink, links_left: Iterator[int]) -> list[tuple[int, int]] | None:
        """(flow, its new way), for one flow to leave a link. Each takes any way that has room at the group of the link
        that it leaves, and there may then be too much at its other end: breadth first over links."""
        ways, ends = self._topology.routes, (self._source, self._destination)
        rooms, on_links = (self._room_up, self._room_down), self._get_flows_by_link()
        came: dict[_DirectedLink, tuple[int, _DirectedLink] | None] = {first: None}
        queue = deque([first])
        for _ in links_left:
            if not queue:
                return None
            link = queue.popleft()
            side, (group, way), step = link.side, divmod(link.number, ways), came[link]
            freed, by = (NO_ROUTE, 0) if step is None else (self._way[step[0]], self._weight[step[0]])
            over = by - rooms[side][link.number] if step is not None else 0
            for flow in on_links[side][link.number]:
                weight = self._weight[flow]
                if weight < over or self._fixed[flow]:
                    continue
                for to in range(ways):
                    end = _DirectedLink(1 - side, ends[1 - side][flow] * ways + to)
                    room = rooms[side][group * ways + to] + (by if to == freed else 0)
                    if to == way or room < weight or end in came:
                        continue
                    came[end] = flow, link
                    if rooms[end.side][end.number] < weight:
                        queue.append(end)
                    elif self._fits(chain := list(_trace_detours(came, end, ways))):
                        return chain
                    else:
                        del came[end]
        return None

    def _fits(self, moves: Sequence[tuple[int, int]]) -> bool:
        """Whether there is room for all of them together: a chain may cross one group, or a flow, twice."""
        if len({flow for flow, _ in moves}) < len(moves):
            return False
        ways, change = self._topology.routes, Counter[_DirectedLink]()
        for flow, to in moves:
            for side, group in enumerate((self._source[flow], self._destination[flow])):
                change[_DirectedLink(side, group * ways + to)] += self._weight[flow]
                change[_DirectedLink(side, group * ways + self._way[flow])] -= self._weight[flow]
        rooms = (self._room_up, self._room_down)
        return all(more <= max(0, rooms[link.side][link.number]) for link, more in change.items())


class _DirectedLink(NamedTuple):
    side: int  # 0: uplinks
    number: int


def _trace_detours(came: Mapping[_DirectedLink, tuple[int, _DirectedLink] | None], end: _DirectedLink, ways: int) -> Iterator[tuple[int, int]]:
    """(flow, its new way) of a chain, the last first. came: what has come to a link, and from where it had to move."""
    link, step = end, came[end]
    while step is not None:
        flow, before = step
        yield flow, link.number % ways
        link, step = before, came[before]


class _GroupSide(NamedTuple):
    """A group's side on which a chain has put one flow too many."""

    receives: bool
    group: int


def _trace_chain(
    came: Mapping[_GroupSide, tuple[int, _GroupSide] | None], end: _GroupSide, a: int, b: int
) -> Iterator[tuple[int, int]]:
    """(flow, its new way) of a chain."""
    step = came[end]
    while step is not None:
        flow, place = step
        yield flow, b if place.receives else a
        step = came[place]
