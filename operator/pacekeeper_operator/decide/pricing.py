"""Prices of remedies as they stand in an Incident."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis.price import Choice, Option, Price, choose_remedy

from ..api import Remedy, RemedyPrice
from ..observation import STANDSTILL_SLOWDOWN, Observation, Policy


def choose_remedy_at_standstill(options: Sequence[Option]) -> Choice:
    """Of a job that does not train at all: every remedy that gets it going wins everything, the cheapest is taken."""
    choice = choose_remedy(options, STANDSTILL_SLOWDOWN, 0.0)
    prices = tuple(replace(price, gain_seconds=math.inf) for price in choice.prices)
    chosen = None if choice.chosen is None else prices[choice.prices.index(choice.chosen)]
    return Choice(chosen, prices)


def build_restart_option(observation: Observation, policy: Policy, *, helps: bool = True) -> Option:
    """The next round by the same workers. `helps` is False where it was tried before and the fault came again."""
    return Option(
        Remedy.RESTART_RANKS,
        observation.estimate_restart_cost(),
        1.0 if helps else STANDSTILL_SLOWDOWN,
        policy.find_refusal(Remedy.RESTART_RANKS),
    )


def build_replace_option(observation: Observation, policy: Policy, *, refused: str = "") -> Option:
    """A spare takes the ranks over."""
    no_spare = "" if _has_warm_spare(observation) else NO_WARM_SPARE
    return Option(
        Remedy.REPLACE_WORKER,
        observation.estimate_restart_cost() + _estimate_spare_seconds(observation),
        1.0,
        refused or policy.find_refusal(Remedy.REPLACE_WORKER) or no_spare,
    )


def build_replace_lost_option(observation: Observation, policy: Policy) -> Option:
    """The same for a worker that is gone, and what it held in memory with it: without a spare its seat waits for the
    worker that is made in its place. It costs less where the others go on meanwhile (`survivors`)."""
    wait = _estimate_spare_seconds(observation) if _has_warm_spare(observation) else observation.start_seconds
    cost = observation.estimate_restart_cost(snapshots=False) + wait
    return Option(Remedy.REPLACE_WORKER, cost, 1.0, policy.find_refusal(Remedy.REPLACE_WORKER))


def build_plan_traffic_option(
    observation: Observation, policy: Policy, *, slowdown_after: float = 1.0, refused: str = ""
) -> Option:
    """A round by the same workers, whose connections take the ways that are planned now. The job stays exact: what
    would make it otherwise is not taken meanwhile."""
    refused = policy.find_refusal(Remedy.PLAN_TRAFFIC) or refused
    return Option(Remedy.PLAN_TRAFFIC, observation.estimate_restart_cost(), slowdown_after, refused, awaited=True)


def compute_traffic_slowdown(waiting: float, before: float, after: float) -> float:
    """Of a job's steps by the ways that are in force, over those by the ways that are planned: what its ranks wait
    shrinks as their ring gets faster. `waiting`: that share of a step; `before`, `after`: the pace of the ring."""
    if not after:
        return 1.0
    return 1.0 / (1.0 - min(waiting, 0.99) * (1.0 - before / after))


def _has_warm_spare(observation: Observation) -> bool:
    return any(view.warm for view in observation.spares)


def estimate_exchange_seconds(observation: Observation) -> float:
    """What a round with a spare costs that waits for a checkpoint: no steps are lost."""
    return observation.restart_seconds + _estimate_spare_seconds(observation)


def _estimate_spare_seconds(observation: Observation) -> float:
    """What a round with a spare takes longer than one with the same workers, as measured last."""
    measured = observation.state.budget.exchange_seconds
    return max(0.0, measured - observation.restart_seconds) if measured else DEFAULT_SPARE_SECONDS


NO_WARM_SPARE = "no spare is warm"
DEFAULT_SPARE_SECONDS = 0.5
"""Before it was measured: the first steps of the spare's ranks are cold."""


def build_remedy_prices(prices: Sequence[Price], chosen: Price | None) -> tuple[RemedyPrice, ...]:
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
