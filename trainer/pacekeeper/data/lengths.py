"""Balances sequences of unequal lengths: who takes which of a global batch's samples, by what they cost.

A remedy of arXiv 2505.05713: attention's cost grows with the square of the length, so ranks with equally many samples,
or equally many tokens, are late by turns. The global batch stays the same samples and each rank keeps its number of
them, so the gradient stays the same; only who takes which is chosen.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.lengths import SequenceCost

Lengths = Callable[[int], float] | Sequence[float] | npt.NDArray[np.floating | np.integer]
"""The length of each sample: by its index in the data set. The same on all ranks."""

Costs = npt.NDArray[np.int64]

_MAX_SAMPLE_COST = 2**30
"""What the dearest sample of a batch counts. Costs are whole numbers, whose sums are exact, so that all ranks come to
the same parts, in whatever order their processors add."""
_CACHED_LENGTHS = 2**17
"""Samples whose lengths a function is asked for once, in 20 MB at most."""
_EXCHANGE_PARTNERS = 4
"""Parts that the most loaded one tries to exchange samples with."""
_BALANCED_LOAD_RATIO = 1.001
"""A load of so many times the mean is even enough."""


class SequenceBalancer:
    """The samples of a data set as sequences."""

    def __init__(self, lengths: Lengths, size: int) -> None:
        """`size`: samples in the data set. Raises InputError where `lengths` does not fit it.

        Numbers stay where they are, in a file that numpy maps, too; a function is asked again for samples that are not
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
        """Of these samples' lengths, and of the squares of these."""
        lengths = self._get_lengths(indices)
        return float(lengths.sum()), float((lengths * lengths).sum())

    def split_by_shares(self, indices: Sequence[int], sizes: Sequence[int], cost: SequenceCost) -> list[list[int]]:
        """For each of the parts, which have `sizes` samples, the ascending numbers in `indices` of its samples.

        Where all is equal, parts take turns from batch to batch: a sequence that outweighs the others is not always
        the same rank's.
        """
        turn = zlib.crc32(indices[0].to_bytes(8, "little"))  # any of them, whatever order the samples have
        return [sorted(part) for part in split_balanced(self._compute_costs(indices, cost), sizes, turn)]

    def split_microbatches(self, indices: Sequence[int], sizes: Sequence[int], cost: SequenceCost) -> list[list[int]]:
        """The same for the microbatches of a rank.

        Those of one size come in descending order of their cost, so that the ranks' matching ones cost alike.
        """
        costs = self._compute_costs(indices, cost)
        parts = [sorted(part) for part in split_balanced(costs, sizes)]
        return sorted(parts, key=lambda part: (-len(part), -int(costs[part].sum()), part))

    def _get_lengths(self, indices: Sequence[int]) -> npt.NDArray[np.float64]:
        if self._get_length is None:
            known: npt.NDArray[np.float64] = self._lengths[np.asarray(indices, dtype=np.int64)].astype(np.float64)
            return known
        found = np.array([self._get_length(index) for index in indices], dtype=np.float64)
        _check_lengths(found, np.asarray(indices))
        return found

    def _compute_costs(self, indices: Sequence[int], cost: SequenceCost) -> Costs:
        seconds = cost.compute_seconds(self._get_lengths(indices))
        dearest = seconds.max(initial=0.0)
        whole: Costs = (
            np.rint(seconds / dearest * _MAX_SAMPLE_COST).astype(np.int64) if dearest > 0 else np.zeros(len(seconds), int)
        )
        return whole


def split_balanced(costs: Costs, sizes: Sequence[int], first_part: int = 0) -> list[list[int]]:
    """Samples with `costs` in parts of exactly `sizes` samples, whose costs are as near to ∝ `sizes` as it finds.

    Largest first, each to the part that is then loaded least (among those with room); then the most loaded part
    exchanges pairs of samples with the least loaded ones while that lowers it. `turn`: parts that are alike are taken
    in the order that begins with number `turn`, modulo their number.
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
    """Of the most loaded part with one of the least loaded; False: none makes it better."""
    order = sorted((part for part in range(len(sizes)) if sizes[part]), key=lambda part: loads[part] / sizes[part])
    if len(order) < 2:  # no part has samples where a rank only stands in
        return False
    worst = order[-1]
    height = loads[worst] / sizes[worst]
    if height <= _BALANCED_LOAD_RATIO * sum(loads) / sum(sizes):
        return False
    mine = costs[members[worst]]
    best: tuple[float, int, int, int] | None = None
    for part in order[: min(_EXCHANGE_PARTNERS, len(order) - 1)]:
        given = mine[:, None] - costs[members[part]][None, :]
        higher = np.maximum((loads[worst] - given) / sizes[worst], (loads[part] + given) / sizes[part])
        at = int(higher.argmin())
        found = (float(higher.flat[at]), part, *divmod(at, len(members[part])))
        best = min(best, found) if best else found
    if best is None or best[0] >= height:
        return False
    _, part, i, j = best
    given_load = int(costs[members[worst][i]] - costs[members[part][j]])
    members[worst][i], members[part][j] = members[part][j], members[worst][i]
    loads[worst] -= given_load
    loads[part] += given_load
    return True


def _check_lengths(lengths: npt.NDArray[np.floating | np.integer], indices: npt.NDArray[np.int64]) -> None:
    bad = ~(np.isfinite(lengths) & (lengths >= 0))
    if bad.any():
        raise InputError(
            f"lengths: of sample {int(indices[bad][0])} it is {lengths[bad][0]}; it must be finite and 0 or more"
        )
