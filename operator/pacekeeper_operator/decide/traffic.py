"""Joint planning: which way each flow of each job takes through the fabric. Pure, and without a memory of its own.

All jobs' plans go in, with the ways that stand in them, and the ways that shall stand there come out. Who has a way
that is alive keeps it, unless what all jobs win by moving flows outweighs the rounds that this costs. Where a leaf has
other spines to choose among than when a round was planned, its ports may lead elsewhere: that flow is adrift until the
job's next round, which is begun where it is worth it. Whoever stops in the middle has changed some plans and others
not: the next look ends the same. A namespace that alone calls links slow has its own flows led around them, as far as
that slows nobody else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.fabric import load, patterns, planes
from pacekeeper_analysis.fabric.assign import RouteAssignment, Flows, assign_routes, keep_live_routes
from pacekeeper_analysis.fabric.topology import NO_ROUTE, Ints, Topology

from ..network import JobName, JobTraffic, RankPair, ReplanProposal, TrafficPlan, Wiring
from . import pricing

TRAFFIC_HORIZON_SECONDS = 600.0
"""What a better plan wins is reckoned over so long: jobs come and go, and change it again."""
HASHING_SAMPLES = 8
"""Guesses at where hashing has put what is not planned."""
MAX_DETOURED_FLOWS = 32
"""Flows of one namespace that are led around slow links in one look: for each, all rates are found anew."""
MAX_WEIGHT_RATIO = 16
"""The heaviest flow counts for so many of the lightest; between them, powers of two."""


def plan_joint_traffic(wiring: Wiring, jobs: Sequence[JobTraffic]) -> TrafficPlan | None:
    """None: there is no fabric to plan on."""
    if wiring.topology is None:
        return None
    topology = wiring.topology
    table = _build_flow_table(wiring, topology, jobs)
    before = _compute_present_speeds(topology, table)
    settled = _weigh_plan(topology, table, before, frozenset())
    movable = [place for place, job in enumerate(jobs) if _is_movable(wiring, job)]
    chosen = _choose_best_plan(topology, table, before, settled, [place for place in movable if jobs[place].acts])
    recommended = dict[JobName, ReplanProposal]()
    if not all(jobs[place].acts for place in movable):
        best = _choose_best_plan(topology, table, before, settled, movable)
        recommended = {name: one for name, one in _list_due_reroutes(topology, table, before, best).items() if not _can_act(jobs, name)}
    assignment, due = chosen.assignment, _list_due_reroutes(topology, table, before, chosen)
    for tenant, view in sorted(wiring.views.items()):
        around = _detour_slow_links(topology, view, table, tenant, assignment)
        if around is not None:
            assignment = around.assignment
            due |= _list_due_reroutes(view, table, _compute_present_speeds(view, table), around)
    return _build_traffic(topology, table, assignment, due, recommended)


def plan_job_routes(wiring: Wiring, others: Iterable[JobTraffic], own: JobTraffic) -> Mapping[RankPair, int]:
    """Ways of one job around those of the others, nobody of whom moves."""
    if wiring.topology is None:
        return {}
    table = _build_flow_table(wiring, wiring.topology, [*others, own])
    found = _assign_flows(wiring.topology, table, frozenset())
    tenant = own.name[0]
    if tenant in wiring.views:
        around = _detour_slow_links(wiring.topology, wiring.views[tenant], table, tenant, found, only=own.name)
        found = found if around is None else around.assignment
    return _collect_routes(table, found)[own.name]


def fingerprint_live_routes(wiring: Wiring, job: JobTraffic, ways: Mapping[RankPair, int]) -> Mapping[RankPair, int]:
    """What these ways of a job are chosen among, for `JobTraffic.among`; nothing where they are chosen among all."""
    if wiring.topology is None or wiring.routes is None:
        return {}
    table = _build_flow_table(wiring, wiring.topology, [job])
    chosen = _to_int_array(ways.get(pair, NO_ROUTE) for pair in table.pairs)
    found = wiring.routes.fingerprint_live_routes(table.flows.source, table.flows.destination, chosen)
    return {pair: number for pair, number in zip(table.pairs, found.tolist(), strict=True) if number}


def _is_movable(wiring: Wiring, job: JobTraffic) -> bool:
    """Who has a view of its own is led by that: what all others see would bring it back."""
    return _is_free(job) and job.name[0] not in wiring.views


def _is_free(job: JobTraffic) -> bool:
    return math.isfinite(job.round_seconds) and not job.held


def _can_act(jobs: Sequence[JobTraffic], name: JobName) -> bool:
    return next(job.acts for job in jobs if job.name == name)


def _choose_best_plan(
    topology: Topology, table: _FlowTable, before: Mapping[int, float], settled: _WeighedPlan, movable: Sequence[int]
) -> _WeighedPlan:
    """The plan that wins most, if some of the movable jobs move; `settled`: nobody does."""
    chosen = settled
    if settled.assignment.level == settled.assignment.bound:
        adrift = set(table.job_index[table.drifted].tolist())
        movable = [place for place in movable if place in adrift]
    for some in _list_movable_sets(table.jobs, movable):
        found = _weigh_plan(topology, table, before, some)
        fewer_lost = len(found.assignment.lost) <= len(chosen.assignment.lost)
        if found.net_seconds > max(0.0, chosen.net_seconds) and fewer_lost:
            chosen = found
    return chosen


def _list_movable_sets(jobs: Sequence[JobTraffic], movable: Sequence[int]) -> Iterator[frozenset[int]]:
    """Those whose rounds cost least, ever more of them."""
    cheapest = sorted(movable, key=lambda place: jobs[place].round_cost)
    count = 1
    while cheapest:
        yield frozenset(cheapest[:count])
        if count >= len(cheapest):
            return
        count *= 2


def list_ring_edges(job: JobTraffic) -> list[RankPair]:
    """Who sends to whom in its rings: gloo's goes through all ranks, each sends to the one before; NCCL has one through
    each place of the workers, in which each sends to the next one."""
    if not job.by_nccl:
        rings = [[rank for seat in job.seats for rank in seat.ranks]]
    else:
        each = min((len(seat.ranks) for seat in job.seats), default=0)
        rings = [[seat.ranks[place] for seat in job.seats] for place in range(each)]
    return [
        (edge.source, edge.destination) for ring in rings for edge in patterns.build_ring_edges(ring, backwards=not job.by_nccl)
    ]


@dataclass(frozen=True)
class _FlowTable:
    """All jobs' flows between leaves, as columns."""

    jobs: Sequence[JobTraffic]
    pairs: Sequence[RankPair]
    job_index: Ints  # its place in `jobs`
    sender: Ints  # node, numbered
    receiver: Ints
    flows: Flows
    live_routes: Ints  # the ways that the plans name, as far as they are alive; WITHIN: none
    drifted: NDArray[np.bool_]  # the flows that may have left these ways since their round was planned


