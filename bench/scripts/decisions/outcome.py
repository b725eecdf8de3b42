"""A scenario under all policies: what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pacekeeper_analysis.price import compute_loss_rate
from pacekeeper_operator.api import Remedy

from . import clairvoyant
from .course import PolicyRun, first_sign, run_policy
from .draw import Scenario
from .ours import Act, PassIntervals, Ours
from .policies import OURS, POLICIES
from .world import CALM, Spare, Strain, CostModel, met

GRACE_SECONDS = 120
"""So long after a slowdown's end what is done still concerns it."""


@dataclass(frozen=True)
class Gain:
    """Of one remedy of ours: seconds a second."""

    remedy: str
    predicted: float
    realised: float


@dataclass(frozen=True)
class Outcome:
    """Seconds of training, by policy: what it lost in all, and from the first sign on."""

    scenario: Scenario
    lost: Mapping[str, float]
    slowed: float  # by ours, and by steps alone: what Local-SGD wins counts without any rule
    since: Mapping[str, float]
    least: float  # that can be lost, by whoever knows all
    informed: float  # from the first sign on, by whoever knows how long it lasts
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
        """By the job's own word, `spec.detection.stragglerSlowdown`."""
        return self.scenario.depth >= 1.1


def outcome(scenario: Scenario) -> Outcome:
    world, sign = CostModel(scenario.job), first_sign(scenario)
    courses = dict[str, PolicyRun]()
    ours: Ours | None = None
    for name, begin in POLICIES.items():
        policy = begin(scenario, world)
        courses[name] = run_policy(scenario, world, policy)
        ours = policy if isinstance(policy, Ours) else ours
    assert ours is not None
    return Outcome(
        scenario,
        lost={name: course.cost() for name, course in courses.items()},
        slowed=courses[OURS].slowed,
        since={name: course.cost(sign) for name, course in courses.items()},
        least=clairvoyant.least_cost(scenario, world),
        informed=clairvoyant.informed_cost(scenario, world),
        gains=tuple(gains(scenario, world, courses[OURS], ours.acts)),
        **_judged(scenario, ours),
    )


def quiet(scenario: Scenario, looks: PassIntervals) -> Outcome:
    """Ours alone, where nothing goes wrong."""
    world = CostModel(scenario.job)
    ours = Ours(scenario, world, pass_intervals=looks)
    course = run_policy(scenario, world, ours)
    lost = {OURS: course.cost(), "never act": 0.0}
    return Outcome(scenario, lost, course.slowed, lost, 0.0, 0.0, **_judged(scenario, ours))


def gains(scenario: Scenario, world: CostModel, course: PolicyRun, acts: list[Act]) -> list[Gain]:
    """Of each remedy: what it was to win, and what it won of the strain that it was for."""
    found = []
    for act in acts:
        came = scenario.timeline.strains_by_second[act.second]
        before = course.setups[act.second]
        after = next((setup for setup in course.setups[act.second :] if setup != before), None)
        if came == CALM or after is None:
            continue
        left, mended = (world.slowed(setup.strategy, met(came, moved=setup.moved)) for setup in (before, after))
        found.append(Gain(act.remedy, compute_loss_rate(act.before) - compute_loss_rate(act.after), left - mended))
    return found


def _judged(scenario: Scenario, ours: Ours) -> dict[str, Any]:
    strains = scenario.timeline.strains_by_second
    exchanges = [act for act in ours.acts if act.remedy == Remedy.REPLACE_WORKER]
    return {
        "false_alarms": sum(not _concerns(strains, second) for second, _ in ours.alarms),
        "exchanges": len(exchanges),
        "wrong_exchanges": sum(not _is_right(act, scenario) for act in exchanges),
        "quarantines": ours.quarantines,
        "questions": ours.questions,
        "remedies": tuple(f"{act.second}: {act.remedy}" for act in ours.acts),
        "failures": tuple(ours.failures),
    }


def _concerns(strains: Sequence[Strain], second: int) -> bool:
    return any(strain != CALM for strain in strains[max(0, second - GRACE_SECONDS) : second + 1])


def _is_right(act: Act, scenario: Scenario) -> bool:
    """It exchanged a worker that was slow, as long as it was, for one that is not."""
    strain: Strain = scenario.timeline.strains_by_second[act.second]
    of = {rank // scenario.job.ranks_each for rank, _ in strain.slow}
    named = act.rank is None or act.rank // scenario.job.ranks_each in of
    return strain.movable and named and scenario.job.spare is Spare.WARM
