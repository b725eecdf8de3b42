"""What a slow rank costs under the operator's decisions, and under those of a clairvoyant who knows how long it lasts.

The real operator in simulated clusters: one of four ranks is slow by each of FACTORS, with a spare warm and without,
for each of SECONDS, in the worlds of several seeds. Costs are seconds of
training: the samples that the same world trains without the fault and this one does not, over its rate, from the
fault's beginning until TAIL_SECONDS after its end; of both their means over the worlds are judged, as restarts take
their time by chance. So all that the operator does is in them: noticing, shares,
exchanging the worker, and noticing that it is over.

The clairvoyant takes the cheapest of three from the first moment on: nothing, the best shares in whole samples, or the
spare. Exchanging a worker costs it what it costs the operator in the same world, who has an idea of it from a crash
that the job has been through. It needs no time to notice; the
operator has twice its cost, and the seconds of noticing beside: what the fault costs, unmended, until the first
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

from pacekeeper_analysis import shares
from pacekeeper_analysis.price import compute_loss_rate
from pacekeeper_operator.api import IncidentCause
from simulation.faults.fault import TargetRole
from simulation.faults.ranks import NodeIsSlow, RankCrashes
from simulation.faults.scene import FaultContext
from simulation.generator import OPERATOR_SETTINGS
from simulation.operators.endpoint import clear_application_cache
from simulation.schedule import SimulatedJob, Schedule
from simulation.workers.run import TrainingRound
from simulation.workers.training import SimulatedTraining
from simulation.world import World, WorldSettings

SEEDS = 3
REPLICAS, SLOW_RANK = 4, 1
FACTORS = (1.15, 1.3, 1.6, 2.2, 3.1, 5.0)
UNBOUNDED_SECONDS = 1200.0
"""So long is measured of a fault that does not end."""
SECONDS = (30.0, 120.0, 600.0, UNBOUNDED_SECONDS)
CRASH_AT_SECONDS, SLOWDOWN_AT_SECONDS = 50.0, 120.0
TAIL_SECONDS = 120.0
STATE_POLL_SECONDS = 0.5
TIMES_THE_CLAIRVOYANT = 2.0
POINTS = 10.0
"""Of the slowdown that a clairvoyant removes at JUDGED_SECONDS, the operator removes as much but for so many."""
JUDGED_SECONDS = 600.0
DRAWS = 4096
NOISE = (0.98, 1.02)
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

    def trained(self, until: float) -> float:
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


MEANS = ("cost", "clairvoyant", "noticing", "removed", "removed_by_clairvoyant")


def play(case: SimulatedCase) -> Played:
    gc.disable()
    logging.getLogger("pacekeeper_operator").setLevel(logging.CRITICAL)
    job = SimulatedJob(replicas=REPLICAS, spares=case.spares, spec={"remediation": {"maxRestarts": 100}})
    settings = WorldSettings(nodes=2 * REPLICAS, slots=1, operator=OPERATOR_SETTINGS)
    world = World(case.seed, settings)
    try:
        watch = _Watch(world, FaultContext(world, Schedule(case.seed, world=settings, jobs=(job,))), case)
        world.run(watch.play())
        return watch.played()
    finally:
        world.loop.close()
        clear_application_cache()
        gc.enable()


class _Watch:
    def __init__(self, world: World, scene: FaultContext, case: SimulatedCase) -> None:
        self._world, self._context, self._case = world, scene, case
        self._at, self._samples, self._rounds = list[float](), list[float](), list[tuple[int, int]]()
        self._decided = math.inf
        self._uneven = 0.0
        self._training: SimulatedTraining | None = None
        world.trainings.on_step.append(self._stepped)

    async def play(self) -> None:
        self._context.create_job(0)
        await asyncio.sleep(CRASH_AT_SECONDS)
        RankCrashes().inject(self._context)
        await asyncio.sleep(SLOWDOWN_AT_SECONDS - self._world.now())
        self._training = self._context.find_training(0)
        heal = None
        if self._case.factor > 1:
            heal = NodeIsSlow(TargetRole.MEMBER, SLOW_RANK, factor=self._case.factor).inject(self._context)
        while (now := self._world.now()) < self._case.ends:
            if heal is not None and now >= SLOWDOWN_AT_SECONDS + self._case.seconds:
                heal = heal()
            self._record_state(now)
            await asyncio.sleep(STATE_POLL_SECONDS)

    def _record_state(self, now: float) -> None:
        draft = self._context.read_desired(0)
        for incident in draft.state.incidents.current:
            if incident.cause is IncidentCause.STRAGGLER:
                self._decided = min(self._decided, now)
        if now >= SLOWDOWN_AT_SECONDS + self._case.seconds and len(set(draft.plan.shares or (0,))) > 1:
            self._uneven += STATE_POLL_SECONDS

    def _stepped(self, run: TrainingRound) -> None:
        self._at.append(self._world.now())
        self._samples.append(run.progress.samples)
        self._rounds.append((run.membership, run.round))

    def played(self) -> Played:
        assert self._training is not None
        return Played(
            self._case,
            tuple(self._at),
            tuple(self._samples),
            _slowdowns(self._training, self._case.factor),
            self._decided,
            self._uneven,
            tuple(self._exchanges()),
        )

    def _exchanges(self) -> Iterable[float]:
        """From the last step of a membership to the first one of the next, without what a step usually takes."""
        begun = bisect_right(self._at, SLOWDOWN_AT_SECONDS)
        usual = (self._at[begun - 1] - self._at[begun - 11]) / (self._samples[begun - 1] - self._samples[begun - 11])
        for place in range(begun, len(self._at) - 1):
            if self._rounds[place][0] != self._rounds[place - 1][0]:  # its ranks have restored their state
                seconds = self._at[place + 1] - self._at[place - 1]
                yield seconds - usual * (self._samples[place + 1] - self._samples[place - 1])


def _slowdowns(training: SimulatedTraining, factor: float) -> tuple[float, float]:
    noise = np.random.default_rng(0).uniform(*NOISE, size=(DRAWS, REPLICAS))
    slow = np.ones(REPLICAS)
    slow[SLOW_RANK] = factor

    def seconds(slowness: np.ndarray, of_each: Sequence[int]) -> float:
        own = (training.fixed_seconds + np.array(of_each) * training.sample_seconds) * slowness * noise
        return float(own.max(axis=1).mean()) + training.communication_seconds

    batch = REPLICAS * training.samples
    equal = (training.samples,) * REPLICAS
    usual = seconds(np.ones(REPLICAS), equal)
    others = ((mine, shares.divide_equally(batch - mine, REPLICAS - 1, 1)) for mine in range(1, training.samples + 1))
    best = min(seconds(slow, (*rest[:SLOW_RANK], mine, *rest[SLOW_RANK:])) for mine, rest in others)
    return seconds(slow, equal) / usual, best / usual


def results(played: Sequence[Played]) -> list[Result]:
    """Of all cases with a fault, each beside the same world without."""
    healthy = {(each.case.seed, each.case.spares): each for each in played if each.case.factor == 1}
    exchange = {
        seed: fmean(cost for each in played if each.case.seed == seed for cost in each.exchanges)
        for seed in {each.case.seed for each in played}
    }
    return [
        _result(each, healthy[each.case.seed, each.case.spares], exchange[each.case.seed])
        for each in played
        if each.case.factor > 1
    ]


def _result(played: Played, healthy: Played, exchange: float) -> Result:
    case = played.case
    usual = healthy.trained(case.ends)
    cost = (usual - played.trained(case.ends)) / usual * (case.ends - SLOWDOWN_AT_SECONDS)
    unmended, shared = (compute_loss_rate(slowdown) for slowdown in played.slowdowns)
    options = [unmended * case.seconds, shared * case.seconds, *([exchange] if case.spares else [])]
    decided = min(case.seconds, played.decided - SLOWDOWN_AT_SECONDS)
    return Result(
        case,
        cost,
        min(options),
        unmended * decided + shared * played.uneven,
        decided,
        1 - cost / options[0],
        1 - min(options) / options[0],
    )


COMPARED = ((0, 1.6, 600.0), (0, 3.1, 600.0), (1, 1.6, UNBOUNDED_SECONDS), (1, 3.1, 600.0))
"""Kinds that are played on the coarse clock, too: spares, factor, seconds."""


def cases(worlds: int) -> list[SimulatedCase]:
    """Longest first. worlds: seeds of each kind; 0: the COMPARED kinds alone, in one world."""
    kinds = list(product((0, 1), FACTORS, SECONDS)) if worlds else COMPARED
    found = [SimulatedCase(seed, spares) for seed, spares in product(range(max(1, worlds)), (0, 1))]
    found += [SimulatedCase(seed, *kind) for seed, kind in product(range(max(1, worlds)), kinds)]
    return sorted(found, key=lambda case: -case.ends)


def report(found: Sequence[Result]) -> tuple[dict[str, object], dict[str, bool]]:
    """Prints the means over the worlds; gives the figures, and which goals are reached."""
    kinds = dict.fromkeys(each.case.kind for each in sorted(found, key=lambda each: each.case.kind))
    table = {kind: [each for each in found if each.case.kind == kind] for kind in kinds}
    print("spares  factor  seconds    cost  clairvoyant's  noticing   times  removed  by the clairvoyant")
    times, behind = dict[str, float](), dict[str, float]()
    for kind, alike in table.items():
        row = {name: fmean(getattr(each, name) for each in alike) for name in MEANS}
        spares, factor, seconds = kind
        words = f"{factor:g} times as slow for {seconds:g} s, spares: {spares}"
        times[words] = max(0.0, row["cost"] - row["noticing"]) / row["clairvoyant"]
        if seconds == JUDGED_SECONDS:
            behind[words] = 100 * (row["removed_by_clairvoyant"] - row["removed"])
        print(
            f"{spares:6}  {factor:6.2f}  {seconds:7g}  {row['cost']:6.1f}  {row['clairvoyant']:13.1f}  "
            f"{row['noticing']:8.1f}  {times[words]:6.2f}  {row['removed']:7.0%}  "
            f"{row['removed_by_clairvoyant']:18.0%}"
        )
    dearest, furthest = max(times, key=times.__getitem__), max(behind, key=behind.__getitem__)
    holds = {
        f"{TIMES_THE_CLAIRVOYANT:g} × the clairvoyant's cost, simulated": times[dearest] <= TIMES_THE_CLAIRVOYANT,
        f"{POINTS:g} points of the slowdown, simulated": behind[furthest] <= POINTS,
    }
    told = {
        "times_the_clairvoyant": {dearest: times[dearest]},
        "points_behind": {furthest: behind[furthest]},
        "decided_after_median": median(each.decided_after for each in found),
    }
    return told, holds
