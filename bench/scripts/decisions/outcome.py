"""A scenario under some policies: what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pacekeeper_analysis.stragglers.price import compute_loss_rate
from pacekeeper_operator.api.training_job import Remedy

from . import clairvoyant
from .draw import Scenario
from .policies import NEVER, USUAL_POLICIES, Variant
from .policy_run import Act, DecidingPolicy, PassIntervals, PolicyRun, find_first_sign, run_policy
from .world import CALM, CostModel, Spare, Strain, get_remaining_strain

GRACE_SECONDS = 120
"""Actions within this time after a slowdown's end still concern it."""
USUAL_VARIANTS: Mapping[str, Variant] = {name: Variant(name) for name in USUAL_POLICIES}


@dataclass(frozen=True)
class Gain:
    """Of one remedy: seconds a second."""

    remedy: str
    predicted: float
    realized: float


@dataclass(frozen=True)
class Decisions:
    """What a deciding policy did. Counts are of the scenario."""

    slowed: float = 0.0  # seconds lost by steps only: what Local-SGD wins counts without any rule
    gains: tuple[Gain, ...] = ()
    false_alarms: int = 0
    exchanges: int = 0
    wrong_exchanges: int = 0
    quarantines: int = 0
    questions: int = 0
    passes: int = 0
    remedies: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Seconds of training, by policy: what it lost in all, and from the first sign on."""

    scenario: Scenario
    lost: Mapping[str, float]
    since: Mapping[str, float]
    least: float  # lost by a policy that knows the future
    informed: float  # lost by a policy that knows, from the first sign on, how long it lasts
    decisions: Mapping[str, Decisions]
    cpu_seconds: Mapping[str, float]

    @property
    def days(self) -> float:
        return self.scenario.timeline.end / 86_400

    @property
    def injected(self) -> float:
        return self.lost[NEVER]

    def compute_times(self, policy: str) -> float:
        """Return the policy's cost over the clairvoyant's. Less than a second is nothing."""
        return max(1.0, self.since[policy] / max(1.0, self.informed))

    @property
    def is_slow(self) -> bool:
        """By the job's own setting, `spec.detection.stragglerSlowdown`."""
        return self.scenario.depth >= 1.1


def run_policies(scenario: Scenario, variants: Mapping[str, Variant] = USUAL_VARIANTS) -> Outcome:
    """Play all variants, and the one that never acts."""
    cost_model, first_second = CostModel(scenario.job), find_first_sign(scenario)
    runs, decisions = dict[str, PolicyRun](), dict[str, Decisions]()
    for name, variant in {**variants, NEVER: Variant(NEVER)}.items():
        policy = variant.begin(scenario, cost_model)
        runs[name] = run_policy(scenario, cost_model, policy)
        if isinstance(policy, DecidingPolicy):
            decisions[name] = _judge_decisions(scenario, cost_model, runs[name], policy)
    return Outcome(
        scenario,
        lost={name: run.cost() for name, run in runs.items()},
        since={name: run.cost(first_second) for name, run in runs.items()},
        least=clairvoyant.compute_least_cost(scenario, cost_model),
        informed=clairvoyant.compute_informed_cost(scenario, cost_model),
        decisions=decisions,
        cpu_seconds={name: run.cpu_seconds for name, run in runs.items()},
    )


def run_calm_scenario(scenario: Scenario, intervals: PassIntervals, variants: Mapping[str, Variant]) -> Outcome:
    """Play the deciding ones of the variants, where nothing goes wrong."""
    cost_model, lost = CostModel(scenario.job), {NEVER: 0.0}
    decisions, cpu_seconds = dict[str, Decisions](), dict[str, float]()
    for name, variant in variants.items():
        policy = variant.begin(scenario, cost_model, intervals)
        if isinstance(policy, DecidingPolicy):
            run = run_policy(scenario, cost_model, policy)
            lost[name], cpu_seconds[name] = run.cost(), run.cpu_seconds
            decisions[name] = _judge_decisions(scenario, cost_model, run, policy)
    return Outcome(scenario, lost, lost, least=0.0, informed=0.0, decisions=decisions, cpu_seconds=cpu_seconds)


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


def _judge_decisions(scenario: Scenario, cost_model: CostModel, run: PolicyRun, policy: DecidingPolicy) -> Decisions:
    strains = scenario.timeline.strains_by_second
    exchanges = [act for act in policy.acts if act.remedy == Remedy.REPLACE_WORKER]
    return Decisions(
        slowed=run.slowed,
        gains=tuple(compute_gains(scenario, cost_model, run, policy.acts)),
        false_alarms=sum(not _has_recent_strain(strains, second) for second, _ in policy.alarms),
        exchanges=len(exchanges),
        wrong_exchanges=sum(not _is_right_exchange(act, scenario) for act in exchanges),
        quarantines=policy.quarantines,
        questions=policy.questions,
        passes=policy.passes,
        remedies=tuple(f"{act.second}: {act.remedy}" for act in policy.acts),
        failures=tuple(policy.failures),
    )


def _has_recent_strain(strains: Sequence[Strain], second: int) -> bool:
    return any(strain != CALM for strain in strains[max(0, second - GRACE_SECONDS) : second + 1])


def _is_right_exchange(act: Act, scenario: Scenario) -> bool:
    """It exchanged a worker that was slow, as long as it was, for one that is not."""
    strain: Strain = scenario.timeline.strains_by_second[act.second]
    slow_workers = {rank // scenario.job.ranks_each for rank, _ in strain.slow}
    is_named = act.rank is None or act.rank // scenario.job.ranks_each in slow_workers
    return strain.movable and is_named and scenario.job.spare is Spare.WARM
