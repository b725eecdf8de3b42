"""Policies, by name. One that decides upon what it observes is a line in DECIDING_POLICIES.

All others receive what is wrong, exactly and as soon as it shows (`policy_run.get_visible_strain`): they have no
evidence to weigh, and raise no false alarm. One of these is a class here and a line in INFORMED_POLICIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pacekeeper_analysis.estimator.parameters import EstimatorParameters

from .draw import Scenario
from .estimating import Estimating
from .ours import OURS_PARTS, USUAL_PARAMETERS, Ours
from .policy_run import (
    USUAL_PASSES,
    Begin,
    DecidingPolicy,
    Now,
    OnlinePolicy,
    PassIntervals,
    find_first_sign,
    get_visible_strain,
)
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


class BeginDeciding(Protocol):
    """Creates a deciding policy without the parts `ablated`, and with these constants."""

    def __call__(
        self,
        scenario: Scenario,
        world: CostModel,
        /,
        *,
        pass_intervals: PassIntervals,
        ablated: frozenset[str],
        parameters: Any,
    ) -> DecidingPolicy: ...


@dataclass(frozen=True)
class DecidingEntry:
    """A deciding policy. parts: what of it can be disabled. parameters: its constants, a frozen dataclass instance."""

    begin: BeginDeciding
    parameters: Any
    parts: frozenset[str] = frozenset()


OURS, NEVER = "ours", "never act"
DECIDING_POLICIES: Mapping[str, DecidingEntry] = {
    OURS: DecidingEntry(Ours, USUAL_PARAMETERS, OURS_PARTS),
    "estimator": DecidingEntry(Estimating, EstimatorParameters()),
}
SKI_RENTAL_MULTIPLES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
INFORMED_POLICIES: Mapping[str, Begin] = {
    NEVER: lambda _scenario, _world: Never(),
    "always restart": lambda scenario, _world: AlwaysRestart(scenario),
    "shares only": SharesOnly,
    "Greyhound's levels": Greyhound,
    **{
        f"ski rental at {times:g} ×": lambda scenario, cost_model, times=times: SkiRental(scenario, cost_model, times)  # type: ignore[misc]
        for times in SKI_RENTAL_MULTIPLES
    },
}


POLICIES: tuple[str, ...] = (*DECIDING_POLICIES, *INFORMED_POLICIES)
USUAL_POLICIES: tuple[str, ...] = (OURS, *INFORMED_POLICIES)
"""Played if none is named. Further deciding policies would change the clairvoyant, which knows what any has tried."""


@dataclass(frozen=True)
class Variant:
    """A policy as it is played. parameters: of a deciding policy; None: its own."""

    policy: str
    ablated: frozenset[str] = frozenset()
    parameters: Any = None

    def begin(
        self, scenario: Scenario, cost_model: CostModel, pass_intervals: PassIntervals = USUAL_PASSES
    ) -> OnlinePolicy:
        """Create the policy. Raise ValueError if it has no such part."""
        if self.policy in INFORMED_POLICIES:
            return INFORMED_POLICIES[self.policy](scenario, cost_model)
        entry = DECIDING_POLICIES[self.policy]
        if unknown := self.ablated - entry.parts:
            raise ValueError(f"{self.policy} has no part {', '.join(sorted(unknown))}")
        parameters = entry.parameters if self.parameters is None else self.parameters
        return entry.begin(
            scenario, cost_model, pass_intervals=pass_intervals, ablated=self.ablated, parameters=parameters
        )


def _choose_shares(cost_model: CostModel, strain: Strain) -> TrainingStrategy:
    strategy = cost_model.choose_best_exact(strain)
    return TrainingStrategy(shares=strategy.shares)


def _can_move(setup: Setup, scenario: Scenario) -> bool:
    return scenario.job.spare is Spare.WARM and not setup.moved


def _next_round(setup: Setup, scenario: Scenario) -> Setup:
    return replace(setup, moved=setup.moved or _can_move(setup, scenario), round=setup.round + 1)
