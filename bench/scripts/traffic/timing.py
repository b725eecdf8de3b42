"""How long planning takes at 10,000 flows; what a link that dies costs: time, and flows of others that are moved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.fabric.assign import Flows, assign_routes
from pacekeeper_analysis.fabric.topology import Topology, build_uniform_topology

from .clusters import eight_jobs, fabrics, traffic_of

DRAWN, DEAD = 10_000, 47
"""Flows between 64 leaves with 32 uplinks each, and links of it that are dead."""
REPAIRS = 8


@dataclass(frozen=True)
class Timing:
    """Seconds of processor time; `moved`: flows that were not on the dead link."""

    plan: float
    repairs: tuple[float, ...]
    moved: tuple[int, ...]


def timings(draws: np.random.Generator) -> dict[str, Timing]:
    return {name: _timed(topology, flows, draws) for name, topology, flows in _cases(draws)}


def _cases(draws: np.random.Generator) -> Iterator[tuple[str, Topology, Flows]]:
    fabric = fabrics()["1:1"]
    yield "8 jobs", fabric.topology, traffic_of(fabric, eight_jobs(draws)).flows
    source, destination = draws.integers(64, size=(2, DRAWN))
    links = draws.integers((64, 32), size=(DEAD, 2)).tolist()
    topology = build_uniform_topology(64, 32).with_dead_links(up=((group, way) for group, way in links))
    yield "drawn", topology, Flows(source, destination, np.ones(DRAWN, dtype=np.int64))


def _timed(topology: Topology, flows: Flows, draws: np.random.Generator) -> Timing:
    began = time.process_time()
    ways = assign_routes(topology, flows).ways
    plan = time.process_time() - began
    crosses = np.flatnonzero(flows.source != flows.destination)
    repairs, moved = [], []
    for number in range(REPAIRS):
        victim = int(draws.choice(crosses))
        links, ends = (("up", flows.source), ("down", flows.destination))[number % 2]
        link = int(ends[victim]), int(ways[victim])
        topology = topology.with_dead_links(**{links: [link]})
        cut_off = (ends == link[0]) & (ways == link[1])
        present = ways.tolist()
        began = time.process_time()
        mended = assign_routes(topology, flows, present)
        repairs.append(time.process_time() - began)
        moved.append(int((~cut_off[list(mended.moved)]).sum()) if mended.moved else 0)
        ways = mended.ways
    return Timing(plan, tuple(repairs), tuple(moved))
