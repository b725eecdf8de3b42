"""Traffic patterns: rings, as in gloo and NCCL, and pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class TrafficEdge(NamedTuple):
    source: int
    destination: int


def build_ring_edges(ranks: Sequence[int], *, backwards: bool = False) -> list[TrafficEdge]:
    """Return the edges of an all-reduce: each rank sends to the next one.

    In gloo's rings it sends to the previous one.
    """
    if len(ranks) <= 1:
        return []
    order = list(ranks)[::-1] if backwards else list(ranks)
    return [TrafficEdge(rank, next_rank) for rank, next_rank in zip(order, order[1:] + order[:1], strict=True)]


def build_pipeline_edges(ranks: Sequence[int]) -> list[TrafficEdge]:
    """Return the edges of stages: activations go to the next stage, their gradients to the previous one."""
    return [
        edge
        for rank, next_rank in pairwise(ranks)
        for edge in (TrafficEdge(rank, next_rank), TrafficEdge(next_rank, rank))
    ]
