"""Policies that ours is held against. One of its own is a class here and a line in POLICIES.

All but ours are told what is wrong, exactly and as soon as it shows (`course.seen`): they have no evidence to weigh,
and raise no false alarm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .course import Begin, Now, first_sign, seen
from .draw import Scenario
from .ours import Ours
from .world import CALM, EQUAL, Setup, Spare, Strain, TrainingStrategy, CostModel, met

SHARES_SECONDS = 5.0
"""What Greyhound's second level is taken to cost: the micro-batches are dealt anew."""


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
        shows = met(seen(self.scenario, now.second), moved=now.setup.moved) != CALM
        news, self._saw = shows and not self._saw, shows
        return _next_round(now.setup, self.scenario) if news and not now.stands else now.setup


@dataclass
class SharesOnly:
    """The best shares as long as a slow rank shows, and equal ones else."""

    scenario: Scenario
    world: CostModel
    due: int = 0

    def choose_setup(self, now: Now) -> Setup:
        return replace(now.setup, way=_shares(self.world, seen(self.scenario, now.second)))


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
        shows = met(seen(self.scenario, now.second), moved=now.setup.moved)
        if shows == CALM:
            self._lost = 0.0
            return replace(now.setup, way=EQUAL)
        self._lost += self.world.loss(now.setup.strategy, shows)
        if now.stands:
            return now.setup
        if self._lost >= self.scenario.job.restart_seconds and _can_move(now.setup, self.scenario):
            return _next_round(now.setup, self.scenario)
        if self._lost >= SHARES_SECONDS:
            return replace(now.setup, way=_shares(self.world, shows))
        return now.setup


@dataclass
class SkiRental:
    """Who errs in nothing, and only does not know how long it will last: what is free is done at once, and the spare is
    taken when the loss so far is `times` what it costs."""

    scenario: Scenario
    world: CostModel
    times: float = 1.0
    due: int = 0
    _lost: float = 0.0

    def choose_setup(self, now: Now) -> Setup:
        shows = met(seen(self.scenario, now.second), moved=now.setup.moved)
        best = replace(now.setup, way=self.world.best(shows))
        if now.second >= first_sign(self.scenario):
            self._lost += self.world.loss(now.setup.strategy, now.strain)
        due = self._lost >= self.times * self.scenario.job.restart_seconds and shows.movable
        if due and not now.stands and _can_move(now.setup, self.scenario) and self.world.loss(best.strategy, shows) > 0:
            return replace(_next_round(now.setup, self.scenario), way=EQUAL)
        return best


OURS = "ours"
TIMES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
POLICIES: Mapping[str, Begin] = {
    OURS: Ours,
    "never act": lambda _scenario, _world: Never(),
    "always restart": lambda scenario, _world: AlwaysRestart(scenario),
    "shares only": SharesOnly,
    "Greyhound's levels": Greyhound,
    **{
        f"ski rental at {times:g} ×": lambda scenario, world, times=times: SkiRental(scenario, world, times)  # type: ignore[misc]
        for times in TIMES
    },
}


def _shares(world: CostModel, strain: Strain) -> TrainingStrategy:
    way = world.best_exact(strain)
    return TrainingStrategy(shares=way.shares)


def _can_move(setup: Setup, scenario: Scenario) -> bool:
    return scenario.job.spare is Spare.WARM and not setup.moved


def _next_round(setup: Setup, scenario: Scenario) -> Setup:
    return replace(setup, moved=setup.moved or _can_move(setup, scenario), round=setup.round + 1)
