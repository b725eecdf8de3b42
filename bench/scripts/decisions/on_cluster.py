"""A slow worker on the test cluster, and the same on the coarse clock: what share of the slowdown is removed.

The job is a real one, its operator, sidecars and ranks too; what its ranks compute is slept, so that one machine can
hold them all (a stand-in for processors that are not here). Pure: when steps ended in, shares out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from pacekeeper_analysis.price import compute_loss_rate

from . import agreement
from .agreement import Compared
from .draw import Scenario
from .simulated import REPLICAS
from .world import JobCosts, Spare

SAMPLES, SECONDS_A_SAMPLE = 16, 0.03
CALM_SECONDS, SLOW_SECONDS, TAIL_SECONDS = 45.0, 120.0, 45.0
NOISE = 0.01


@dataclass(frozen=True)
class ClusterCase:
    """spares: of the job. factor: times its peers' time that the slow worker takes."""

    spares: int
    factor: float

    @property
    def name(self) -> str:
        return f"slow-{self.factor:g}-{self.spares}".replace(".", "-")


CASES = (ClusterCase(0, 1.6), ClusterCase(0, 3.1), ClusterCase(1, 3.1))


@dataclass(frozen=True)
class RankStep:
    """That a rank has ended."""

    at: float  # seconds since the epoch
    round: int
    number: int  # in Local-SGD modes it may come again
    samples: int


def compare(case: ClusterCase, by_rank: Mapping[int, Sequence[RankStep]], struck: float) -> Compared:
    """by_rank: all steps of a job, of which a worker was slow from `struck` on for SLOW_SECONDS."""
    trained = Trained(by_rank)
    usual = trained.count_samples(struck - CALM_SECONDS, struck) / CALM_SECONDS  # samples a second
    step_seconds, own_seconds = REPLICAS * SAMPLES / usual, SAMPLES * SECONDS_A_SAMPLE
    until = struck + SLOW_SECONDS + TAIL_SECONDS
    cost = until - struck - trained.count_samples(struck, until) / usual
    unmended = SLOW_SECONDS * compute_loss_rate(1.0 + own_seconds * (case.factor - 1.0) / step_seconds)
    job = JobCosts(
        workers=REPLICAS,
        ranks_each=1,
        samples=SAMPLES,
        sample_seconds=SECONDS_A_SAMPLE,
        fixed_seconds=0.0,
        transfer_seconds=max(0.0, step_seconds - own_seconds),
        noise=NOISE,
        hiccups=0.0,
        spare=Spare.WARM if case.spares else Spare.NONE,
        restart_seconds=agreement.RESTART_SECONDS,
    )
    coarse = fmean(agreement.removed(scenario(seed, case.factor, job)) for seed in range(agreement.SEEDS))
    return Compared(case.spares, case.factor, SLOW_SECONDS, 1.0 - cost / unmended, coarse)


class Trained:
    """What a job has trained by when: a step that an earlier round had ended counts once."""

    def __init__(self, by_rank: Mapping[int, Sequence[RankStep]]) -> None:
        steps = sorted((step for told in by_rank.values() for step in _new(told)), key=lambda step: step.at)
        self._at = [step.at for step in steps]
        self._samples = [0, *accumulate(step.samples for step in steps)]

    def count_samples(self, begin: float, end: float) -> int:
        """Samples."""
        return self._samples[bisect_right(self._at, end)] - self._samples[bisect_right(self._at, begin)]


def _new(told: Sequence[RankStep]) -> Iterator[RankStep]:
    """Of one rank."""
    reached, before, round_ = 0, 0, 0
    for step in told:
        if step.round > round_:
            round_, before = step.round, reached
        reached = max(reached, step.number)
        if step.number > before:
            yield step


def scenario(seed: int, factor: float, job: JobCosts) -> Scenario:
    """It has been through no restart, and does not know what one costs."""
    return agreement.slowed(seed, factor, int(SLOW_SECONDS), job, int(TAIL_SECONDS), restart_known=False)


def read(lines: Iterable[str]) -> list[RankStep]:
    """What a rank's diary says; its last line may not be whole yet."""
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) == 4 and line.endswith("\n"):
            found.append(RankStep(float(fields[0]), *map(int, fields[1:])))
    return found
