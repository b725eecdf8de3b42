"""Joint planning: the route of each flow of each job through the fabric. Pure functions without state.

The input is all jobs' plans with their present routes. The output is the routes that they are to have. A flow with a
live route keeps it, unless all jobs win more by moves than the rounds for these cost.

If a leaf has other spines to choose among than when a round was planned, its ports may lead elsewhere. Such a flow has
drifted until the job's next round, which is begun where it is worth it. An operator that stops halfway has changed some
plans and not others: the next refresh ends the same.

If one namespace alone calls links slow, its own flows are led around them, as far as that slows no other job.
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
from pacekeeper_analysis.fabric.route_assignment import Flows, RouteAssignment, assign_routes, keep_live_routes
from pacekeeper_analysis.fabric.topology import NO_ROUTE, Ints, Topology

from ...state.network import JobName, JobTraffic, RankPair, ReplanProposal, TrafficPlan, Wiring
from ..stragglers import pricing

TRAFFIC_HORIZON_SECONDS = 600.0
"""Horizon of a better plan's gain: jobs come and go, and change it again."""
HASHING_SAMPLES = 8
"""Samples of where hashing may have put flows that are not planned."""
MAX_DETOURED_FLOWS = 32
"""Flows of one namespace that are led around slow links in one refresh: for each, all rates are computed again."""
MAX_WEIGHT_RATIO = 16
"""Weight of the heaviest flow over that of the lightest; weights between them are powers of two."""


def plan_joint_traffic(wiring: Wiring, jobs: Sequence[JobTraffic]) -> TrafficPlan | None:
    """Return the joint plan; None: there is no fabric to plan."""
    if wiring.topology is None:
        return None
    topology = wiring.topology
    table = _build_flow_table(wiring, topology, jobs)
    speeds_before = _compute_present_speeds(topology, table)
    baseline = _weigh_plan(topology, table, speeds_before, frozenset())
    movable = [index for index, job in enumerate(jobs) if _is_movable(wiring, job)]
    chosen = _choose_best_plan(
        topology, table, speeds_before, baseline, [index for index in movable if jobs[index].can_move]
    )
    recommended = dict[JobName, ReplanProposal]()
    if not all(jobs[index].can_move for index in movable):
        best = _choose_best_plan(topology, table, speeds_before, baseline, movable)
        recommended = {
            name: proposal
            for name, proposal in _list_due_reroutes(topology, table, speeds_before, best).items()
            if not _can_act(jobs, name)
        }
    assignment, due = chosen.assignment, _list_due_reroutes(topology, table, speeds_before, chosen)
    for tenant, view in sorted(wiring.namespace_topologies.items()):
        detour = _detour_slow_links(topology, view, table, tenant, assignment)
        if detour is not None:
            assignment = detour.assignment
            due |= _list_due_reroutes(view, table, _compute_present_speeds(view, table), detour)
    return _build_traffic(topology, table, assignment, due, recommended)


def plan_job_routes(wiring: Wiring, others: Iterable[JobTraffic], own: JobTraffic) -> Mapping[RankPair, int]:
    """Return the routes of one job around those of the others, none of which moves."""
    if wiring.topology is None:
        return {}
    table = _build_flow_table(wiring, wiring.topology, [*others, own])
    assignment = _assign_flows(wiring.topology, table, frozenset())
    tenant = own.name[0]
    if tenant in wiring.namespace_topologies:
        detour = _detour_slow_links(
            wiring.topology, wiring.namespace_topologies[tenant], table, tenant, assignment, only=own.name
        )
        assignment = assignment if detour is None else detour.assignment
    return _collect_routes(table, assignment)[own.name]


def fingerprint_live_routes(wiring: Wiring, job: JobTraffic, routes: Mapping[RankPair, int]) -> Mapping[RankPair, int]:
    """Return what these routes of a job are chosen among, for `JobTraffic.among`; nothing where that is all."""
    if wiring.topology is None or wiring.switch_topology is None:
        return {}
    table = _build_flow_table(wiring, wiring.topology, [job])
    chosen = _to_int_array(routes.get(pair, NO_ROUTE) for pair in table.pairs)
    fingerprints = wiring.switch_topology.fingerprint_live_routes(table.flows.source, table.flows.destination, chosen)
    return {
        pair: fingerprint for pair, fingerprint in zip(table.pairs, fingerprints.tolist(), strict=True) if fingerprint
    }


