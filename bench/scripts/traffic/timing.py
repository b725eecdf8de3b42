"""How long planning takes at 10,000 flows; what a link that dies costs: time, and flows of others that are moved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.fabric.route_assignment import Flows, assign_routes
from pacekeeper_analysis.fabric.topology import Topology, build_uniform_topology

from .clusters import build_fabrics, build_traffic, draw_eight_jobs

DRAWN_FLOWS, DEAD_LINKS = 10_000, 47
"""Flows between 64 leaves with 32 uplinks each, and links of it that are dead."""
REPAIR_COUNT = 8


@dataclass(frozen=True)
class Timing:
    """Seconds of processor time; `moved`: flows that were not on the dead link."""

    plan: float
    repairs: tuple[float, ...]
    moved: tuple[int, ...]


def measure_timings(rng: np.random.Generator) -> dict[str, Timing]:
    return {name: _measure_timing(topology, flows, rng) for name, topology, flows in _iterate_cases(rng)}


def _iterate_cases(rng: np.random.Generator) -> Iterator[tuple[str, Topology, Flows]]:
    fabric = build_fabrics()["1:1"]
    yield "8 jobs", fabric.topology, build_traffic(fabric, draw_eight_jobs(rng)).flows
    source, destination = rng.integers(64, size=(2, DRAWN_FLOWS))
    links = rng.integers((64, 32), size=(DEAD_LINKS, 2)).tolist()
    topology = build_uniform_topology(64, 32).with_dead_links(up=((group, route) for group, route in links))
    yield "drawn", topology, Flows(source, destination, np.ones(DRAWN_FLOWS, dtype=np.int64))


def _measure_timing(topology: Topology, flows: Flows, rng: np.random.Generator) -> Timing:
    start = time.process_time()
    routes = assign_routes(topology, flows).routes
    plan = time.process_time() - start
    crossing = np.flatnonzero(flows.source != flows.destination)
    repairs, moved = [], []
    for number in range(REPAIR_COUNT):
        victim = int(rng.choice(crossing))
        direction, leaves = (("up", flows.source), ("down", flows.destination))[number % 2]
        link = int(leaves[victim]), int(routes[victim])
        topology = topology.with_dead_links(**{direction: [link]})
        cut_off = (leaves == link[0]) & (routes == link[1])
        current_routes = routes.tolist()
        start = time.process_time()
        repaired = assign_routes(topology, flows, current_routes)
        repairs.append(time.process_time() - start)
        moved.append(int((~cut_off[list(repaired.moved)]).sum()) if repaired.moved else 0)
        routes = repaired.routes
    return Timing(plan, tuple(repairs), tuple(moved))
