"""What a remedy costs and gains, and which one to apply now.

The duration of a fault is not known in advance, so the choice is a ski-rental problem. A free remedy is applied at
once. A costly remedy is bought when the loss since the first sign, before and after the free one, reaches its cost.
Even with the fault's duration known from its start, no strategy pays less than half of that. Buying earlier, because
most faults last, would lose this guarantee for short ones. Seconds are always seconds of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_REMEDY_WIN = 0.02
"""Smallest relative gain of a change. A change for less would only make the job flap."""
MIN_LASTING_WIN = 0.005
"""The same limit for remedies that do not flap: they stay once applied, or are bought by the loss."""

MAX_EXACT_STEP_TIME_RATIO = 1.15
"""Synchronous SGD is exact, so it is kept or preferred if its steps take at most this multiple of Local-SGD's steps.

What Local-SGD gains beyond mending the fault (a slowdown below 1) does not count.
"""


@dataclass(frozen=True)
class Option:
    """One possible remedy. A slowdown of infinity means that the job makes no progress."""

    remedy: str
    cost_seconds: float  # steps lost since the checkpoint + restart time; 0: a live change
    slowdown_after: float  # remaining slowdown under it, by simulation; 1: none
    refused: str = ""  # why it may not be taken (not allowed, no spare, budget spent); "": it may
    exact: bool = True  # the job stays synchronous SGD; False: it trains by Local-SGD
    min_win: float = MIN_REMEDY_WIN  # smallest relative gain of step time that is worth the change
    awaited: bool = False  # costly, and so good that no inexact one precedes it if it mends nearly as well


@dataclass(frozen=True)
class Price:
    """An option with its expected gain, and why it was chosen or not."""

    option: Option
    gain_seconds: float  # expected, before its cost
    due: bool
    reason: str


@dataclass(frozen=True)
class Choice:
    """All options with their prices, and the one to apply now. None means wait, and choose again as the loss grows."""

    chosen: Price | None
    prices: tuple[Price, ...]


@dataclass(frozen=True)
class AccumulatedLoss:
    """What a fault has cost since its first sign, and continues to cost, including the effect of remedies.

    It holds plain numbers, to be stored with the job. Times are seconds of any one clock.
    """

    seconds: float  # lost until `at`
    at: float
    slowdown: float  # since then

    def compute_seconds(self, now: float) -> float:
        """Return the seconds lost until `now`."""
        return self.seconds + max(0.0, now - self.at) * compute_loss_rate(self.slowdown)

    def continue_at(self, now: float, slowdown: float) -> AccumulatedLoss:
        """Return the loss with another rate from `now` on: a remedy has left `slowdown`, or the fault has changed."""
        return AccumulatedLoss(self.compute_seconds(now), now, slowdown)

    def observe(self, now: float, slowdown: float) -> AccumulatedLoss:
        """Return the loss after an observation of the same fault. The rate since the last one is the mean of both."""
        rate = (compute_loss_rate(self.slowdown) + compute_loss_rate(slowdown)) / 2
        return AccumulatedLoss(self.seconds + max(0.0, now - self.at) * rate, now, slowdown)


def choose_remedy(
    options: Sequence[Option],
    slowdown: float,
    lost_seconds: float,
    remaining_seconds: float = math.inf,
    *,
    sufficient_slowdown: float = 1.0,
    tolerable_slowdown: float = math.inf,
) -> Choice:
    """Choose the option to apply now.

    `slowdown` is the present S of the job (inf: no progress). `lost_seconds` is the loss since the first sign, see
    `AccumulatedLoss`. `remaining_seconds` is the expected remaining duration of the fault, over which gains are
    computed, see `estimate_remaining_seconds`. inf means that it will not pass by itself. A slowdown below
    `sufficient_slowdown` needs no better free remedy. A free remedy that leaves `tolerable_slowdown` or more ranks
    behind a costly one that is due.

    Free options come first: exact SGD if it mends the job, or does nearly as well as Local-SGD. A costly option is due
    once the loss has reached its cost, if it gains something over the free ones. Of several, the one with the lowest
    cost plus remaining loss is chosen. No inexact option is chosen while an exact one is `awaited`.
    """
    horizon = remaining_seconds if math.isfinite(remaining_seconds) else _UNBOUNDED_FAULT_SECONDS
    free = [_price_free_option(option, slowdown, horizon) for option in options if option.cost_seconds == 0]
    best_free = _choose_best_free([price for price in free if price.due], sufficient_slowdown)
    free_slowdown = slowdown if best_free is None else best_free.option.slowdown_after
    free_is_inexact = best_free is not None and not best_free.option.exact
    costly = [
        # An awaited option replaces a free inexact one, so it is compared with the present slowdown.
        _price_costly_option(
            option, slowdown, slowdown if option.awaited and free_is_inexact else free_slowdown, lost_seconds, horizon
        )
        for option in options
        if option.cost_seconds
    ]

    def whole_cost(price: Price) -> float:
        return price.option.cost_seconds + horizon * compute_loss_rate(price.option.slowdown_after)

    best_costly = min((price for price in costly if price.due), key=whole_cost, default=None)
    by_kind = iter(free), iter(costly)
    prices = tuple(next(by_kind[option.cost_seconds > 0]) for option in options)
    awaited = [price for price in costly if free_is_inexact and _is_awaited(price, slowdown, free_slowdown)]
    if awaited:
        return Choice(min((price for price in awaited if price.due), key=whole_cost, default=None), prices)
    prefers_free = best_free is not None and (best_costly is None or free_slowdown < tolerable_slowdown)
    return Choice(best_free if prefers_free else best_costly, prices)


def _is_awaited(price: Price, slowdown: float, free_slowdown: float) -> bool:
    """Return whether to wait for this option instead of an inexact one.

    It keeps the job exact, does nearly as well as the best free one, which leaves `free_slowdown`, and will gain
    more than it costs.
    """
    option = price.option
    if not (option.awaited and option.exact) or option.refused or not is_worth_change(slowdown, option.slowdown_after):
        return False
    return (
        option.slowdown_after <= MAX_EXACT_STEP_TIME_RATIO * max(1.0, free_slowdown)
        and price.gain_seconds > option.cost_seconds
    )


_UNBOUNDED_FAULT_SECONDS = 86_400.0
"""Horizon for a fault that does not pass by itself: the remaining slowdown then outweighs any restart."""


def compute_loss_rate(slowdown: float) -> float:
    """Return the seconds of training lost per second: 1 − 1/S."""
    return 1.0 if math.isinf(slowdown) else 1.0 - 1.0 / max(slowdown, 1.0)


def is_worth_change(slowdown: float, slowdown_after: float, min_win: float = MIN_REMEDY_WIN) -> bool:
    """Return whether steps at slowdown `slowdown_after` are faster than at `slowdown` by enough to change anything."""
    return math.isinf(slowdown) or max(slowdown_after, 1.0) <= (1.0 - min_win) * slowdown


def outweighs_exact(slowdown: float, slowdown_after: float) -> bool:
    """Return whether Local-SGD at slowdown `slowdown_after` is worth leaving exact steps at `slowdown`."""
    return slowdown >= MAX_EXACT_STEP_TIME_RATIO * max(1.0, slowdown_after)


def estimate_remaining_seconds(
    elapsed_seconds: float, durations: Sequence[float], prior_seconds: float = 600.0
) -> float:
    """Return the expected remaining seconds of a fault, from the durations of earlier ones of its class.

    It is the mean residual life of earlier faults that lasted longer than `elapsed_seconds`, with two
    pseudo-observations of the prior: an exponential of mean `prior_seconds`, whose residual is the same at every age
    (10 minutes for compute faults, 24 for communication: Greyhound).
    """
    longer = [duration - elapsed_seconds for duration in durations if duration > elapsed_seconds]
    return (2 * prior_seconds + sum(longer)) / (2 + len(longer))


def _choose_best_free(due_prices: Sequence[Price], sufficient_slowdown: float) -> Price | None:
    best = min(due_prices, key=lambda price: price.option.slowdown_after, default=None)
    preferred = min(
        (price for price in due_prices if price.option.exact),
        key=lambda price: price.option.slowdown_after,
        default=None,
    )
    if best is None or preferred is None:
        return best
    slowdown_after = preferred.option.slowdown_after
    return (
        preferred
        if slowdown_after < sufficient_slowdown
        or slowdown_after <= MAX_EXACT_STEP_TIME_RATIO * max(1.0, best.option.slowdown_after)
        else best
    )


def _price_free_option(option: Option, slowdown: float, horizon: float) -> Price:
    saved_rate = compute_loss_rate(slowdown) - compute_loss_rate(option.slowdown_after)
    gain = saved_rate * horizon
    if option.refused:
        return Price(option, gain, False, option.refused)
    if saved_rate <= 0:
        return Price(option, 0.0, False, "wins nothing")
    relative_gain = 1.0 - option.slowdown_after / slowdown if math.isfinite(slowdown) else 1.0
    if not option.exact and not outweighs_exact(slowdown, option.slowdown_after):
        return Price(option, gain, False, f"{relative_gain:.0%} faster steps are not worth leaving synchronous SGD")
    if relative_gain < option.min_win:
        return Price(option, gain, False, f"only {relative_gain:.1%} faster steps")
    return Price(option, gain, True, f"free, {relative_gain:.0%} faster steps")


def _price_costly_option(
    option: Option, slowdown: float, free_slowdown: float, lost_seconds: float, horizon: float
) -> Price:
    """Price a costly option. `free_slowdown` is the slowdown under the best free option."""
    cost = option.cost_seconds
    gain = max(0.0, compute_loss_rate(slowdown) - compute_loss_rate(option.slowdown_after)) * horizon
    if option.refused:
        return Price(option, gain, False, option.refused)
    if not is_worth_change(free_slowdown, option.slowdown_after, option.min_win):
        return Price(
            option, gain, False, "wins nothing" if free_slowdown == slowdown else "wins nothing over the free options"
        )
    if math.isinf(free_slowdown):
        return Price(option, gain, True, "the job stands still")
    if lost_seconds >= cost:
        return Price(option, gain, True, f"the loss of {lost_seconds:.0f} s has reached its cost of {cost:.1f} s")
    return Price(option, gain, False, f"costs {cost:.1f} s, but only {lost_seconds:.1f} s are lost so far")
