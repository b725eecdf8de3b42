"""Whether all ranks of a job have become slow alike: code, configuration or storage, never a node's fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class UniformSlowdown:
    """`ratio`: present own work a step over that of the job's own first steady steps, median over ranks."""

    ratio: float
    spread: float  # largest minus smallest ratio of a rank


def find(compute_seconds: Sequence[float], first_seconds: Sequence[float], threshold: float) -> UniformSlowdown | None:
    """Compare each rank's work a step (seconds) with its own first steady steps; both in rank order.

    None where some rank is not slower than `threshold` (then it is a straggler's matter), or the ranks differ by more
    than half of the rise.
    """
    if not compute_seconds or len(compute_seconds) != len(first_seconds) or min(first_seconds) <= 0:
        return None
    ratios = np.asarray(compute_seconds) / np.asarray(first_seconds)
    ratio, spread = float(np.median(ratios)), float(ratios.max() - ratios.min())
    if ratios.min() < threshold or spread > (ratio - 1) / 2:
        return None
    return UniformSlowdown(ratio, spread)
