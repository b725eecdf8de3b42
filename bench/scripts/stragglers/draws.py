"""What each sample costs each rank, as a pure function of scenario, seed, rank and sample: the same for every side.

The cost is keyed by rank *and* sample because which rank takes which sample depends on the side, and in A-EDiT on the
race itself. So a cost belongs to the pair, and nothing depends on the machine.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
"""Shape (ranks, samples), in units of what a sample costs an undisturbed rank."""

SLOWDOWN = 2.0
SLOW_RANK = 3
NOISE_SHIFT = 0.5
"""Shifted exponential: this much is certain, the rest (1 on average together) is exponentially distributed."""


class Scenario(StrEnum):
    """What holds the job back."""

    NONE = "none"
    CONSTANT = "constant"  # SLOW_RANK takes SLOWDOWN times as long, always
    RANDOM = "random"  # in each global batch of the stream, one rank drawn at random does
    NOISE = "noise"  # each sample's cost on each rank is drawn from a shifted exponential distribution
    SLOW_LINK = "slow_link"  # nothing costs more, but SLOW_RANK's network link is slow


def draw_costs(scenario: Scenario, ranks: int, samples: int, global_batch: int, seed: int) -> Costs:
    """The cost of the stream's sample number s (column) on rank r (row)."""
    costs = np.ones((ranks, samples))
    if scenario is Scenario.CONSTANT:
        costs[SLOW_RANK] = SLOWDOWN
    elif scenario is Scenario.RANDOM:
        batches = -(-samples // global_batch)
        slow_rank = np.random.default_rng(seed).integers(ranks, size=batches).repeat(global_batch)[:samples]
        costs[slow_rank, np.arange(samples)] = SLOWDOWN
    elif scenario is Scenario.NOISE:
        for rank in range(ranks):
            exponential = np.random.default_rng([seed, rank]).exponential(1 - NOISE_SHIFT, samples)
            costs[rank] = NOISE_SHIFT + exponential
    return costs
