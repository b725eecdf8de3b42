"""How fast jobs are under a plan: at once, where all communicate all the time, and by turns with computing.

A speed is a part of what the job would reach alone on a fabric without a bottleneck; a ring is as fast as its slowest
edge, and a job as its slowest ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.fabric.load import Floats, HostPorts, LinkUsage, compute_link_loads, compute_link_usage
from pacekeeper_analysis.fabric.topology import Ints

from .clusters import HOSTS, NICS, SimulatedFabric, TrafficJob, Traffic

SLOTS = 24
"""Of the circle on which jobs take turns: a multiple of each period."""


@dataclass(frozen=True)
class PlannedTraffic:
    traffic: Traffic  # in the parts that were planned
    routes: Ints
    shifts: Ints | None = None  # of each job, slots; None: as they happen to be

    def load(self, fabric: SimulatedFabric) -> float:
        """The largest of a link, as a part of what it carries, were nobody held up."""
        topology, traffic = fabric.topology, self.traffic
        demand = traffic.demand * fabric.port
        both = compute_link_loads(topology, traffic.source, traffic.destination, self.routes, demand)
        return max(
            float((load[links > 0] / links[links > 0]).max())
            for load, links in zip(both, (topology.up, topology.down), strict=True)
        )

    def level(self, fabric: SimulatedFabric) -> int:
        """The same in weights of whole flows on a link of the best capacity, as `assign` counts."""
        weight = self.traffic.unit * self.traffic.parts / fabric.topology.planes * fabric.port / fabric.topology.unit
        return math.ceil(self.load(fabric) / weight - 1e-9)

    def usage(self, fabric: SimulatedFabric) -> LinkUsage:
        """By job: what each takes of which link and port at full speed."""
        traffic, planes = self.traffic, fabric.topology.planes
        ports = HostPorts(np.full((HOSTS * NICS, planes), float(fabric.port)), traffic.sender, traffic.receiver)
        demand = traffic.demand * fabric.port
        return compute_link_usage(fabric.topology, traffic.source, traffic.destination, self.routes, demand, traffic.job, ports)


def compute_concurrent_speeds(used: LinkUsage, jobs: int) -> Floats:
    """Of each job."""
    return _speeds(used, np.ones(jobs, bool))


def compute_turn_speeds(used: LinkUsage, jobs: Sequence[TrafficJob], shifts: Ints) -> Floats:
    """Of each job, by the length of its iterations. To first order: turns stay as they were planned, and communication
    takes longer by what its speed, on average, is below its own."""
    busy = busy_slots(jobs, shifts)
    speeds = np.array([_speeds(used, busy[:, slot]) for slot in range(SLOTS)]).T
    mean = np.where(busy, speeds, 0.0).sum(axis=1) / busy.sum(axis=1)
    period, communicates = np.array([(job.period, job.busy) for job in jobs], dtype=float).T
    found: Floats = period / (period - communicates + communicates / mean)
    return found


def busy_slots(jobs: Sequence[TrafficJob], shifts: Ints) -> NDArray[np.bool_]:
    """When each communicates: (jobs, SLOTS)."""
    slots = np.arange(SLOTS)
    return np.array([(slots - shift) % job.period < job.busy for job, shift in zip(jobs, shifts, strict=True)])


def _speeds(used: LinkUsage, active: NDArray[np.bool_]) -> Floats:
    """Who has no flows is not held up."""
    speeds = np.ones(len(active))
    speeds[: used.entities] = np.minimum(1.0, used.compute_rates(active[: used.entities]))
    return speeds
