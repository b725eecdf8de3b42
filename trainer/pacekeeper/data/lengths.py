"""Balances sequences of unequal lengths: assigns a global batch's samples to ranks by their cost.

It is a remedy of arXiv 2505.05713: the cost of attention grows with the square of the length, so ranks with equally
many samples, or tokens, are late in turn. The global batch keeps its samples and each rank keeps its number of samples,
so the gradient stays the same. Only the assignment changes.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.length_cost import SequenceCost

Lengths = Callable[[int], float] | Sequence[float] | npt.NDArray[np.floating | np.integer]
"""Length of each sample by its index in the data set; the same on all ranks."""

Costs = npt.NDArray[np.int64]

_MAX_SAMPLE_COST = 2**30
"""Cost of the most expensive sample of a batch.

Costs are integers, whose sums are exact. All ranks therefore compute the same parts, regardless of the order in which
their processors add.
"""
_CACHED_LENGTHS = 2**17
"""Number of samples whose lengths are cached, in 20 MB at most."""
_EXCHANGE_PARTNERS = 4
"""Number of parts that the most loaded one tries to exchange samples with."""
_BALANCED_LOAD_RATIO = 1.001
"""Ratio of a load to the mean that counts as balanced."""


class SequenceBalancer:
    """Balances the samples of a data set as sequences."""

    def __init__(self, lengths: Lengths, size: int) -> None:
        """Create the balancer for a data set of `size` samples. Raises InputError if `lengths` does not match it.

        Numbers are not copied, which allows a file that numpy maps. A function is called again for samples that are not
        among the last `_CACHED_LENGTHS`.
        """
        self._get_length = lru_cache(_CACHED_LENGTHS)(lengths) if callable(lengths) else None
        self._lengths = np.empty(0) if callable(lengths) else np.asarray(lengths)
        if callable(lengths):
            return
        if (shape := self._lengths.shape) != (size,):
            raise InputError(
                f"lengths: its shape is {shape} for {size} samples; give one number a sample, or a function"
            )
        for first in range(0, size, _CACHED_LENGTHS):
            part = self._lengths[first : first + _CACHED_LENGTHS]
            _check_lengths(part, np.arange(first, first + len(part)))

    def sum_lengths(self, indices: Sequence[int]) -> tuple[float, float]:
        """Return the sums of these samples' lengths and of their squares."""
        lengths = self._get_lengths(indices)
        return float(lengths.sum()), float((lengths * lengths).sum())

    def split_by_shares(self, indices: Sequence[int], sizes: Sequence[int], cost: SequenceCost) -> list[list[int]]:
        """Return for each part, of `sizes` samples, the ascending numbers in `indices` of its samples.

        Parts that are equal take turns from batch to batch: a sequence that outweighs the others does not always go to
        the same rank.
        """
        first_part = zlib.crc32(indices[0].to_bytes(8, "little"))  # any sample works, in any order of samples
        return [sorted(part) for part in split_balanced(self._compute_costs(indices, cost), sizes, first_part)]

    def split_microbatches(self, indices: Sequence[int], sizes: Sequence[int], cost: SequenceCost) -> list[list[int]]:
        """Split a rank's samples into microbatches, as `split_by_shares` does for ranks.

        Microbatches of one size are ordered by descending cost, so that matching ones of the ranks cost alike.
        """
        costs = self._compute_costs(indices, cost)
        parts = [sorted(part) for part in split_balanced(costs, sizes)]
        return sorted(parts, key=lambda part: (-len(part), -int(costs[part].sum()), part))

    def _get_lengths(self, indices: Sequence[int]) -> npt.NDArray[np.float64]:
        if self._get_length is None:
            stored: npt.NDArray[np.float64] = self._lengths[np.asarray(indices, dtype=np.int64)].astype(np.float64)
            return stored
        lengths = np.array([self._get_length(index) for index in indices], dtype=np.float64)
        _check_lengths(lengths, np.asarray(indices))
        return lengths

    def _compute_costs(self, indices: Sequence[int], cost: SequenceCost) -> Costs:
        seconds = cost.compute_seconds(self._get_lengths(indices))
        highest = seconds.max(initial=0.0)
        costs: Costs = (
            np.rint(seconds / highest * _MAX_SAMPLE_COST).astype(np.int64)
            if highest > 0
            else np.zeros(len(seconds), int)
        )
        return costs


def split_balanced(costs: Costs, sizes: Sequence[int], first_part: int = 0) -> list[list[int]]:
    """Split samples into parts of exactly `sizes` samples, whose `costs` are approximately proportional to `sizes`.

    Largest first, each sample goes to the least loaded part with room. Then the most loaded part exchanges pairs of
    samples with the least loaded ones while that lowers its load. `first_part`: number, modulo their count, of the part
    from which equal parts are filled in order.
    """
    members = _assign_largest_first(costs, sizes, first_part)
    loads = [int(costs[part].sum()) for part in members]
    for _ in range(2 * len(sizes)):
        if not _exchange_samples(costs, sizes, members, loads):
            break
    return members


def _assign_largest_first(costs: Costs, sizes: Sequence[int], first_part: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in sizes]
    open_parts = [(0.0, -size, (part - first_part) % len(sizes), part, 0) for part, size in enumerate(sizes) if size]
    heapq.heapify(open_parts)
    for number in np.argsort(-costs, kind="stable").tolist():
        *_, order, part, load = heapq.heappop(open_parts)
        members[part].append(number)
        load += int(costs[number])
        if len(members[part]) < sizes[part]:
            heapq.heappush(open_parts, (load / sizes[part], -sizes[part], order, part, load))
    return members


def _exchange_samples(costs: Costs, sizes: Sequence[int], members: list[list[int]], loads: list[int]) -> bool:
    """Exchange a sample of the most loaded part with one of the least loaded; returns False if none improves it."""
    order = sorted((part for part in range(len(sizes)) if sizes[part]), key=lambda part: loads[part] / sizes[part])
    if len(order) < 2:  # a part without samples belongs to a rank that only runs padding
        return False
    worst = order[-1]
    worst_ratio = loads[worst] / sizes[worst]
    if worst_ratio <= _BALANCED_LOAD_RATIO * sum(loads) / sum(sizes):
        return False
    worst_costs = costs[members[worst]]
    best: tuple[float, int, int, int] | None = None
    for part in order[: min(_EXCHANGE_PARTNERS, len(order) - 1)]:
        transferred = worst_costs[:, None] - costs[members[part]][None, :]
        ratios = np.maximum((loads[worst] - transferred) / sizes[worst], (loads[part] + transferred) / sizes[part])
        index = int(ratios.argmin())
        candidate = (float(ratios.flat[index]), part, *divmod(index, len(members[part])))
        best = min(best, candidate) if best else candidate
    if best is None or best[0] >= worst_ratio:
        return False
    _, part, i, j = best
    transferred_load = int(costs[members[worst][i]] - costs[members[part][j]])
    members[worst][i], members[part][j] = members[part][j], members[worst][i]
    loads[worst] -= transferred_load
    loads[part] += transferred_load
    return True


def _check_lengths(lengths: npt.NDArray[np.floating | np.integer], indices: npt.NDArray[np.int64]) -> None:
    mask = ~(np.isfinite(lengths) & (lengths >= 0))
    if mask.any():
        raise InputError(
            f"lengths: of sample {int(indices[mask][0])} it is {lengths[mask][0]}; it must be finite and 0 or more"
        )
