"""Choosers of each flow's route: `PLANNERS` by name, ours and those that it must outperform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.fabric.planes import assign_planes, split_across_planes
from pacekeeper_analysis.fabric.route_assignment import assign_routes, compute_load_bound
from pacekeeper_analysis.fabric.topology import Ints

from .clusters import SimulatedFabric, Traffic, TrafficJob
from .shifts import shift_jobs
from .speeds import PlannedTraffic

MIN_PARTS, MAX_PARTS = 4, 16
"""Sub-connections of a flow. With four, more jobs have a small part each of a link, and seldom all want it at once."""
NEAR_SPEED_SHARE = 0.99
"""Part of the best speed that is near enough: the rest is not worth more sub-connections."""


@dataclass(frozen=True)
class PlannerCase:
    """`traffic`: in as many parts as there are planes, so that a flow can use all ports of its NIC. `speed`: what no
    plan can beat. `happen`: by how much jobs happen to be shifted."""

    fabric: SimulatedFabric
    jobs: Sequence[TrafficJob]
    traffic: Traffic
    speed: float
    happen: Ints


Planner = Callable[[PlannerCase, np.random.Generator], PlannedTraffic]


def _plan_ours(case: PlannerCase, _: np.random.Generator) -> PlannedTraffic:
    """Flows as they are."""
    return _assign_traffic(case.fabric, case.traffic)


def _plan_ours_in_parts(case: PlannerCase, _: np.random.Generator) -> PlannedTraffic:
    return _assign_traffic(case.fabric, case.traffic.split_flows(choose_parts(case)))


def choose_parts(case: PlannerCase) -> int:
    """The fewest sub-connections of each flow with which the integer bound is near to the best speed."""
    speeds = {}
    for parts in range(MIN_PARTS // case.traffic.parts, MAX_PARTS // case.traffic.parts + 1):
        traffic, topology = case.traffic.split_flows(parts), case.fabric.topology
        load = compute_load_bound(topology, traffic.flows) * traffic.unit * case.fabric.port / topology.unit
        speeds[parts] = min(1.0, 1.0 / load) if load else 1.0
        if speeds[parts] >= NEAR_SPEED_SHARE * case.speed:
            return parts
    return max(speeds, key=lambda parts: speeds[parts])


def _assign_traffic(fabric: SimulatedFabric, traffic: Traffic) -> PlannedTraffic:
    if traffic.planes == 1:
        return PlannedTraffic(traffic, assign_routes(fabric.topology, traffic.flows).routes)
    plane = split_across_planes(traffic.sender, traffic.source, traffic.receiver, traffic.destination, traffic.weight)
    return PlannedTraffic(traffic, assign_planes(fabric.topology, traffic.flows, plane).routes)


def _build_hash_planner(parts: int) -> Planner:
    """ECMP: each flow anywhere by chance, but not over a dead link; there must be a live route. E-ECMP (Meta,
    SIGCOMM 2024) hashes each of a flow's sub-connections by itself."""

    def plan(case: PlannerCase, rng: np.random.Generator) -> PlannedTraffic:
        topology = case.fabric.topology
        traffic = case.traffic.split_flows(max(1, parts // case.traffic.parts))
        routes = rng.integers(topology.routes, size=len(traffic.weight))
        while True:
            is_dead = (topology.up[traffic.source, routes] == 0) | (topology.down[traffic.destination, routes] == 0)
            if not is_dead.any():
                return PlannedTraffic(traffic, routes)
            routes[is_dead] = rng.integers(topology.routes, size=int(is_dead.sum()))

    return plan


def _plan_cassini(case: PlannerCase, rng: np.random.Generator) -> PlannedTraffic:
    plan = _build_hash_planner(1)(case, rng)
    return PlannedTraffic(
        plan.traffic, plan.routes, shift_jobs(plan.compute_usage(case.fabric), case.jobs, case.happen)
    )


def _plan_greedy(case: PlannerCase, rng: np.random.Generator) -> PlannedTraffic:
    """C4P's manner: jobs as they come, each flow over what is loaded least. None of them has ended since."""
    return _plan_least_loaded(case, rng.permutation(len(case.jobs)))


def _plan_crux(case: PlannerCase, _: np.random.Generator) -> PlannedTraffic:
    """Crux's choice of paths: the same, but jobs of most work for a second of communication go first."""
    return _plan_least_loaded(case, np.argsort([-job.intensity for job in case.jobs], kind="stable"))


def _plan_least_loaded(case: PlannerCase, jobs: Ints) -> PlannedTraffic:
    """Flow by flow, in this order of jobs: the least of the fullest that it crosses, links of both leaves and ports of
    both NICs. No flow that has a route is moved."""
    fabric, topology, traffic = case.fabric, case.fabric.topology, case.traffic
    with np.errstate(divide="ignore"):
        slow_up, slow_down = 1.0 / topology.up, 1.0 / topology.down
    up, down = (np.where(links > 0, 0.0, np.inf) for links in (topology.up, topology.down))
    nic_count = int(max(traffic.sender.max(initial=0), traffic.receiver.max(initial=0))) + 1
    sent, received = (np.zeros((nic_count, topology.planes)) for _ in range(2))
    routes = np.zeros(len(traffic.weight), dtype=np.int64)
    demand = traffic.demand * fabric.port
    for flow in np.argsort(np.argsort(jobs)[traffic.job], kind="stable").tolist():
        source, destination = traffic.source[flow], traffic.destination[flow]
        sender, receiver = traffic.sender[flow], traffic.receiver[flow]
        max_loads = np.maximum(
            up[source] + demand[flow] * slow_up[source], down[destination] + demand[flow] * slow_down[destination]
        )
        if topology.planes > 1:
            ports = (np.maximum(sent[sender], received[receiver]) + demand[flow]) / fabric.port
            max_loads = np.maximum(max_loads, ports.repeat(topology.spines))
        route = int(max_loads.argmin())
        routes[flow] = route
        up[source, route] += demand[flow] * slow_up[source, route]
        down[destination, route] += demand[flow] * slow_down[destination, route]
        sent[sender, route // topology.spines] += demand[flow]
        received[receiver, route // topology.spines] += demand[flow]
    return PlannedTraffic(traffic, routes)


PLANNERS: dict[str, Planner] = {
    "ecmp": _build_hash_planner(1),
    "e-ecmp 4": _build_hash_planner(4),
    "e-ecmp 16": _build_hash_planner(16),
    "cassini": _plan_cassini,
    "greedy": _plan_greedy,
    "crux": _plan_crux,
    "ours": _plan_ours,
    "ours in parts": _plan_ours_in_parts,
}
