"""A training job on a coarse clock: what each strategy costs it under each strain, by expectation.

A second is the resolution. A step takes what its last rank takes, and the transfer behind it; ranks
differ by noise, the same draws for every strategy, so that nothing else differs between strategies. The cost of a
sequence of strategies is a plain sum of these expectations and of restarts, which makes a clairvoyant provable.
Noise that is *observed* is drawn elsewhere (`sampled_metrics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.stragglers import shares
from pacekeeper_analysis.stragglers.price import MAX_EXACT_STEP_TIME_RATIO, compute_loss_rate
from pacekeeper_analysis.stragglers.strategies import MAX_REMAINING_COST_WITH_SHARES

GC_INTERVAL_STEPS = 20
"""Steps between two collections of a rank that collects garbage by itself."""
HICCUP_FACTOR = 3.0
"""Duration of a step of a rank that is held up once, as a multiple of the usual one."""
HICCUP_INTERVAL_STEPS = 40
"""Steps of a job with hiccups from one such rank to the next, on average."""
SYNC_TRANSFER_FACTOR = 1.3
"""Times the transfer of a step that one of a synchronization in a Local-SGD mode takes
(`simulation.workers.training_round`)."""
CLEAR_MARGIN = 1.1
"""Times the bound beyond which the two sides of it are distinct: up to there it is worth nothing to have left exact
training, nor to have stayed."""
BACKWARD_SHARE, FORWARD_SHARE = 2 / 3, 1 / 3
"""Parts of a rank's own work that hide a transfer: the first in a synchronous step, the second at a synchronization. A
step's transfer is assumed to be just longer than what hides it."""
MAX_RANK_DRAWS, MAX_DRAWS, FITTED_DRAWS = 262_144, 1024, 256
"""Draws times ranks, and draws, that an expectation is of; and others, that the best shares are fitted to."""

Seconds = npt.NDArray[np.float64]


class Spare(StrEnum):
    """What stands by."""

    NONE = "none"
    WARM = "warm"
    DEAD = "dead"  # its pod exists, and sends no heartbeats


@dataclass(frozen=True)
class JobCosts:
    """Times are seconds."""

    workers: int
    ranks_each: int
    samples: int  # of each rank in a step
    sample_seconds: float
    fixed_seconds: float  # of a step with any number of samples
    transfer_seconds: float  # of a step, that no computation hides
    noise: float  # standard deviation of a rank's own work in a step, over its mean
    hiccups: float  # share of a rank's steps that take HICCUP_FACTOR times as long
    spare: Spare
    restart_seconds: int
    phase_every: int = 0  # by the clock: from one evaluation or checkpoint, in which no step is done, to the next
    phase_seconds: int = 0  # 0: there is none

    @property
    def ranks(self) -> int:
        return self.workers * self.ranks_each

    @property
    def batch(self) -> int:
        return self.ranks * self.samples

    @property
    def own_seconds(self) -> float:
        """A rank's own work in a step, where nothing is wrong."""
        return self.fixed_seconds + self.samples * self.sample_seconds

    @property
    def step_seconds(self) -> float:
        """A step without noise."""
        return self.own_seconds + self.transfer_seconds

    def compute_trained_seconds(self, until: float) -> float:
        """Seconds of steps, rather than of other phases, from 0 on."""
        if not self.phase_seconds:
            return until
        periods, remainder = divmod(until, self.phase_every)
        return periods * (self.phase_every - self.phase_seconds) + min(remainder, self.phase_every - self.phase_seconds)

    def find_time(self, trained: float) -> float:
        """Return the time at which it has trained for `trained` seconds."""
        if not self.phase_seconds:
            return trained
        periods, remainder = divmod(trained, self.phase_every - self.phase_seconds)
        return periods * self.phase_every + remainder

    def is_training(self, second: int) -> bool:
        return self.compute_trained_seconds(second + 1) > self.compute_trained_seconds(second)


