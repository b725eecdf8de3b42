"""What the operator is told of how the ranks train, and when that cannot wait for the next poll.

Figures are means over a rank's window of steps with its present share, and go with every heartbeat. They are news once
the *medians* of a rank's last steps have left what was told last by more than the plan's band: a single slow step is
none. A mean needs as long as its window to follow, so that for this long it is told again whenever it has moved by as
much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from pacekeeper.observe.windows import RankHistory, StepTimes
from pacekeeper_analysis.reports import RankFigures

SHORT_SECONDS = 2.0
FEWEST_STEPS, MOST_STEPS = 4, 8
"""The last steps are those of so many seconds, but no fewer and no more."""
SETTLES_SECONDS = 6.0
"""So long a window's means may still move after its last steps have changed."""
_DIGITS = 5
"""Of a figure as it is sent; more are noise, and bytes."""


@dataclass(frozen=True)
class Level:
    """How a rank trains, as far as it may be news. Seconds."""

    step: float
    own_per_sample: float
    waiting: float  # share of a step

    def has_left(self, told: Level, band: float) -> bool:
        """Whether it differs from what was told by more than this part (of waiting: of a step)."""
        pairs = ((self.step, told.step), (self.own_per_sample, told.own_per_sample))
        moved = any(abs(now - before) > band * before for now, before in pairs)
        return moved or abs(self.waiting - told.waiting) > band


@dataclass(frozen=True)
class RankNow:
    """A rank at one look."""

    figures: RankFigures
    mean: Level | None  # over its window; None: no step
    lately: Level | None  # medians over its last steps; None: too few


class FiguresTold:
    """What was seen last, and what of it was told."""

    def __init__(self) -> None:
        self.news = 0
        """Another number whenever the figures are to be told at once."""
        self._seen: Sequence[RankNow] = ()
        self._told: dict[int, RankNow] = {}
        self._unsettled_until = -math.inf

    def look(self, ranks: Sequence[RankNow], band: float, now: float) -> None:
        """`ranks`: those here, as they are now. `band`: by which they may differ from what was told. `now`: seconds."""
        self._seen = ranks
        known = [(rank, self._told[rank.figures.rank]) for rank in ranks if rank.figures.rank in self._told]
        left = any(_has_left(rank.lately, told.lately, band) for rank, told in known)
        if left:
            self._unsettled_until = now + SETTLES_SECONDS
        moves = now < self._unsettled_until and any(_has_left(rank.mean, told.mean, band) for rank, told in known)
        self.news += left or moves

    def tell(self) -> tuple[RankFigures, ...]:
        """The newest figures, which count as told."""
        self._told = {rank.figures.rank: rank for rank in self._seen}
        return tuple(rank.figures for rank in self._seen)


def seen(rank: int, history: RankHistory, share: int) -> RankNow:
    """One rank now, which takes `share` samples in a step (0: unknown): by the steps that it has taken so many in, or,
    as long as there are none, by all."""
    of_share = [step for step in history.steps if share in (0, step.samples)]
    steps = of_share or history.steps
    step_seconds, own = _mean(step.step_seconds for step in steps), _mean(step.compute_seconds for step in steps)
    figures = RankFigures(
        rank=rank,
        steps=len(of_share),
        step_seconds=_brief(step_seconds),
        compute_seconds=_brief(own),
        compute_seconds_per_sample=_brief(_mean(step.compute_seconds / max(step.samples, 1) for step in steps)),
        wait_seconds=_brief(max(0.0, step_seconds - own)),
        share=share,
        first_steps_seconds=_brief(history.first_steps_seconds or 0.0),
        synchronisation_seconds=_brief(history.synchronisation_seconds or 0.0),
    )
    mean = None
    if figures.step_seconds > 0:
        waiting = figures.wait_seconds / figures.step_seconds
        mean = Level(figures.step_seconds, figures.compute_seconds_per_sample, waiting)
    return RankNow(figures, mean, _lately(steps))


def _lately(steps: Sequence[StepTimes]) -> Level | None:
    """By the last steps of a window."""
    newest = steps[-MOST_STEPS:]
    ages = accumulate(step.step_seconds for step in reversed(newest))
    count = max(FEWEST_STEPS, sum(age <= SHORT_SECONDS for age in ages))
    if len(newest) < count:
        return None
    last = newest[-count:]
    return Level(
        median(step.step_seconds for step in last),
        median(step.compute_seconds / max(step.samples, 1) for step in last),
        median(max(0.0, 1 - step.compute_seconds / step.step_seconds) if step.step_seconds > 0 else 0 for step in last),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def _brief(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")


def _has_left(now: Level | None, told: Level | None, band: float) -> bool:
    return now is not None and told is not None and now.has_left(told, band)
