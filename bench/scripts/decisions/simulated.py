"""What a slow rank costs under the operator's decisions, and under those of a clairvoyant who knows how long it lasts.

The real operator in simulated clusters: one of four ranks is slow by each of FACTORS, with a spare warm and without,
for each of SLOW_SECONDS, in the worlds of several seeds. Costs are seconds of
training: the samples that the same world trains without the fault and this one does not, over its rate, from the
fault's beginning until TAIL_SECONDS after its end; the means of both over the worlds are compared, as restarts take
their time by chance. So all that the operator does is in them: noticing, shares,
exchanging the worker, and noticing that it is over.

The clairvoyant takes the cheapest of three from the first moment on: nothing, the best shares in whole samples, or the
spare. Exchanging a worker costs it what it costs the operator in the same world, who has an idea of it from a crash
that the job has been through. It needs no time to notice; the
operator has twice its cost, plus the seconds of detection: what the fault costs, unmended, until the first
decision, and what shares cost that outlive it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median

import numpy as np

from pacekeeper_analysis.stragglers import shares
from pacekeeper_analysis.stragglers.price import compute_loss_rate
from pacekeeper_operator.api.incident import IncidentCause
from simulation.faults.context import FaultContext
from simulation.faults.ranks import NodeIsSlow, RankCrashes
from simulation.faults.targets import TargetRole
from simulation.generator import OPERATOR_SETTINGS
from simulation.operators.endpoint import clear_application_cache
from simulation.simulated_job import SimulatedJob
from simulation.workers.training import SimulatedTraining
from simulation.workers.training_round import TrainingRound
from simulation.world import World, WorldSettings

SEED_COUNT = 3
REPLICAS, SLOW_RANK = 4, 1
FACTORS = (1.15, 1.3, 1.6, 2.2, 3.1, 5.0)
UNBOUNDED_SECONDS = 1200.0
"""How long a fault that does not end is measured."""
SLOW_SECONDS = (30.0, 120.0, 600.0, UNBOUNDED_SECONDS)
CRASH_AT_SECONDS, SLOWDOWN_AT_SECONDS = 50.0, 120.0
TAIL_SECONDS = 120.0
STATE_POLL_SECONDS = 0.5
MAX_TIMES_CLAIRVOYANT = 2.0
MAX_POINTS_BEHIND = 10.0
"""Of the slowdown that a clairvoyant removes at COMPARED_SECONDS, the operator may leave this much."""
COMPARED_SECONDS = 600.0
DRAWS = 4096
NOISE_RANGE = (0.98, 1.02)
"""Of the simulated ranks' steps."""


@dataclass(frozen=True)
class SimulatedCase:
    """factor: 1: nothing happens."""

    seed: int
    spares: int
    factor: float = 1.0
    seconds: float = UNBOUNDED_SECONDS

    @property
    def kind(self) -> tuple[int, float, float]:
        """What it has in common with those of other seeds."""
        return self.spares, self.factor, self.seconds

    @property
    def ends(self) -> float:
        """When it has been watched for long enough, in virtual seconds."""
        return SLOWDOWN_AT_SECONDS + self.seconds + (0.0 if self.seconds == UNBOUNDED_SECONDS else TAIL_SECONDS)


@dataclass(frozen=True)
class Played:
    """What a world has shown. Times are virtual seconds."""

    case: SimulatedCase
    at: tuple[float, ...]  # of the job's steps
    samples: tuple[float, ...]  # of the job, at these times
    slowdowns: tuple[float, float]  # of its steps by this fault: with equal shares, with the best ones
    decided: float = math.inf  # when something was first done about it
    uneven: float = 0.0  # seconds for which shares have outlived it
    exchanges: tuple[float, ...] = ()  # what each exchange of a worker has cost

    def count_samples(self, until: float) -> float:
        """Samples since the fault has begun."""
        begin, end = (float(np.interp(moment, self.at, self.samples)) for moment in (SLOWDOWN_AT_SECONDS, until))
        return end - begin


@dataclass(frozen=True)
class Result:
    """Seconds of training, but for `removed`: shares of the slowdown."""

    case: SimulatedCase
    cost: float
    clairvoyant: float
    noticing: float
    decided_after: float
    removed: float
    removed_by_clairvoyant: float


AVERAGED_FIELDS = ("cost", "clairvoyant", "noticing", "removed", "removed_by_clairvoyant")