def _is_movable(wiring: Wiring, job: JobTraffic) -> bool:
    """Return whether the joint plan may move the job.

    A namespace with its own view is led by that: the common view would move it back.
    """
    return _is_free(job) and job.name[0] not in wiring.namespace_topologies


def _is_free(job: JobTraffic) -> bool:
    return job.round_seconds != math.inf and not job.keeps_routes


def _can_act(jobs: Sequence[JobTraffic], name: JobName) -> bool:
    return next(job.can_move for job in jobs if job.name == name)


def _choose_best_plan(
    topology: Topology,
    table: _FlowTable,
    speeds_before: Mapping[int, float],
    baseline: _WeighedPlan,
    movable: Sequence[int],
) -> _WeighedPlan:
    """Return the plan that wins most if some of the movable jobs move. In `baseline`, none does."""
    chosen = baseline
    if baseline.assignment.level == baseline.assignment.bound:
        drifted_jobs = set(table.job_index[table.drifted].tolist())
        movable = [index for index in movable if index in drifted_jobs]
    for moving in _list_movable_sets(table.jobs, movable):
        plan = _weigh_plan(topology, table, speeds_before, moving)
        fewer_lost = len(plan.assignment.lost) <= len(chosen.assignment.lost)
        if plan.net_seconds > max(0.0, chosen.net_seconds) and fewer_lost:
            chosen = plan
    return chosen


def _list_movable_sets(jobs: Sequence[JobTraffic], movable: Sequence[int]) -> Iterator[frozenset[int]]:
    """Yield larger and larger sets of the jobs whose rounds cost least."""
    cheapest = sorted(movable, key=lambda index: jobs[index].round_cost)
    count = 1
    while cheapest:
        yield frozenset(cheapest[:count])
        if count >= len(cheapest):
            return
        count *= 2


def list_ring_edges(job: JobTraffic) -> list[RankPair]:
    """Return who sends to whom in the job's rings.

    gloo's ring goes through all ranks, and each sends to the one before. NCCL has one ring for each local rank through
    all workers, in which each sends to the next one.
    """
    if not job.uses_nccl:
        rings = [[rank for node in job.node_ranks for rank in node.ranks]]
    else:
        ranks_per_node = min((len(node.ranks) for node in job.node_ranks), default=0)
        rings = [[node.ranks[local_rank] for node in job.node_ranks] for local_rank in range(ranks_per_node)]
    return [
        (edge.source, edge.destination)
        for ring in rings
        for edge in patterns.build_ring_edges(ring, backwards=not job.uses_nccl)
    ]


@dataclass(frozen=True)
class _FlowTable:
    """All jobs' flows between leaves, as columns."""

    jobs: Sequence[JobTraffic]
    pairs: Sequence[RankPair]
    job_index: Ints  # index in `jobs`
    sender: Ints  # node, numbered
    receiver: Ints
    flows: Flows
    live_routes: Ints  # the routes that the plans name, as far as they are alive; NO_ROUTE: none
    drifted: NDArray[np.bool_]  # the flows that may have left these routes since their round was planned


def _build_flow_table(wiring: Wiring, topology: Topology, jobs: Sequence[JobTraffic]) -> _FlowTable:
    rows: list[_FlowRow] = []
    for index, (job, weights) in enumerate(zip(jobs, _compute_weights(jobs), strict=True)):
        node_of_rank = {rank: node_ranks.node for node_ranks in job.node_ranks for rank in node_ranks.ranks}
        for pair, weight in weights.items():
            source, destination = (wiring.leaf_of.get(node_of_rank[rank]) for rank in pair)
            if source is not None and destination is not None and source != destination:
                rows.append(_FlowRow(index, pair, node_of_rank[pair[0]], node_of_rank[pair[1]], weight))
    nodes = {name: index for index, name in enumerate(wiring.leaf_of)}
    sender, receiver = (
        _to_int_array(nodes[row.sender] for row in rows),
        _to_int_array(nodes[row.receiver] for row in rows),
    )
    leaves = _to_int_array(wiring.leaf_of.values())
    flows = Flows(leaves[sender], leaves[receiver], _to_int_array(row.weight for row in rows))
    routes = keep_live_routes(topology, flows, [jobs[row.job_index].routes.get(row.pair, NO_ROUTE) for row in rows])
    fingerprints = _to_int_array(jobs[row.job_index].route_choices.get(row.pair, 0) for row in rows)
    drifted = (routes != NO_ROUTE) & (
        (wiring.switch_topology or topology).fingerprint_live_routes(flows.source, flows.destination, routes)
        != fingerprints
    )
    pairs, job_index = [row.pair for row in rows], _to_int_array(row.job_index for row in rows)
    return _FlowTable(jobs, pairs, job_index, sender, receiver, flows, routes, drifted)


