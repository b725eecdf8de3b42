"""How real the coarse clock is: cases of the simulator, played on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from . import simulated
from .draw import Scenario
from .ours import Ours
from .policies import Never
from .policy_run import run_policy
from .simulated import COMPARED_KINDS, REPLICAS, SLOW_RANK, UNBOUNDED_SECONDS, Result
from .world import CALM, CostModel, JobCosts, Segment, Spare, Strain, Timeline

MAX_DIFFERENCE = 0.15
SEED_COUNT = 3
LEAD_SECONDS = 90
"""That nothing is wrong before."""
RESTART_SECONDS = 4
"""What exchanging a worker costs in these worlds, to the second."""


@dataclass(frozen=True)
class Compared:
    """Of the slowdown, the share that was removed."""

    spares: int
    factor: float
    seconds: float
    there: float  # where the whole operator runs
    coarse: float

    @property
    def agrees(self) -> bool:
        return abs(self.there - self.coarse) <= MAX_DIFFERENCE

    @property
    def description(self) -> str:
        return (
            f"{self.factor:g} × for {self.seconds:g} s, spares: {self.spares}: removed {self.there:.1%} and "
            f"{self.coarse:.1%}"
        )


def compare_results(results: Sequence[Result]) -> list[Compared]:
    """All kinds that are played by both, their means."""
    return [
        Compared(
            *kind,
            there=fmean(result.removed for result in results if result.case.kind == kind),
            coarse=fmean(compute_removed_share(build_scenario(seed, *kind)) for seed in range(SEED_COUNT)),
        )
        for kind in COMPARED_KINDS
    ]


def compute_removed_share(scenario: Scenario) -> float:
    """By ours, of what is lost where nothing is done."""
    cost_model = CostModel(scenario.job)
    ours, never = (run_policy(scenario, cost_model, policy).cost() for policy in (Ours(scenario, cost_model), Never()))
    return 1 - ours / never


def build_scenario(seed: int, spares: int, factor: float, seconds: float) -> Scenario:
    """With the means of what the simulator draws for a job (`simulation.workers.training`)."""
    job = JobCosts(
        workers=REPLICAS,
        ranks_each=1,
        samples=8,
        sample_seconds=0.085,
        fixed_seconds=0.03,
        transfer_seconds=0.04,
        noise=0.0115,  # as wide as `simulated.NOISE_RANGE`
        hiccups=0.0,
        spare=Spare.WARM if spares else Spare.NONE,
        restart_seconds=RESTART_SECONDS,
    )
    return build_slow_scenario(
        seed, factor, int(seconds), job, tail=0 if seconds == UNBOUNDED_SECONDS else int(simulated.TAIL_SECONDS)
    )


def build_slow_scenario(
    seed: int, factor: float, seconds: int, job: JobCosts, tail: int, *, restart_known: bool = True
) -> Scenario:
    """The job with one worker that is slow for `seconds`. tail: seconds that are observed after them; 0: none."""
    strain = Strain(slow=((SLOW_RANK, factor),), movable=True)
    end = LEAD_SECONDS + seconds
    segments = [Segment(0, LEAD_SECONDS, CALM), Segment(LEAD_SECONDS, end, strain)]
    if tail:
        segments.append(Segment(end, end + tail, CALM))
    return Scenario(seed, "rank", factor, "once", job, Timeline(tuple(segments)), restart_known=restart_known)
