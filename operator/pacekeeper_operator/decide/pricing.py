"""Prices of remedies as they stand in an Incident."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis.price import Choice, Option, Price, choose

from ..api import Remedy, RemedyPrice
from ..observation import STANDSTILL, Observation, Policy


def choose_at_standstill(options: Sequence[Option]) -> Choice:
    """Of a job that does not train at all: every remedy that gets it going wins everything, the cheapest is taken."""
    choice = choose(options, STANDSTILL, 0.0)
    prices = tuple(replace(price, gain_seconds=math.inf) for price in choice.prices)
    chosen = None if choice.chosen is None else prices[choice.prices.index(choice.chosen)]
    return Choice(chosen, prices)


def restart_option(observation: Observation, policy: Policy, *, helps: bool = True) -> Option:
    """The next round by the same workers. `helps` is False where it was tried before and the fault came again."""
    return Option(
        Remedy.RESTART_RANKS,
        observation.restart_cost(),
        1.0 if helps else STANDSTILL,
        policy.refusal(Remedy.RESTART_RANKS),
    )


def replace_option(observation: Observation, policy: Policy, *, refused: str = "") -> Option:
    """A spare takes the ranks over."""
    no_spare = "" if _spare_is_warm(observation) else NO_SPARE
    return Option(
        Remedy.REPLACE_WORKER,
        observation.restart_cost() + _spare_seconds(observation),
        1.0,
        refused or policy.refusal(Remedy.REPLACE_WORKER) or no_spare,
    )


def replace_lost_option(observation: Observation, policy: Policy) -> Option:
    """The same for a worker that is gone, and what it held in memory with it: without a spare its seat waits for the
    worker that is made in its place. It costs less where the others go on meanwhile (`survivors`)."""
    wait = _spare_seconds(observation) if _spare_is_warm(observation) else observation.start_seconds
    cost = observation.restart_cost(snapshots=False) + wait
    return Option(Remedy.REPLACE_WORKER, cost, 1.0, policy.refusal(Remedy.REPLACE_WORKER))


def plan_traffic_option(
    observation: Observation, policy: Policy, *, slowdown_after: float = 1.0, refused: str = ""
) -> Option:
    """A round by the same workers, whose connections take the ways that are planned now. The job stays exact: what
    would make it otherwise is not taken meanwhile."""
    refused = policy.refusal(Remedy.PLAN_TRAFFIC) or refused
    return Option(Remedy.PLAN_TRAFFIC, observation.restart_cost(), slowdown_after, refused, awaited=True)


def slowdown_of_traffic(waiting: float, before: float, after: float) -> float:
    """Of a job's steps by the ways that are in force, over those by the ways that are planned: what its ranks wait
    shrinks as their ring gets faster. `waiting`: that share of a step; `before`, `after`: the pace of the ring."""
    if not after:
        return 1.0
    return 1.0 / (1.0 - min(waiting, 0.99) * (1.0 - before / after))


def _spare_is_warm(observation: Observation) -> bool:
    return any(view.warm for view in observation.spares)


def exchange_seconds(observation: Observation) -> float:
    """What a round with a spare costs that waits for a checkpoint: no steps are lost."""
    return observation.restart_seconds + _spare_seconds(observation)


def _spare_seconds(observation: Observation) -> float:
    """What a round with a spare takes longer than one with the same workers, as measured last."""
    measured = observation.state.budget.exchange_seconds
    return max(0.0, measured - observation.restart_seconds) if measured else SPARE_SECONDS


NO_SPARE = "no spare is warm"
SPARE_SECONDS = 0.5
"""Before it was measured: the first steps of the spare's ranks are cold."""


def written(prices: Sequence[Price], chosen: Price | None) -> tuple[RemedyPrice, ...]:
    """As they stand in the Incident; an infinite gain (the job stands still) is left open."""
    return tuple(
        RemedyPrice(
            name=price.option.remedy,
            gain_seconds=price.gain_seconds if math.isfinite(price.gain_seconds) else None,
            cost_seconds=price.option.cost_seconds,
            chosen=price is chosen,
            reason=price.reason,
        )
        for price in prices
    )
