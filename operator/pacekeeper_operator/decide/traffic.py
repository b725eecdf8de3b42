"""Joint planning: which way each flow of each job takes through the fabric. Pure, and without a memory of its own.

All jobs' plans go in, with the ways that stand in them, and the ways that shall stand there come out. Who has a way
that is alive keeps it, unless what all jobs win by moving flows outweighs the rounds that this costs. Whoever stops in
the middle has changed some plans and others not: the next look ends the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.fabric import assign as assigning
from pacekeeper_analysis.fabric import load, patterns, planes
from pacekeeper_analysis.fabric.assign import Assignment, Flows, assign
from pacekeeper_analysis.fabric.topology import WITHIN, Ints, Topology

from ..network import JobName, JobTraffic, Pair, Traffic, Wiring

HORIZON_SECONDS = 600.0
"""What a better plan wins is reckoned over so long: jobs come and go, and change it again."""
FINEST = 16
"""The heaviest flow counts for so many of the lightest; between them, powers of two."""


def plan(wiring: Wiring, jobs: Sequence[JobTraffic]) -> Traffic | None:
    """None: there is no fabric to plan on."""
    if wiring.topology is None:
        return None
    table = _table(wiring, jobs)
    kept = _assigned(wiring.topology, table, frozenset())
    chosen, gain = kept, 0.0
    if kept.level > kept.bound:
        for movable in _movable(jobs):
            found = _assigned(wiring.topology, table, movable)
            won = _won(wiring.topology, table, kept, found)
            if won > gain and len(found.lost) <= len(kept.lost):
                chosen, gain = found, won
    return _told(wiring.topology, table, chosen, gain)


def place(wiring: Wiring, others: Iterable[JobTraffic], own: JobTraffic) -> Mapping[Pair, int]:
    """Ways of one job around those of the others, nobody of whom moves."""
    if wiring.topology is None:
        return {}
    table = _table(wiring, [*others, own])
    found = _assigned(wiring.topology, table, frozenset())
    return _told(wiring.topology, table, found, 0.0).ways[own.name]


def _movable(jobs: Sequence[JobTraffic]) -> Iterator[frozenset[int]]:
    """Which of the jobs may be moved, by their places: those whose rounds cost least, ever more of them."""
    cheapest = sorted(range(len(jobs)), key=lambda place: jobs[place].round_cost)
    count = 1
    while cheapest:
        yield frozenset(cheapest[:count])
        if count >= len(cheapest):
            return
        count *= 2


def living(wiring: Wiring, job: JobTraffic) -> Mapping[Pair, int]:
    """The ways that its plan names, as far as they are alive."""
    if wiring.topology is None:
        return {}
    table = _table(wiring, [job])
    ways = assigning.living(wiring.topology, table.flows, table.present.tolist())
    return {pair: way for pair, way in zip(table.pairs, ways.tolist(), strict=True) if way != WITHIN}


def edges(job: JobTraffic) -> list[Pair]:
    """Who sends to whom in its rings: gloo's goes through all ranks, each sends to the one before; NCCL has one through
    each place of the workers, in which each sends to the next one."""
    if not job.by_nccl:
        rings = [[rank for seat in job.seats for rank in seat.ranks]]
    else:
        each = min((len(seat.ranks) for seat in job.seats), default=0)
        rings = [[seat.ranks[place] for seat in job.seats] for place in range(each)]
    return [
        (edge.source, edge.destination) for ring in rings for edge in patterns.ring(ring, backwards=not job.by_nccl)
    ]


@dataclass(frozen=True)
class _Table:
    """All jobs' flows between leaves, as columns."""

    jobs: Sequence[JobTraffic]
    pairs: Sequence[Pair]
    job: Ints  # its place in `jobs`
    sender: Ints  # node, numbered
    receiver: Ints
    flows: Flows
    present: Ints


def _table(wiring: Wiring, jobs: Sequence[JobTraffic]) -> _Table:
    rows: list[_Row] = []
    for number, (job, weights) in enumerate(zip(jobs, _weights(jobs), strict=True)):
        node = {rank: seat.node for seat in job.seats for rank in seat.ranks}
        for pair, weight in weights.items():
            source, destination = (wiring.leaf_of.get(node[rank]) for rank in pair)
            if source is not None and destination is not None and source != destination:
                rows.append(_Row(number, pair, node[pair[0]], node[pair[1]], weight))
    nodes = {name: number for number, name in enumerate(wiring.leaf_of)}
    sender, receiver = _ints(nodes[row.sender] for row in rows), _ints(nodes[row.receiver] for row in rows)
    leaves = _ints(wiring.leaf_of.values())
    flows = Flows(leaves[sender], leaves[receiver], _ints(row.weight for row in rows))
    present = _ints(jobs[row.job].ways.get(row.pair, WITHIN) for row in rows)
    return _Table(jobs, [row.pair for row in rows], _ints(row.job for row in rows), sender, receiver, flows, present)


