"""How real the coarse clock is: cases of the simulator, played on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from . import simulated
from .course import run_policy
from .draw import Scenario
from .ours import Ours
from .policies import Never
from .simulated import COMPARED, UNBOUNDED_SECONDS, REPLICAS, SLOW_RANK, Result
from .world import CALM, JobCosts, Segment, Spare, Strain, Timeline, CostModel

NEAR = 0.15
SEEDS = 3
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
        return abs(self.there - self.coarse) <= NEAR

    @property
    def description(self) -> str:
        return (
            f"{self.factor:g} × for {self.seconds:g} s, spares: {self.spares}: removed {self.there:.1%} and "
            f"{self.coarse:.1%}"
        )


def compare(found: Sequence[Result]) -> list[Compared]:
    """All kinds that are played by both, their means."""
    return [
        Compared(
            *kind,
            there=fmean(each.removed for each in found if each.case.kind == kind),
            coarse=fmean(removed(scenario(seed, *kind)) for seed in range(SEEDS)),
        )
        for kind in COMPARED
    ]


def removed(of: Scenario) -> float:
    """By ours, of what is lost where nothing is done."""
    world = CostModel(of.job)
    ours, never = (run_policy(of, world, policy).cost() for policy in (Ours(of, world), Never()))
    return 1 - ours / never


def scenario(seed: int, spares: int, factor: float, seconds: float) -> Scenario:
    """With the means of what the simulator draws for a job (`simulation.workers.training`)."""
    job = JobCosts(
        workers=REPLICAS,
        ranks_each=1,
        samples=8,
        sample_seconds=0.085,
        fixed_seconds=0.03,
        transfer_seconds=0.04,
        noise=0.0115,  # as wide as `simulated.NOISE`
        hiccups=0.0,
        spare=Spare.WARM if spares else Spare.NONE,
        restart_seconds=RESTART_SECONDS,
    )
    return slowed(seed, factor, int(seconds), job, tail=0 if seconds == UNBOUNDED_SECONDS else int(simulated.TAIL_SECONDS))


def slowed(seed: int, factor: float, seconds: int, job: JobCosts, tail: int, *, restart_known: bool = True) -> Scenario:
    """The job with one worker that is slow for so many seconds. tail: seconds that are watched behind them; 0: none."""
    strain = Strain(slow=((SLOW_RANK, factor),), movable=True)
    over = LEAD_SECONDS + seconds
    segments = [Segment(0, LEAD_SECONDS, CALM), Segment(LEAD_SECONDS, over, strain)]
    if tail:
        segments.append(Segment(over, over + tail, CALM))
    return Scenario(seed, "rank", factor, "once", job, Timeline(tuple(segments)), restart_known=restart_known)