def play_case(case: SimulatedCase) -> Played:
    gc.disable()
    logging.getLogger("pacekeeper_operator").setLevel(logging.CRITICAL)
    job = SimulatedJob(replicas=REPLICAS, spares=case.spares, spec={"remediation": {"maxRestarts": 100}})
    settings = WorldSettings(nodes=2 * REPLICAS, slots=1, operator=OPERATOR_SETTINGS)
    world = World(case.seed, settings)
    try:
        watch = _Watch(world, FaultContext(world, (job,)), case)
        world.run(watch.play())
        return watch.build_played()
    finally:
        world.loop.close()
        clear_application_cache()
        gc.enable()


class _Watch:
    def __init__(self, world: World, context: FaultContext, case: SimulatedCase) -> None:
        self._world, self._context, self._case = world, context, case
        self._at, self._samples, self._rounds = list[float](), list[float](), list[tuple[int, int]]()
        self._decided = math.inf
        self._uneven = 0.0
        self._training: SimulatedTraining | None = None
        world.trainings.on_step.append(self._on_step)

    async def play(self) -> None:
        self._context.create_job(0)
        await asyncio.sleep(CRASH_AT_SECONDS)
        RankCrashes().inject(self._context)
        await asyncio.sleep(SLOWDOWN_AT_SECONDS - self._world.now())
        self._training = self._context.find_training(0)
        undo = None
        if self._case.factor > 1:
            undo = NodeIsSlow(TargetRole.MEMBER, SLOW_RANK, factor=self._case.factor).inject(self._context)
        while (now := self._world.now()) < self._case.ends:
            if undo is not None and now >= SLOWDOWN_AT_SECONDS + self._case.seconds:
                undo = undo()
            self._record_state(now)
            await asyncio.sleep(STATE_POLL_SECONDS)

    def _record_state(self, now: float) -> None:
        desired = self._context.read_desired(0)
        for incident in desired.state.incidents.current:
            if incident.cause is IncidentCause.STRAGGLER:
                self._decided = min(self._decided, now)
        if now >= SLOWDOWN_AT_SECONDS + self._case.seconds and len(set(desired.plan.shares or (0,))) > 1:
            self._uneven += STATE_POLL_SECONDS

    def _on_step(self, training_round: TrainingRound) -> None:
        self._at.append(self._world.now())
        self._samples.append(training_round.progress.samples)
        self._rounds.append((training_round.membership, training_round.round))

    def build_played(self) -> Played:
        assert self._training is not None
        return Played(
            self._case,
            tuple(self._at),
            tuple(self._samples),
            _compute_slowdowns(self._training, self._case.factor),
            self._decided,
            self._uneven,
            tuple(self._iterate_exchange_seconds()),
        )

    def _iterate_exchange_seconds(self) -> Iterable[float]:
        """From the last step of a membership to the first one of the next, without what a step usually takes."""
        start_index = bisect_right(self._at, SLOWDOWN_AT_SECONDS)
        seconds_per_sample = (self._at[start_index - 1] - self._at[start_index - 11]) / (
            self._samples[start_index - 1] - self._samples[start_index - 11]
        )
        for index in range(start_index, len(self._at) - 1):
            if self._rounds[index][0] != self._rounds[index - 1][0]:  # its ranks have restored their state
                seconds = self._at[index + 1] - self._at[index - 1]
                yield seconds - seconds_per_sample * (self._samples[index + 1] - self._samples[index - 1])


def _compute_slowdowns(training: SimulatedTraining, factor: float) -> tuple[float, float]:
    noise = np.random.default_rng(0).uniform(*NOISE_RANGE, size=(DRAWS, REPLICAS))
    relative_times = np.ones(REPLICAS)
    relative_times[SLOW_RANK] = factor

    def compute_step_seconds(slowness: np.ndarray, samples: Sequence[int]) -> float:
        own_seconds = (training.fixed_seconds + np.array(samples) * training.sample_seconds) * slowness * noise
        return float(own_seconds.max(axis=1).mean()) + training.communication_seconds

    batch = REPLICAS * training.samples
    equal_samples = (training.samples,) * REPLICAS
    usual_seconds = compute_step_seconds(np.ones(REPLICAS), equal_samples)
    divisions = (
        (slow_samples, shares.divide_equally(batch - slow_samples, REPLICAS - 1, 1))
        for slow_samples in range(1, training.samples + 1)
    )
    best_seconds = min(
        compute_step_seconds(relative_times, (*other_samples[:SLOW_RANK], slow_samples, *other_samples[SLOW_RANK:]))
        for slow_samples, other_samples in divisions
    )
    return compute_step_seconds(relative_times, equal_samples) / usual_seconds, best_seconds / usual_seconds


