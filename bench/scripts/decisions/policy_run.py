"""What a policy makes of a scenario, second by second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from pacekeeper_analysis.stragglers.windows import count_window_steps
from pacekeeper_operator.api.incident import IncidentCause

from .draw import Scenario
from .world import CALM, CostModel, Setup, Strain, get_remaining_strain

WINDOW_STEPS, THRESHOLD = 32, 1.1
"""`spec.detection`, as it is by default."""
PASS_INTERVAL_SECONDS = 2
"""Between two passes (`Settings.sample_seconds`)."""


@dataclass(frozen=True)
class Now:
    """A second. `strain`: as it is for this setup; `came`: as it reaches the job, wherever its ranks are."""

    second: int
    setup: Setup
    strain: Strain
    came: Strain
    stands: bool  # between two rounds: no rank trains


class OnlinePolicy(Protocol):
    """Called at the end of a second to choose the setup from the next one on."""

    due: int
    """The next second at which it must be called. It is also called when the strain changes, or a round begins."""

    def choose_setup(self, now: Now) -> Setup: ...


@dataclass(frozen=True)
class Act:
    """A remedy that was applied. `before`, `after`: slowdowns, as it was estimated and as it was predicted."""

    second: int
    cause: IncidentCause
    remedy: str
    rank: int | None
    before: float
    after: float


@runtime_checkable
class DecidingPolicy(OnlinePolicy, Protocol):
    """A policy that decides upon what it observes, and so may be wrong. All counts are of the scenario until now."""

    acts: list[Act]
    alarms: list[tuple[int, IncidentCause]]
    """Seconds and causes: each Incident about slowness."""
    quarantines: int
    failures: list[str]
    """Errors of its own code."""
    passes: int
    """How often it weighed what it observed."""
    questions: int
    """Requests to all ranks."""


@dataclass(frozen=True)
class PassIntervals:
    """At a job in which nothing happens: seconds between two, and behind `row` of them; row 0: that never comes."""

    every: int = PASS_INTERVAL_SECONDS
    row: int = 0
    rest: int = 0


USUAL_PASSES = PassIntervals()

Begin = Callable[[Scenario, CostModel], OnlinePolicy]


@dataclass(frozen=True)
class PolicyRun:
    """Seconds of training that each second has cost, and the setups that were in force."""

    lost: tuple[float, ...]
    slowed: float  # seconds in all, by its steps only (`CostModel.slowed`)
    setups: tuple[Setup, ...]
    stood: int  # seconds between rounds
    cpu_seconds: float = 0.0  # of the policy

    def cost(self, begin: int = 0) -> float:
        return math.fsum(self.lost[begin:])


def run_policy(scenario: Scenario, cost_model: CostModel, policy: OnlinePolicy) -> PolicyRun:
    """A new round takes the job's restart, and is not broken off."""
    setup, next_setup, remaining = Setup(), Setup(), 0
    lost, slowed, setups, stood = list[float](), list[float](), list[Setup](), 0
    previous: tuple[Strain, Setup, bool] | None = None
    cpu_seconds = 0.0
    for second, raw_strain in enumerate(scenario.timeline.strains_by_second):
        is_training = cost_model.job.is_training(second)
        if second < policy.due and not remaining and previous == (raw_strain, setup, is_training):
            lost.append(lost[-1])
            slowed.append(slowed[-1])
            setups.append(setup)
            continue
        previous = raw_strain, setup, is_training
        strain = get_remaining_strain(raw_strain, moved=setup.moved)
        lost.append(1.0 if remaining else cost_model.compute_loss(setup.strategy, strain) if is_training else 0.0)
        slowed.append(1.0 if remaining else cost_model.slowed(setup.strategy, strain) if is_training else 0.0)
        setups.append(setup)
        stood += bool(remaining)
        start = time.process_time()
        requested_setup = policy.choose_setup(Now(second, setup, strain, raw_strain, stands=bool(remaining)))
        cpu_seconds += time.process_time() - start
        if remaining:
            remaining -= 1
            setup = setup if remaining else next_setup
        elif setup.needs_restart(requested_setup):
            # New members begin with equal shares.
            next_setup = (
                replace(requested_setup, strategy=replace(requested_setup.strategy, shares=None))
                if requested_setup.moved != setup.moved
                else requested_setup
            )
            remaining = cost_model.job.restart_seconds
        else:
            setup = requested_setup
    return PolicyRun(tuple(lost), math.fsum(slowed), tuple(setups), stood, cpu_seconds)


def find_first_sign(scenario: Scenario) -> int:
    """The second from which on it shows that something is wrong: the same for every policy."""
    job, onset = scenario.job, scenario.timeline.onset
    visible_at = (
        job.find_time(job.compute_trained_seconds(onset) + _compute_detection_seconds(scenario))
        + scenario.evidence_delay_seconds
    )
    return min(scenario.timeline.end, math.ceil(visible_at))


def get_visible_strain(scenario: Scenario, second: int, ago: int = 0) -> Strain:
    """What a policy observes that detects a change only once it shows; `ago`: seconds of training before."""
    job = scenario.job
    trained = (
        job.compute_trained_seconds(max(0, second - scenario.evidence_delay_seconds))
        - _compute_detection_seconds(scenario)
        - ago
    )
    return scenario.timeline.strains_by_second[int(job.find_time(trained))] if trained >= 0 else CALM


def _compute_detection_seconds(scenario: Scenario) -> int:
    """Seconds of training until the mean step of a window has grown by the threshold, or all of its steps are slow."""
    depth, slow_step_seconds = scenario.depth, scenario.job.step_seconds * scenario.depth
    window_steps = count_window_steps(WINDOW_STEPS, slow_step_seconds)
    steps = (
        min(window_steps, math.ceil(window_steps * (THRESHOLD - 1.0) / (depth - 1.0))) if depth > 1 else window_steps
    )
    return max(1, math.ceil(steps * slow_step_seconds))
