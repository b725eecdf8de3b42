"""Each worker's shards have copies on the node of another worker."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pacekeeper.checkpointing.snapshots.peer_ring import RankLocation, assign_peer_ranks, assign_peer_workers


def map_workers_to_nodes(nodes: str) -> dict[str, str]:
    """Map workers w0, w1, … to nodes with names of one letter."""
    return {f"w{number}": node for number, node in enumerate(nodes)}


@pytest.mark.parametrize(
    ("nodes", "ring"),
    [
        ("ABC", {"w0": "w1", "w1": "w2", "w2": "w0"}),
        ("AABB", {"w0": "w2", "w1": "w3", "w2": "w0", "w3": "w1"}),
        ("AAAB", {"w0": "w3", "w1": "w3", "w2": "w3", "w3": "w0"}),
        ("AAA", {}),
        ("A", {}),
        ("", {}),
    ],
)
def test_each_workers_copies_are_on_another_node(nodes: str, ring: dict[str, str]) -> None:
    assert assign_peer_workers(map_workers_to_nodes(nodes)) == ring


@pytest.mark.parametrize("seed", range(200))
def test_no_peer_shares_the_node_and_none_stores_more_than_its_part(seed: int) -> None:
    chance = random.Random(seed)
    nodes = map_workers_to_nodes("".join(chance.choices("ABCDEFGH"[: chance.randint(2, 8)], k=chance.randint(2, 40))))
    ring = assign_peer_workers(nodes)
    if len(set(nodes.values())) < 2:
        assert ring == {}
        return
    assert ring.keys() == nodes.keys()
    assert all(nodes[worker] != nodes[neighbor] for worker, neighbor in ring.items())
    most = max(Counter(nodes.values()).values())
    part = 1 if 2 * most <= len(nodes) else -(-most // (len(nodes) - most))
    assert max(Counter(ring.values()).values()) <= part


def build_location(worker: str, port: int | None = 1) -> RankLocation:
    return RankLocation(worker, f"node of {worker}", "10.0.0.1", port)


def test_ranks_of_a_worker_use_different_ranks_of_the_peer() -> None:
    assert assign_peer_ranks([build_location("a"), build_location("a"), build_location("b"), build_location("b")]) == {
        0: 2,
        1: 3,
        2: 0,
        3: 1,
    }
    assert assign_peer_ranks([build_location("a"), build_location("a"), build_location("b")]) == {0: 2, 1: 2, 2: 0}


def test_a_rank_may_be_on_any_worker() -> None:
    assert assign_peer_ranks([build_location("a"), build_location("b"), build_location("a"), build_location("b")]) == {
        0: 1,
        2: 3,
        1: 0,
        3: 2,
    }


@pytest.mark.parametrize(
    "odd",
    [build_location("c", port=None), RankLocation("c", "", "10.0.0.1", 1), RankLocation("", "N", "10.0.0.1", 1)],
    ids=repr,
)
def test_no_rank_has_a_peer_if_one_rank_can_receive_no_copy(odd: RankLocation) -> None:
    assert assign_peer_ranks([build_location("a"), build_location("b"), odd]) == {}
