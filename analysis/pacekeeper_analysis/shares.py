"""Batch shares: how many samples of a global batch each rank gets (arXiv 2110.08941).

    balance = rebalance(compute_seconds, samples)        # both [steps, ranks]
    if balance.worthwhile: ...                           # balance.shares

The best shares minimise the *expected maximum* over ranks of the step time. Under noise that is not the same as shares
proportional to speed, so the observed distribution of costs is used, not its mean alone. A step costs a rank
`fixed + per_sample · samples`; the two can only be told apart where its samples varied: the first change of
shares is the probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .errors import InputError

Seconds = npt.NDArray[np.float64]
Shares = npt.NDArray[np.int64]
RankClasses = npt.NDArray[np.int64]

MIN_REBALANCE_WIN = 0.02
"""Shares are not worth a change for less than this relative win: it would only make the job flap."""

MIN_KNOWN_RANKS_WIN = 0.01
"""The same of ranks whose paces are known by many steps: their shares do not flap."""

MIN_HALF_WINDOW_WIN = 0.01
"""The same of each half of the steps that are looked at: what only one of them shows is luck."""

MAX_FIXED_COST_ERROR = 0.1
"""The fixed part counts as identified where its standard error is below this part of the rank's own work."""

ASSUMED_FIXED_COST_SHARE = 0.05
"""Part of a rank's own work that is taken to be fixed where that cannot be identified."""

_MAX_STEPS_COMPARED = 128
"""Steps of which all pairs are compared for a slope: enough for 1 % at 10 % noise, and a millisecond a rank."""

MIN_DISTINCT_STANDARD_ERRORS = 3.0
"""Standard errors by which a rank varies more than the others, to be one that comes and goes, or is farther from ranks
that are slow, to be not as slow as they are."""

CHANCE_STANDARD_ERRORS, REPEATED_CHANCE_STANDARD_ERRORS = 2.0, 4.0
"""Standard errors by which a rank is off by luck: by the few steps of one look, and in one of many looks."""

_BOOTSTRAP_DRAWS = 512
"""Steps that are put together from the ranks' own, and draws of them that shares are fitted to."""

_MAX_MOVE_CANDIDATES = 8
"""Ranks that might give, and might take, which are tried in all pairs for each move."""


@dataclass(frozen=True)
class ShareCosts:
    """What a step costs each rank: `fixed + per_sample · samples` seconds; arrays of shape (ranks,)."""

    fixed: Seconds
    per_sample: Seconds
    identified: npt.NDArray[np.bool_]  # False: the samples hardly varied; all is in `per_sample`, see `supposed`

    def compute_seconds(self, samples: npt.ArrayLike) -> Seconds:
        """Expected own work under these samples, shape (…, ranks)."""
        return np.asarray(self.fixed + self.per_sample * np.asarray(samples))

    def with_assumed_fixed_cost(self, samples: npt.ArrayLike) -> ShareCosts:
        """With FIXED of what a step of these samples costs taken for fixed, where it is not known: no rank's steps are
        without any such part, and who does not reckon with it expects too much of other shares."""
        known, seconds = self.identified, self.compute_seconds(samples)
        return replace(
            self,
            fixed=np.where(known, self.fixed, ASSUMED_FIXED_COST_SHARE * seconds),
            per_sample=np.where(known, self.per_sample, (1.0 - ASSUMED_FIXED_COST_SHARE) * seconds / np.asarray(samples)),
        )


@dataclass(frozen=True)
class ShareBalance:
    """Shares in rank order and the step time (seconds) expected of the present shares and of these. sure: either half
    of the steps says so. least_win: below which they are not worth a change."""

    shares: tuple[int, ...]
    seconds_now: float
    seconds_after: float
    sure: bool = True
    least_win: float = MIN_REBALANCE_WIN

    @property
    def win(self) -> float:
        """Predicted relative win: 0.25 where a step gets a quarter shorter."""
        return 1.0 - self.seconds_after / self.seconds_now if self.seconds_now > 0 else 0.0

    @property
    def is_worthwhile(self) -> bool:
        return self.sure and self.win >= self.least_win