class _Row(NamedTuple):
    job: int
    pair: Pair
    sender: str
    receiver: str
    weight: int


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _weights(jobs: Sequence[JobTraffic]) -> list[dict[Pair, int]]:
    """Of each job's edges. What was measured is counted in parts of the heaviest; of whom nothing was, all are alike,
    and as heavy as the middle of those that were."""
    rings = [edges(job) for job in jobs]
    sent = [{pair: job.sent.get(pair, 0.0) for pair in ring} for job, ring in zip(jobs, rings, strict=True)]
    known = sorted(bytes_ for of in sent for bytes_ in of.values() if bytes_ > 0)
    if not known:
        return [dict.fromkeys(ring, 1) for ring in rings]
    middle = known[len(known) // 2]

    def weight(bytes_: float) -> int:
        return 1 << max(0, round(math.log2(FINEST * (bytes_ or middle) / known[-1])))

    weights = [{pair: weight(bytes_) for pair, bytes_ in of.items()} for of in sent]
    lightest = min(number for of in weights for number in of.values())
    return [{pair: number // lightest for pair, number in of.items()} for of in weights]


def _assigned(topology: Topology, table: _Table, movable: frozenset[int]) -> Assignment:
    """`movable`: the jobs whose flows may leave a way that is alive."""
    held = ~np.isin(table.job, list(movable))
    if topology.planes == 1:
        return assign(topology, table.flows, table.present.tolist(), held.tolist())
    plane = _planes(topology, table, held)
    return planes.assign_planes(topology, table.flows, plane, table.present.tolist(), held.tolist())


def _planes(topology: Topology, table: _Table, held: NDArray[np.bool_]) -> Ints:
    """By which of its host's ports each flow goes: who is held stays, the others so that ports are used evenly."""
    plane = np.where(held & (table.present != WITHIN), table.present // topology.spines, WITHIN)
    new, flows = np.flatnonzero(plane == WITHIN), table.flows
    plane[new] = planes.split(
        table.sender[new], flows.source[new], table.receiver[new], flows.destination[new], flows.weight[new]
    )
    return plane


def _won(topology: Topology, table: _Table, kept: Assignment, found: Assignment) -> float:
    """Seconds of ranks that the jobs win by `found` beyond what its new rounds cost; 0 or less: leave them alone."""
    before, after = (_pace(topology, table, one) for one in (kept, found))
    won = sum(
        HORIZON_SECONDS * job.ranks * job.waiting * (1.0 - before[number] / after[number])
        for number, job in enumerate(table.jobs)
        if after[number] > 0
    )
    moved = {int(table.job[flow]) for flow in found.moved}
    return won - sum(table.jobs[number].round_cost for number in moved)


def _pace(topology: Topology, table: _Table, found: Assignment) -> dict[int, float]:
    """How fast each job's ring goes, by simulation: as its slowest flow."""
    flows = table.flows
    numbers, entity = np.unique(table.job, return_inverse=True)
    rate = load.rates(
        topology, flows.source, flows.destination, found.ways, flows.weight.astype(float), entity.ravel().tolist()
    )
    pace = dict.fromkeys(range(len(table.jobs)), 0.0)
    for place, number in enumerate(numbers.tolist()):
        pace[number] = float((rate / flows.weight)[entity == place].min())
    return pace


def _told(topology: Topology, table: _Table, found: Assignment, gain: float) -> Traffic:
    ways: dict[JobName, dict[Pair, int]] = {job.name: {} for job in table.jobs}
    for job, pair, way in zip(table.job.tolist(), table.pairs, found.ways.tolist(), strict=True):
        if way != WITHIN:
            ways[table.jobs[job].name][pair] = way
    flows = table.flows
    up, down = load.loads(topology, flows.source, flows.destination, found.ways, flows.weight.astype(float))
    return Traffic(
        ways=ways,
        flows=len(flows),
        level=found.level,
        bound=found.bound,
        moved=len(found.moved),
        lost=tuple((table.jobs[int(table.job[flow])].name, table.pairs[flow]) for flow in found.lost),
        up=up.astype(np.int64),
        down=down.astype(np.int64),
        gain_seconds=gain,
    )
