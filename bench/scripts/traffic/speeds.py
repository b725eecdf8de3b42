"""How fast jobs are under a plan: at once, where all communicate all the time, and by turns with computing.

A speed is a part of what the job would reach as the only one on a fabric without a bottleneck. A ring is as fast as its
slowest edge, and a job as its slowest ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.fabric.load import Floats, HostPorts, LinkUsage, compute_link_loads, compute_link_usage
from pacekeeper_analysis.fabric.topology import Ints

from .clusters import HOSTS, NICS, SimulatedFabric, Traffic, TrafficJob

SLOTS = 24
"""Of the circle on which jobs take turns: a multiple of each period."""


@dataclass(frozen=True)
class PlannedTraffic:
    traffic: Traffic  # in the parts that were planned
    routes: Ints
    shifts: Ints | None = None  # of each job, slots; None: as they happen to be

    def compute_load(self, fabric: SimulatedFabric) -> float:
        """The largest of a link, as a part of what it carries, were no job held up."""
        topology, traffic = fabric.topology, self.traffic
        demand = traffic.demand * fabric.port
        loads = compute_link_loads(topology, traffic.source, traffic.destination, self.routes, demand)
        return max(
            float((load[links > 0] / links[links > 0]).max())
            for load, links in zip(loads, (topology.up, topology.down), strict=True)
        )

    def compute_level(self, fabric: SimulatedFabric) -> int:
        """The same in weights of whole flows on a link of the best capacity, as `assign` counts."""
        weight = self.traffic.unit * self.traffic.parts / fabric.topology.planes * fabric.port / fabric.topology.unit
        return math.ceil(self.compute_load(fabric) / weight - 1e-9)

    def compute_usage(self, fabric: SimulatedFabric) -> LinkUsage:
        """By job: what each takes of which link and port at full speed."""
        traffic, planes = self.traffic, fabric.topology.planes
        ports = HostPorts(np.full((HOSTS * NICS, planes), float(fabric.port)), traffic.sender, traffic.receiver)
        demand = traffic.demand * fabric.port
        return compute_link_usage(
            fabric.topology, traffic.source, traffic.destination, self.routes, demand, traffic.job, ports
        )


def compute_concurrent_speeds(usage: LinkUsage, jobs: int) -> Floats:
    """Of each job."""
    return _compute_speeds(usage, np.ones(jobs, bool))


def compute_turn_speeds(usage: LinkUsage, jobs: Sequence[TrafficJob], shifts: Ints) -> Floats:
    """Of each job, by the length of its iterations. To first order: turns stay as they were planned, and communication
    takes longer by what its speed, on average, is below its own."""
    busy = compute_busy_slots(jobs, shifts)
    speeds = np.array([_compute_speeds(usage, busy[:, slot]) for slot in range(SLOTS)]).T
    mean = np.where(busy, speeds, 0.0).sum(axis=1) / busy.sum(axis=1)
    period, communication = np.array([(job.period, job.busy) for job in jobs], dtype=float).T
    turn_speeds: Floats = period / (period - communication + communication / mean)
    return turn_speeds


def compute_busy_slots(jobs: Sequence[TrafficJob], shifts: Ints) -> NDArray[np.bool_]:
    """When each communicates: (jobs, SLOTS)."""
    slots = np.arange(SLOTS)
    return np.array([(slots - shift) % job.period < job.busy for job, shift in zip(jobs, shifts, strict=True)])


def _compute_speeds(usage: LinkUsage, active: NDArray[np.bool_]) -> Floats:
    """Who has no flows is not held up."""
    speeds = np.ones(len(active))
    speeds[: usage.entities] = np.minimum(1.0, usage.compute_rates(active[: usage.entities]))
    return speeds
