"""What the ranks of a run wrote down, and what follows from it: throughput, weights, virtual time. Pure functions.

A diary has an entry for each local step of a rank. The steps between two synchronizations are a *period*; where every
step is synchronous, each is a period of its own. Periods are numbered from 1, on all ranks alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class DiaryEntry:
    """One local step of one rank."""

    at: float
    """The end of its backward pass, in seconds of the machine's monotonic clock."""
    samples: tuple[int, ...]
    cost: float
    """Sum of the samples' drawn costs, in units."""
    compute: float
    """Processor seconds of real work; the rest of what was drawn was slept away."""
    period: int


@dataclass(frozen=True)
class Period:
    """What the ranks did between two synchronizations."""

    seconds: float
    """Wall time, on the last rank: between the ends of the last steps before two synchronizations, or between the
    beginnings of the first steps behind them."""
    samples: tuple[int, ...]
    """Of each rank."""
    virtual: float
    """Units of time that the draws by themselves take: of the rank that needs longest."""


Diary = Sequence[DiaryEntry]


def list_complete_periods(diaries: Sequence[Diary]) -> list[Period]:
    """In order, from the second on: the beginning of the first was not observed."""
    steps = _group_by_period(diaries, find_last_period(diaries))
    ends = [max(rank_steps[-1].at for rank_steps in period if rank_steps) for period in steps]
    return [_build_period(period, end - begin) for period, (begin, end) in zip(steps[1:], pairwise(ends), strict=False)]


def list_begun_periods(diaries: Sequence[Diary], unit_seconds: float) -> list[Period]:
    """In order, from the first one to the last but one, where ranks do steps of their own in between: all these last
    as long as was drawn, so that the beginning of a period's first step is known. A rank that was left behind counts
    for what it has done by the end. `unit_seconds`: of a sample of cost 1.
    """
    steps = _group_by_period(diaries, max(diary[-1].period for diary in diaries))
    begins = [
        max(rank_steps[0].at - rank_steps[0].cost * unit_seconds for rank_steps in period if rank_steps)
        for period in steps
    ]
    return [
        _build_period([[entry for entry in rank_steps if entry.at <= end] for rank_steps in period], end - begin)
        for period, (begin, end) in zip(steps, pairwise(begins), strict=False)
    ]


def find_last_period(diaries: Sequence[Diary]) -> int:
    """That all ranks came to."""
    return min(diary[-1].period for diary in diaries)


def compute_virtual_time(diaries: Sequence[Diary], period: int) -> float:
    """Units until the end of `period`, where only the draws take time and a period ends with its last rank."""
    return sum(_compute_period_time(steps) for steps in _group_by_period(diaries, period))


def count_samples(diaries: Sequence[Diary], period: int) -> int:
    """Of the whole job, until the end of `period`."""
    return sum(len(entry.samples) for diary in diaries for entry in diary if entry.period <= period)


def compute_counted_share(samples: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> float:
    """The share of the samples that counts in the result; both arguments [period][rank].

    A rank whose weight is less than its share of the samples has done part of its work for nothing: of its samples
    count as many as its weight would have cost. Over the whole run, so that chance from one period to the next evens
    out.
    """
    ranks = range(len(samples[0]))
    done_samples = [sum(period[rank] for period in samples) for rank in ranks]
    weighted_samples = [
        sum(weight[rank] * sum(period) for period, weight in zip(samples, weights, strict=True)) for rank in ranks
    ]
    return sum(min(pair) for pair in zip(done_samples, weighted_samples, strict=True)) / sum(done_samples)


def compute_rank_weights(samples: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> list[float]:
    """The weight of each rank's data in the result, over all periods, weighed by their samples."""
    total = sum(sum(period) for period in samples)
    return [
        sum(weight[rank] * sum(period) for period, weight in zip(samples, weights, strict=True)) / total
        for rank in range(len(samples[0]))
    ]


# 97.5 % quantiles of Student's t distribution for 1, 2, … degrees of freedom
_STUDENT_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def compute_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (Student's t); infinite where there is one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    quantile = _STUDENT_QUANTILES[len(values) - 2] if len(values) - 2 < len(_STUDENT_QUANTILES) else 1.96
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def _build_period(steps: Sequence[Sequence[DiaryEntry]], seconds: float) -> Period:
    """`steps` of each rank."""
    samples = tuple(sum(len(entry.samples) for entry in rank_steps) for rank_steps in steps)
    return Period(seconds, samples, _compute_period_time(steps))


def _group_by_period(diaries: Sequence[Diary], last: int) -> list[list[list[DiaryEntry]]]:
    """Steps by period, from the first one to the `last`, and rank."""
    periods = range(1, last + 1)
    return [[[entry for entry in diary if entry.period == number] for diary in diaries] for number in periods]


def _compute_period_time(steps: Sequence[Sequence[DiaryEntry]]) -> float:
    """Of one period; `steps` of each rank."""
    return max(sum(entry.cost for entry in rank_steps) for rank_steps in steps)
