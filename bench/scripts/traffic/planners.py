"""Who chooses the way of each flow: `PLANNERS` by name, ours and those that it has to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.fabric.assign import assign_routes, compute_load_bound
from pacekeeper_analysis.fabric.planes import assign_planes, split_across_planes
from pacekeeper_analysis.fabric.topology import Ints

from .clusters import SimulatedFabric, TrafficJob, Traffic
from .shifts import shifted
from .speeds import PlannedTraffic

LEAST_PARTS, MOST_PARTS = 4, 16
"""Sub-connections of a flow. With four, more jobs have a small part each of a link, and seldom all want it at once."""
NEAR = 0.99
"""Part of the best speed that is near enough: nobody needs more sub-connections for the rest."""


@dataclass(frozen=True)
class PlannerCase:
    """`traffic`: in so many parts as there are planes, so that a flow can use all ports of its NIC. `speed`: what no
    plan can beat. `happen`: by how much jobs happen to be shifted."""

    fabric: SimulatedFabric
    jobs: Sequence[TrafficJob]
    traffic: Traffic
    speed: float
    happen: Ints


Planner = Callable[[PlannerCase, np.random.Generator], PlannedTraffic]


def _ours(case: PlannerCase, _: np.random.Generator) -> PlannedTraffic:
    """Flows as they are."""
    return _assigned(case.fabric, case.traffic)


def _ours_in_parts(case: PlannerCase, _: np.random.Generator) -> PlannedTraffic:
    return _assigned(case.fabric, case.traffic.split_flows(enough_parts(case)))


def enough_parts(case: PlannerCase) -> int:
    """The fewest sub-connections of each flow with which the integer bound is near to the best speed."""
    speeds = {}
    for parts in range(LEAST_PARTS // case.traffic.parts, MOST_PARTS // case.traffic.parts + 1):
        traffic, topology = case.traffic.split_flows(parts), case.fabric.topology
        load = compute_load_bound(topology, traffic.flows) * traffic.unit * case.fabric.port / topology.unit
        speeds[parts] = min(1.0, 1.0 / load) if load else 1.0
        if speeds[parts] >= NEAR * case.speed:
            return parts
    return max(speeds, key=lambda parts: speeds[parts])


def _assigned(fabric: SimulatedFabric, traffic: Traffic) -> PlannedTraffic:
    if traffic.planes == 1:
        return PlannedTraffic(traffic, assign_routes(fabric.topology, traffic.flows).ways)
    plane = split_across_planes(traffic.sender, traffic.source, traffic.receiver, traffic.destination, traffic.weight)
    return PlannedTraffic(traffic, assign_planes(fabric.topology, traffic.flows, plane).ways)


def _hashed(parts: int) -> Planner:
    """ECMP: each flow anywhere by chance, but not over a dead link; there must be a way that is alive. E-ECMP (Meta,
    SIGCOMM 2024) hashes each of a flow's sub-connections by itself."""

    def plan(case: PlannerCase, draws: np.random.Generator) -> PlannedTraffic:
        topology = case.fabric.topology
        traffic = case.traffic.split_flows(max(1, parts // case.traffic.parts))
        ways = draws.integers(topology.routes, size=len(traffic.weight))
        while True:
            dead = (topology.up[traffic.source, ways] == 0) | (topology.down[traffic.destination, ways] == 0)
            if not dead.any():
                return PlannedTraffic(traffic, ways)
            ways[dead] = draws.integers(topology.routes, size=int(dead.sum()))

    return plan


def _cassini(case: PlannerCase, draws: np.random.Generator) -> PlannedTraffic:
    plan = _hashed(1)(case, draws)
    return PlannedTraffic(plan.traffic, plan.routes, shifted(plan.usage(case.fabric), case.jobs, case.happen))


def _greedy(case: PlannerCase, draws: np.random.Generator) -> PlannedTraffic:
    """C4P's manner: jobs as they come, each flow over what is loaded least. None of them has ended since."""
    return _least_loaded(case, draws.permutation(len(case.jobs)))


def _crux(case: PlannerCase, _: np.random.Generator) -> PlannedTraffic:
    """Crux's choice of paths: the same, but jobs of most work for a second of communication go first."""
    return _least_loaded(case, np.argsort([-job.intensity for job in case.jobs], kind="stable"))


def _least_loaded(case: PlannerCase, jobs: Ints) -> PlannedTraffic:
    """Flow by flow, in this order of jobs: the least of the fullest that it crosses, links of both leaves and ports of
    both NICs. Nobody who has a way is moved."""
    fabric, topology, traffic = case.fabric, case.fabric.topology, case.traffic
    with np.errstate(divide="ignore"):
        slow_up, slow_down = 1.0 / topology.up, 1.0 / topology.down
    up, down = (np.where(links > 0, 0.0, np.inf) for links in (topology.up, topology.down))
    nics = int(max(traffic.sender.max(initial=0), traffic.receiver.max(initial=0))) + 1
    out, into = (np.zeros((nics, topology.planes)) for _ in range(2))
    ways = np.zeros(len(traffic.weight), dtype=np.int64)
    demand = traffic.demand * fabric.port
    for flow in np.argsort(np.argsort(jobs)[traffic.job], kind="stable").tolist():
        source, destination = traffic.source[flow], traffic.destination[flow]
        sender, receiver = traffic.sender[flow], traffic.receiver[flow]
        fullest = np.maximum(
            up[source] + demand[flow] * slow_up[source], down[destination] + demand[flow] * slow_down[destination]
        )
        if topology.planes > 1:
            ports = (np.maximum(out[sender], into[receiver]) + demand[flow]) / fabric.port
            fullest = np.maximum(fullest, ports.repeat(topology.spines))
        way = int(fullest.argmin())
        ways[flow] = way
        up[source, way] += demand[flow] * slow_up[source, way]
        down[destination, way] += demand[flow] * slow_down[destination, way]
        out[sender, way // topology.spines] += demand[flow]
        into[receiver, way // topology.spines] += demand[flow]
    return PlannedTraffic(traffic, ways)


PLANNERS: dict[str, Planner] = {
    "ecmp": _hashed(1),
    "e-ecmp 4": _hashed(4),
    "e-ecmp 16": _hashed(16),
    "cassini": _cassini,
    "greedy": _greedy,
    "crux": _crux,
    "ours": _ours,
    "ours in parts": _ours_in_parts,
}
