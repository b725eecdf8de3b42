"""What a remedy costs and wins, and which one to take now.

How long a fault will last is not known in advance, so the choice is a ski-rental problem: what is free is done at once,
and a dear remedy is bought when the loss since the first sign, before and after what was free, reaches its cost. Nobody
who hears of the fault at the same time, and knows how long it will last, pays less than half of that. To buy earlier
because most faults last would give this up for the short ones. Seconds are seconds of training throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_REMEDY_WIN = 0.02
"""A change for less than this relative win would only make the job flap."""
MIN_LASTING_WIN = 0.005
"""The same of what does not flap: it stays once it is taken, or is bought by what has been lost."""

MAX_EXACT_STEP_TIME_RATIO = 1.15
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
    least_win: float = MIN_REMEDY_WIN  # of its steps, relative, below which it is not worth the change
    awaited: bool = False  # dear, and so good that nothing inexact is taken before it, where it mends nearly as well


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


@dataclass(frozen=True)
class AccumulatedLoss:
    """What a fault has cost since its first sign, and costs on, whatever is done about it meanwhile.

    Plain numbers, to be kept with the job; times are seconds of any one clock.
    """

    seconds: float  # lost until `at`
    at: float
    slowdown: float  # since then

    def compute_seconds(self, now: float) -> float:
        """Seconds lost until `now`."""
        return self.seconds + max(0.0, now - self.at) * compute_loss_rate(self.slowdown)

    def continue_at(self, now: float, slowdown: float) -> AccumulatedLoss:
        """From `now` on at another rate: a remedy has left `slowdown`, or the fault has changed."""
        return AccumulatedLoss(self.compute_seconds(now), now, slowdown)

    def observe(self, now: float, slowdown: float) -> AccumulatedLoss:
        """What is seen of the same fault now: since the last look it has cost what both say, on average."""
        rate = (compute_loss_rate(self.slowdown) + compute_loss_rate(slowdown)) / 2
        return AccumulatedLoss(self.seconds + max(0.0, now - self.at) * rate, now, slowdown)


def choose_remedy(
    options: Sequence[Option],
    slowdown: float,
    lost_seconds: float,
    remaining_seconds: float = math.inf,
    *,
    mended: float = 1.0,
    bearable: float = math.inf,
) -> Choice:
    """Which option to take now.

    slowdown: S of the job as it is (inf: it stands still). lost_seconds: loss accumulated since the first sign, see
    `Loss`. remaining_seconds: expected rest of the fault's duration, over which gains are reckoned, see
    `estimate_remaining_seconds`; inf: it will not pass by itself. mended: a slowdown below this needs no better free remedy.
    bearable: a free remedy that leaves this or more comes behind a dear one that is due.

    What is free comes first: exact SGD where it mends the job, or nearly as well as Local-SGD. A dear option is due
    once the loss has reached its cost, if it wins something beside what is free; of several, the one with the least
    cost plus remaining loss is taken. Nothing inexact is taken while an exact one is `awaited`.
    """
    horizon = remaining_seconds if math.isfinite(remaining_seconds) else _UNBOUNDED_FAULT_SECONDS
    free = [_price_free_option(option, slowdown, horizon) for option in options if option.cost_seconds == 0]
    best_free = _choose_best_free([price for price in free if price.due], mended)
    left = slowdown if best_free is None else best_free.option.slowdown_after
    inexact = best_free is not None and not best_free.option.exact
    dear = [
        # What is awaited is taken instead of what is free and inexact, not beside it.
        _price_costly_option(option, slowdown, slowdown if option.awaited and inexact else left, lost_seconds, horizon)
        for option in options
        if option.cost_seconds
    ]

    def whole_cost(price: Price) -> float:
        return price.option.cost_seconds + horizon * compute_loss_rate(price.option.slowdown_after)

    best_dear = min((price for price in dear if price.due), key=whole_cost, default=None)
    by_kind = iter(free), iter(dear)
    prices = tuple(next(by_kind[option.cost_seconds > 0]) for option in options)
    awaited = [price for price in dear if inexact and _is_awaited(price, slowdown, left)]
    if awaited:
        return Choice(min((price for price in awaited if price.due), key=whole_cost, default=None), prices)
    is_free = best_free is not None and (best_dear is None or left < bearable)
    return Choice(best_free if is_free else best_dear, prices)


def _is_awaited(price: Price, slowdown: float, left: float) -> bool:
    """It keeps the job exact, mends nearly as well as the best of what is free, which leaves `left`, and will win more
    than it costs."""
    option = price.option
    if not (option.awaited and option.exact) or option.refused or not is_worth_change(slowdown, option.slowdown_after):
        return False
    return option.slowdown_after <= MAX_EXACT_STEP_TIME_RATIO * max(1.0, left) and price.gain_seconds > option.cost_seconds


_UNBOUNDED_FAULT_SECONDS = 86_400.0
"""Horizon for a fault that does not pass by itself: what is left of the slowdown then outweighs any restart."""


def compute_loss_rate(slowdown: float) -> float:
    """Seconds of training lost a second: 1 − 1/S."""
    return 1.0 if math.isinf(slowdown) else 1.0 - 1.0 / max(slowdown, 1.0)


def is_worth_change(slowdown: float, after: float, least: float = MIN_REMEDY_WIN) -> bool:
    """Whether steps at slowdown `after` are enough faster than at `slowdown` to change anything."""
    return math.isinf(slowdown) or max(after, 1.0) <= (1.0 - least) * slowdown


def outweighs_exact(slowdown: float, after: float) -> bool:
    """Whether Local-SGD at slowdown `after` is worth leaving exact steps at `slowdown`."""
    return slowdown >= MAX_EXACT_STEP_TIME_RATIO * max(1.0, after)


def estimate_remaining_seconds(elapsed_seconds: float, durations: Sequence[float], prior_seconds: float = 600.0) -> float:
    """Expected rest of a fault that has lasted `elapsed_seconds`, from the durations of earlier ones of its class.

    The mean residual life of the earlier ones that lasted longer, with two pseudo-observations of the prior: an
    exponential of mean `prior_seconds`, whose residual is the same at every age (10 minutes for compute faults, 24 for
    communication: Greyhound).
    """
    longer = [duration - elapsed_seconds for duration in durations if duration > elapsed_seconds]
    return (2 * prior_seconds + sum(longer)) / (2 + len(longer))


def _choose_best_free(due: Sequence[Price], mended: float) -> Price | None:
    best = min(due, key=lambda price: price.option.slowdown_after, default=None)
    preferred = min(
        (price for price in due if price.option.exact), key=lambda price: price.option.slowdown_after, default=None
    )
    if best is None or preferred is None:
        return best
    after = preferred.option.slowdown_after
    return preferred if after < mended or after <= MAX_EXACT_STEP_TIME_RATIO * max(1.0, best.option.slowdown_after) else best


def _price_free_option(option: Option, slowdown: float, horizon: float) -> Price:
    saved = compute_loss_rate(slowdown) - compute_loss_rate(option.slowdown_after)
    gain = saved * horizon
    if option.refused:
        return Price(option, gain, False, option.refused)
    if saved <= 0:
        return Price(option, 0.0, False, "wins nothing")
    relative = 1.0 - option.slowdown_after / slowdown if math.isfinite(slowdown) else 1.0
    if not option.exact and not outweighs_exact(slowdown, option.slowdown_after):
        return Price(option, gain, False, f"{relative:.0%} faster steps are not worth leaving synchronous SGD")
    if relative < option.least_win:
        return Price(option, gain, False, f"only {relative:.1%} faster steps")
    return Price(option, gain, True, f"free, {relative:.0%} faster steps")


def _price_costly_option(option: Option, slowdown: float, left: float, lost_seconds: float, horizon: float) -> Price:
    """`left`: the slowdown under the best of what is free."""
    cost = option.cost_seconds
    gain = max(0.0, compute_loss_rate(slowdown) - compute_loss_rate(option.slowdown_after)) * horizon
    if option.refused:
        return Price(option, gain, False, option.refused)
    if not is_worth_change(left, option.slowdown_after, option.least_win):
        return Price(option, gain, False, "wins nothing" if left == slowdown else "wins nothing beside what is free")
    if math.isinf(left):
        return Price(option, gain, True, "the job stands still")
    if lost_seconds >= cost:
        return Price(option, gain, True, f"{lost_seconds:.0f} s lost so far reach its cost of {cost:.1f} s")
    return Price(option, gain, False, f"costs {cost:.1f} s, and only {lost_seconds:.1f} s are lost so far")
