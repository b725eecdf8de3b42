"""What a remedy costs and wins, and which one to take now.

How long a fault will last is not known in advance, so the choice is a ski-rental problem: a remedy is bought at the
latest when the loss that has accumulated since the first sign reaches its price, which is never more than twice what a
clairvoyant would have paid. The durations of earlier incidents of the same class let it be bought earlier. Seconds are
seconds of training throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MINIMAL_WIN = 0.02
"""A free live change for less than this relative win would only make the job flap."""

NEARLY = 1.15
"""Synchronous SGD is exact, so it is kept, or preferred, where its steps take at most this many times as long as those
of Local-SGD. What Local-SGD wins beyond mending the fault (a slowdown below 1) does not count."""


@dataclass(frozen=True)
class Option:
    """One remedy that could be taken. A slowdown of infinity means that the job stands still."""

    remedy: str
    cost_seconds: float  # steps lost since the checkpoint + restart time; 0: a live change
    slowdown_after: float  # what is left of the slowdown under it, by simulation; 1: nothing
    refused: str = ""  # why it may not be taken (not allowed, no spare, budget spent); "": it may
    exact: bool = True  # the job stays synchronous SGD; False: it trains by Local-SGD


@dataclass(frozen=True)
class Price:
    """An option with what it would win, and why it was taken or not."""

    option: Option
    gain_seconds: float  # expected, before its cost
    due: bool
    reason: str


@dataclass(frozen=True)
class Choice:
    """All options with their prices, and the one to take now; None: wait, and ask again as the loss grows."""

    chosen: Price | None
    prices: tuple[Price, ...]


def choose(
    options: Sequence[Option],
    slowdown: float,
    lost_seconds: float,
    remaining_seconds: float = math.inf,
    *,
    mended: float = 1.0,
) -> Choice:
    """Which option to take now.

    slowdown: S of the job as it is (inf: it stands still). lost_seconds: loss accumulated since the first sign.
    remaining_seconds: expected rest of the fault's duration, see `expected_remaining`; inf: it will not pass by itself.
    mended: a slowdown below this needs no better remedy. Free options come first, and of these exact SGD where it mends
    the job, or nearly as well as Local-SGD. Of the others that are due, and that are worth their cost beside a free one
    that does not mend the job, the one with the least cost plus remaining loss.
    """
    prices = tuple(_price(option, slowdown, lost_seconds, remaining_seconds) for option in options)
    due = [price for price in prices if price.due]
    if not due:
        return Choice(None, prices)
    horizon = remaining_seconds if math.isfinite(remaining_seconds) else _LONG

    def whole_cost(price: Price) -> float:
        return price.option.cost_seconds + horizon * loss_rate(price.option.slowdown_after)

    best = min(due, key=whole_cost)
    free = [price for price in due if price.option.cost_seconds == 0]
    if free:
        best_free = _free(free, mended)
        mends = best_free.option.slowdown_after < mended
        best = best_free if mends or best.option.cost_seconds == 0 else best
    return Choice(best, prices)


_LONG = 86_400.0
"""Horizon for a fault that does not pass by itself: what is left of the slowdown then outweighs any restart."""


def loss_rate(slowdown: float) -> float:
    """Seconds of training lost a second: 1 − 1/S."""
    return 1.0 if math.isinf(slowdown) else 1.0 - 1.0 / max(slowdown, 1.0)


def expected_remaining(elapsed_seconds: float, durations: Sequence[float], prior_seconds: float = 600.0) -> float:
    """Expected rest of a fault that has lasted `elapsed_seconds`, from the durations of earlier ones of its class.

    The mean residual life of the earlier ones that lasted longer, with two pseudo-observations of the prior: an
    exponential of mean `prior_seconds`, whose residual is the same at every age (10 minutes for compute faults, 24 for
    communication: Greyhound).
    """
    longer = [duration - elapsed_seconds for duration in durations if duration > elapsed_seconds]
    return (2 * prior_seconds + sum(longer)) / (2 + len(longer))


def _free(due: Sequence[Price], mended: float) -> Price:
    best = min(due, key=lambda price: price.option.slowdown_after)
    exact = [price for price in due if price.option.exact]
    if not exact:
        return best
    preferred = min(exact, key=lambda price: price.option.slowdown_after)
    after = preferred.option.slowdown_after
    return preferred if after < mended or after <= NEARLY * max(1.0, best.option.slowdown_after) else best


def _price(option: Option, slowdown: float, lost_seconds: float, remaining_seconds: float) -> Price:
    saved = loss_rate(slowdown) - loss_rate(option.slowdown_after)
    gain = saved * (remaining_seconds if math.isfinite(remaining_seconds) else _LONG)
    if option.refused:
        return Price(option, gain, False, option.refused)
    if saved <= 0:
        return Price(option, 0.0, False, "wins nothing")
    cost = option.cost_seconds
    if cost == 0:
        relative = 1.0 - option.slowdown_after / slowdown if math.isfinite(slowdown) else 1.0
        if not option.exact and slowdown < NEARLY * max(1.0, option.slowdown_after):
            return Price(option, gain, False, f"{relative:.0%} faster steps are not worth leaving synchronous SGD")
        due = relative >= MINIMAL_WIN
        return Price(
            option, gain, due, f"free, {relative:.0%} faster steps" if due else f"only {relative:.1%} faster steps"
        )
    if math.isinf(slowdown):
        return Price(option, gain, True, "the job stands still")
    if lost_seconds >= cost:
        return Price(option, gain, True, f"{lost_seconds:.0f} s lost so far reach its cost of {cost:.1f} s")
    if math.isfinite(remaining_seconds) and gain > cost:
        return Price(option, gain, True, f"expected gain of {gain:.0f} s exceeds its cost of {cost:.1f} s")
    return Price(option, gain, False, f"costs {cost:.1f} s, and only {lost_seconds:.1f} s are lost so far")
