"""Who sends to whom, and how much of what is moved: as gloo and NCCL lay their rings and trees, and between stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Edge(NamedTuple):
    """`part`: bytes sent along it for each byte that the operation is about."""

    source: int
    destination: int
    part: float


def ring(ranks: Sequence[int], *, backwards: bool = False) -> list[Edge]:
    """An all-reduce: each sends 2 (n − 1) / n to the next one; gloo's rings go backwards, to the one before."""
    count = len(ranks)
    if count < 2:
        return []
    part = 2 * (count - 1) / count
    order = list(ranks)[::-1] if backwards else list(ranks)
    return [Edge(one, other, part) for one, other in zip(order, order[1:] + order[:1], strict=True)]


def pipeline(ranks: Sequence[int]) -> list[Edge]:
    """Stages: activations go on from each to the next one, their gradients back."""
    return [edge for one, other in pairwise(ranks) for edge in (Edge(one, other, 1.0), Edge(other, one, 1.0))]


def double_binary_tree(ranks: Sequence[int]) -> list[Edge]:
    """NCCL's trees for an all-reduce: each carries one half up and down again. The second one is the first with every
    rank one further, so that nearly everybody is a leaf in one and inside the other (Sanders et al. 2009)."""
    count = len(ranks)
    edges = []
    for shift in (0, 1):
        for rank in range(count):
            parent = _parent(rank, count)
            if parent is not None:
                child, above = ranks[(rank + shift) % count], ranks[(parent + shift) % count]
                edges += [Edge(child, above, 0.5), Edge(above, child, 0.5)]
    return edges


def all_to_all(ranks: Sequence[int]) -> list[Edge]:
    """Each sends its n-th part to each other one."""
    return [Edge(one, other, 1 / len(ranks)) for one in ranks for other in ranks if one != other]


def _parent(rank: int, count: int) -> int | None:
    """In the binary tree over 0 … count − 1 that has rank 0 as its root and whose levels are the lowest bits."""
    if rank == 0:
        return None
    bit = rank & -rank
    above = (rank ^ bit) | (bit << 1)
    return above if above < count else rank ^ bit
