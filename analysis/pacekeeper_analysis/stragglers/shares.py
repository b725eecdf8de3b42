"""Batch shares: how many samples of a global batch each rank gets (arXiv 2110.08941).

    balance = rebalance_shares(compute_seconds, samples)        # both [steps, ranks]
    if balance.is_worthwhile: ...                               # balance.shares

The best shares minimize the *expected maximum* over ranks of the step time. Under noise that is not the same as shares
proportional to speed, so the observed distribution of costs is used, not only its mean. A step costs a rank `fixed +
per_sample · samples`. The two can only be separated if its samples varied: the first change of shares is the probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ..errors import InputError

Seconds = npt.NDArray[np.float64]
Shares = npt.NDArray[np.int64]
RankClasses = npt.NDArray[np.int64]

MIN_REBALANCE_WIN = 0.02
"""Smallest relative gain that is worth a change of shares. A change for less would only make the job flap."""

MIN_KNOWN_RANKS_WIN = 0.01
"""The same limit for ranks whose speeds are known from many steps: their shares do not flap."""

MIN_HALF_WINDOW_WIN = 0.01
"""The same limit for each half of the examined steps. A gain in only one of them is chance."""

MAX_FIXED_COST_ERROR = 0.1
"""The fixed part counts as identified if its standard error is below this part of the rank's own work."""

ASSUMED_FIXED_COST_SHARE = 0.05
"""Part of a rank's own work that is assumed to be fixed if the fixed part is not identified."""

_MAX_STEPS_COMPARED = 128
"""Upper limit of steps of which all pairs are compared for a slope: enough for 1 % at 10 % noise, in 1 ms per rank."""

MIN_DISTINCT_STANDARD_ERRORS = 3.0
"""Standard errors from which on a rank differs from the others.

A rank varies more by this much if it comes and goes. A rank at this distance from slow ranks is not as slow as they
are.
"""

CHANCE_STANDARD_ERRORS, REPEATED_CHANCE_STANDARD_ERRORS = 2.0, 4.0
"""Standard errors by which a rank may differ by chance: in the few steps of one window, and in one of many windows."""

_BOOTSTRAP_DRAWS = 512
"""Number of steps composed from the ranks' own, and of draws of them that shares are fitted to."""

_SHARE_WINDOW_DIMENSIONS = 2
"""Steps and ranks."""

_MAX_MOVE_CANDIDATES = 8
"""Number of possible givers, and of possible takers, of which all pairs are tried for each move."""


@dataclass(frozen=True)
class ShareCosts:
    """The cost of a step on each rank: `fixed + per_sample · samples` seconds; arrays of shape (ranks,)."""

    fixed: Seconds
    per_sample: Seconds
    identified: npt.NDArray[np.bool_]  # False: the samples hardly varied; all is in `per_sample`

    def compute_seconds(self, samples: npt.ArrayLike) -> Seconds:
        """Return the expected own work under these samples, shape (…, ranks)."""
        return np.asarray(self.fixed + self.per_sample * np.asarray(samples))

    def with_assumed_fixed_cost(self, samples: npt.ArrayLike) -> ShareCosts:
        """Assume a fixed part of ASSUMED_FIXED_COST_SHARE of the cost of these samples where it is not identified.

        Every rank has some fixed part. Without it, too much would be expected of other shares.
        """
        identified, seconds = self.identified, self.compute_seconds(samples)
        return replace(
            self,
            fixed=np.where(identified, self.fixed, ASSUMED_FIXED_COST_SHARE * seconds),
            per_sample=np.where(
                identified, self.per_sample, (1.0 - ASSUMED_FIXED_COST_SHARE) * seconds / np.asarray(samples)
            ),
        )


