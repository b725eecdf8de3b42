"""10,240 GPUs, the jobs on them, and the flows between their NICs.

1,280 hosts of eight GPUs, a NIC for each. A leaf is over a *rack* (the 64 NICs of eight hosts), or over a *rail* (the
NICs of the same number of 32 hosts); it has as many uplinks as NICs (1:1) or half as many (2:1). A link is as fast as a
NIC's port, but a trunk as fast as eight. With dual ports each NIC has one in each of two planes, half as fast as the
NIC, as in Alibaba's HPN (SIGCOMM 2024).

Jobs reduce their gradients over a ring for each rail, as NCCL's channels do, in the order of `order.order_by_topology`: that
first half of the remedy is given to all who plan. A ring's edges under one leaf meet nobody and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pacekeeper_analysis.fabric.assign import Flows
from pacekeeper_analysis.fabric.load import Floats
from pacekeeper_analysis.fabric.order import order_by_topology, arrange_in_mesh
from pacekeeper_analysis.fabric.patterns import build_pipeline_edges, build_ring_edges
from pacekeeper_analysis.fabric.topology import Ints, Topology, build_uniform_topology

HOSTS, NICS = 1_280, 8
RACK, SEGMENT = 8, 32
"""Hosts under a leaf."""
TRUNKS = 8
STAGES, RING_WEIGHT = 8, 7
"""Of the one large job: a dense model of 175 billion parameters, layers over a host's GPUs, 8 stages, 160 replicas. In
a step each GPU sends 10.9 GB of gradients (a ring, 2 bytes a parameter), and 1.6 GB on to the next stage, as much back:
16 microbatches of 8,192 tokens × 12,288 × 2 bytes, an eighth for each GPU, at four visits to each stage."""
HUNDRED = 100
SIZES = (2, 32)
"""Hosts of one of a hundred jobs, log-uniform: about 85 % of the cluster is in use."""
TURNOVERS = 5
"""So often each of them has been replaced, about, before we look."""


@dataclass(frozen=True)
class SimulatedFabric:
    """`port`: what a port of a NIC carries, in the topology's unit."""

    topology: Topology
    by_rail: bool = False
    port: int = 1

    def group(self, host: int, rail: int) -> int:
        return host // SEGMENT * NICS + rail if self.by_rail else host // RACK

    def place(self, host: int) -> tuple[str, ...]:
        return (str(host // (SEGMENT if self.by_rail else RACK)),)


@dataclass(frozen=True)
class TrafficJob:
    """It computes and communicates by turns."""

    hosts: tuple[int, ...]  # in the order of its ranks
    period: int  # slots of the circle that `shifts` looks at
    busy: int  # slots in which it communicates, were it alone
    stages: int = 1

    @property
    def intensity(self) -> float:
        """Work of its GPUs for each second of communication (Crux's, SIGCOMM 2024)."""
        return len(self.hosts) * NICS * (self.period - self.busy) / self.busy


@dataclass(frozen=True)
class Traffic:
    """Flows between leaves; arrays, one entry a flow. `parts`: so many sub-connections is each flow split over."""

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
        """What a weight of 1 sends, in speeds of a port, where nobody is held up: the busiest NIC all that it can."""
        sent = (np.bincount(end, self.weight).max(initial=0.0) for end in (self.sender, self.receiver))
        return float(self.planes / max(1.0, *sent))

    @property
    def demand(self) -> Floats:
        """Of each, in speeds of a port, where nobody is held up."""
        return self.weight.astype(float) * self.unit


def fabrics() -> dict[str, SimulatedFabric]:
    """The symmetric ones."""
    racks, rails = HOSTS // RACK, HOSTS // SEGMENT * NICS
    ports = RACK * NICS
    return {
        "1:1": SimulatedFabric(build_uniform_topology(racks, ports)),
        "2:1": SimulatedFabric(build_uniform_topology(racks, ports // 2)),
        "rails 1:1": SimulatedFabric(build_uniform_topology(rails, SEGMENT), by_rail=True),
        "rails 2:1": SimulatedFabric(build_uniform_topology(rails, SEGMENT // 2), by_rail=True),
        "dual ports": SimulatedFabric(build_uniform_topology(racks, ports, planes=2)),
        "8 trunks": SimulatedFabric(build_uniform_topology(racks, TRUNKS, capacity=ports // TRUNKS)),
    }


def one_uplink_dead(fabric: SimulatedFabric, traffic: Traffic) -> SimulatedFabric:
    """Of the leaf that sends most."""
    sent = np.bincount(traffic.source, traffic.weight, fabric.topology.groups)
    return SimulatedFabric(fabric.topology.with_dead_links(up=[(int(sent.argmax()), 0)]), fabric.by_rail)


def damaged(fabric: SimulatedFabric, draws: np.random.Generator) -> SimulatedFabric:
    """One link of a hundred is dead, another one slower by half."""
    links = (fabric.topology.up * 2, fabric.topology.down * 2)
    for array in links:
        fate = draws.random(array.shape)
        array[fate < 0.02] //= 2
        array[fate < 0.01] = 0
    return SimulatedFabric(Topology(*links, fabric.topology.planes), fabric.by_rail, port=2)


def traffic_of(fabric: SimulatedFabric, jobs: Sequence[TrafficJob]) -> Traffic:
    rows = [
        (number, sender * NICS + rail, receiver * NICS + rail, leaf, other, weight)
        for number, job in enumerate(jobs)
        for sender, receiver, weight in edges(fabric, job)
        for rail in range(NICS)
        if (leaf := fabric.group(sender, rail)) != (other := fabric.group(receiver, rail))
    ]
    job, sender, receiver, source, destination, weight = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return Traffic(job, sender, receiver, source, destination, weight, fabric.topology.planes)


def edges(fabric: SimulatedFabric, job: TrafficJob) -> Iterator[tuple[int, int, int]]:
    """(sending host, receiving host, weight) in each rail."""
    ordered = order_by_topology(job.hosts, {host: fabric.place(host) for host in job.hosts})
    shape = (job.stages, len(ordered) // job.stages)
    seats = arrange_in_mesh(ordered, shape, (1, RING_WEIGHT))
    mesh = np.array(seats).reshape(shape)
    weight = RING_WEIGHT if job.stages > 1 else 1
    for stage in mesh.tolist():
        yield from ((edge.source, edge.destination, weight) for edge in build_ring_edges(stage))
    for replica in mesh.T.tolist():
        yield from ((edge.source, edge.destination, 1) for edge in build_pipeline_edges(replica))


def one_large_job() -> list[TrafficJob]:
    return [TrafficJob(tuple(range(HOSTS)), period=24, busy=12, stages=STAGES)]


def eight_jobs(draws: np.random.Generator) -> list[TrafficJob]:
    """As a scheduler leaves them that spreads: each rack's eight hosts are those of eight jobs. Every leaf is full, and
    the jobs go round them in different orders: the hardest case."""
    racks = np.arange(HOSTS).reshape(-1, RACK)
    of_jobs = draws.permuted(racks, axis=1).T
    return [_job(draws.permutation(hosts).tolist(), draws) for hosts in of_jobs]


def hundred_jobs(draws: np.random.Generator, packed: bool) -> list[TrafficJob]:
    """Jobs come and go, and later ones fill the gaps. packed: with the first free hosts; else with any, as Kubernetes'
    scheduler does where no labels of the fabric tell it better."""
    free = np.ones(HOSTS, bool)
    running: list[list[int]] = []
    for turn in range(1 + TURNOVERS * HUNDRED):
        if turn:
            free[running.pop(int(draws.integers(len(running))))] = True
        while len(running) < HUNDRED and free.sum() >= SIZES[1]:
            size = round(float(np.exp(draws.uniform(*np.log(SIZES)))))
            left = np.flatnonzero(free)
            hosts = (left if packed else draws.permutation(left))[:size]
            free[hosts] = False
            running.append(hosts.tolist())
    return [_job(hosts, draws) for hosts in running]


def _job(hosts: Sequence[int], draws: np.random.Generator) -> TrafficJob:
    """Periods divide one another, so that shifts hold for ever: CASSINI's best case. Bound by communication to a fifth
    up to three fifths."""
    period = int(draws.choice([6, 12, 24]))
    return TrafficJob(tuple(hosts), period, round(period * float(draws.uniform(0.2, 0.6))))
