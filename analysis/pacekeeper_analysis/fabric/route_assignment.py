"""Assigns a route to each flow: the largest load of a link is minimal, and few flows move.

Equal flows over equal spines are edges of a bipartite multigraph, with sending groups on one side and receiving groups
on the other. Routes are colors. An equitable edge coloring loads no link with more than ⌈degree / routes⌉ flows, which
is optimal (König 1916; de Werra 1971). A flow gets the route with the most free capacity. If none has enough, one is
freed along an alternating chain of two routes, the shortest one (breadth first). If no such chain exists, the level
rises by one. The same routine adds the flows of a new job and repairs what a dead link has cut off, so one flow moves
one chain.

With dead links, or unequal capacities or flows, the theorem does not apply. Then chains may use any routes, and start
at both ends of a flow. `RouteAssignment.level` compared with `bound` shows the distance from the lower limit of any
plan.
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
"""Upper limit of pairs of routes along which a chain is searched."""
MAX_LINKS_SEARCHED = 2_000
"""Upper limit of links searched for chains over any routes, before the level rises."""


@dataclass(frozen=True)
class Flows:
    """Arrays with one entry per flow."""

    source: Ints  # group
    destination: Ints  # group
    weight: Ints  # demand, in whole units of the smallest one that counts

    def __post_init__(self) -> None:
        if not len(self.source) == len(self.destination) == len(self.weight):
            raise InputError("flows: sources, destinations and weights differ in number")
        if len(self.weight) and self.weight.min() < 1:
            raise InputError("flows: a weight is below 1; leave out flows without traffic")

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class RouteAssignment:
    """The result of an assignment.

    `level` is the largest load of a link, in units of weight on a link of the best capacity. `bound` is a lower limit
    of any plan. `moved` are flows that had a live route and have another one now. `lost` are flows for which no route
    is alive.
    """

    routes: Ints  # of each flow; NO_ROUTE: it needs none, or none exists (`lost`)
    level: int
    bound: int
    moved: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


def assign_routes(
    topology: Topology, flows: Flows, previous_routes: Sequence[int] | None = None, fixed: Sequence[bool] | None = None
) -> RouteAssignment:
    """Assign a route to each flow.

    `previous_routes` is each flow's previous route, NO_ROUTE if none. Flows in `fixed` must not move while their route
    is alive: they belong to another job, for which the new round would cost more than it gains.
    """
    repaired = _plan_routes(_RoutePlanner(topology, flows, previous_routes, fixed), replan=False)
    if repaired.level == repaired.bound or previous_routes is None:
        return repaired
    replanned = _plan_routes(_RoutePlanner(topology, flows, previous_routes, fixed), replan=True)
    return min(repaired, replanned, key=lambda assignment: (assignment.level, len(assignment.moved)))


def _plan_routes(planner: _RoutePlanner, replan: bool) -> RouteAssignment:
    """Run a planner.

    With `replan`, flows above the reachable level get other routes. Otherwise flows move only to make room.
    """
    if replan:
        planner.free_overloaded_links()
    else:
        planner.raise_level()
    planner.place()
    return planner.build_assignment()


def compute_load_bound(topology: Topology, flows: Flows) -> int:
    """Return a lower limit of the level of any plan: by cuts, and by pairs that share few routes."""
    pairs = _collect_group_pairs(topology, flows)
    return max(
        _compute_cut_bound(topology, flows, pairs),
        0 if topology.is_symmetric else _compute_narrow_pairs_bound(topology, pairs),
    )


class _GroupPairs(NamedTuple):
    """Pairs of groups with flows and a route between them. Arrays have one entry per pair."""

    source: Ints
    destination: Ints
    weight: Ints
    route_capacities: Ints  # (pairs, routes): upper limit of what each carries


def _collect_group_pairs(topology: Topology, flows: Flows) -> _GroupPairs:
    crosses = flows.source != flows.destination
    pair = flows.source[crosses] * topology.groups + flows.destination[crosses]
    weight = _sum_weights(pair, flows.weight[crosses], topology.groups**2)
    source, destination = np.divmod(np.flatnonzero(weight), topology.groups)
    capacities = np.minimum(topology.up[source], topology.down[destination])
    alive = capacities.any(axis=1)
    return _GroupPairs(source[alive], destination[alive], weight[weight > 0][alive], capacities[alive])


def _compute_cut_bound(topology: Topology, flows: Flows, pairs: _GroupPairs) -> int:
    """Return a lower limit by the largest flow, by all links of each group, and by those of each pair."""
    best_capacity = np.zeros((topology.groups, topology.groups), dtype=np.int64)
    best_capacity[pairs.source, pairs.destination] = pairs.route_capacities.max(axis=1, initial=0)
    flow_capacity = best_capacity[flows.source, flows.destination]
    weight = flows.weight[flow_capacity > 0] * topology.unit
    level = int((-(-weight // flow_capacity[flow_capacity > 0])).max(initial=0))
    for links, ends in ((topology.up, pairs.source), (topology.down, pairs.destination)):
        level = max(level, _compute_min_level(links, topology.unit, _sum_weights(ends, pairs.weight, topology.groups)))
    return max(level, _compute_min_level(pairs.route_capacities, topology.unit, pairs.weight))


def _compute_narrow_pairs_bound(topology: Topology, pairs: _GroupPairs) -> int:
    """Return a lower limit by the routes that a pair has: pairs without others share them."""
    level, alive = 0, pairs.route_capacities > 0
    for links, ends in ((topology.up, pairs.source), (topology.down, pairs.destination)):
        for group in np.unique(ends).tolist():
            in_group = ends == group
            contained = alive[in_group].astype(np.int64) @ ~alive[in_group].T == 0
            level = max(
                level,
                _compute_min_level(links[group] * alive[in_group], topology.unit, pairs.weight[in_group] @ contained),
            )
    return level


def keep_live_routes(topology: Topology, flows: Flows, previous_routes: Sequence[int] | None) -> Ints:
    """Return the previous routes that are alive and needed, and NO_ROUTE for the others."""
    if previous_routes is None:
        return np.full(len(flows), NO_ROUTE, dtype=np.int64)
    routes = np.array(previous_routes, dtype=np.int64)
    routes[(routes < 0) | (routes >= topology.routes) | (flows.source == flows.destination)] = NO_ROUTE
    index = np.maximum(routes, 0)
    alive = (topology.up[flows.source, index] > 0) & (topology.down[flows.destination, index] > 0)
    return np.where(alive, routes, NO_ROUTE)


def _compute_min_level(capacities: Ints, unit: int, weight: Ints) -> int:
    """Return the level at which the links of each row together hold its weight. Rows of dead links do not count."""
    total = capacities.sum(axis=1)
    capacities, weight, total = capacities[total > 0], weight[total > 0], total[total > 0]
    level = -(-weight * unit // total)
    while (short := (level[:, None] * capacities // unit).sum(axis=1) < weight).any():
        level[short] += 1
    return int(level.max(initial=0))


def _sum_weights(index: Ints, weight: Ints, count: int) -> Ints:
    return np.bincount(index, weight, count).astype(np.int64)


class _RoutePlanner:
    """Plans routes. Links are numbered group × routes + route, uplinks and downlinks separately."""

    def __init__(
        self, topology: Topology, flows: Flows, previous_routes: Sequence[int] | None, fixed: Sequence[bool] | None
    ) -> None:
        self._topology, self._flows = topology, flows
        self._source: list[int] = flows.source.tolist()
        self._destination: list[int] = flows.destination.tolist()
        self._weight: list[int] = flows.weight.tolist()
        self._alive_up: list[bool] = (topology.up > 0).ravel().tolist()
        self._alive_down: list[bool] = (topology.down > 0).ravel().tolist()
        self._before = keep_live_routes(topology, flows, previous_routes)
        is_fixed = np.zeros(len(flows), bool) if fixed is None else np.array(fixed, bool)
        self._fixed = is_fixed & (self._before != NO_ROUTE)
        self._way: list[int] = self._before.tolist()
        self._on_links: tuple[list[list[int]], list[list[int]]] | None = None
        self._pairs = _collect_group_pairs(topology, flows)
        self._bound, self._bound_is_final = _compute_cut_bound(topology, flows, self._pairs), topology.is_symmetric
        self._set_level(self._bound)

    def free_overloaded_links(self) -> None:
        """Remove flows above the reachable level from their routes."""
        free_capacity = self._compute_free_capacity(self._level)
        for side, rooms in enumerate((self._room_up, self._room_down)):
            for link in np.flatnonzero(free_capacity[side] < 0).tolist():
                for flow in reversed(self._get_flows_by_link()[side][link].copy()):
                    if rooms[link] < 0 and not self._fixed[flow]:
                        self._take(flow)

    def raise_level(self) -> None:
        """Raise the level so that no flow has to move."""
        level = self._compute_largest_load(self._before)
        if level > self._level:
            self._set_level(level)

    def place(self) -> None:
        """Place all flows without a route, the heaviest first, because they are the hardest to place."""
        unrouted = [flow for flow in self._list_unrouted() if any(self._find_live_routes(flow))]
        for flow in sorted(unrouted, key=lambda flow: -self._weight[flow]):
            while not (self._put_on_freest_route(flow) or self._put_by_chain(flow) or self._put_by_force(flow)):
                self._sharpen_bound()
                self._set_level(max(self._bound, self._level + 1))

    def build_assignment(self) -> RouteAssignment:
        routes = np.array(self._way, dtype=np.int64)
        level = self._compute_largest_load(routes)
        if level > self._bound:
            self._sharpen_bound()
        moved = (self._before != NO_ROUTE) & (routes != NO_ROUTE) & (routes != self._before)
        return RouteAssignment(
            routes=routes,
            level=level,
            bound=self._bound,
            moved=tuple(np.flatnonzero(moved).tolist()),
            lost=tuple(self._list_unrouted()),
        )

    def _list_unrouted(self) -> list[int]:
        crosses = self._flows.source != self._flows.destination
        return np.flatnonzero(crosses & (np.array(self._way, dtype=np.int64) == NO_ROUTE)).tolist()

    def _find_live_routes(self, flow: int) -> list[bool]:
        """Return which routes are alive for the flow."""
        route_count = self._topology.routes
        up, down = self._source[flow] * route_count, self._destination[flow] * route_count
        pairs = zip(self._alive_up[up : up + route_count], self._alive_down[down : down + route_count], strict=True)
        return [up_alive and down_alive for up_alive, down_alive in pairs]

    def _compute_largest_load(self, routes: Ints) -> int:
        largest = 0
        for capacities, load in zip((self._topology.up, self._topology.down), self._compute_loads(routes), strict=True):
            used = load > 0
            if used.any():
                largest = max(largest, int((-(-load[used] * self._topology.unit // capacities.ravel()[used])).max()))
        return largest

    def _compute_loads(self, routes: Ints) -> tuple[Ints, Ints]:
        """Return the loads of all uplinks and all downlinks."""
        flows, size = self._flows, self._topology.up.size
        routed = routes != NO_ROUTE
        up, down = (
            _sum_weights(ends[routed] * self._topology.routes + routes[routed], flows.weight[routed], size)
            for ends in (flows.source, flows.destination)
        )
        return up, down

    def _set_level(self, level: int) -> None:
        """Set the level, and recompute the free capacities."""
        self._level = level
        up, down = self._compute_free_capacity(level)
        self._room_up: list[int] = up.tolist()
        self._room_down: list[int] = down.tolist()

    def _compute_free_capacity(self, level: int) -> tuple[Ints, Ints]:
        """Return the free capacity of all uplinks and downlinks at a level. Below 0 means overload."""
        up, down = self._compute_loads(np.array(self._way, dtype=np.int64))
        topology = self._topology
        return level * topology.up.ravel() // topology.unit - up, level * topology.down.ravel() // topology.unit - down

    def _sharpen_bound(self) -> None:
        """Raise the bound to that of `compute_load_bound`. It takes longer, and is rarely needed."""
        if not self._bound_is_final:
            self._bound = max(self._bound, _compute_narrow_pairs_bound(self._topology, self._pairs))
            self._bound_is_final = True

    def _get_flows_by_link(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the flows on each uplink and downlink. Only chains need them, and most flows need no chain."""
        if self._on_links is None:
            size = self._topology.up.size
            self._on_links = [[] for _ in range(size)], [[] for _ in range(size)]
            for flow, route in enumerate(self._way):
                if route != NO_ROUTE:
                    self._on_links[0][self._source[flow] * self._topology.routes + route].append(flow)
                    self._on_links[1][self._destination[flow] * self._topology.routes + route].append(flow)
        return self._on_links

    def _put(self, flow: int, route: int) -> None:
        up = self._source[flow] * self._topology.routes + route
        down = self._destination[flow] * self._topology.routes + route
        self._way[flow] = route
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
        """Return the free capacity of each route at the flow's two ends. A dead link has none."""
        route_count = self._topology.routes
        up, down = self._source[flow] * route_count, self._destination[flow] * route_count
        return self._room_up[up : up + route_count], self._room_down[down : down + route_count]

    def _put_on_freest_route(self, flow: int) -> bool:
        rooms = list(map(min, *self._get_free_capacity(flow)))
        largest = max(rooms)
        if largest < self._weight[flow]:
            return False
        self._put(flow, rooms.index(largest))
        return True

    def _put_by_chain(self, flow: int) -> bool:
        weight, alive = self._weight[flow], self._find_live_routes(flow)
        free_at_source, free_at_destination = (
            [route for route, room in enumerate(rooms) if room >= weight] for rooms in self._get_free_capacity(flow)
        )
        pairs = ((a, b) for a in free_at_source for b in free_at_destination if alive[a])
        for a, b in islice(pairs, MAX_ROUTE_PAIRS_SEARCHED):
            chain = self._find_chain(flow, a, b)
            if chain is not None:
                for moved_flow, route in chain:
                    self._take(moved_flow)
                    self._put(moved_flow, route)
                self._put(flow, a)
                return True
        return False

    def _find_chain(self, new_flow: int, a: int, b: int) -> list[tuple[int, int]] | None:
        """Return the moves that make `new_flow` fit on `a`. None if there is no chain.

        Flows of its weight move from a to b at receiving groups, and back at sending groups, until one ends at free
        capacity. The source of `new_flow` has free capacity on a, its destination on b.
        """
        route_count, weight = self._topology.routes, self._weight[new_flow]
        on_up, on_down = self._get_flows_by_link()
        first = _GroupSide(True, self._destination[new_flow])
        arrivals: dict[_GroupSide, tuple[int, _GroupSide] | None] = {first: None}
        queue = deque([first])
        while queue:
            group_side = queue.popleft()
            if group_side.receives:
                on_link, ends, target = on_down[group_side.group * route_count + a], self._source, b
                rooms, alive = self._room_up, self._alive_up
            else:
                on_link, ends, target = on_up[group_side.group * route_count + b], self._destination, a
                rooms, alive = self._room_down, self._alive_down
            for flow in on_link:
                end = _GroupSide(not group_side.receives, ends[flow])
                link = end.group * route_count + target
                if self._weight[flow] != weight or self._fixed[flow] or end in arrivals or not alive[link]:
                    continue
                arrivals[end] = flow, group_side
                if rooms[link] >= weight:
                    return list(_trace_chain(arrivals, end, a, b))
                queue.append(end)
        return None

    def _put_by_force(self, flow: int) -> bool:
        """Place a flow on a full route if no two routes suffice. The overload at its two ends moves on."""
        route_count, link_budget = self._topology.routes, iter(range(MAX_LINKS_SEARCHED))
        room = [min(up, down) for up, down in zip(*self._get_free_capacity(flow), strict=True)]
        alive = [route for route, alive in enumerate(self._find_live_routes(flow)) if alive]
        for route in sorted(alive, key=lambda route: -room[route]):
            moves: list[tuple[int, int]] = []
            self._put(flow, route)
            ends = (self._source[flow], self._destination[flow])
            if all(
                self._relieve(_DirectedLink(side, ends[side] * route_count + route), link_budget, moves)
                for side in (0, 1)
            ):
                return True
            for moved_flow, previous_route in reversed(moves):
                self._take(moved_flow)
                self._put(moved_flow, previous_route)
            self._take(flow)
        return False

    def _relieve(self, link: _DirectedLink, link_budget: Iterator[int], moves: list[tuple[int, int]]) -> bool:
        """Move flows until a link is not overloaded. `moves` receives (flow, previous route) of all moved flows."""
        rooms = (self._room_up, self._room_down)
        while rooms[link.side][link.number] < 0:
            changes = self._find_detours(link, link_budget) or self._find_exchange(link)
            if changes is None:
                return False
            for flow, route in changes:
                moves.append((flow, self._way[flow]))
                self._take(flow)
                self._put(flow, route)
        return True

    def _find_exchange(self, link: _DirectedLink) -> list[tuple[int, int]] | None:
        """Return (flow, new route) pairs: a flow leaves a link, and a lighter one of its group takes its route."""
        route_count, on_links = self._topology.routes, self._get_flows_by_link()[link.side]
        group, route = divmod(link.number, route_count)
        for target in (target for target in range(route_count) if target != route):
            for flow, lighter in product(on_links[link.number], on_links[group * route_count + target]):
                if self._weight[lighter] < self._weight[flow] and not (self._fixed[flow] or self._fixed[lighter]):
                    exchange = [(flow, target), (lighter, route)]
                    if self._fits(exchange):
                        return exchange
        return None

    def _find_detours(self, first: _DirectedLink, link_budget: Iterator[int]) -> list[tuple[int, int]] | None:
        """Return (flow, new route) pairs that make one flow leave a link. None if there are none.

        Each takes any route with free capacity at the group of the link that it leaves, which may overload its other
        end. The search is breadth first over links.
        """
        route_count, ends = self._topology.routes, (self._source, self._destination)
        rooms, on_links = (self._room_up, self._room_down), self._get_flows_by_link()
        arrivals: dict[_DirectedLink, tuple[int, _DirectedLink] | None] = {first: None}
        queue = deque([first])
        for _ in link_budget:
            if not queue:
                return None
            link = queue.popleft()
            side, (group, route), step = link.side, divmod(link.number, route_count), arrivals[link]
            freed_route, freed_weight = (NO_ROUTE, 0) if step is None else (self._way[step[0]], self._weight[step[0]])
            overload = freed_weight - rooms[side][link.number] if step is not None else 0
            for flow in on_links[side][link.number]:
                weight = self._weight[flow]
                if weight < overload or self._fixed[flow]:
                    continue
                for target in range(route_count):
                    end = _DirectedLink(1 - side, ends[1 - side][flow] * route_count + target)
                    room = rooms[side][group * route_count + target] + (freed_weight if target == freed_route else 0)
                    if target == route or room < weight or end in arrivals:
                        continue
                    arrivals[end] = flow, link
                    if rooms[end.side][end.number] < weight:
                        queue.append(end)
                    elif self._fits(chain := list(_trace_detours(arrivals, end, route_count))):
                        return chain
                    else:
                        del arrivals[end]
        return None

    def _fits(self, moves: Sequence[tuple[int, int]]) -> bool:
        """Return whether all moves together fit: a chain may cross one group, or a flow, twice."""
        if len({flow for flow, _ in moves}) < len(moves):
            return False
        route_count, load_change = self._topology.routes, Counter[_DirectedLink]()
        for flow, route in moves:
            for side, group in enumerate((self._source[flow], self._destination[flow])):
                load_change[_DirectedLink(side, group * route_count + route)] += self._weight[flow]
                load_change[_DirectedLink(side, group * route_count + self._way[flow])] -= self._weight[flow]
        rooms = (self._room_up, self._room_down)
        return all(added <= max(0, rooms[link.side][link.number]) for link, added in load_change.items())


class _DirectedLink(NamedTuple):
    side: int  # 0: uplinks
    number: int


def _trace_detours(
    arrivals: Mapping[_DirectedLink, tuple[int, _DirectedLink] | None], end: _DirectedLink, route_count: int
) -> Iterator[tuple[int, int]]:
    """Yield (flow, new route) of a chain, the last first.

    `arrivals` is the flow that arrived at each link, and the link from which it had to move.
    """
    link, step = end, arrivals[end]
    while step is not None:
        flow, previous_link = step
        yield flow, link.number % route_count
        link, step = previous_link, arrivals[previous_link]


class _GroupSide(NamedTuple):
    """A group's side on which a chain has placed one flow too many."""

    receives: bool
    group: int


def _trace_chain(
    arrivals: Mapping[_GroupSide, tuple[int, _GroupSide] | None], end: _GroupSide, a: int, b: int
) -> Iterator[tuple[int, int]]:
    """Yield (flow, new route) of a chain."""
    step = arrivals[end]
    while step is not None:
        flow, group_side = step
        yield flow, b if group_side.receives else a
        step = arrivals[group_side]
