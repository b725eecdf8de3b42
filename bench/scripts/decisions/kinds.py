"""What may slow a job down: one function a kind, in one table. A kind of its own is a function here and a line there.

Each makes the strain that lets the steps of an otherwise undisturbed job take `depth` times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .world import GC_INTERVAL_STEPS, JobCosts, Strain

Make = Callable[[JobCosts, float, np.random.Generator], Strain]


@dataclass(frozen=True)
class Kind:
    """weight: how often it is drawn. mean_seconds: that it lasts, where it ends. deepest: beyond it, none is seen."""

    make: Make
    weight: float
    mean_seconds: float = 600.0
    deepest: float = 5.0


def slow_rank(job: JobCosts, depth: float, rng: np.random.Generator) -> Strain:
    """One GPU."""
    return Strain(slow=((int(rng.integers(job.ranks)), _compute_own_factor(job, depth)),), movable=True)


def slow_node(job: JobCosts, depth: float, rng: np.random.Generator) -> Strain:
    """All ranks of one worker."""
    first_rank = int(rng.integers(job.workers)) * job.ranks_each
    return Strain(
        slow=tuple((first_rank + offset, _compute_own_factor(job, depth)) for offset in range(job.ranks_each)),
        movable=True,
    )


def slow_link(job: JobCosts, depth: float, _rng: np.random.Generator) -> Strain:
    """A route through the fabric, whose connections are not observed: all transfers wait for it in every placement."""
    return Strain(transfer_seconds=(depth - 1.0) * job.step_seconds)


def slow_ranks_in_turn(job: JobCosts, depth: float, _rng: np.random.Generator) -> Strain:
    """Another rank in each step."""
    return Strain(turns=_compute_own_factor(job, depth))


def slow_by_gc(job: JobCosts, depth: float, _rng: np.random.Generator) -> Strain:
    """Python's garbage collections, of each rank in steps of its own."""
    collecting_share = 1.0 - (1.0 - 1.0 / GC_INTERVAL_STEPS) ** job.ranks
    return Strain(gc_seconds=(depth - 1.0) * job.step_seconds / collecting_share)


def vary_lengths(job: JobCosts, depth: float, _rng: np.random.Generator) -> Strain:
    """Sequences of many lengths, dealt by their number."""
    wanted_factor = _compute_own_factor(job, depth)
    draws = min(8192, 65_536 // job.ranks)
    normals = np.random.default_rng(0).standard_normal((draws, job.ranks)).max(axis=1)
    low, high = 0.0, 2.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        longest = float(np.exp(middle * normals - middle**2 / 2).mean())
        low, high = (middle, high) if longest < wanted_factor else (low, middle)
    return Strain(lengths=low)


def slow_all_ranks(job: JobCosts, depth: float, _rng: np.random.Generator) -> Strain:
    """All causes that slow all ranks at once. There is no remedy."""
    return Strain(all_slow=_compute_own_factor(job, depth))


KINDS: Mapping[str, Kind] = {
    "rank": Kind(slow_rank, 0.15),
    "node": Kind(slow_node, 0.13),
    "link": Kind(slow_link, 0.40, mean_seconds=1440.0),
    "turns": Kind(slow_ranks_in_turn, 0.10),
    "garbage": Kind(slow_by_gc, 0.07, deepest=2.0),
    "lengths": Kind(vary_lengths, 0.07, deepest=2.2),
    "all alike": Kind(slow_all_ranks, 0.08),
}
"""Weights: 40 % of large jobs have slow communication (Greyhound, ATC'25). Of the rest all causes of the what-if traces
(arXiv 2505.05713), and slow ranks and nodes, which are few there, more often: they have the dearest remedies.
Durations: computing ten minutes on average, communication 24 (Greyhound)."""


def _compute_own_factor(job: JobCosts, depth: float) -> float:
    """Of own work that lets a step take `depth` times as long."""
    return 1.0 + (depth - 1.0) * job.step_seconds / job.own_seconds
