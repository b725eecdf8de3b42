"""Assignment of workers to the peers that keep their copies: a ring that never shares a node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def assign_peer_workers(nodes: Mapping[str, str]) -> dict[str, str]:
    """Return the worker on another node that keeps each worker's copies; empty if all are on one node.

    `nodes`: node of each worker, in rank order. If no node has more than half of the workers, each keeps the copies of
    one. Otherwise the few on other nodes share those of that node equally.
    """
    workers_by_node: dict[str, list[str]] = {}
    for worker, node in nodes.items():
        workers_by_node.setdefault(node, []).append(worker)
    if len(workers_by_node) < 2:
        return {}
    largest = max(workers_by_node.values(), key=len)
    ring = [worker for node_workers in workers_by_node.values() for worker in node_workers]
    if 2 * len(largest) <= len(ring):  # shifted by this number, no worker stays on its node
        return {worker: ring[(position + len(largest)) % len(ring)] for position, worker in enumerate(ring)}
    other_workers = [worker for worker in ring if nodes[worker] != nodes[largest[0]]]
    peer_by_worker = {worker: other_workers[position % len(other_workers)] for position, worker in enumerate(largest)}
    return peer_by_worker | dict(zip(other_workers, largest, strict=False))


@dataclass(frozen=True)
class RankLocation:
    """Location of a rank, and where it accepts copies of others."""

    worker: str
    node: str
    address: str
    port: int | None
    """None: it accepts none."""


def assign_peer_ranks(locations: Sequence[RankLocation]) -> dict[int, int]:
    """Return the rank that keeps each rank's copies, on the peer of its worker; empty: there are no copies.

    `locations`: in rank order. Copies only help if all ranks have them, so there are none if a rank accepts none.
    """
    if not all(location.port is not None and location.node and location.worker for location in locations):
        return {}
    ranks: dict[str, list[int]] = {}
    for rank, location in enumerate(locations):
        ranks.setdefault(location.worker, []).append(rank)
    ring = assign_peer_workers({worker: locations[worker_ranks[0]].node for worker, worker_ranks in ranks.items()})
    return {
        rank: ranks[peer][number % len(ranks[peer])]
        for worker, peer in ring.items()
        for number, rank in enumerate(ranks[worker])
    }