class _FlowRow(NamedTuple):
    job_index: int
    pair: RankPair
    sender: str
    receiver: str
    weight: int


def _to_int_array(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _compute_weights(jobs: Sequence[JobTraffic]) -> list[dict[RankPair, int]]:
    """Return the weights of each job's edges, by the bytes that were measured.

    They are counted in parts of the heaviest. Edges without a measurement are as heavy as the median of the others.
    """
    rings = [list_ring_edges(job) for job in jobs]
    bytes_sent = [{pair: job.bytes_sent.get(pair, 0.0) for pair in ring} for job, ring in zip(jobs, rings, strict=True)]
    measured = sorted(bytes_ for job_edges in bytes_sent for bytes_ in job_edges.values() if bytes_ > 0)
    if not measured:
        return [dict.fromkeys(ring, 1) for ring in rings]
    median = measured[len(measured) // 2]

    def weight(bytes_: float) -> int:
        return 1 << max(0, round(math.log2(MAX_WEIGHT_RATIO * (bytes_ or median) / measured[-1])))

    weights = [{pair: weight(bytes_) for pair, bytes_ in job_edges.items()} for job_edges in bytes_sent]
    lightest = min(value for job_edges in weights for value in job_edges.values())
    return [{pair: value // lightest for pair, value in job_edges.items()} for job_edges in weights]


def _assign_flows(topology: Topology, table: _FlowTable, movable: frozenset[int]) -> RouteAssignment:
    """Assign routes. `movable`: the jobs whose flows may leave a live route."""
    held = ~np.isin(table.job_index, list(movable))
    if topology.planes == 1:
        return assign_routes(topology, table.flows, table.live_routes.tolist(), held.tolist())
    plane = _assign_planes(topology, table, held)
    return planes.assign_planes(topology, table.flows, plane, table.live_routes.tolist(), held.tolist())


def _assign_planes(topology: Topology, table: _FlowTable, held: NDArray[np.bool_]) -> Ints:
    """Return the plane of each flow, a port of its host. Held flows stay; the others use ports evenly."""
    plane = np.where(held & (table.live_routes != NO_ROUTE), table.live_routes // topology.spines, NO_ROUTE)
    unassigned, flows = np.flatnonzero(plane == NO_ROUTE), table.flows
    plane[unassigned] = planes.split_across_planes(
        table.sender[unassigned],
        flows.source[unassigned],
        table.receiver[unassigned],
        flows.destination[unassigned],
        flows.weight[unassigned],
    )
    return plane


class _WeighedPlan(NamedTuple):
    """A plan with its gain and cost, in seconds of ranks over the horizon."""

    assignment: RouteAssignment
    speeds_after: Mapping[int, float]  # speed of each job's ring
    gain_seconds: float
    cost_seconds: float
    changed: frozenset[int]  # jobs that train, and would begin a round

    @property
    def net_seconds(self) -> float:
        return self.gain_seconds - self.cost_seconds


def _weigh_plan(
    topology: Topology, table: _FlowTable, speeds_before: Mapping[int, float], movable: frozenset[int]
) -> _WeighedPlan:
    """Return the plan in which flows of `movable` may leave a live route. Their drifted flows get one again."""
    assignment = _assign_flows(topology, table, movable)
    renewed = movable | {index for index, job in enumerate(table.jobs) if job.round_seconds is None}
    return _weigh_assignment(
        topology, table, speeds_before, assignment, renewed & set(table.job_index[table.drifted].tolist())
    )


def _weigh_assignment(
    topology: Topology,
    table: _FlowTable,
    speeds_before: Mapping[int, float],
    assignment: RouteAssignment,
    renewed: Set[int] = frozenset(),
    tenant: str | None = None,
) -> _WeighedPlan:
    """Return the gain and the cost of an assignment.

    `renewed`: jobs that begin a round even where no route of theirs changes. `tenant`: the namespace whose jobs count;
    None: all.
    """
    counted = {index for index, job in enumerate(table.jobs) if tenant in (None, job.name[0])}
    changed = set(table.job_index[assignment.routes != table.live_routes].tolist()) | renewed
    speeds_after = _compute_mean_speeds(
        topology, table, assignment.routes, table.drifted & ~np.isin(table.job_index, list(changed))
    )
    changed &= counted
    training = frozenset(index for index in changed if table.jobs[index].round_seconds not in (None, math.inf))
    gain = sum(
        TRAFFIC_HORIZON_SECONDS * job.ranks * job.wait_share * (1.0 - speeds_before[index] / speeds_after[index])
        for index, job in enumerate(table.jobs)
        if speeds_after[index] > 0 and index in counted
    )
    return _WeighedPlan(
        assignment, speeds_after, gain, sum(table.jobs[index].round_cost for index in training), training
    )


def _list_due_reroutes(
    topology: Topology, table: _FlowTable, speeds_before: Mapping[int, float], chosen: _WeighedPlan
) -> dict[JobName, ReplanProposal]:
    if chosen.net_seconds <= 0:
        return {}
    return {
        table.jobs[index].name: ReplanProposal(
            pricing.compute_traffic_slowdown(
                table.jobs[index].wait_share, speeds_before[index], chosen.speeds_after[index]
            ),
            _compute_recovered_share(topology, table, index, speeds_before[index], chosen.speeds_after[index]),
            chosen.gain_seconds,
            chosen.cost_seconds,
        )
        for index in sorted(chosen.changed)
    }


def _compute_recovered_share(topology: Topology, table: _FlowTable, index: int, before: float, after: float) -> float:
    """Return the share of a job's loss, against links without other flows, that the planned routes win back."""
    unshared = topology.unit / int(table.flows.weight[table.job_index == index].max())
    if not before < unshared:
        return 1.0
    if not before or not after:
        return 1.0 if after else 0.0
    return min(1.0, max(0.0, (1 / before - 1 / after) / (1 / before - 1 / unshared)))


def _detour_slow_links(
    topology: Topology,
    view: Topology,
    table: _FlowTable,
    tenant: str,
    current: RouteAssignment,
    only: JobName | None = None,
) -> _WeighedPlan | None:
    """Return a plan that leads flows of one namespace around links that it alone calls slow; None: it wins nothing.

    `only`: one of its jobs. No other namespace's job is moved or slowed for it, whether the report is true or not.
    """
    flows, jobs = table.flows, table.jobs
    is_movable = [
        job.name == only if only else job.name[0] == tenant and job.can_move and _is_free(job) for job in jobs
    ]
    indices = np.maximum(current.routes, 0)
    slow = (view.up < topology.up)[flows.source, indices] | (view.down < topology.down)[flows.destination, indices]
    leaving = np.flatnonzero(slow & (current.routes != NO_ROUTE) & np.array(is_movable, dtype=bool)[table.job_index])
    other_jobs = [index for index, job in enumerate(jobs) if job.name[0] != tenant]
    usual_speeds, routes = _compute_ring_speeds(topology, table, current.routes), current.routes
    for flow in leaving.tolist()[:MAX_DETOURED_FLOWS]:
        tried = _move_to_emptiest_route(view, flows, routes, flow)
        speeds = _compute_ring_speeds(topology, table, tried)
        if all(speeds[index] >= usual_speeds[index] * (1 - load.MAX_EQUAL_RATE_DIFFERENCE) for index in other_jobs):
            routes = tried
    moved = tuple(np.flatnonzero((table.live_routes != NO_ROUTE) & (routes != table.live_routes)).tolist())
    assignment = replace(current, routes=routes, moved=moved)
    weighed = _weigh_assignment(view, table, _compute_present_speeds(view, table), assignment, tenant=tenant)
    if (routes == current.routes).all() or (weighed.changed and weighed.net_seconds <= 0):
        return None
    return weighed


def _move_to_emptiest_route(view: Topology, flows: Flows, routes: Ints, flow: int) -> Ints:
    """Return all routes, with this flow's where it would have most room."""
    updated, source, destination = routes.copy(), int(flows.source[flow]), int(flows.destination[flow])
    updated[flow] = NO_ROUTE
    up, down = load.compute_link_loads(view, flows.source, flows.destination, updated, flows.weight.astype(float))
    room = np.minimum(
        view.up[source] / (up[source] + flows.weight[flow]),
        view.down[destination] / (down[destination] + flows.weight[flow]),
    )
    updated[flow] = int(np.argmax(room)) if room.max() > room[routes[flow]] else routes[flow]
    return updated


def _compute_present_speeds(topology: Topology, table: _FlowTable) -> Mapping[int, float]:
    """Return the present speed of each job's ring."""
    return _compute_mean_speeds(topology, table, table.live_routes, (table.live_routes == NO_ROUTE) | table.drifted)


def _compute_mean_speeds(
    topology: Topology, table: _FlowTable, routes: Ints, unknown: NDArray[np.bool_]
) -> Mapping[int, float]:
    """Return the mean speed of each job's ring by these routes.

    For flows whose route is not known, it is the mean over some that hashing may have chosen.
    """
    draws = HASHING_SAMPLES if unknown.any() else 1
    samples = [
        _compute_ring_speeds(topology, table, _simulate_hashing(topology, table, routes, unknown, draw))
        for draw in range(draws)
    ]
    return {index: sum(sample[index] for sample in samples) / draws for index in samples[0]}


def _simulate_hashing(
    topology: Topology, table: _FlowTable, routes: Ints, unknown: NDArray[np.bool_], draw: int
) -> Ints:
    routes = routes.copy()
    for flow in np.flatnonzero(unknown).tolist():
        source, destination = int(table.flows.source[flow]), int(table.flows.destination[flow])
        alive = np.flatnonzero((topology.up[source] > 0) & (topology.down[destination] > 0))
        if len(alive):
            seed = f"{draw} {table.jobs[int(table.job_index[flow])].name} {table.pairs[flow]}"
            digest = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest())
            routes[flow] = alive[digest % len(alive)]
    return routes


def _compute_ring_speeds(topology: Topology, table: _FlowTable, routes: Ints) -> dict[int, float]:
    """Return the speed of each job's ring by simulation: that of its slowest flow."""
    flows = table.flows
    indices, entity = np.unique(table.job_index, return_inverse=True)
    rate = load.compute_flow_rates(
        topology, flows.source, flows.destination, routes, flows.weight.astype(float), entity.ravel().tolist()
    )
    speeds = dict.fromkeys(range(len(table.jobs)), 0.0)
    for position, index in enumerate(indices.tolist()):
        speeds[index] = float((rate / flows.weight)[entity == position].min())
    return speeds


def _build_traffic(
    topology: Topology,
    table: _FlowTable,
    assignment: RouteAssignment,
    due: Mapping[JobName, ReplanProposal],
    recommended: Mapping[JobName, ReplanProposal],
) -> TrafficPlan:
    flows = table.flows
    up, down = load.compute_link_loads(
        topology, flows.source, flows.destination, assignment.routes, flows.weight.astype(float)
    )
    return TrafficPlan(
        routes=_collect_routes(table, assignment),
        flows=len(flows),
        max_load=_compute_max_load(topology, up, down),
        lower_bound=assignment.bound,
        moved_flows=len(assignment.moved),
        unroutable_flows=tuple(
            (table.jobs[int(table.job_index[flow])].name, table.pairs[flow]) for flow in assignment.lost
        ),
        up=up.astype(np.int64),
        down=down.astype(np.int64),
        due=due,
        recommended=recommended,
    )


def _compute_max_load(topology: Topology, *loads: NDArray[np.float64]) -> int:
    """Return the load of the fullest link, counted as if all had the capacity of the best one."""
    directions = zip((topology.up, topology.down), loads, strict=True)
    return max(
        int(np.ceil(carried[carried > 0] * topology.unit / links[carried > 0]).max(initial=0))
        for links, carried in directions
    )


def _collect_routes(table: _FlowTable, assignment: RouteAssignment) -> dict[JobName, dict[RankPair, int]]:
    routes: dict[JobName, dict[RankPair, int]] = {job.name: {} for job in table.jobs}
    for job, pair, route in zip(table.job_index.tolist(), table.pairs, assignment.routes.tolist(), strict=True):
        if route != NO_ROUTE:
            routes[table.jobs[job].name][pair] = route
    return routes
