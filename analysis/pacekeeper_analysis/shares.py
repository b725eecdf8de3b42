"""Batch shares: how many samples of a global batch each rank gets (arXiv 2110.08941).

The best shares minimise the *expected maximum* over ranks of the step time. Under noise that is not the same as shares
proportional to speed, so the observed distribution of costs is used, not its mean alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import InputError

Seconds = npt.NDArray[np.float64]
Shares = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Balance:
    """Shares in rank order and the step time (seconds) expected of the present shares and of these."""

    shares: tuple[int, ...]
    seconds_now: float
    seconds_after: float

    @property
    def win(self) -> float:
        """Predicted relative win: 0.25 where a step gets a quarter shorter."""
        return 1.0 - self.seconds_after / self.seconds_now if self.seconds_now > 0 else 0.0


def balance(
    cost_per_sample: Seconds,
    current: tuple[int, ...],
    *,
    fixed: Seconds | None = None,
    minimum: int = 1,
    maximum: int | None = None,
    draws: int = 256,
    seed: int = 0,
) -> Balance:
    """Integer shares, summing to sum(current), that minimise the expected maximum over ranks of `fixed + share · cost`.

    cost_per_sample: seconds a sample, shape (steps observed, ranks). fixed: seconds a step whatever the share, shape
    (ranks,). The expectation is over `draws` bootstrapped steps, each rank drawn by itself, the same ones for every
    candidate.
    """
    steps, ranks = cost_per_sample.shape
    total = sum(current)
    ceiling = total if maximum is None else maximum
    _check(cost_per_sample, current, minimum, ceiling)
    offset = np.zeros(ranks) if fixed is None else np.asarray(fixed, dtype=np.float64)
    random = np.random.default_rng(seed)
    drawn = cost_per_sample[random.integers(0, steps, size=(draws, ranks)), np.arange(ranks)]

    def finish(shares: Shares) -> Seconds:
        return offset + drawn * shares

    def expected(shares: Shares) -> float:
        return float(finish(shares).max(axis=1).mean())

    start = _greedy(cost_per_sample.mean(axis=0), offset, total, minimum, ceiling)
    best = _descend(start, finish, minimum, ceiling)
    now = expected(np.asarray(current, dtype=np.int64))
    after = expected(best)
    return Balance(tuple(int(n) for n in best), now, after) if after < now else Balance(current, now, now)


def equal(total: int, ranks: int) -> tuple[int, ...]:
    """Shares as equal as integers allow; the first ranks get the remainder. InputError where a rank would get none."""
    if total < ranks:
        raise InputError(
            f"global batch {total} is smaller than the {ranks} ranks; raise the batch or lower spec.replicas"
        )
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def _greedy(cost: Seconds, fixed: Seconds, total: int, minimum: int, maximum: int) -> Shares:
    """Each next sample to the rank that would be done with it first: optimal where costs do not vary."""
    shares = np.full(len(cost), minimum, dtype=np.int64)
    for _ in range(total - minimum * len(cost)):
        finish = np.where(shares < maximum, fixed + (shares + 1) * cost, np.inf)
        shares[int(finish.argmin())] += 1
    return shares


def _descend(shares: Shares, finish: Callable[[Shares], Seconds], minimum: int, maximum: int) -> Shares:
    """Move one sample at a time from ranks that are often last to early ones, as long as the mean maximum falls.

    finish: the ranks' finish times under given shares, shape (draws, ranks).
    """
    best, times = shares, finish(shares)
    for _ in range(int(shares.sum())):
        last = np.bincount(times.argmax(axis=1), minlength=len(best))
        givers, takers = np.argsort(-last, kind="stable")[:3], np.argsort(times.mean(axis=0), kind="stable")[:3]
        for giver, taker in [(g, t) for g in givers for t in takers if g != t]:
            if best[giver] <= minimum or best[taker] >= maximum:
                continue
            candidate = best.copy()
            candidate[giver] -= 1
            candidate[taker] += 1
            after = finish(candidate)
            if after.max(axis=1).mean() < times.max(axis=1).mean() * (1 - 1e-9):
                best, times = candidate, after
                break
        else:
            return best
    return best


def _check(cost: Seconds, current: tuple[int, ...], minimum: int, maximum: int) -> None:
    steps, ranks = cost.shape
    total = sum(current)
    if steps == 0 or not np.isfinite(cost).all() or (cost <= 0).any():
        raise InputError("cost_per_sample must hold at least one step of finite, positive seconds for every rank")
    if len(current) != ranks:
        raise InputError(f"current has {len(current)} shares for {ranks} ranks; give one a rank")
    if not minimum * ranks <= total <= maximum * ranks:
        raise InputError(f"{total} samples do not fit {ranks} ranks with {minimum} to {maximum} each; widen the bounds")