@dataclass(frozen=True)
class Strain:
    """What slows a job down. As it is by default, nothing does."""

    slow: tuple[tuple[int, float], ...] = ()  # ranks, and how many times their peers' time they take
    all_slow: float = 1.0  # the same of all ranks
    turns: float = 1.0  # of one rank in each step, drawn again
    transfer_seconds: float = 0.0  # that each transfer takes longer
    gc_seconds: float = 0.0  # of a pause, of each rank once in GC_INTERVAL_STEPS steps
    lengths: float = 0.0  # standard deviation of the logarithm of a rank's work in a step: sequences, dealt unevenly
    movable: bool = False  # it stays behind with a worker that is exchanged


CALM = Strain()


@dataclass(frozen=True)
class TrainingStrategy:
    """How the job trains. What changes it costs nothing, and is done live."""

    shares: tuple[int, ...] | None = None  # None: equal ones
    mode: SyncMode = SyncMode.SYNC
    sync_seconds: float = 30.0  # between two synchronizations, in mode AsyncEDiT
    sync_every: int = 16  # steps, in mode EDiT
    gc_interval: int = 0  # steps between collections of all ranks at once; 0: each by itself
    balanced: bool = False  # samples are dealt by what they cost


EQUAL_SHARES = TrainingStrategy()
LOCAL_SGD = TrainingStrategy(mode=SyncMode.ASYNC_EDIT)
"""As seldom synchronized as adaptation has it."""


@dataclass(frozen=True)
class Setup:
    """How the job trains, and on what. Another round costs the job's restart."""

    strategy: TrainingStrategy = EQUAL_SHARES
    moved: bool = False  # the worker that is slow has been exchanged for the spare
    round: int = 1

    def needs_restart(self, other: Setup) -> bool:
        """Whether it takes a new round to come to `other`."""
        return (self.moved, self.round) != (other.moved, other.round)


