"""Policies that ours is held against. One of its own is a class here and a line in POLICIES.

All but ours receive what is wrong, exactly and as soon as it shows (`policy_run.get_visible_strain`): they have no
evidence to weigh, and raise no false alarm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .draw import Scenario
from .ours import Ours
from .policy_run import Begin, Now, find_first_sign, get_visible_strain
from .world import CALM, EQUAL_SHARES, CostModel, Setup, Spare, Strain, TrainingStrategy, get_remaining_strain

SHARES_SECONDS = 5.0
"""Assumed cost of Greyhound's second level: the micro-batches are distributed again."""


@dataclass
class Never:
    """Does nothing."""

    due: int = 0

    def choose_setup(self, now: Now) -> Setup:
        return now.setup


@dataclass
class AlwaysRestart:
    """A new round at every first sign, on the spare where there is one: what is done by hand, and at once."""

    scenario: Scenario
    due: int = 0
    _saw: bool = False

    def choose_setup(self, now: Now) -> Setup:
        is_visible = get_remaining_strain(get_visible_strain(self.scenario, now.second), moved=now.setup.moved) != CALM
        is_new, self._saw = is_visible and not self._saw, is_visible
        return _next_round(now.setup, self.scenario) if is_new and not now.stands else now.setup


@dataclass
class SharesOnly:
    """The best shares as long as a slow rank shows, and equal ones else."""

    scenario: Scenario
    world: CostModel
    due: int = 0

    def choose_setup(self, now: Now) -> Setup:
        return replace(now.setup, strategy=_choose_shares(self.world, get_visible_strain(self.scenario, now.second)))


@dataclass
class Greyhound:
    """The four levels of Greyhound (ATC'25), each taken when the loss so far has come to what it costs: nothing, other
    micro-batches, another topology, and a restart on healthy nodes.

    After the paper's description. The third level trades places between kinds of parallelism, of which a job in plain
    data parallelism has one: it wins nothing here, and is passed over.
    """

    scenario: Scenario
    world: CostModel
    due: int = 0
    _lost: float = 0.0

    def choose_setup(self, now: Now) -> Setup:
        strain = get_remaining_strain(get_visible_strain(self.scenario, now.second), moved=now.setup.moved)
        if strain == CALM:
            self._lost = 0.0
            return replace(now.setup, strategy=EQUAL_SHARES)
        self._lost += self.world.compute_loss(now.setup.strategy, strain)
        if now.stands:
            return now.setup
        if self._lost >= self.scenario.job.restart_seconds and _can_move(now.setup, self.scenario):
            return _next_round(now.setup, self.scenario)
        if self._lost >= SHARES_SECONDS:
            return replace(now.setup, strategy=_choose_shares(self.world, strain))
        return now.setup


@dataclass
class SkiRental:
    """A policy without errors that only lacks the duration: what is free is done at once, and the spare is taken when
    the loss so far is `times` what it costs."""

    scenario: Scenario
    world: CostModel
    times: float = 1.0
    due: int = 0
    _lost: float = 0.0

    def choose_setup(self, now: Now) -> Setup:
        strain = get_remaining_strain(get_visible_strain(self.scenario, now.second), moved=now.setup.moved)
        best_setup = replace(now.setup, strategy=self.world.choose_best(strain))
        if now.second >= find_first_sign(self.scenario):
            self._lost += self.world.compute_loss(now.setup.strategy, now.strain)
        is_due = self._lost >= self.times * self.scenario.job.restart_seconds and strain.movable
        if (
            is_due
            and not now.stands
            and _can_move(now.setup, self.scenario)
            and self.world.compute_loss(best_setup.strategy, strain) > 0
        ):
            return replace(_next_round(now.setup, self.scenario), strategy=EQUAL_SHARES)
        return best_setup


OURS = "ours"
SKI_RENTAL_MULTIPLES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
POLICIES: Mapping[str, Begin] = {
    OURS: Ours,
    "never act": lambda _scenario, _world: Never(),
    "always restart": lambda scenario, _world: AlwaysRestart(scenario),
    "shares only": SharesOnly,
    "Greyhound's levels": Greyhound,
    **{
        f"ski rental at {times:g} ×": lambda scenario, cost_model, times=times: SkiRental(scenario, cost_model, times)  # type: ignore[misc]
        for times in SKI_RENTAL_MULTIPLES
    },
}


def _choose_shares(cost_model: CostModel, strain: Strain) -> TrainingStrategy:
    strategy = cost_model.choose_best_exact(strain)
    return TrainingStrategy(shares=strategy.shares)


def _can_move(setup: Setup, scenario: Scenario) -> bool:
    return scenario.job.spare is Spare.WARM and not setup.moved


def _next_round(setup: Setup, scenario: Scenario) -> Setup:
    return replace(setup, moved=setup.moved or _can_move(setup, scenario), round=setup.round + 1)