@dataclass(frozen=True)
class ShareLimits:
    """The limits of each rank's share, in samples. Each share is a multiple of `granularity`."""

    minimum: int = 1
    maximum: int | None = None  # the rank's memory; None: no limit
    granularity: int = 1

    def count_granules(self) -> ShareLimits:
        """Return the limits in units of `granularity` samples."""
        return ShareLimits(
            minimum=-(-self.minimum // self.granularity),
            maximum=None if self.maximum is None else self.maximum // self.granularity,
        )


NO_SHARE_LIMITS = ShareLimits()


@dataclass(frozen=True)
class ShareBalance:
    """Shares in rank order, and the expected step times (seconds) of the present shares and of these.

    `sure` means that each half of the steps confirms the gain. Below `min_win` a change is not worthwhile.
    """

    shares: tuple[int, ...]
    seconds_now: float
    seconds_after: float
    is_sure: bool = True
    min_win: float = MIN_REBALANCE_WIN

    @property
    def win(self) -> float:
        """Predicted relative gain: 0.25 if a step becomes a quarter shorter."""
        return 1.0 - self.seconds_after / self.seconds_now if self.seconds_now > 0 else 0.0

    @property
    def is_worthwhile(self) -> bool:
        return self.is_sure and self.win >= self.min_win


def rebalance_shares(
    compute_seconds: npt.ArrayLike,
    samples: npt.ArrayLike,
    *,
    costs: ShareCosts | None = None,
    limits: ShareLimits = NO_SHARE_LIMITS,
    known_relative_times: Mapping[int, float] | None = None,
) -> ShareBalance:
    """Compute the best shares from windows of own work. The present shares are those of the last step.

    `compute_seconds` and `samples` have the shape (steps, ranks), oldest first. `costs` are the known costs. None means
    those that `fit_costs` finds in these steps. Rare long steps (garbage collection, other pauses) are left out,
    because shares cannot help against them. `known_relative_times` are ranks whose time per sample, relative to the
    median rank, is known from many more steps. Raises InputError if the input does not fit.
    """
    seconds, amounts = _check_window(compute_seconds, samples)
    if known_relative_times and not {*known_relative_times} <= {*range(amounts.shape[1])}:
        raise InputError(
            f"known paces of ranks {sorted(known_relative_times)} do not fit {amounts.shape[1]} ranks; leave others out"
        )
    costs = (fit_costs(seconds, amounts) if costs is None else costs).with_assumed_fixed_cost(amounts[-1])
    relative = _replace_pauses(seconds / costs.compute_seconds(amounts))
    per_sample = (relative * costs.compute_seconds(amounts) - costs.fixed) / amounts
    per_sample = np.maximum(
        per_sample, 0.05 * costs.per_sample
    )  # noise on a large fixed part must not make it negative
    current = tuple(int(count) for count in amounts[-1])

    def best(sample_costs: Seconds, draws: int) -> ShareBalance:
        drawn_costs, rank_classes = _shrink_costs(sample_costs, known_relative_times)
        return optimize_shares(
            drawn_costs,
            current,
            fixed=costs.fixed,
            rank_classes=rank_classes,
            limits=limits,
            draws=draws,
        )

    balance = best(per_sample, _BOOTSTRAP_DRAWS)
    if known_relative_times:
        # Other draws than those that the shares were fitted to.
        other_draws, _ = _shrink_costs(per_sample, known_relative_times, seed=2)
        win = min(balance.win, _compute_win(balance.shares, current, other_draws, costs.fixed))
        return ShareBalance(
            balance.shares, balance.seconds_now, balance.seconds_now * (1.0 - win), min_win=MIN_KNOWN_RANKS_WIN
        )
    halves = per_sample[0::2], per_sample[1::2]
    if balance.shares == current or len(halves[1]) <= 1:
        return balance
    # Shares fitted to these steps look better on them than they are. So the gain is what each half's shares gain on the
    # other half.
    wins = [
        _compute_win(best(fit_half, 64).shares, current, test_half, costs.fixed)
        for fit_half, test_half in (halves, halves[::-1])
    ]
    win = min(balance.win, float(np.mean(wins)))
    return ShareBalance(
        balance.shares, balance.seconds_now, balance.seconds_now * (1.0 - win), min(wins) >= MIN_HALF_WINDOW_WIN
    )


def fit_costs(compute_seconds: npt.ArrayLike, samples: npt.ArrayLike) -> ShareCosts:
    """Fit each rank's fixed cost and cost per sample, by a robust line through its steps.

    `compute_seconds` is the own work without waits. `samples` are those of the same steps (or their cost units). Both
    are (steps, ranks). The slope is the median of the slopes between all pairs of steps, weighted by the distance of
    their samples (Theil–Sen, Sievers 1978). Up to a quarter of the steps may be outliers. Raises InputError if values
    are not finite and positive.
    """
    seconds, amounts = _check_window(compute_seconds, samples)
    typical = np.median(seconds, axis=0)
    mean_amount = amounts.mean(axis=0)
    per_sample = np.median(seconds / amounts, axis=0)
    fixed = np.zeros_like(typical)
    identified = np.zeros(len(typical), dtype=bool)
    for rank in np.flatnonzero(np.ptp(amounts, axis=0) > 0):
        own, own_amounts = seconds[:, rank], amounts[:, rank]
        slope = _estimate_slope(own, own_amounts)
        residual = own - slope * own_amounts
        noise = 1.4826 * float(np.median(np.abs(residual - np.median(residual))))
        error = noise / float(np.sqrt(((own_amounts - mean_amount[rank]) ** 2).sum())) * mean_amount[rank]
        if error > MAX_FIXED_COST_ERROR * typical[rank]:
            continue
        variable = slope * mean_amount[rank]
        if not -max(2 * error, 0.1 * typical[rank]) <= variable <= typical[rank] + max(2 * error, 0.1 * typical[rank]):
            continue  # neither part can be negative: the rank's speed has changed along with its samples
        identified[rank] = True
        # Noise can push either part below zero, and a cost that no share could lower has no best share.
        per_sample[rank] = np.clip(slope, 0.02 * per_sample[rank], per_sample[rank])
        fixed[rank] = max(0.0, float(np.median(own - per_sample[rank] * own_amounts)))
    return ShareCosts(fixed, per_sample, identified)


def fit_costs_per_rank(compute_seconds: Sequence[npt.ArrayLike], samples: Sequence[npt.ArrayLike]) -> ShareCosts:
    """Fit the costs of ranks that have different steps: for each rank, shape (its steps,)."""
    if len({(np.shape(own), np.shape(amounts)) for own, amounts in zip(compute_seconds, samples, strict=True)}) == 1:
        # As is usual, in one call: the same result in a fraction of the time.
        return fit_costs(np.stack(compute_seconds, axis=1), np.stack(samples, axis=1))
    rank_costs = [
        fit_costs(np.reshape(own, (-1, 1)), np.reshape(amounts, (-1, 1)))
        for own, amounts in zip(compute_seconds, samples, strict=True)
    ]
    return ShareCosts(
        np.concatenate([costs.fixed for costs in rank_costs]),
        np.concatenate([costs.per_sample for costs in rank_costs]),
        np.concatenate([costs.identified for costs in rank_costs]),
    )


def optimize_shares(
    cost_per_sample: Seconds,
    current: tuple[int, ...],
    *,
    fixed: Seconds | None = None,
    rank_classes: RankClasses | None = None,
    limits: ShareLimits = NO_SHARE_LIMITS,
    draws: int = _BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> ShareBalance:
    """Find integer shares, summing to sum(current), that minimize the expected maximum of `fixed + share · cost`.

    `cost_per_sample` is in seconds per sample, shape (observed steps, ranks). `fixed` is in seconds per step at any
    share, shape (ranks,). `rank_classes` (ranks,) has the same number for ranks that differ only by chance, so that
    their shares must not differ. None means no such ranks. The expectation is over `draws` bootstrapped steps, each
    rank drawn separately, the same ones for every candidate.
    """
    if (granularity := limits.granularity) > 1:  # count in units of `granularity` samples
        units = optimize_shares(
            cost_per_sample * granularity,
            _count_granules(current, granularity),
            fixed=fixed,
            rank_classes=rank_classes,
            limits=limits.count_granules(),
            draws=draws,
            seed=seed,
        )
        return replace(units, shares=tuple(granularity * count for count in units.shares))
    steps, ranks = cost_per_sample.shape
    total, minimum = sum(current), limits.minimum
    ceiling = total if limits.maximum is None else limits.maximum
    _check_bounds(cost_per_sample, current, minimum, ceiling)
    offset = np.zeros(ranks) if fixed is None else np.asarray(fixed, dtype=np.float64)
    classes = (
        np.arange(ranks)
        if rank_classes is None
        else _number_rank_classes(rank_classes, offset / cost_per_sample.mean(axis=0))
    )
    rng = np.random.default_rng(seed)
    drawn = cost_per_sample[rng.integers(0, steps, size=(draws, ranks)), np.arange(ranks)]

    def expected(shares: Shares) -> float:
        return float((offset + drawn * shares).max(axis=1).mean())

    # An erratic rank must finish early on average: starts from several quantiles of the costs ensure that.
    costs = [cost_per_sample.mean(axis=0), *np.quantile(cost_per_sample, [0.75, 0.9, 0.97], axis=0)]
    starts = (_divide_by_cost(_average_classes(cost, classes), offset, total, minimum, ceiling) for cost in costs)
    start = min(starts, key=expected)
    best = _equalize_classes(_improve_shares(start, offset, drawn, classes, minimum, ceiling), classes)
    now = expected(np.asarray(current, dtype=np.int64))
    after = expected(best)
    return (
        ShareBalance(tuple(int(share) for share in best), now, after)
        if after < now
        else ShareBalance(current, now, now)
    )


def divide_equally(total: int, ranks: int, granularity: int = 1) -> tuple[int, ...]:
    """Return shares as equal as multiples of `granularity` allow. The first ranks get the remainder.

    Raises InputError if a rank would get none, or `total` is not a multiple.
    """
    (units,) = _count_granules((total,), granularity)
    if units < ranks:
        raise InputError(
            f"global batch {total} is too small for {ranks} ranks with {granularity} samples or more each; "
            "raise the batch "
            "or lower spec.replicas"
        )
    return tuple(granularity * (units // ranks + (rank < units % ranks)) for rank in range(ranks))


def _count_granules(samples: Sequence[int], granularity: int) -> tuple[int, ...]:
    if any(count % granularity for count in samples):
        raise InputError(f"{list(samples)} samples must all be multiples of the shares' granularity, {granularity}")
    return tuple(count // granularity for count in samples)


def _estimate_slope(seconds: Seconds, amounts: Seconds) -> float:
    """Return the weighted median of the slopes between all pairs of steps with different amounts.

    Of many steps, evenly spaced ones are used.
    """
    by_amount = np.argsort(amounts, kind="stable")
    chosen = by_amount[np.unique(np.linspace(0, len(seconds) - 1, _MAX_STEPS_COMPARED).round().astype(int))]
    first, second = np.triu_indices(len(chosen), k=1)
    distance = amounts[chosen][second] - amounts[chosen][first]
    is_different = distance != 0
    slopes = (seconds[chosen][second] - seconds[chosen][first])[is_different] / distance[is_different]
    order = np.argsort(slopes)
    weight = np.cumsum(np.abs(distance[is_different])[order])
    return float(slopes[order][np.searchsorted(weight, weight[-1] / 2)])


def _replace_pauses(relative: Seconds) -> Seconds:
    """Set a rank's rare long steps to its usual time. `relative` is seconds over the expected, (steps, ranks).

    Times that occur in more than a tenth of the steps are not exceptions but the rank's distribution, and stay.
    """
    usual = np.median(relative, axis=0)
    spread = 1.4826 * np.median(np.abs(relative - usual), axis=0)
    long = relative > usual + np.maximum(6.0 * spread, 0.15 * usual)
    rare = long.sum(axis=0) <= max(2.0, 0.1 * len(relative))
    return np.where(long & rare, usual, relative)


def _compute_win(new: tuple[int, ...], old: tuple[int, ...], per_sample: Seconds, fixed: Seconds) -> float:
    """Return the relative gain of the new shares on these costs per sample (steps, ranks)."""
    after, before = ((fixed + per_sample * np.array(shares)).max(axis=1).mean() for shares in (new, old))
    return float(1.0 - after / before)


def _shrink_costs(
    per_sample: Seconds, relative_times: Mapping[int, float] | None = None, seed: int = 1
) -> tuple[Seconds, RankClasses]:
    """Return costs per sample (steps, ranks) without chance, and classes of equal ranks for shares.

    Ranks that differ from the others only by chance get the common speed. Ranks that vary only as the others do get the
    variation of all of their steps. `relative_times` are speeds that are known better.

    Shares that follow chance make steps longer, by more the more ranks there are. A rank's deviation from the median
    rank counts in full if it is many standard errors. It does not count within CHANCE_STANDARD_ERRORS, or within the
    deviation that one of this many ranks has by chance (positive-part shrinkage). With known ranks, which are examined
    repeatedly, the limit is REPEATED_CHANCE_STANDARD_ERRORS. Ranks that are equally slow, as a node's ranks are, get
    their mean. A rank's own steps define its variation only if it differs from the others' by more than chance.
    """
    steps, ranks = per_sample.shape
    mean = per_sample.mean(axis=0)
    scale = np.sqrt(steps / max(1, steps - 1))  # deviations are from a mean of the same steps
    variation = np.maximum(0.05, 1.0 + (per_sample / mean - 1.0) * scale)
    spread = variation.std(axis=0)
    median_spread = np.sort(spread)[(ranks - 1) // 2]
    is_typical = spread <= median_spread * _compute_max_chance_spread(steps, ranks)
    median_cost = float(np.median(mean))
    error = np.where(is_typical, median_spread, spread) * mean / np.sqrt(steps)
    deviation = _pool_deviations(
        mean - median_cost, error, REPEATED_CHANCE_STANDARD_ERRORS if relative_times else CHANCE_STANDARD_ERRORS
    )
    for rank, relative_time in (relative_times or {}).items():
        deviation[rank] = median_cost * (relative_time - 1.0)
    rng = np.random.default_rng(seed)  # not the one that `optimize_shares` draws from
    drawn = variation[rng.integers(0, steps, size=(_BOOTSTRAP_DRAWS, ranks)), np.arange(ranks)]
    # A healthy rank's step may be any of theirs: the difference of each one's few steps from their own mean is chance.
    is_healthy = is_typical & (deviation == 0)
    pool = per_sample[:, is_healthy] / mean[is_healthy].mean() if is_healthy.any() else variation[:, is_typical]
    drawn[:, is_typical] = rng.choice(pool.ravel(), size=(_BOOTSTRAP_DRAWS, int(is_typical.sum())))
    _, classes = np.unique(np.where(is_typical, deviation, np.nan), return_inverse=True, equal_nan=False)
    return np.asarray(drawn * (median_cost + deviation)), classes


def _compute_max_chance_spread(steps: int, ranks: int) -> float:
    """Return the ratio to the usual deviation that none of the ranks exceeds by chance in this many steps.

    The ranks vary alike. The limit is MIN_DISTINCT_STANDARD_ERRORS, or the value that some rank exceeds in one of
    twenty cases (χ², by Wilson and Hilferty 1931).
    """
    error = 2.0 / (9.0 * max(1, steps - 1))
    errors = max(MIN_DISTINCT_STANDARD_ERRORS, NormalDist().inv_cdf(1.0 - 0.05 / ranks))
    return float((1.0 + errors * np.sqrt(error) / (1.0 - error)) ** 1.5)


def _pool_deviations(deviation: Seconds, error: Seconds, error_limit: float) -> Seconds:
    """Return the part of the deviations (ranks,) that is not chance. Equally slow ranks get their mean.

    `error` are the standard errors. `error_limit` is the limit in standard errors.
    """
    error_limit = max(error_limit, NormalDist().inv_cdf(1.0 - 0.5 / len(deviation)))  # of one of this many
    pooled = _shrink_deviations(deviation, error_limit * error)
    is_slow = pooled > 0
    if is_slow.any():
        rank_limit = (
            MIN_DISTINCT_STANDARD_ERRORS * error * np.sqrt(1.0 - 1.0 / is_slow.sum())
        )  # from a mean that it is part of
        is_alike = is_slow & (np.abs(deviation - np.median(deviation[is_slow])) <= rank_limit)
        if is_alike.sum() > 1:
            mean_limit = error_limit * error[is_alike].mean() / np.sqrt(is_alike.sum())
            pooled[is_alike] = _shrink_deviations(deviation[is_alike].mean(), mean_limit)
    return pooled


def _shrink_deviations(deviation: npt.ArrayLike, limit: npt.ArrayLike) -> Seconds:
    """Shrink deviations that may be off by `limit` (positive-part shrinkage)."""
    values = np.asarray(deviation, dtype=np.float64)
    return np.asarray(values * np.maximum(0.0, 1.0 - np.square(limit) / np.maximum(np.square(values), 1e-30)))


def _divide_by_cost(cost: Seconds, fixed: Seconds, total: int, minimum: int, maximum: int) -> Shares:
    """Give each next sample to the rank that would finish it first. This is optimal if costs do not vary.

    All but the last few samples of each rank are given at once: those that fit below a common finish time, found by
    bisection.
    """

    def fitting(finish: float) -> Shares:
        return np.clip((finish - fixed) / cost, minimum, maximum).astype(np.int64)

    low, high = 0.0, float((fixed + total * cost).max())
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if fitting(middle).sum() <= total else (low, middle)
    shares = fitting(low)
    remaining = total - int(shares.sum())
    if remaining > len(shares):  # many samples take less than the smallest difference of floats, so no rank is first
        extra = np.minimum(np.cumsum(fitting(high) - shares), remaining)
        return shares + np.diff(extra, prepend=0)
    for _ in range(remaining):
        finish = np.where(shares < maximum, fixed + (shares + 1) * cost, np.inf)
        shares[int(finish.argmin())] += 1
    return shares


def _improve_shares(
    shares: Shares, fixed: Seconds, cost: Seconds, classes: RankClasses, minimum: int, maximum: int
) -> Shares:
    """Move samples from ranks that are often last to early ones, in large amounts first, while the mean maximum falls.

    `cost` is in seconds per sample in each drawn step, (draws, ranks). Samples are not moved between ranks of one
    class.
    """
    shares, times = shares.copy(), fixed + cost * shares
    amount = 1 << max(0, int(shares.mean()).bit_length() - 3)
    while amount:
        move = _find_best_move(shares, times, cost, classes, amount, minimum, maximum)
        if move is None:
            amount //= 2
            continue
        giver, taker = move
        shares[giver] -= amount
        shares[taker] += amount
        for rank in move:
            times[:, rank] = fixed[rank] + cost[:, rank] * shares[rank]
    return shares


def _number_rank_classes(rank_classes: RankClasses, fixed: Seconds) -> RankClasses:
    """Renumber the classes 0, 1 …, and split classes whose ranks' fixed parts, in samples, differ."""
    _, classes = np.unique(rank_classes, return_inverse=True)
    difference = np.round(fixed - _average_classes(fixed, classes))
    return np.unique(np.stack([classes, difference]), axis=1, return_inverse=True)[1].ravel()


def _average_classes(values: Seconds, classes: RankClasses) -> Seconds:
    """Return for each rank the mean of its class."""
    return np.asarray((np.bincount(classes, values) / np.bincount(classes))[classes])


def _equalize_classes(shares: Shares, classes: RankClasses) -> Shares:
    """Make shares within each class as equal as whole samples allow. The first ranks get the remainder."""
    count, total = np.bincount(classes), np.bincount(classes, shares).astype(np.int64)
    order = np.argsort(classes, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(classes)) - np.repeat(np.cumsum(count) - count, count)  # of a rank in its class
    return np.asarray((total // count)[classes] + (position < (total % count)[classes]))


def _find_best_move(
    shares: Shares, times: Seconds, cost: Seconds, classes: RankClasses, amount: int, minimum: int, maximum: int
) -> tuple[int, int] | None:
    """Return the giver and the taker of `amount` samples that lower the mean maximum most.

    None if no pair lowers it.
    """
    draws = np.arange(len(times))
    last_rank = times.argmax(axis=1)
    longest = times[draws, last_rank]
    other_times = times.copy()
    other_times[draws, last_rank] = -np.inf
    second = other_times.max(axis=1)  # in each draw the longest time without the last rank

    saved_seconds = longest - np.maximum(second, longest - amount * cost[draws, last_rank])
    gains = np.bincount(last_rank, saved_seconds, minlength=len(shares))
    losses = np.maximum(times + amount * cost - longest[:, None], 0.0).sum(axis=0)
    gains[shares - amount < minimum] = -1.0
    losses[shares + amount > maximum] = np.inf
    givers = _pick_rank_per_class(-gains.astype(np.float64), -shares, classes)[:_MAX_MOVE_CANDIDATES]
    takers = _pick_rank_per_class(losses, shares, classes)[:_MAX_MOVE_CANDIDATES]
    givers, takers = givers[gains[givers] > 0], takers[np.isfinite(losses[takers])]
    if not len(givers) or not len(takers):
        return None
    longest_others = np.where(last_rank[:, None] == givers, second[:, None], longest[:, None])
    giver_times = np.maximum(longest_others, times[:, givers] - amount * cost[:, givers])
    taker_times = times[:, takers] + amount * cost[:, takers]
    mean_after = np.maximum(giver_times[:, :, None], taker_times[:, None, :]).mean(axis=0)
    mean_after[classes[givers][:, None] == classes[takers]] = np.inf
    best = int(mean_after.argmin())
    if not mean_after.flat[best] < longest.mean() * (1 - 1e-5):
        return None
    return int(givers[best // len(takers)]), int(takers[best % len(takers)])


def _pick_rank_per_class(cost: Seconds, shares: Shares, classes: RankClasses) -> npt.NDArray[np.int64]:
    """Pick one rank of each class, cheapest class first: of those with its smallest share, the one of median cost.

    The cheapest rank is so by chance of the draws.
    """
    order = np.lexsort((cost, shares, classes))
    first = np.flatnonzero(np.diff(classes[order], prepend=-1))
    smallest = np.repeat(shares[order][first], np.diff(first, append=len(order)))
    chosen = order[first + np.add.reduceat(shares[order] == smallest, first, dtype=np.int64) // 2]
    return np.asarray(chosen[np.argsort(cost[chosen], kind="stable")])


def _check_window(compute_seconds: npt.ArrayLike, samples: npt.ArrayLike) -> tuple[Seconds, Seconds]:
    seconds, amounts = np.asarray(compute_seconds, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    if seconds.ndim != _SHARE_WINDOW_DIMENSIONS or seconds.shape != amounts.shape or 0 in seconds.shape:
        raise InputError(
            f"compute_seconds {seconds.shape} and samples {amounts.shape} must both be [steps, ranks], with one of each"
        )
    for name, values in (("compute_seconds", seconds), ("samples", amounts)):
        if not np.isfinite(values).all() or (values <= 0).any():
            raise InputError(f"{name} must be finite and above 0 for every rank and step; leave other steps out")
    return seconds, amounts


def _check_bounds(cost: Seconds, current: tuple[int, ...], minimum: int, maximum: int) -> None:
    steps, ranks = cost.shape
    total = sum(current)
    if steps == 0 or not np.isfinite(cost).all() or (cost <= 0).any():
        raise InputError("cost_per_sample must hold at least one step of finite, positive seconds for every rank")
    if len(current) != ranks:
        raise InputError(f"current has {len(current)} shares for {ranks} ranks; give one a rank")
    if not minimum * ranks <= total <= maximum * ranks:
        raise InputError(f"{total} samples do not fit {ranks} ranks with {minimum} to {maximum} each; widen the bounds")