def rebalance_shares(
    compute_seconds: npt.ArrayLike,
    samples: npt.ArrayLike,
    *,
    costs: ShareCosts | None = None,
    minimum: int = 1,
    maximum: int | None = None,
    granularity: int = 1,
    known: Mapping[int, float] | None = None,
) -> ShareBalance:
    """The best shares, from windows of own work; the present shares are those of the last step.

    compute_seconds, samples: shape (steps, ranks), oldest first. costs: as far as they are known already, None: what
    `fit` finds in these steps. Rare long steps (pauses for garbage, hiccups) are left out: shares cannot help
    against them. minimum, maximum: of each rank's share (memory); grain: what it is a multiple of. known: ranks
    that by many more steps take so many times as long a sample as the median rank. Raises InputError where the input
    does not fit.
    """
    seconds, amounts = _check_window(compute_seconds, samples)
    if known and not {*known} <= {*range(amounts.shape[1])}:
        raise InputError(f"known paces of ranks {sorted(known)} do not fit {amounts.shape[1]} ranks; leave others out")
    costs = (fit_costs(seconds, amounts) if costs is None else costs).with_assumed_fixed_cost(amounts[-1])
    relative = _replace_pauses(seconds / costs.compute_seconds(amounts))
    per_sample = (relative * costs.compute_seconds(amounts) - costs.fixed) / amounts
    per_sample = np.maximum(
        per_sample, 0.05 * costs.per_sample
    )  # noise on a large fixed part must not make it negative
    current = tuple(int(n) for n in amounts[-1])

    def best(of: Seconds, draws: int) -> ShareBalance:
        drawn, alike = _shrink_costs(of, known)
        return optimize_shares(
            drawn,
            current,
            fixed=costs.fixed,
            alike=alike,
            minimum=minimum,
            maximum=maximum,
            granularity=granularity,
            draws=draws,
        )

    found = best(per_sample, _BOOTSTRAP_DRAWS)
    if known:
        others, _ = _shrink_costs(per_sample, known, seed=2)  # than those that it was fitted to
        win = min(found.win, _compute_win(found.shares, current, others, costs.fixed))
        return ShareBalance(found.shares, found.seconds_now, found.seconds_now * (1.0 - win), least_win=MIN_KNOWN_RANKS_WIN)
    halves = per_sample[0::2], per_sample[1::2]
    if found.shares == current or len(halves[1]) < 2:
        return found
    # What was fitted to these steps looks better on them than it is: its win is what each half's shares win on the
    # other half.
    wins = [_compute_win(best(of, 64).shares, current, on, costs.fixed) for of, on in (halves, halves[::-1])]
    win = min(found.win, float(np.mean(wins)))
    return ShareBalance(found.shares, found.seconds_now, found.seconds_now * (1.0 - win), min(wins) >= MIN_HALF_WINDOW_WIN)


def fit_costs(compute_seconds: npt.ArrayLike, samples: npt.ArrayLike) -> ShareCosts:
    """Each rank's fixed cost and cost per sample, by a robust line through its steps.

    compute_seconds: own work without waits, samples: of the same steps (or their cost units), both (steps, ranks).
    The slope is the median of the slopes between all pairs of steps, weighted by how far apart their samples are
    (Theil–Sen, Sievers 1978): up to a quarter of the steps may be outliers. Raises InputError where values are not
    finite and positive.
    """
    seconds, amounts = _check_window(compute_seconds, samples)
    usual = np.median(seconds, axis=0)
    mean = amounts.mean(axis=0)
    per_sample = np.median(seconds / amounts, axis=0)
    fixed = np.zeros_like(usual)
    identified = np.zeros(len(usual), dtype=bool)
    for rank in np.flatnonzero(np.ptp(amounts, axis=0) > 0):
        own, n = seconds[:, rank], amounts[:, rank]
        slope = _estimate_slope(own, n)
        residual = own - slope * n
        noise = 1.4826 * float(np.median(np.abs(residual - np.median(residual))))
        error = noise / float(np.sqrt(((n - mean[rank]) ** 2).sum())) * mean[rank]
        if error > MAX_FIXED_COST_ERROR * usual[rank]:
            continue
        variable = slope * mean[rank]
        if not -max(2 * error, 0.1 * usual[rank]) <= variable <= usual[rank] + max(2 * error, 0.1 * usual[rank]):
            continue  # neither part can be negative: the rank's pace has changed along with its samples
        identified[rank] = True
        # Noise can push either part below zero, and a cost that no share could lower has no best share.
        per_sample[rank] = np.clip(slope, 0.02 * per_sample[rank], per_sample[rank])
        fixed[rank] = max(0.0, float(np.median(own - per_sample[rank] * n)))
    return ShareCosts(fixed, per_sample, identified)


