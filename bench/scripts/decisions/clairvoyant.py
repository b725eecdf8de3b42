"""A policy that knows the future: dynamic programming over every strategy, and over exchanging the worker.

Live changes cost nothing, so that in each second the best strategy is taken (`CostModel.compute_least_loss`, which
also covers every strategy that a policy has tried). What is left to plan is when, if ever, to pay for a new round. The
states are whether the spare has been taken, a decision is possible at every second, and the value of a second is the
least that all seconds from there on cost.

`compute_least_cost` is the bound that no policy can be below. Policies are compared with `compute_informed_cost`: it
also has the duration of all events, and the value of each remedy, but a change has to show before it acts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pacekeeper_analysis.protocol.plan import SyncMode

from .draw import Scenario
from .policy_run import find_first_sign, get_visible_strain
from .world import CostModel, Spare, Strain, get_remaining_strain

DECISION_SECONDS = 8
"""Of training, from the first sign until something is done: a question to the ranks, their answers, and where one
answer is not enough a second one, of later steps."""

Rates = Sequence[tuple[float, float]]
"""Of each second: the loss with the workers as they are, and with the spare in the place of the slow one."""


def compute_least_cost(scenario: Scenario, cost_model: CostModel, begin: int = 0) -> float:
    """Seconds of training that are lost from `begin` on until the end, at least."""
    strains = scenario.timeline.strains_by_second[begin:]
    rates = {strain: _compute_losses(strain, cost_model) for strain in set(strains)}
    seconds = [
        rates[strain] if cost_model.job.is_training(second) else (0.0, 0.0)
        for second, strain in enumerate(strains, begin)
    ]
    return plan_exchange(seconds, cost_model.job.restart_seconds, can_exchange=_can_exchange(cost_model))


def compute_informed_cost(scenario: Scenario, cost_model: CostModel) -> float:
    """From the first sign on. A change of the strain is met by another strategy once it has shown and been decided
    upon, and until then by the one that was best before; or an exact one for one strain is kept from then on, since
    what comes and goes is back before it shows. No policy keeps a mode that is not exact after its reason has ended."""
    job, strains, first_second = scenario.job, scenario.timeline.strains_by_second, find_first_sign(scenario)
    seconds = range(first_second, scenario.timeline.end)
    visible = [get_visible_strain(scenario, second, ago=DECISION_SECONDS) for second in seconds]
    earliest = math.ceil(job.find_time(job.compute_trained_seconds(first_second) + DECISION_SECONDS)) - first_second
    loss_cache: dict[tuple[Strain, Strain], tuple[float, float]] = {}

    def get_losses(second: int, planned_for: Strain) -> tuple[float, float]:
        if not job.is_training(second):
            return 0.0, 0.0
        current = strains[second]
        if (current, planned_for) not in loss_cache:
            loss_cache[current, planned_for] = (
                _compute_losses(current, cost_model)
                if current == planned_for
                else _compute_unprepared_losses(current, planned_for, cost_model)
            )
        return loss_cache[current, planned_for]

    def compute_cost(planned_strains: Sequence[Strain]) -> float:
        losses = [get_losses(second, strain) for second, strain in zip(seconds, planned_strains, strict=True)]
        return plan_exchange(losses, job.restart_seconds, can_exchange=_can_exchange(cost_model), earliest=earliest)

    exact_strains = [
        strain for strain in dict.fromkeys(visible) if cost_model.choose_best(strain).mode is SyncMode.SYNC
    ]
    return min(map(compute_cost, (visible, *(_select_strains(visible, strain) for strain in exact_strains))))


def _select_strains(visible: Sequence[Strain], strain: Strain) -> list[Strain]:
    first = visible.index(strain)
    return [*visible[:first], *[strain] * (len(visible) - first)]


def plan_exchange(losses: Rates, restart_seconds: int, *, can_exchange: bool, earliest: int = 0) -> float:
    """The least cost of all these seconds: the exchange is begun at one of them from `earliest` on, or never."""
    stay_losses, moved_losses = np.array(losses, dtype=np.float64).reshape(-1, 2).T
    remaining_losses = np.concatenate(
        [np.cumsum(moved_losses[::-1])[::-1], [0.0]]
    )  # of all seconds from each on, with the spare
    seconds, least_cost = len(stay_losses), 0.0
    for second in range(seconds - 1, -1, -1):
        least_cost += stay_losses[second]
        if can_exchange and second >= earliest:
            least_cost = min(
                least_cost,
                min(restart_seconds, seconds - second) + remaining_losses[min(second + restart_seconds, seconds)],
            )
    return float(least_cost)


def _can_exchange(cost_model: CostModel) -> bool:
    return cost_model.job.spare is Spare.WARM


def _compute_losses(strain: Strain, cost_model: CostModel) -> tuple[float, float]:
    return cost_model.compute_least_loss(strain), cost_model.compute_least_loss(
        get_remaining_strain(strain, moved=True)
    )


def _compute_unprepared_losses(current: Strain, planned_for: Strain, cost_model: CostModel) -> tuple[float, float]:
    stays, moved = (
        cost_model.compute_loss(
            cost_model.choose_best(get_remaining_strain(planned_for, moved=moved)),
            get_remaining_strain(current, moved=moved),
        )
        for moved in (False, True)
    )
    return stays, moved