@dataclass
class CostModel:
    """What strategies cost a job. Loss is in seconds of training a second, against the job without any strain."""

    job: JobCosts
    _known: dict[tuple[TrainingStrategy, Strain], float] = field(default_factory=dict)
    _best: dict[Strain, TrainingStrategy] = field(default_factory=dict)
    tried: dict[TrainingStrategy, None] = field(default_factory=dict)
    """Strategies that a policy has taken."""

    def compute_loss(self, strategy: TrainingStrategy, strain: Strain) -> float:
        """0 to 1. No publication says what it is worth to stay exact, so that it is a rule here, the product's own,
        and binds all: what Local-SGD wins over exact training counts only where it `may_leave_exact`."""
        self.tried.setdefault(strategy)
        seconds = self.step_seconds(strategy, strain)
        if strategy.mode is not SyncMode.SYNC and not self.may_leave_exact(strain):
            seconds = max(seconds, self.step_seconds(self.choose_best_exact(strain), strain))
        return compute_loss_rate(seconds / self.usual_seconds)

    def slowed(self, strategy: TrainingStrategy, strain: Strain) -> float:
        """The same of its steps only, whether they are exact or not."""
        return compute_loss_rate(self.step_seconds(strategy, strain) / self.usual_seconds)

    def may_leave_exact(self, strain: Strain) -> bool:
        """The best exact strategy exceeds MAX_EXACT_STEP_TIME_RATIO clearly, and removes less than half of the
        slowness. That Local-SGD hides transfers where nothing is wrong, too, is no remedy."""
        exact, equal, local = (
            self.step_seconds(strategy, strain) / self.usual_seconds
            for strategy in (self.choose_best_exact(strain), EQUAL_SHARES, LOCAL_SGD)
        )
        local_slowdown = self.step_seconds(LOCAL_SGD, strain) / self.step_seconds(LOCAL_SGD, CALM)
        is_halved = bool(strain.slow) and exact - 1.0 <= MAX_REMAINING_COST_WITH_SHARES * (equal - 1.0)
        return exact >= CLEAR_MARGIN * MAX_EXACT_STEP_TIME_RATIO * max(1.0, local, local_slowdown) and not is_halved

    def compute_least_loss(self, strain: Strain) -> float:
        """Under the best strategy that exists, or that a policy has tried."""
        strategies = [self.choose_best_exact(strain), LOCAL_SGD, *self.tried]
        return min(self.compute_loss(strategy, strain) for strategy in strategies)

    def choose_best(self, strain: Strain) -> TrainingStrategy:
        exact, local = self.choose_best_exact(strain), LOCAL_SGD
        return local if self.compute_loss(local, strain) < self.compute_loss(exact, strain) else exact

    def choose_best_exact(self, strain: Strain) -> TrainingStrategy:
        """In mode Sync."""
        if strain not in self._best:
            options = {
                "gc_interval": GC_INTERVAL_STEPS if strain.gc_seconds else 0,
                "balanced": strain.lengths > 0,
            }
            strategies = [TrainingStrategy(rank_shares, **options) for rank_shares in (None, *self._fit_shares(strain))]  # type: ignore[arg-type]
            self._best[strain] = min(strategies, key=lambda strategy: self.step_seconds(strategy, strain))
        return self._best[strain]

    def _fit_shares(self, strain: Strain) -> list[tuple[int, ...]]:
        """Shares for its slow ranks: where own work does not vary, the best in whole samples; and where it does."""
        if not strain.slow:
            return []
        job, relative_times = self.job, self._compute_step_times(strain)
        equal_shares = (job.samples,) * job.ranks
        _, rank_classes = np.unique(relative_times, return_inverse=True)
        candidates = []
        for draws in (np.ones((1, job.ranks)), self._draw_noise(FITTED_DRAWS, seed=7)):
            cost = draws * relative_times * job.sample_seconds
            fixed = relative_times * job.fixed_seconds
            candidates.append(
                shares.optimize_shares(
                    cost, equal_shares, fixed=fixed, rank_classes=rank_classes, draws=len(draws)
                ).shares
            )
        return candidates

    @cached_property
    def usual_seconds(self) -> float:
        """Of a step, without strain, as the job begins."""
        return self.step_seconds(EQUAL_SHARES, CALM)

    @cached_property
    def first_steps(self) -> tuple[float, float]:
        """Medians of the job's first steady steps, as its ranks remember them: of a step, and of own work in it."""
        own = self.own_seconds(EQUAL_SHARES, CALM)
        return float(np.median(own.max(axis=1))) + self.job.transfer_seconds, float(np.median(own))

    def step_seconds(self, strategy: TrainingStrategy, strain: Strain) -> float:
        """Expected for one step's worth of samples of the whole job."""
        key = strategy, strain
        if key not in self._known:
            own = self.own_seconds(strategy, strain)
            self._known[key] = self._combine_ranks(strategy, strain, own)
        return self._known[key]

    def _combine_ranks(self, strategy: TrainingStrategy, strain: Strain, own: Seconds) -> float:
        if strategy.mode is SyncMode.SYNC:
            planned_gc_seconds = strain.gc_seconds / strategy.gc_interval if strategy.gc_interval else 0.0
            return (
                float(own.max(axis=1).mean()) + self.job.transfer_seconds + strain.transfer_seconds + planned_gc_seconds
            )
        transfer = self.synchronisation_seconds(strain)
        mean = own.mean(axis=0)
        if strategy.mode is SyncMode.EDIT:  # every rank does as many steps
            rows = np.random.default_rng(1).integers(0, len(own), size=(64, strategy.sync_every))
            return float(own[rows].sum(axis=1).max(axis=1).mean() + transfer) / strategy.sync_every
        remaining = self._uniform * mean  # of the step in hand, when the clock strikes
        cost = transfer + float((remaining.max(axis=1) - remaining.mean(axis=1)).mean())
        return float(1.0 / (1.0 / mean).mean()) * (1.0 + cost / strategy.sync_seconds)

    def synchronisation_seconds(self, strain: Strain) -> float:
        """That one holds the ranks up, in a Local-SGD mode, once all are there."""
        own = self.job.own_seconds
        total = BACKWARD_SHARE * own + self.job.transfer_seconds + strain.transfer_seconds
        return SYNC_TRANSFER_FACTOR * total - FORWARD_SHARE * own

    def own_seconds(self, strategy: TrainingStrategy, strain: Strain) -> Seconds:
        """Of the ranks' own work in drawn steps: shape (draws, ranks)."""
        job, normals = self.job, self._normals
        rank_samples = np.array(strategy.shares or (job.samples,) * job.ranks)
        own = (job.fixed_seconds + rank_samples * job.sample_seconds) * self._compute_step_times(strain) * self._noise
        if strain.lengths and not strategy.balanced:
            own = own * np.exp(strain.lengths * normals - strain.lengths**2 / 2)
        if strain.turns > 1:
            own = own.copy()
            own[np.arange(len(own)), self._turn] *= strain.turns
        if strain.gc_seconds and not strategy.gc_interval:
            own = own + strain.gc_seconds * self._collects
        return np.asarray(own)

    def _compute_step_times(self, strain: Strain) -> Seconds:
        relative_times = np.full(self.job.ranks, strain.all_slow)
        for rank, factor in strain.slow:
            relative_times[rank] *= factor
        return relative_times

    @cached_property
    def _draws(self) -> int:
        return min(MAX_DRAWS, max(16, MAX_RANK_DRAWS // self.job.ranks))

    @cached_property
    def _noise(self) -> Seconds:
        return self._draw_noise(self._draws, seed=2)

    def _draw_noise(self, draws: int, seed: int) -> Seconds:
        rng = np.random.default_rng(seed)
        shape = draws, self.job.ranks
        noise = np.maximum(0.2, 1.0 + self.job.noise * rng.standard_normal(shape))
        return np.where(rng.random(shape) < self.job.hiccups, HICCUP_FACTOR, 1.0) * noise

    @cached_property
    def _normals(self) -> Seconds:
        return np.random.default_rng(3).standard_normal((self._draws, self.job.ranks))

    @cached_property
    def _turn(self) -> npt.NDArray[np.int64]:
        return np.random.default_rng(4).integers(0, self.job.ranks, size=self._draws)

    @cached_property
    def _collects(self) -> npt.NDArray[np.bool_]:
        return np.random.default_rng(5).random((self._draws, self.job.ranks)) < 1.0 / GC_INTERVAL_STEPS

    @cached_property
    def _uniform(self) -> Seconds:
        return np.random.default_rng(6).random((256, self.job.ranks))


@dataclass(frozen=True)
class Segment:
    """Of a scenario: the same strain from `begin` on until `end`. Seconds since the scenario's beginning."""

    begin: int
    end: int
    strain: Strain


@dataclass(frozen=True)
class Timeline:
    """All of a scenario, without gaps, beginning at 0."""

    segments: tuple[Segment, ...]

    @property
    def end(self) -> int:
        return self.segments[-1].end

    @cached_property
    def strains_by_second(self) -> Sequence[Strain]:
        return [segment.strain for segment in self.segments for _ in range(segment.begin, segment.end)]

    @property
    def onset(self) -> int:
        """When something first goes wrong; the end, where nothing does."""
        return next((segment.begin for segment in self.segments if segment.strain != CALM), self.end)

    @property
    def end_second(self) -> int:
        """From when on nothing goes wrong any more."""
        return max((segment.end for segment in self.segments if segment.strain != CALM), default=0)


def get_remaining_strain(strain: Strain, *, moved: bool) -> Strain:
    """What is left of it."""
    return CALM if moved and strain.movable else strain
