"""Prices of remedies, as an Incident lists them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis.stragglers.price import Choice, Option, Price, choose_remedy

from ...api.incident import RemedyPrice
from ...api.training_job import Remedy
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.restart_estimates import RestartKind, SavedState

STANDSTILL_SLOWDOWN = math.inf
"""The slowdown of a job that stands still."""


def choose_remedy_at_standstill(options: Sequence[Option]) -> Choice:
    """Choose the cheapest remedy that gets a job going that does not train at all. Each such remedy wins everything."""
    choice = choose_remedy(options, STANDSTILL_SLOWDOWN, 0.0)
    prices = tuple(replace(price, gain_seconds=math.inf) for price in choice.prices)
    chosen = None if choice.chosen is None else prices[choice.prices.index(choice.chosen)]
    return Choice(chosen, prices)


def build_restart_option(observation: Observation, policy: Policy, *, helps: bool = True) -> Option:
    """Return the option of the next round with the same workers.

    `helps` is False if it was tried before and the fault recurred.
    """
    return Option(
        Remedy.RESTART_RANKS,
        observation.restarts.estimate_cost(),
        1.0 if helps else STANDSTILL_SLOWDOWN,
        policy.find_refusal(Remedy.RESTART_RANKS),
    )


def build_replace_option(observation: Observation, policy: Policy, *, refused: str = "") -> Option:
    """Return the option that a spare takes over the ranks."""
    # A watched job is priced as if it had a spare: that is what a TrainingJob would have.
    no_spare = "" if _has_warm_spare(observation) or policy.observes_only else NO_WARM_SPARE
    return Option(
        Remedy.REPLACE_WORKER,
        observation.restarts.estimate_cost(RestartKind.REPLACEMENT),
        1.0,
        refused or policy.find_refusal(Remedy.REPLACE_WORKER) or no_spare,
    )


def build_replace_lost_option(observation: Observation, policy: Policy) -> Option:
    """Return the option to replace a worker that is gone, together with what it held in memory.

    Without a spare, its ranks wait for the worker that is created instead. It costs less where the others go on at the
    same time (`elastic_scaling`).
    """
    wait = 0.0 if _has_warm_spare(observation) else observation.restarts.start_seconds
    cost = observation.restarts.estimate_cost(RestartKind.REPLACEMENT, SavedState.REPLICA) + wait
    return Option(Remedy.REPLACE_WORKER, cost, 1.0, policy.find_refusal(Remedy.REPLACE_WORKER))


def build_plan_traffic_option(
    observation: Observation, policy: Policy, *, slowdown_after: float = 1.0, refused: str = ""
) -> Option:
    """Return the option of a round with the same workers, whose connections take the routes that are planned now.

    The job stays exact: while this option is awaited, no remedy that would change that is taken.
    """
    refused = policy.find_refusal(Remedy.PLAN_TRAFFIC) or refused
    return Option(Remedy.PLAN_TRAFFIC, observation.restarts.estimate_cost(), slowdown_after, refused, awaited=True)


def compute_traffic_slowdown(wait_share: float, before: float, after: float) -> float:
    """Return a job's step time by the present routes over that by the planned ones.

    What its ranks wait shrinks as their ring gets faster. `wait_share`: that share of a step; `before`, `after`: the
    speed of the ring.
    """
    if not after:
        return 1.0
    return 1.0 / (1.0 - min(wait_share, 0.99) * (1.0 - before / after))


def _has_warm_spare(observation: Observation) -> bool:
    return any(view.warm for view in observation.spares)


NO_WARM_SPARE = "no spare is warm"


def build_remedy_prices(prices: Sequence[Price], chosen: Price | None) -> tuple[RemedyPrice, ...]:
    """Return the prices for the Incident. An infinite gain (the job stands still) is left open."""
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
