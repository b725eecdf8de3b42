"""What a policy makes of a scenario, second by second."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from pacekeeper_analysis.diagnose.windows import count_window_steps

from .draw import Scenario
from .world import CALM, Setup, Strain, CostModel, met

WINDOW_STEPS, THRESHOLD = 32, 1.1
"""`spec.detection`, as it is by default."""


@dataclass(frozen=True)
class Now:
    """A second. `strain`: as it is for this setup; `came`: as it befalls the job, whoever holds its ranks."""

    second: int
    setup: Setup
    strain: Strain
    came: Strain
    stands: bool  # between two rounds: nobody trains


class OnlinePolicy(Protocol):
    """Asked at the end of a second what shall be from the next one on."""

    due: int
    """The next second that it wants to be asked at; it is asked at those as well at which the strain is another one, or
    a round begins."""

    def choose_setup(self, now: Now) -> Setup: ...


Begin = Callable[[Scenario, CostModel], OnlinePolicy]


@dataclass(frozen=True)
class PolicyRun:
    """Seconds of training that each second has cost, and the setups that were in force."""

    lost: tuple[float, ...]
    slowed: float  # seconds in all, by its steps alone (`World.slowed`)
    setups: tuple[Setup, ...]
    stood: int  # seconds between rounds

    def cost(self, begin: int = 0) -> float:
        return math.fsum(self.lost[begin:])


def run_policy(scenario: Scenario, world: CostModel, policy: OnlinePolicy) -> PolicyRun:
    """A new round takes the job's restart, and is not broken off."""
    setup, coming, left = Setup(), Setup(), 0
    lost, slowed, setups, stood = list[float](), list[float](), list[Setup](), 0
    before: tuple[Strain, Setup, bool] | None = None
    for second, came in enumerate(scenario.timeline.strains_by_second):
        trains = world.job.trains(second)
        if second < policy.due and not left and before == (came, setup, trains):
            lost.append(lost[-1])
            slowed.append(slowed[-1])
            setups.append(setup)
            continue
        before = came, setup, trains
        strain = met(came, moved=setup.moved)
        lost.append(1.0 if left else world.loss(setup.strategy, strain) if trains else 0.0)
        slowed.append(1.0 if left else world.slowed(setup.strategy, strain) if trains else 0.0)
        setups.append(setup)
        stood += bool(left)
        wish = policy.choose_setup(Now(second, setup, strain, came, stands=bool(left)))
        if left:
            left -= 1
            setup = setup if left else coming
        elif setup.restarts(wish):
            # New members begin with equal shares.
            coming = replace(wish, way=replace(wish.strategy, shares=None)) if wish.moved != setup.moved else wish
            left = world.job.restart_seconds
        else:
            setup = wish
    return PolicyRun(tuple(lost), math.fsum(slowed), tuple(setups), stood)


def first_sign(scenario: Scenario) -> int:
    """The second from which on it shows that something is wrong: the same for every policy."""
    job, onset = scenario.job, scenario.timeline.onset
    shows = job.when(job.trained(onset) + _compute_detection_seconds(scenario)) + scenario.evidence_delay_seconds
    return min(scenario.timeline.end, math.ceil(shows))


def seen(scenario: Scenario, second: int, ago: int = 0) -> Strain:
    """What those see who notice a change as late as it shows; `ago`: so many seconds of training before."""
    job = scenario.job
    trained = job.trained(max(0, second - scenario.evidence_delay_seconds)) - _compute_detection_seconds(scenario) - ago
    return scenario.timeline.strains_by_second[int(job.when(trained))] if trained >= 0 else CALM


def _compute_detection_seconds(scenario: Scenario) -> int:
    """Seconds of training until the mean step of a window has grown by the threshold, or all of its steps are slow."""
    depth, slow = scenario.depth, scenario.job.step_seconds * scenario.depth
    window = count_window_steps(WINDOW_STEPS, slow)
    steps = min(window, math.ceil(window * (THRESHOLD - 1.0) / (depth - 1.0))) if depth > 1 else window
    return max(1, math.ceil(steps * slow))
