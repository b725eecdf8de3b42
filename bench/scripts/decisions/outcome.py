"""A scenario under all policies: what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pacekeeper_analysis.stragglers.price import compute_loss_rate
from pacekeeper_operator.api.training_job import Remedy

from . import clairvoyant
from .draw import Scenario
from .ours import Act, Ours, PassIntervals
from .policies import OURS, POLICIES
from .policy_run import PolicyRun, find_first_sign, run_policy
from .world import CALM, CostModel, Spare, Strain, get_remaining_strain

GRACE_SECONDS = 120
"""Actions within this time after a slowdown's end still concern it."""


@dataclass(frozen=True)
class Gain:
    """Of one remedy of ours: seconds a second."""

    remedy: str
    predicted: float
    realized: float


@dataclass(frozen=True)
class Outcome:
    """Seconds of training, by policy: what it lost in all, and from the first sign on."""

    scenario: Scenario
    lost: Mapping[str, float]
    slowed: float  # by ours, and by steps only: what Local-SGD wins counts without any rule
    since: Mapping[str, float]
    least: float  # lost by a policy that knows the future
    informed: float  # lost by a policy that knows, from the first sign on, how long it lasts
    gains: tuple[Gain, ...] = ()
    false_alarms: int = 0
    exchanges: int = 0
    wrong_exchanges: int = 0
    quarantines: int = 0
    questions: int = 0
    remedies: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def days(self) -> float:
        return self.scenario.timeline.end / 86_400

    @property
    def injected(self) -> float:
        return self.lost["never act"]

    @property
    def times(self) -> float:
        """Our cost over the clairvoyant's. Less than a second is nothing."""
        ours = self.since[OURS]
        return 1.0 if ours <= max(1.0, self.informed) else ours / max(1.0, self.informed)

    @property
    def is_slow(self) -> bool:
        """By the job's own setting, `spec.detection.stragglerSlowdown`."""
        return self.scenario.depth >= 1.1


def run_policies(scenario: Scenario) -> Outcome:
    cost_model, first_second = CostModel(scenario.job), find_first_sign(scenario)
    runs = dict[str, PolicyRun]()
    ours: Ours | None = None
    for name, create_policy in POLICIES.items():
        policy = create_policy(scenario, cost_model)
        runs[name] = run_policy(scenario, cost_model, policy)
        ours = policy if isinstance(policy, Ours) else ours
    assert ours is not None
    return Outcome(
        scenario,
        lost={name: run.cost() for name, run in runs.items()},
        slowed=runs[OURS].slowed,
        since={name: run.cost(first_second) for name, run in runs.items()},
        least=clairvoyant.compute_least_cost(scenario, cost_model),
        informed=clairvoyant.compute_informed_cost(scenario, cost_model),
        gains=tuple(compute_gains(scenario, cost_model, runs[OURS], ours.acts)),
        **_count_actions(scenario, ours),
    )


def run_calm_scenario(scenario: Scenario, intervals: PassIntervals) -> Outcome:
    """Only ours, where nothing goes wrong."""
    cost_model = CostModel(scenario.job)
    ours = Ours(scenario, cost_model, pass_intervals=intervals)
    run = run_policy(scenario, cost_model, ours)
    lost = {OURS: run.cost(), "never act": 0.0}
    return Outcome(scenario, lost, run.slowed, lost, 0.0, 0.0, **_count_actions(scenario, ours))


def compute_gains(scenario: Scenario, cost_model: CostModel, run: PolicyRun, acts: list[Act]) -> list[Gain]:
    """Of each remedy: what it was to win, and what it won of the strain that it was for."""
    gains = []
    for act in acts:
        strain = scenario.timeline.strains_by_second[act.second]
        before = run.setups[act.second]
        after = next((setup for setup in run.setups[act.second :] if setup != before), None)
        if strain == CALM or after is None:
            continue
        unmitigated, mitigated = (
            cost_model.slowed(setup.strategy, get_remaining_strain(strain, moved=setup.moved))
            for setup in (before, after)
        )
        gains.append(
            Gain(act.remedy, compute_loss_rate(act.before) - compute_loss_rate(act.after), unmitigated - mitigated)
        )
    return gains


def _count_actions(scenario: Scenario, ours: Ours) -> dict[str, Any]:
    strains = scenario.timeline.strains_by_second
    exchanges = [act for act in ours.acts if act.remedy == Remedy.REPLACE_WORKER]
    return {
        "false_alarms": sum(not _has_recent_strain(strains, second) for second, _ in ours.alarms),
        "exchanges": len(exchanges),
        "wrong_exchanges": sum(not _is_right_exchange(act, scenario) for act in exchanges),
        "quarantines": ours.quarantines,
        "questions": ours.questions,
        "remedies": tuple(f"{act.second}: {act.remedy}" for act in ours.acts),
        "failures": tuple(ours.failures),
    }


def _has_recent_strain(strains: Sequence[Strain], second: int) -> bool:
    return any(strain != CALM for strain in strains[max(0, second - GRACE_SECONDS) : second + 1])


def _is_right_exchange(act: Act, scenario: Scenario) -> bool:
    """It exchanged a worker that was slow, as long as it was, for one that is not."""
    strain: Strain = scenario.timeline.strains_by_second[act.second]
    slow_workers = {rank // scenario.job.ranks_each for rank, _ in strain.slow}
    is_named = act.rank is None or act.rank // scenario.job.ranks_each in slow_workers
    return strain.movable and is_named and scenario.job.spare is Spare.WARM