def _build_flow_table(wiring: Wiring, topology: Topology, jobs: Sequence[JobTraffic]) -> _FlowTable:
    rows: list[_FlowRow] = []
    for number, (job, weights) in enumerate(zip(jobs, _compute_weights(jobs), strict=True)):
        node = {rank: seat.node for seat in job.seats for rank in seat.ranks}
        for pair, weight in weights.items():
            source, destination = (wiring.leaf_of.get(node[rank]) for rank in pair)
            if source is not None and destination is not None and source != destination:
                rows.append(_FlowRow(number, pair, node[pair[0]], node[pair[1]], weight))
    nodes = {name: number for number, name in enumerate(wiring.leaf_of)}
    sender, receiver = _to_int_array(nodes[row.sender] for row in rows), _to_int_array(nodes[row.receiver] for row in rows)
    leaves = _to_int_array(wiring.leaf_of.values())
    flows = Flows(leaves[sender], leaves[receiver], _to_int_array(row.weight for row in rows))
    ways = keep_live_routes(topology, flows, [jobs[row.job_index].ways.get(row.pair, NO_ROUTE) for row in rows])
    chosen_among = _to_int_array(jobs[row.job_index].among.get(row.pair, 0) for row in rows)
    adrift = (ways != NO_ROUTE) & (
        (wiring.routes or topology).fingerprint_live_routes(flows.source, flows.destination, ways) != chosen_among
    )
    pairs, numbers = [row.pair for row in rows], _to_int_array(row.job_index for row in rows)
    return _FlowTable(jobs, pairs, numbers, sender, receiver, flows, ways, adrift)


