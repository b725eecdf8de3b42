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

from pacekeeper_analysis.stragglers.price import compute_loss_rate

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


def compare_with_coarse_clock(
    case: ClusterCase, by_rank: Mapping[int, Sequence[RankStep]], injected_at: float
) -> Compared:
    """by_rank: all steps of a job, of which a worker was slow from `injected_at` on for SLOW_SECONDS."""
    trained = Trained(by_rank)
    usual_rate = trained.count_samples(injected_at - CALM_SECONDS, injected_at) / CALM_SECONDS  # samples a second
    step_seconds, own_seconds = REPLICAS * SAMPLES / usual_rate, SAMPLES * SECONDS_A_SAMPLE
    end = injected_at + SLOW_SECONDS + TAIL_SECONDS
    cost = end - injected_at - trained.count_samples(injected_at, end) / usual_rate
    unmitigated_cost = SLOW_SECONDS * compute_loss_rate(1.0 + own_seconds * (case.factor - 1.0) / step_seconds)
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
    coarse_share = fmean(
        agreement.compute_removed_share(build_scenario(seed, case.factor, job)) for seed in range(agreement.SEED_COUNT)
    )
    return Compared(case.spares, case.factor, SLOW_SECONDS, 1.0 - cost / unmitigated_cost, coarse_share)


class Trained:
    """What a job has trained by when: a step that an earlier round had ended counts once."""

    def __init__(self, by_rank: Mapping[int, Sequence[RankStep]]) -> None:
        steps = sorted(
            (step for rank_steps in by_rank.values() for step in _iterate_new_steps(rank_steps)),
            key=lambda step: step.at,
        )
        self._at = [step.at for step in steps]
        self._samples = [0, *accumulate(step.samples for step in steps)]

    def count_samples(self, begin: float, end: float) -> int:
        """Samples."""
        return self._samples[bisect_right(self._at, end)] - self._samples[bisect_right(self._at, begin)]


def _iterate_new_steps(rank_steps: Sequence[RankStep]) -> Iterator[RankStep]:
    """Of one rank."""
    highest, previous_highest, round_ = 0, 0, 0
    for step in rank_steps:
        if step.round > round_:
            round_, previous_highest = step.round, highest
        highest = max(highest, step.number)
        if step.number > previous_highest:
            yield step


def build_scenario(seed: int, factor: float, job: JobCosts) -> Scenario:
    """It has been through no restart, so that the cost of one is unknown."""
    return agreement.build_slow_scenario(seed, factor, int(SLOW_SECONDS), job, int(TAIL_SECONDS), restart_known=False)


def parse_diary(lines: Iterable[str]) -> list[RankStep]:
    """The entries of a rank's diary; its last line may not be complete yet."""
    steps = []
    for line in lines:
        fields = line.split()
        if len(fields) == 4 and line.endswith("\n"):
            steps.append(RankStep(float(fields[0]), *map(int, fields[1:])))
    return steps