def build_results(played: Sequence[Played]) -> list[Result]:
    """Of all cases with a fault, each compared with the same world without it."""
    healthy = {
        (played_case.case.seed, played_case.case.spares): played_case
        for played_case in played
        if played_case.case.factor == 1
    }
    exchange_seconds = {
        seed: fmean(cost for played_case in played if played_case.case.seed == seed for cost in played_case.exchanges)
        for seed in {played_case.case.seed for played_case in played}
    }
    return [
        _build_result(
            played_case,
            healthy[played_case.case.seed, played_case.case.spares],
            exchange_seconds[played_case.case.seed],
        )
        for played_case in played
        if played_case.case.factor > 1
    ]


def _build_result(played: Played, healthy: Played, exchange_seconds: float) -> Result:
    case = played.case
    usual_samples = healthy.count_samples(case.ends)
    cost = (usual_samples - played.count_samples(case.ends)) / usual_samples * (case.ends - SLOWDOWN_AT_SECONDS)
    unmitigated_rate, shared_rate = (compute_loss_rate(slowdown) for slowdown in played.slowdowns)
    options = [
        unmitigated_rate * case.seconds,
        shared_rate * case.seconds,
        *([exchange_seconds] if case.spares else []),
    ]
    decided_after = min(case.seconds, played.decided - SLOWDOWN_AT_SECONDS)
    return Result(
        case,
        cost,
        min(options),
        unmitigated_rate * decided_after + shared_rate * played.uneven,
        decided_after,
        1 - cost / options[0],
        1 - min(options) / options[0],
    )


COMPARED_KINDS = ((0, 1.6, 600.0), (0, 3.1, 600.0), (1, 1.6, UNBOUNDED_SECONDS), (1, 3.1, 600.0))
"""Kinds that are played on the coarse clock, too: spares, factor, seconds."""


def list_cases(worlds: int) -> list[SimulatedCase]:
    """Longest first. worlds: seeds of each kind; 0: only the COMPARED_KINDS, in one world."""
    kinds = list(product((0, 1), FACTORS, SLOW_SECONDS)) if worlds else COMPARED_KINDS
    cases = [SimulatedCase(seed, spares) for seed, spares in product(range(max(1, worlds)), (0, 1))]
    cases += [SimulatedCase(seed, *kind) for seed, kind in product(range(max(1, worlds)), kinds)]
    return sorted(cases, key=lambda case: -case.ends)


def print_report(results: Sequence[Result]) -> tuple[dict[str, object], dict[str, bool]]:
    """Prints the means over the worlds; gives the figures, and which goals are reached."""
    kinds = dict.fromkeys(result.case.kind for result in sorted(results, key=lambda result: result.case.kind))
    by_kind = {kind: [result for result in results if result.case.kind == kind] for kind in kinds}
    print("spares  factor  seconds    cost  clairvoyant's  noticing   times  removed  by the clairvoyant")
    times, points_behind = dict[str, float](), dict[str, float]()
    for kind, same_kind in by_kind.items():
        row = {name: fmean(getattr(result, name) for result in same_kind) for name in AVERAGED_FIELDS}
        spares, factor, seconds = kind
        description = f"{factor:g} times as slow for {seconds:g} s, spares: {spares}"
        times[description] = max(0.0, row["cost"] - row["noticing"]) / row["clairvoyant"]
        if seconds == COMPARED_SECONDS:
            points_behind[description] = 100 * (row["removed_by_clairvoyant"] - row["removed"])
        print(
            f"{spares:6}  {factor:6.2f}  {seconds:7g}  {row['cost']:6.1f}  {row['clairvoyant']:13.1f}  "
            f"{row['noticing']:8.1f}  {times[description]:6.2f}  {row['removed']:7.0%}  "
            f"{row['removed_by_clairvoyant']:18.0%}"
        )
    costliest, furthest = max(times, key=times.__getitem__), max(points_behind, key=points_behind.__getitem__)
    holds = {
        f"{MAX_TIMES_CLAIRVOYANT:g} × the clairvoyant's cost, simulated": times[costliest] <= MAX_TIMES_CLAIRVOYANT,
        f"{MAX_POINTS_BEHIND:g} points of the slowdown, simulated": points_behind[furthest] <= MAX_POINTS_BEHIND,
    }
    metrics = {
        "times_the_clairvoyant": {costliest: times[costliest]},
        "points_behind": {furthest: points_behind[furthest]},
        "decided_after_median": median(result.decided_after for result in results),
    }
    return metrics, holds
