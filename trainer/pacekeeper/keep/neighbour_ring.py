"""Which worker keeps the copies of which: a ring that never shares a node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def assign_peer_workers(nodes: Mapping[str, str]) -> dict[str, str]:
    """The worker on another node that keeps each worker's copies; empty where all are on one node.

    nodes: of each worker, in rank order. Where no node has more than half of the workers, each keeps the copies of
    one; otherwise the few on other nodes share those of that node equally.
    """
    by_node: dict[str, list[str]] = {}
    for worker, node in nodes.items():
        by_node.setdefault(node, []).append(worker)
    if len(by_node) < 2:
        return {}
    fullest = max(by_node.values(), key=len)
    ring = [worker for of_node in by_node.values() for worker in of_node]
    if 2 * len(fullest) <= len(ring):  # so many places on, nobody is on the node where he was
        return {worker: ring[(place + len(fullest)) % len(ring)] for place, worker in enumerate(ring)}
    others = [worker for worker in ring if nodes[worker] != nodes[fullest[0]]]
    theirs = {worker: others[place % len(others)] for place, worker in enumerate(fullest)}
    return theirs | dict(zip(others, fullest, strict=False))


@dataclass(frozen=True)
class RankLocation:
    """Where a rank is, and where it takes copies of others."""

    worker: str
    node: str
    address: str
    port: int
    """0: it can take none."""


def assign_peer_ranks(locations: Sequence[RankLocation]) -> dict[int, int]:
    """The rank that keeps each rank's copies, on the neighbour of its worker; empty: nobody does.

    places: in rank order. Copies help only all together, so there are none where a rank can take none.
    """
    if not all(place.port and place.node and place.worker for place in locations):
        return {}
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(locations):
        ranks.setdefault(place.worker, []).append(rank)
    ring = assign_peer_workers({worker: locations[its[0]].node for worker, its in ranks.items()})
    return {
        rank: ranks[neighbour][number % len(ranks[neighbour])]
        for worker, neighbour in ring.items()
        for number, rank in enumerate(ranks[worker])
    }
