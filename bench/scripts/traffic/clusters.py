"""10,240 GPUs, the jobs on them, and the flows between their NICs.

1,280 hosts of eight GPUs, a NIC for each. A leaf is over a *rack* (the 64 NICs of eight hosts), or over a *rail* (the
NICs of the same number of 32 hosts); it has as many uplinks as NICs (1:1) or half as many (2:1). A link is as fast as a
NIC's port, but a trunk as fast as eight. With dual ports each NIC has one in each of two planes, half as fast as the
NIC, as in Alibaba's HPN (SIGCOMM 2024).

Jobs reduce their gradients over a ring for each rail, as NCCL's channels do, in the order of
`order.order_by_topology`: all planners get that first half of the remedy. A ring's edges under one leaf share no link
and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pacekeeper_analysis.fabric.load import Floats
from pacekeeper_analysis.fabric.patterns import build_pipeline_edges, build_ring_edges
from pacekeeper_analysis.fabric.rank_order import arrange_in_mesh, order_by_topology
from pacekeeper_analysis.fabric.route_assignment import Flows
from pacekeeper_analysis.fabric.topology import Ints, Topology, build_uniform_topology

HOSTS, NICS = 1_280, 8
RACK_HOSTS, SEGMENT_HOSTS = 8, 32
"""Hosts under a leaf."""
TRUNKS = 8
STAGES, RING_WEIGHT = 8, 7
"""Of the one large job: a dense model of 175 billion parameters, layers over a host's GPUs, 8 stages, 160 replicas. In
a step each GPU sends 10.9 GB of gradients (a ring, 2 bytes a parameter), and 1.6 GB on to the next stage, as much back:
16 microbatches of 8,192 tokens × 12,288 × 2 bytes, an eighth for each GPU, at four visits to each stage."""
JOB_COUNT = 100
JOB_HOSTS_RANGE = (2, 32)
"""Hosts of one of a hundred jobs, log-uniform: about 85 % of the cluster is in use."""
TURNOVERS = 5
"""How often each of them has been replaced, about, before the measurement."""


@dataclass(frozen=True)
class SimulatedFabric:
    """`port`: what a port of a NIC carries, in the topology's unit."""

    topology: Topology
    by_rail: bool = False
    port: int = 1

    def find_group(self, host: int, rail: int) -> int:
        return host // SEGMENT_HOSTS * NICS + rail if self.by_rail else host // RACK_HOSTS

    def find_location(self, host: int) -> tuple[str, ...]:
        return (str(host // (SEGMENT_HOSTS if self.by_rail else RACK_HOSTS)),)


@dataclass(frozen=True)
class TrafficJob:
    """It computes and communicates by turns."""

    hosts: tuple[int, ...]  # in the order of its ranks
    period: int  # slots of the circle that `shifts` uses
    busy: int  # slots in which it communicates, were it the only job
    stages: int = 1

    @property
    def intensity(self) -> float:
        """Work of its GPUs for each second of communication (Crux's, SIGCOMM 2024)."""
        return len(self.hosts) * NICS * (self.period - self.busy) / self.busy


@dataclass(frozen=True)
class Traffic:
    """Flows between leaves; arrays, one entry a flow. `parts`: how many sub-connections each flow is split over."""

    job: Ints
    sender: Ints  # NIC: host × NICS + rail
    receiver: Ints
    source: Ints  # group
    destination: Ints
    weight: Ints
    planes: int
    parts: int = 1

    def split_flows(self, parts: int) -> Traffic:
        """Each flow's sub-connections follow one another."""
        return Traffic(
            self.job.repeat(parts),
            self.sender.repeat(parts),
            self.receiver.repeat(parts),
            self.source.repeat(parts),
            self.destination.repeat(parts),
            self.weight.repeat(parts),
            self.planes,
            self.parts * parts,
        )

    @cached_property
    def flows(self) -> Flows:
        return Flows(self.source, self.destination, self.weight)

    @cached_property
    def unit(self) -> float:
        """What a weight of 1 sends, in speeds of a port, where no job is held up: the busiest NIC all that it can."""
        sent = (np.bincount(end, self.weight).max(initial=0.0) for end in (self.sender, self.receiver))
        return float(self.planes / max(1.0, *sent))

    @property
    def demand(self) -> Floats:
        """Of each, in speeds of a port, where no job is held up."""
        return self.weight.astype(float) * self.unit


def build_fabrics() -> dict[str, SimulatedFabric]:
    """The symmetric ones."""
    racks, rails = HOSTS // RACK_HOSTS, HOSTS // SEGMENT_HOSTS * NICS
    ports = RACK_HOSTS * NICS
    return {
        "1:1": SimulatedFabric(build_uniform_topology(racks, ports)),
        "2:1": SimulatedFabric(build_uniform_topology(racks, ports // 2)),
        "rails 1:1": SimulatedFabric(build_uniform_topology(rails, SEGMENT_HOSTS), by_rail=True),
        "rails 2:1": SimulatedFabric(build_uniform_topology(rails, SEGMENT_HOSTS // 2), by_rail=True),
        "dual ports": SimulatedFabric(build_uniform_topology(racks, ports, planes=2)),
        "8 trunks": SimulatedFabric(build_uniform_topology(racks, TRUNKS, capacity=ports // TRUNKS)),
    }


def break_busiest_uplink(fabric: SimulatedFabric, traffic: Traffic) -> SimulatedFabric:
    """Of the leaf that sends most."""
    sent_weight = np.bincount(traffic.source, traffic.weight, fabric.topology.groups)
    return SimulatedFabric(fabric.topology.with_dead_links(up=[(int(sent_weight.argmax()), 0)]), fabric.by_rail)


def damage_fabric(fabric: SimulatedFabric, rng: np.random.Generator) -> SimulatedFabric:
    """One link of a hundred is dead, another one slower by half."""
    links = (fabric.topology.up * 2, fabric.topology.down * 2)
    for array in links:
        values = rng.random(array.shape)
        array[values < 0.02] //= 2
        array[values < 0.01] = 0
    return SimulatedFabric(Topology(*links, fabric.topology.planes), fabric.by_rail, port=2)


def build_traffic(fabric: SimulatedFabric, jobs: Sequence[TrafficJob]) -> Traffic:
    rows = [
        (number, sender * NICS + rail, receiver * NICS + rail, leaf, peer_leaf, weight)
        for number, job in enumerate(jobs)
        for sender, receiver, weight in iterate_edges(fabric, job)
        for rail in range(NICS)
        if (leaf := fabric.find_group(sender, rail)) != (peer_leaf := fabric.find_group(receiver, rail))
    ]
    job, sender, receiver, source, destination, weight = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return Traffic(job, sender, receiver, source, destination, weight, fabric.topology.planes)


def iterate_edges(fabric: SimulatedFabric, job: TrafficJob) -> Iterator[tuple[int, int, int]]:
    """(sending host, receiving host, weight) in each rail."""
    ordered = order_by_topology(job.hosts, {host: fabric.find_location(host) for host in job.hosts})
    shape = (job.stages, len(ordered) // job.stages)
    assignment = arrange_in_mesh(ordered, shape, (1, RING_WEIGHT))
    mesh = np.array(assignment).reshape(shape)
    weight = RING_WEIGHT if job.stages > 1 else 1
    for stage in mesh.tolist():
        yield from ((edge.source, edge.destination, weight) for edge in build_ring_edges(stage))
    for replica in mesh.T.tolist():
        yield from ((edge.source, edge.destination, 1) for edge in build_pipeline_edges(replica))


def build_one_large_job() -> list[TrafficJob]:
    return [TrafficJob(tuple(range(HOSTS)), period=24, busy=12, stages=STAGES)]


def draw_eight_jobs(rng: np.random.Generator) -> list[TrafficJob]:
    """As a scheduler leaves them that spreads: each rack's eight hosts are those of eight jobs. Every leaf is full, and
    the jobs go round them in different orders: the hardest case."""
    racks = np.arange(HOSTS).reshape(-1, RACK_HOSTS)
    job_hosts = rng.permuted(racks, axis=1).T
    return [_draw_job(rng.permutation(hosts).tolist(), rng) for hosts in job_hosts]


def draw_hundred_jobs(rng: np.random.Generator, packed: bool) -> list[TrafficJob]:
    """Jobs come and go, and later ones fill the gaps. packed: with the first free hosts; else with any, as Kubernetes'
    scheduler does where no labels of the fabric improve the order."""
    free = np.ones(HOSTS, bool)
    running: list[list[int]] = []
    for turn in range(1 + TURNOVERS * JOB_COUNT):
        if turn:
            free[running.pop(int(rng.integers(len(running))))] = True
        while len(running) < JOB_COUNT and free.sum() >= JOB_HOSTS_RANGE[1]:
            size = round(float(np.exp(rng.uniform(*np.log(JOB_HOSTS_RANGE)))))
            free_hosts = np.flatnonzero(free)
            hosts = (free_hosts if packed else rng.permutation(free_hosts))[:size]
            free[hosts] = False
            running.append(hosts.tolist())
    return [_draw_job(hosts, rng) for hosts in running]


def _draw_job(hosts: Sequence[int], rng: np.random.Generator) -> TrafficJob:
    """Periods divide one another, so that shifts hold without end: CASSINI's best case. Communication takes a fifth up
    to three fifths."""
    period = int(rng.choice([6, 12, 24]))
    return TrafficJob(tuple(hosts), period, round(period * float(rng.uniform(0.2, 0.6))))