class _FlowRow(NamedTuple):
    job_index: int
    pair: RankPair
    sender: str
    receiver: str
    weight: int


def _to_int_array(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _compute_weights(jobs: Sequence[JobTraffic]) -> list[dict[RankPair, int]]:
    """Of each job's edges. What was measured is counted in parts of the heaviest; of whom nothing was, all are alike,
    and as heavy as the middle of those that were."""
    rings = [list_ring_edges(job) for job in jobs]
    sent = [{pair: job.sent.get(pair, 0.0) for pair in ring} for job, ring in zip(jobs, rings, strict=True)]
    known = sorted(bytes_ for of in sent for bytes_ in of.values() if bytes_ > 0)
    if not known:
        return [dict.fromkeys(ring, 1) for ring in rings]
    middle = known[len(known) // 2]

    def weight(bytes_: float) -> int:
        return 1 << max(0, round(math.log2(MAX_WEIGHT_RATIO * (bytes_ or middle) / known[-1])))

    weights = [{pair: weight(bytes_) for pair, bytes_ in of.items()} for of in sent]
    lightest = min(number for of in weights for number in of.values())
    return [{pair: number // lightest for pair, number in of.items()} for of in weights]


def _assign_flows(topology: Topology, table: _FlowTable, movable: frozenset[int]) -> RouteAssignment:
    """`movable`: the jobs whose flows may leave a way that is alive."""
    held = ~np.isin(table.job_index, list(movable))
    if topology.planes == 1:
        return assign_routes(topology, table.flows, table.live_routes.tolist(), held.tolist())
    plane = _assign_planes(topology, table, held)
    return planes.assign_planes(topology, table.flows, plane, table.live_routes.tolist(), held.tolist())


def _assign_planes(topology: Topology, table: _FlowTable, held: NDArray[np.bool_]) -> Ints:
    """By which of its host's ports each flow goes: who is held stays, the others so that ports are used evenly."""
    plane = np.where(held & (table.live_routes != NO_ROUTE), table.live_routes // topology.spines, NO_ROUTE)
    new, flows = np.flatnonzero(plane == NO_ROUTE), table.flows
    plane[new] = planes.split_across_planes(
        table.sender[new], flows.source[new], table.receiver[new], flows.destination[new], flows.weight[new]
    )
    return plane


class _WeighedPlan(NamedTuple):
    """Seconds of ranks, over the horizon."""

    assignment: RouteAssignment
    speeds_after: Mapping[int, float]  # the pace of each job's ring
    gain_seconds: float
    cost_seconds: float
    changed: frozenset[int]  # jobs that train, and would begin a round

    @property
    def net_seconds(self) -> float:
        return self.gain_seconds - self.cost_seconds


def _weigh_plan(topology: Topology, table: _FlowTable, before: Mapping[int, float], movable: frozenset[int]) -> _WeighedPlan:
    """The plan in which these jobs' flows may leave a way that is alive, and are found again where they are adrift."""
    found = _assign_flows(topology, table, movable)
    renewed = movable | {number for number, job in enumerate(table.jobs) if not job.round_seconds}
    return _weigh_assignment(topology, table, before, found, renewed & set(table.job_index[table.drifted].tolist()))


def _weigh_assignment(
    topology: Topology,
    table: _FlowTable,
    before: Mapping[int, float],
    found: RouteAssignment,
    renewed: Set[int] = frozenset(),
    tenant: str | None = None,
) -> _WeighedPlan:
    """`renewed`: jobs that begin a round even where no way of theirs changes. `tenant`: whose jobs alone count; None:
    all."""
    counted = {number for number, job in enumerate(table.jobs) if tenant in (None, job.name[0])}
    changed = set(table.job_index[found.ways != table.live_routes].tolist()) | renewed
    after = _compute_mean_speeds(topology, table, found.ways, table.drifted & ~np.isin(table.job_index, list(changed)))
    changed &= counted
    training = frozenset(number for number in changed if 0 < table.jobs[number].round_seconds < math.inf)
    gain = sum(
        TRAFFIC_HORIZON_SECONDS * job.ranks * job.waiting * (1.0 - before[number] / after[number])
        for number, job in enumerate(table.jobs)
        if after[number] > 0 and number in counted
    )
    return _WeighedPlan(found, after, gain, sum(table.jobs[number].round_cost for number in training), training)


def _list_due_reroutes(topology: Topology, table: _FlowTable, before: Mapping[int, float], chosen: _WeighedPlan) -> dict[JobName, ReplanProposal]:
    if chosen.net_seconds <= 0:
        return {}
    return {
        table.jobs[number].name: ReplanProposal(
            pricing.compute_traffic_slowdown(table.jobs[number].waiting, before[number], chosen.speeds_after[number]),
            _compute_recovered_share(topology, table, number, before[number], chosen.speeds_after[number]),
            chosen.gain_seconds,
            chosen.cost_seconds,
        )
        for number in sorted(chosen.changed)
    }


def _compute_recovered_share(topology: Topology, table: _FlowTable, number: int, before: float, after: float) -> float:
    """Part of what a job's ways cost it that the planned ones win back, beside links that it has to itself."""
    alone = topology.unit / int(table.flows.weight[table.job_index == number].max())
    if not before < alone:
        return 1.0
    if not before or not after:
        return 1.0 if after else 0.0
    return min(1.0, max(0.0, (1 / before - 1 / after) / (1 / before - 1 / alone)))


def _detour_slow_links(
    topology: Topology, view: Topology, table: _FlowTable, tenant: str, found: RouteAssignment, only: JobName | None = None
) -> _WeighedPlan | None:
    """The flows of one namespace (`only`: of one of its jobs) around links that it alone calls slow: nobody else is
    moved for it, nor slowed, whether it is true or not. None: nothing is to be won."""
    flows, jobs = table.flows, table.jobs
    free = [job.name == only if only else job.name[0] == tenant and job.acts and _is_free(job) for job in jobs]
    at = np.maximum(found.ways, 0)
    slow = (view.up < topology.up)[flows.source, at] | (view.down < topology.down)[flows.destination, at]
    leaving = np.flatnonzero(slow & (found.ways != NO_ROUTE) & np.array(free, dtype=bool)[table.job_index])
    others = [number for number, job in enumerate(jobs) if job.name[0] != tenant]
    usual, ways = _compute_ring_speeds(topology, table, found.ways), found.ways
    for flow in leaving.tolist()[:MAX_DETOURED_FLOWS]:
        tried = _move_to_emptiest_route(view, flows, ways, flow)
        now = _compute_ring_speeds(topology, table, tried)
        if all(now[number] >= usual[number] * (1 - load.MAX_EQUAL_RATE_DIFFERENCE) for number in others):
            ways = tried
    moved = tuple(np.flatnonzero((table.live_routes != NO_ROUTE) & (ways != table.live_routes)).tolist())
    assignment = replace(found, ways=ways, moved=moved)
    weighed = _weigh_assignment(view, table, _compute_present_speeds(view, table), assignment, tenant=tenant)
    if (ways == found.ways).all() or (weighed.changed and weighed.net_seconds <= 0):
        return None
    return weighed


def _move_to_emptiest_route(view: Topology, flows: Flows, ways: Ints, flow: int) -> Ints:
    """All ways, with this flow's where it would have most room."""
    others, source, destination = ways.copy(), int(flows.source[flow]), int(flows.destination[flow])
    others[flow] = NO_ROUTE
    up, down = load.compute_link_loads(view, flows.source, flows.destination, others, flows.weight.astype(float))
    room = np.minimum(
        view.up[source] / (up[source] + flows.weight[flow]),
        view.down[destination] / (down[destination] + flows.weight[flow]),
    )
    others[flow] = int(np.argmax(room)) if room.max() > room[ways[flow]] else ways[flow]
    return others


def _compute_present_speeds(topology: Topology, table: _FlowTable) -> Mapping[int, float]:
    """As things are."""
    return _compute_mean_speeds(topology, table, table.live_routes, (table.live_routes == NO_ROUTE) | table.drifted)


def _compute_mean_speeds(topology: Topology, table: _FlowTable, ways: Ints, unknown: NDArray[np.bool_]) -> Mapping[int, float]:
    """By these ways; of the flows whose way is not known, the mean over some that hashing may have chosen."""
    draws = HASHING_SAMPLES if unknown.any() else 1
    paces = [_compute_ring_speeds(topology, table, _simulate_hashing(topology, table, ways, unknown, draw)) for draw in range(draws)]
    return {number: sum(pace[number] for pace in paces) / draws for number in paces[0]}


def _simulate_hashing(topology: Topology, table: _FlowTable, ways: Ints, unknown: NDArray[np.bool_], draw: int) -> Ints:
    ways = ways.copy()
    for flow in np.flatnonzero(unknown).tolist():
        source, destination = int(table.flows.source[flow]), int(table.flows.destination[flow])
        alive = np.flatnonzero((topology.up[source] > 0) & (topology.down[destination] > 0))
        if len(alive):
            seed = f"{draw} {table.jobs[int(table.job_index[flow])].name} {table.pairs[flow]}"
            number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest())
            ways[flow] = alive[number % len(alive)]
    return ways


def _compute_ring_speeds(topology: Topology, table: _FlowTable, ways: Ints) -> dict[int, float]:
    """How fast each job's ring goes, by simulation: as its slowest flow."""
    flows = table.flows
    numbers, entity = np.unique(table.job_index, return_inverse=True)
    rate = load.compute_flow_rates(
        topology, flows.source, flows.destination, ways, flows.weight.astype(float), entity.ravel().tolist()
    )
    pace = dict.fromkeys(range(len(table.jobs)), 0.0)
    for place, number in enumerate(numbers.tolist()):
        pace[number] = float((rate / flows.weight)[entity == place].min())
    return pace


def _build_traffic(
    topology: Topology,
    table: _FlowTable,
    found: RouteAssignment,
    due: Mapping[JobName, ReplanProposal],
    recommended: Mapping[JobName, ReplanProposal],
) -> TrafficPlan:
    flows = table.flows
    up, down = load.compute_link_loads(topology, flows.source, flows.destination, found.ways, flows.weight.astype(float))
    return TrafficPlan(
        ways=_collect_routes(table, found),
        flows=len(flows),
        level=_compute_max_load(topology, up, down),
        bound=found.bound,
        moved=len(found.moved),
        lost=tuple((table.jobs[int(table.job_index[flow])].name, table.pairs[flow]) for flow in found.lost),
        up=up.astype(np.int64),
        down=down.astype(np.int64),
        due=due,
        recommended=recommended,
    )


def _compute_max_load(topology: Topology, *loads: NDArray[np.float64]) -> int:
    """Load of the fullest link, counted as if all were as the best one."""
    each = zip((topology.up, topology.down), loads, strict=True)
    return max(
        int(np.ceil(carried[carried > 0] * topology.unit / links[carried > 0]).max(initial=0))
        for links, carried in each
    )


def _collect_routes(table: _FlowTable, found: RouteAssignment) -> dict[JobName, dict[RankPair, int]]:
    ways: dict[JobName, dict[RankPair, int]] = {job.name: {} for job in table.jobs}
    for job, pair, way in zip(table.job_index.tolist(), table.pairs, found.ways.tolist(), strict=True):
        if way != NO_ROUTE:
            ways[table.jobs[job].name][pair] = way
    return ways
