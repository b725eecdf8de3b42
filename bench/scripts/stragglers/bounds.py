"""The fastest schedules that given draws allow, without machine, communication or overhead: what all sides are held to.

All take whole samples in the order of the stream, and no sample twice. The bound is the better of two: shares of each
global batch that are chosen with that batch's draws known beforehand, and leases of a single sample, taken whenever a
rank is free. Both are better than what a system can do that learns of a draw by waiting for it, or that works in local
batches; `find_fixed_shares`, `compute_lease_rate` of a local batch and `compute_local_sgd_rate` show how much of the
bound is within reach of those.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import combinations
from statistics import median

import numpy as np
import numpy.typing as npt

from .draws import Costs

Shares = tuple[int, ...]


def compute_bound(costs: Costs, global_batch: int) -> float:
    """Samples a unit of time of the best integer schedule; `costs` [rank, sample]."""
    return max(compute_foreseen_rate(costs, global_batch), compute_lease_rate(costs, 1))


def find_fixed_shares(costs: Costs, global_batch: int) -> tuple[Shares, float]:
    """The integer shares, kept throughout, that were the fastest, and their samples a unit of time."""
    candidates = list_shares(global_batch, len(costs))
    seconds = compute_step_times(costs, candidates, global_batch).sum(axis=1)
    best = int(seconds.argmin())
    return tuple(candidates[best].tolist()), _count_samples(costs, global_batch) / float(seconds[best])


def compute_foreseen_rate(costs: Costs, global_batch: int) -> float:
    """Samples per unit of time if each batch is distributed optimally for its own draws."""
    seconds = compute_step_times(costs, list_shares(global_batch, len(costs)), global_batch)
    return _count_samples(costs, global_batch) / float(seconds.min(axis=0).sum())


def compute_shares_rate(costs: Costs, shares: Shares) -> float:
    """Samples a unit of time where every global batch is dealt out by `shares` and all wait for the last rank."""
    seconds = compute_step_times(costs, np.array([shares]), sum(shares))
    return _count_samples(costs, sum(shares)) / float(seconds.sum())


def compute_lease_rate(costs: Costs, lease: int) -> float:
    """Samples a unit of time where each rank takes the stream's next `lease` samples as soon as it is free.

    No rank ever waits, so the rate is the sum of the ranks' own rates.
    """
    ranks, samples = costs.shape
    summed = np.concatenate([np.zeros((ranks, 1)), costs.cumsum(axis=1)], axis=1)
    free = [(0.0, rank) for rank in range(ranks)]
    taken = np.zeros(ranks)
    busy = np.zeros(ranks)
    for first in range(0, samples - lease + 1, lease):
        at, rank = heapq.heappop(free)
        seconds = float(summed[rank, first + lease] - summed[rank, first])
        taken[rank] += lease
        busy[rank] += seconds
        heapq.heappush(free, (at + seconds, rank))
    return float((taken[busy > 0] / busy[busy > 0]).sum())


def compute_local_sgd_rate(costs: Costs, lease: int, batch: int, sync_every: int) -> float:
    """Samples a unit of time of ranks that lease as in `compute_lease_rate`, in steps of `batch` samples, and
    synchronize.

    A rank joins a synchronization with the step that ends nearest to `sync_every` undisturbed steps after the last one,
    as AsyncEDiT does, and waits there for the others. A lease of `batch` samples is a whole step's.
    """
    ranks, samples = costs.shape
    summed = np.concatenate([np.zeros((ranks, 1)), costs.cumsum(axis=1)], axis=1)
    recent = [deque[float](maxlen=8) for _ in range(ranks)]
    began, next_sample, taken, finished = 0.0, 0, 0, 0.0
    while True:
        # When a rank is free, which one, when its step began, and how many of its samples are done.
        free = [(began, rank, began, 0) for rank in range(ranks)]
        last_end, period_samples = began, 0
        while free:
            at, rank, step_began, done_samples = heapq.heappop(free)
            end = min(next_sample + lease, next_sample + batch - done_samples)
            if end > samples:
                return taken / finished
            at += float(summed[rank, end] - summed[rank, next_sample])
            period_samples, done_samples, next_sample = (
                period_samples + end - next_sample,
                done_samples + end - next_sample,
                end,
            )
            if done_samples < batch:
                heapq.heappush(free, (at, rank, step_began, done_samples))
                continue
            recent[rank].append(at - step_began)
            if at - began + median(recent[rank]) / 2 >= sync_every * batch:
                last_end = max(last_end, at)
            else:
                heapq.heappush(free, (at, rank, at, 0))
        began, taken, finished = last_end, taken + period_samples, last_end


def compute_step_times(costs: Costs, candidates: npt.NDArray[np.int64], global_batch: int) -> Costs:
    """Time of each whole global batch under each candidate's shares: [candidate, batch].

    The shares are dealt out in rank order, as the loader does.
    """
    ranks = len(costs)
    batches = costs.shape[1] // global_batch
    batch_costs = costs[:, : batches * global_batch].reshape(ranks, batches, global_batch)
    summed = np.concatenate([np.zeros((ranks, batches, 1)), batch_costs.cumsum(axis=2)], axis=2)
    ends = candidates.cumsum(axis=1)
    slowest = np.zeros((len(candidates), batches))
    for rank in range(ranks):
        end, first = ends[:, rank], ends[:, rank] - candidates[:, rank]
        slowest = np.maximum(slowest, (summed[rank][:, end] - summed[rank][:, first]).T)
    return slowest


def list_shares(total: int, ranks: int) -> npt.NDArray[np.int64]:
    """Every distribution of `total` samples over `ranks` ranks with one or more each: [distribution, rank]."""
    cuts = np.array(list(combinations(range(1, total), ranks - 1)), dtype=np.int64).reshape(-1, ranks - 1)
    edges = np.concatenate([np.zeros((len(cuts), 1), np.int64), cuts, np.full((len(cuts), 1), total)], axis=1)
    return np.diff(edges, axis=1)


def _count_samples(costs: Costs, global_batch: int) -> int:
    """In whole global batches."""
    return int(costs.shape[1]) // global_batch * global_batch
