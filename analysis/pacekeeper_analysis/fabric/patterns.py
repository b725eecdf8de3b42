"""Who sends to whom: around a ring, as gloo and NCCL lay theirs, and between stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class TrafficEdge(NamedTuple):
    source: int
    destination: int


def build_ring_edges(ranks: Sequence[int], *, backwards: bool = False) -> list[TrafficEdge]:
    """An all-reduce: each sends to the next one; gloo's rings go backwards, to the one before."""
    if len(ranks) < 2:
        return []
    order = list(ranks)[::-1] if backwards else list(ranks)
    return [TrafficEdge(one, other) for one, other in zip(order, order[1:] + order[:1], strict=True)]


def build_pipeline_edges(ranks: Sequence[int]) -> list[TrafficEdge]:
    """Stages: activations go on from each to the next one, their gradients back."""
    return [edge for one, other in pairwise(ranks) for edge in (TrafficEdge(one, other), TrafficEdge(other, one))]
