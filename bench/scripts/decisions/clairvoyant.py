"""Who knows all that will happen: dynamic programming over every way to train, and over exchanging the worker.

Live changes cost nothing, so that in each second the best way is taken (`World.least_loss`, which knows every way that
any course has tried, too). What is left to plan is when, if ever, to pay for a new round: the states are whether the
spare has been taken, a decision is possible at every second, and the value of a second is the least that all seconds
from there on cost.

`least_cost` is the bound that no policy can be below. `informed_cost` is whom policies are held against: it knows as
well how long all will last, and what each remedy is worth, but a change has to show before it is acted upon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pacekeeper_analysis.plan import SyncMode

from .course import first_sign, seen
from .draw import Scenario
from .world import Spare, Strain, CostModel, met

DECISION_SECONDS = 8
"""Of training, from the first sign until something is done: a question to the ranks, their answers, and where one
answer is not enough a second one, of later steps."""

Rates = Sequence[tuple[float, float]]
"""Of each second: the loss with the workers as they are, and with the spare in the place of the slow one."""


def least_cost(scenario: Scenario, world: CostModel, begin: int = 0) -> float:
    """Seconds of training that are lost from `begin` on until the end, at least."""
    strains = scenario.timeline.strains_by_second[begin:]
    rates = {strain: _both(strain, world) for strain in set(strains)}
    seconds = [
        rates[strain] if world.job.trains(second) else (0.0, 0.0) for second, strain in enumerate(strains, begin)
    ]
    return plan(seconds, world.job.restart_seconds, able=_able(world))


def informed_cost(scenario: Scenario, world: CostModel) -> float:
    """From the first sign on. A change of the strain is met by another way to train once it has shown and been decided
    upon, and until then by the way that was best before; or an exact way for one strain is kept from then on, since
    what comes and goes is back before it shows. A mode that is not exact does not outlast its reason, for nobody."""
    job, strains, sign = scenario.job, scenario.timeline.strains_by_second, first_sign(scenario)
    seconds = range(sign, scenario.timeline.end)
    shown = [seen(scenario, second, ago=DECISION_SECONDS) for second in seconds]
    earliest = math.ceil(job.when(job.trained(sign) + DECISION_SECONDS)) - sign
    known: dict[tuple[Strain, Strain], tuple[float, float]] = {}

    def rates(second: int, met_for: Strain) -> tuple[float, float]:
        if not job.trains(second):
            return 0.0, 0.0
        now = strains[second]
        if (now, met_for) not in known:
            known[now, met_for] = _both(now, world) if now == met_for else _unprepared(now, met_for, world)
        return known[now, met_for]

    def cost(ways_for: Sequence[Strain]) -> float:
        of_each = [rates(second, strain) for second, strain in zip(seconds, ways_for, strict=True)]
        return plan(of_each, job.restart_seconds, able=_able(world), earliest=earliest)

    exact = [strain for strain in dict.fromkeys(shown) if world.best(strain).mode is SyncMode.SYNC]
    return min(map(cost, (shown, *(_select_strains(shown, strain) for strain in exact))))


def _select_strains(shown: Sequence[Strain], strain: Strain) -> list[Strain]:
    first = shown.index(strain)
    return [*shown[:first], *[strain] * (len(shown) - first)]


def plan(rates: Rates, restart: int, *, able: bool, earliest: int = 0) -> float:
    """The least cost of all these seconds: the exchange is begun at one of them from `earliest` on, or never."""
    stays, moved = np.array(rates, dtype=np.float64).reshape(-1, 2).T
    behind = np.concatenate([np.cumsum(moved[::-1])[::-1], [0.0]])  # of all seconds from each on, with the spare
    seconds, least = len(stays), 0.0
    for second in range(seconds - 1, -1, -1):
        least += stays[second]
        if able and second >= earliest:
            least = min(least, min(restart, seconds - second) + behind[min(second + restart, seconds)])
    return float(least)


def _able(world: CostModel) -> bool:
    return world.job.spare is Spare.WARM


def _both(strain: Strain, world: CostModel) -> tuple[float, float]:
    return world.least_loss(strain), world.least_loss(met(strain, moved=True))


def _unprepared(now: Strain, before: Strain, world: CostModel) -> tuple[float, float]:
    stays, moved = (world.loss(world.best(met(before, moved=moved)), met(now, moved=moved)) for moved in (False, True))
    return stays, moved