def fit_costs_per_rank(compute_seconds: Sequence[npt.ArrayLike], samples: Sequence[npt.ArrayLike]) -> ShareCosts:
    """`fit` for ranks whose steps are not the same ones: for each rank, shape (its steps,)."""
    ranks = [
        fit_costs(np.reshape(own, (-1, 1)), np.reshape(amounts, (-1, 1)))
        for own, amounts in zip(compute_seconds, samples, strict=True)
    ]
    return ShareCosts(
        np.concatenate([rank.fixed for rank in ranks]),
        np.concatenate([rank.per_sample for rank in ranks]),
        np.concatenate([rank.identified for rank in ranks]),
    )


def optimize_shares(
    cost_per_sample: Seconds,
    current: tuple[int, ...],
    *,
    fixed: Seconds | None = None,
    alike: RankClasses | None = None,
    minimum: int = 1,
    maximum: int | None = None,
    granularity: int = 1,
    draws: int = _BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> ShareBalance:
    """Integer shares, summing to sum(current), that minimise the expected maximum over ranks of `fixed + share · cost`.

    cost_per_sample: seconds a sample, shape (steps observed, ranks). fixed: seconds a step whatever the share, shape
    (ranks,). alike: (ranks,), the same number for ranks between which only luck tells, so that their shares must not
    follow it, None: none. minimum, maximum: of each share; grain: what each is a multiple of. The expectation is over
    `draws` bootstrapped steps, each rank drawn by itself, the same ones for every candidate.
    """
    if granularity > 1:  # a unit of so many samples takes the place of a sample
        units = optimize_shares(
            cost_per_sample * granularity,
            _count_granules(current, granularity),
            fixed=fixed,
            alike=alike,
            minimum=-(-minimum // granularity),
            maximum=None if maximum is None else maximum // granularity,
            draws=draws,
            seed=seed,
        )
        return replace(units, shares=tuple(granularity * count for count in units.shares))
    steps, ranks = cost_per_sample.shape
    total = sum(current)
    ceiling = total if maximum is None else maximum
    _check_bounds(cost_per_sample, current, minimum, ceiling)
    offset = np.zeros(ranks) if fixed is None else np.asarray(fixed, dtype=np.float64)
    kinds = np.arange(ranks) if alike is None else _number_rank_classes(alike, offset / cost_per_sample.mean(axis=0))
    random = np.random.default_rng(seed)
    drawn = cost_per_sample[random.integers(0, steps, size=(draws, ranks)), np.arange(ranks)]

    def expected(shares: Shares) -> float:
        return float((offset + drawn * shares).max(axis=1).mean())

    # A rank that is erratic must finish early on average: starts from several quantiles of the costs see to that.
    costs = [cost_per_sample.mean(axis=0), *np.quantile(cost_per_sample, [0.75, 0.9, 0.97], axis=0)]
    starts = (_divide_by_cost(_average_classes(cost, kinds), offset, total, minimum, ceiling) for cost in costs)
    start = min(starts, key=expected)
    best = _equalize_classes(_improve_shares(start, offset, drawn, kinds, minimum, ceiling), kinds)
    now = expected(np.asarray(current, dtype=np.int64))
    after = expected(best)
    return ShareBalance(tuple(int(n) for n in best), now, after) if after < now else ShareBalance(current, now, now)


def divide_equally(total: int, ranks: int, granularity: int = 1) -> tuple[int, ...]:
    """Shares as equal as multiples of `grain` allow; the first ranks get the remainder. InputError where a rank would
    get none, or `total` is no multiple."""
    (units,) = _count_granules((total,), granularity)
    if units < ranks:
        raise InputError(
            f"global batch {total} is too small for {ranks} ranks with {granularity} samples or more each; raise the batch "
            "or lower spec.replicas"
        )
    return tuple(granularity * (units // ranks + (rank < units % ranks)) for rank in range(ranks))


def _count_granules(samples: Sequence[int], grain: int) -> tuple[int, ...]:
    if any(count % grain for count in samples):
        raise InputError(f"{list(samples)} samples must all be multiples of the shares' grain, {grain}")
    return tuple(count // grain for count in samples)


def _estimate_slope(seconds: Seconds, amounts: Seconds) -> float:
    """Weighted median of the slopes between all pairs of steps (of many: evenly chosen ones) with different amounts."""
    by_amount = np.argsort(amounts, kind="stable")
    chosen = by_amount[np.unique(np.linspace(0, len(seconds) - 1, _MAX_STEPS_COMPARED).round().astype(int))]
    first, second = np.triu_indices(len(chosen), k=1)
    apart = amounts[chosen][second] - amounts[chosen][first]
    different = apart != 0
    slopes = (seconds[chosen][second] - seconds[chosen][first])[different] / apart[different]
    order = np.argsort(slopes)
    weight = np.cumsum(np.abs(apart[different])[order])
    return float(slopes[order][np.searchsorted(weight, weight[-1] / 2)])


def _replace_pauses(relative: Seconds) -> Seconds:
    """A rank's rare long steps at its usual time. relative: seconds over the expected, (steps, ranks).

    What happens in more than a tenth of the steps is no exception but the rank's distribution, and stays.
    """
    usual = np.median(relative, axis=0)
    spread = 1.4826 * np.median(np.abs(relative - usual), axis=0)
    long = relative > usual + np.maximum(6.0 * spread, 0.15 * usual)
    rare = long.sum(axis=0) <= max(2.0, 0.1 * len(relative))
    return np.where(long & rare, usual, relative)


def _compute_win(new: tuple[int, ...], old: tuple[int, ...], per_sample: Seconds, fixed: Seconds) -> float:
    """Relative win of the new shares on these costs a sample (steps, ranks)."""
    after, before = ((fixed + per_sample * np.array(shares)).max(axis=1).mean() for shares in (new, old))
    return float(1.0 - after / before)


def _shrink_costs(per_sample: Seconds, known: Mapping[int, float] | None = None, seed: int = 1) -> tuple[Seconds, RankClasses]:
    """Costs a sample (steps, ranks), with ranks that differ from the others by no more than chance at their pace, and
    of whom no more is known than that they vary as the others do, by all of their steps; and which of them are alike,
    as `balance` takes it. known: paces that are known better.

    Shares that follow chance make steps longer, by more the more ranks there are. A rank's deviation from the median
    rank counts in full where it is many standard errors, and not at all within LUCK (REPEATED_CHANCE_STANDARD_ERRORS beside known ones, who
    are looked at again and again), or as many as one of so many ranks is off by (positive-part shrinkage). Those that
    are as slow as each other, as a node's ranks are, are so by their mean. Its own steps say how a rank varies where
    they do so by more than chance has it.
    """
    steps, ranks = per_sample.shape
    mean = per_sample.mean(axis=0)
    scale = np.sqrt(steps / max(1, steps - 1))  # deviations are from a mean of the same steps
    varied = np.maximum(0.05, 1.0 + (per_sample / mean - 1.0) * scale)
    spread = varied.std(axis=0)
    most = np.sort(spread)[(ranks - 1) // 2]
    like = spread <= most * _compute_max_chance_spread(steps, ranks)
    usual = float(np.median(mean))
    error = np.where(like, most, spread) * mean / np.sqrt(steps)
    deviation = _pool_deviations(mean - usual, error, REPEATED_CHANCE_STANDARD_ERRORS if known else CHANCE_STANDARD_ERRORS)
    for rank, pace in (known or {}).items():
        deviation[rank] = usual * (pace - 1.0)
    random = np.random.default_rng(seed)  # another one than `balance` draws by
    drawn = varied[random.integers(0, steps, size=(_BOOTSTRAP_DRAWS, ranks)), np.arange(ranks)]
    # A healthy rank's step may be any of theirs: how far each one's few are from their own mean is luck.
    alike = like & (deviation == 0)
    pool = per_sample[:, alike] / mean[alike].mean() if alike.any() else varied[:, like]
    drawn[:, like] = random.choice(pool.ravel(), size=(_BOOTSTRAP_DRAWS, int(like.sum())))
    _, kinds = np.unique(np.where(like, deviation, np.nan), return_inverse=True, equal_nan=False)
    return np.asarray(drawn * (usual + deviation)), kinds


def _compute_max_chance_spread(steps: int, ranks: int) -> float:
    """So many times the usual deviation none of so many ranks that vary alike shows in so many steps: UNLIKE standard
    errors, or what one in twenty times some rank exceeds (χ², by Wilson and Hilferty 1931)."""
    error = 2.0 / (9.0 * max(1, steps - 1))
    errors = max(MIN_DISTINCT_STANDARD_ERRORS, NormalDist().inv_cdf(1.0 - 0.05 / ranks))
    return float((1.0 + errors * np.sqrt(error) / (1.0 - error)) ** 1.5)


def _pool_deviations(deviation: Seconds, error: Seconds, luck: float) -> Seconds:
    """Deviations and standard errors (ranks,): what of them is not luck, of those that are as slow as each other by
    their mean. luck: standard errors."""
    luck = max(luck, NormalDist().inv_cdf(1.0 - 0.5 / len(deviation)))  # of one of so many
    found = _shrink_deviations(deviation, luck * error)
    slow = found > 0
    if slow.any():
        of_one = MIN_DISTINCT_STANDARD_ERRORS * error * np.sqrt(1.0 - 1.0 / slow.sum())  # from a mean that it is part of
        alike = slow & (np.abs(deviation - np.median(deviation[slow])) <= of_one)
        if alike.sum() > 1:
            of_mean = luck * error[alike].mean() / np.sqrt(alike.sum())
            found[alike] = _shrink_deviations(deviation[alike].mean(), of_mean)
    return found


def _shrink_deviations(deviation: npt.ArrayLike, by_luck: npt.ArrayLike) -> Seconds:
    """What is left of deviations that may be off by so much (positive-part shrinkage)."""
    of = np.asarray(deviation, dtype=np.float64)
    return np.asarray(of * np.maximum(0.0, 1.0 - np.square(by_luck) / np.maximum(np.square(of), 1e-30)))


def _divide_by_cost(cost: Seconds, fixed: Seconds, total: int, minimum: int, maximum: int) -> Shares:
    """Each next sample to the rank that would be done with it first: optimal where costs do not vary.

    All samples but the last few of each rank at once: those that fit below a common finish time, found by bisection.
    """

    def fitting(finish: float) -> Shares:
        return np.clip((finish - fixed) / cost, minimum, maximum).astype(np.int64)

    low, high = 0.0, float((fixed + total * cost).max())
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if fitting(middle).sum() <= total else (low, middle)
    shares = fitting(low)
    left = total - int(shares.sum())
    if left > len(shares):  # many samples take less than the least time that numbers tell apart: no rank is done first
        room = np.minimum(np.cumsum(fitting(high) - shares), left)
        return shares + np.diff(room, prepend=0)
    for _ in range(left):
        finish = np.where(shares < maximum, fixed + (shares + 1) * cost, np.inf)
        shares[int(finish.argmin())] += 1
    return shares


def _improve_shares(shares: Shares, fixed: Seconds, cost: Seconds, kinds: RankClasses, minimum: int, maximum: int) -> Shares:
    """Move samples from ranks that are often last to early ones, many at a time first, while the mean maximum falls.

    cost: seconds a sample in each drawn step, (draws, ranks). kinds: no samples are moved between ranks of the same.
    """
    shares, times = shares.copy(), fixed + cost * shares
    amount = 1 << max(0, int(shares.mean()).bit_length() - 3)
    while amount:
        move = _find_best_move(shares, times, cost, kinds, amount, minimum, maximum)
        if move is None:
            amount //= 2
            continue
        giver, taker = move
        shares[giver] -= amount
        shares[taker] += amount
        for rank in move:
            times[:, rank] = fixed[rank] + cost[:, rank] * shares[rank]
    return shares


def _number_rank_classes(alike: RankClasses, fixed: Seconds) -> RankClasses:
    """The same, 0, 1 …, but for ranks whose fixed parts, in samples, are not one that they have in common."""
    _, kinds = np.unique(alike, return_inverse=True)
    apart = np.round(fixed - _average_classes(fixed, kinds))
    return np.unique(np.stack([kinds, apart]), axis=1, return_inverse=True)[1].ravel()


def _average_classes(of_each: Seconds, kinds: RankClasses) -> Seconds:
    """For each rank the mean of its kind."""
    return np.asarray((np.bincount(kinds, of_each) / np.bincount(kinds))[kinds])


def _equalize_classes(shares: Shares, kinds: RankClasses) -> Shares:
    """Within each kind all as equal as whole samples allow; the first ranks get the remainder."""
    count, total = np.bincount(kinds), np.bincount(kinds, shares).astype(np.int64)
    order = np.argsort(kinds, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(kinds)) - np.repeat(np.cumsum(count) - count, count)  # of a rank among its kind
    return np.asarray((total // count)[kinds] + (place < (total % count)[kinds]))


def _find_best_move(
    shares: Shares, times: Seconds, cost: Seconds, kinds: RankClasses, amount: int, minimum: int, maximum: int
) -> tuple[int, int] | None:
    """The giver and the taker of `amount` samples that lower the mean maximum most; None: no pair lowers it."""
    rows = np.arange(len(times))
    last = times.argmax(axis=1)
    longest = times[rows, last]
    others = times.copy()
    others[rows, last] = -np.inf
    second = others.max(axis=1)  # in each draw the longest but for the last rank

    won = longest - np.maximum(second, longest - amount * cost[rows, last])
    gains = np.bincount(last, won, minlength=len(shares))
    losses = np.maximum(times + amount * cost - longest[:, None], 0.0).sum(axis=0)
    gains[shares - amount < minimum] = -1.0
    losses[shares + amount > maximum] = np.inf
    givers = _pick_rank_per_class(-gains.astype(np.float64), -shares, kinds)[:_MAX_MOVE_CANDIDATES]
    takers = _pick_rank_per_class(losses, shares, kinds)[:_MAX_MOVE_CANDIDATES]
    givers, takers = givers[gains[givers] > 0], takers[np.isfinite(losses[takers])]
    if not len(givers) or not len(takers):
        return None
    rest = np.where(last[:, None] == givers, second[:, None], longest[:, None])
    given = np.maximum(rest, times[:, givers] - amount * cost[:, givers])
    taken = times[:, takers] + amount * cost[:, takers]
    after = np.maximum(given[:, :, None], taken[:, None, :]).mean(axis=0)
    after[kinds[givers][:, None] == kinds[takers]] = np.inf
    best = int(after.argmin())
    if not after.flat[best] < longest.mean() * (1 - 1e-5):
        return None
    return int(givers[best // len(takers)]), int(takers[best % len(takers)])


def _pick_rank_per_class(cost: Seconds, shares: Shares, kinds: RankClasses) -> npt.NDArray[np.int64]:
    """One rank of each kind, cheapest first: of those with its least shares the one of median cost, since the cheapest
    is so by luck of the draws."""
    order = np.lexsort((cost, shares, kinds))
    first = np.flatnonzero(np.diff(kinds[order], prepend=-1))
    least = np.repeat(shares[order][first], np.diff(first, append=len(order)))
    chosen = order[first + np.add.reduceat(shares[order] == least, first, dtype=np.int64) // 2]
    return np.asarray(chosen[np.argsort(cost[chosen], kind="stable")])


def _check_window(compute_seconds: npt.ArrayLike, samples: npt.ArrayLike) -> tuple[Seconds, Seconds]:
    seconds, amounts = np.asarray(compute_seconds, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    if seconds.ndim != 2 or seconds.shape != amounts.shape or 0 in seconds.shape:
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
