"""What a step would take with other shares, in another mode, or without a worker: expectations over the posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..protocol.plan import SyncMode
from ..stragglers import shares
from ..stragglers.shares import ShareLimits
from ..stragglers.strategies import (
    MAX_SECONDS_BETWEEN_SYNCS,
    MIN_STEPS_BETWEEN_SYNCS,
    SYNC_INTERVAL_SECONDS_RANGE,
    SYNC_STEP_CHOICES,
    Bottleneck,
)
from ..whatif.data_parallel import estimate_sync_wait_seconds
from .chain import Values
from .estimator import StragglerEstimator
from .observations import StepWindow
from .parameters import PROBABLE

DRAWS = 512
"""Steps that an expectation is of."""
BASE_STEPS = 8
"""Newest steps that tell how long a healthy rank's work takes."""


@dataclass(frozen=True)
class LocalForecast:
    """One step's worth of samples in a Local-SGD mode. Seconds."""

    mode: SyncMode
    step_seconds: float  # with its share of synchronizations
    sync_seconds: float  # between two synchronizations, in mode AsyncEDiT
    sync_every: int  # the same in steps, in mode EDiT


@dataclass(frozen=True)
class StepForecast:
    """Expected steps of a job with known noise."""

    estimator: StragglerEstimator

    @property
    def window(self) -> StepWindow:
        """The newest single steps."""
        assert self.estimator.recent is not None  # since its noise is known
        return self.estimator.recent

    @cached_property
    def healthy_seconds(self) -> float:
        """Own work of a healthy rank with an equal share, now."""
        newest = self.window.select(slice(-BASE_STEPS, None))
        work = np.log(
            [self.estimator.level_work(*row) for row in zip(newest.balanced_seconds, newest.samples, strict=True)]
        )
        return float(np.exp(np.median(work - self.estimator.rank_levels)))

    @property
    def exposed_seconds(self) -> float:
        """Communication of a step that no computation hides, now."""
        estimator = self.estimator
        growth = math.expm1(float(estimator.transfer.mean_levels[0, 0]))
        return (estimator.baseline_exposed or 0.0) + (estimator.baseline_seconds or 0.0) * growth

    @cached_property
    def drawn_levels(self) -> Values:
        """Levels of all ranks, (draws, ranks)."""
        return self.estimator.workers.draw_levels(np.random.default_rng(5), DRAWS)

    @property
    def noise(self) -> Values:
        return np.asarray(self.estimator.noise.sigma * _draw_normals(self.estimator.layout.ranks))

    def compute_own_work(self, samples: Sequence[float] | None, levels: Values | float = 0.0) -> Values:
        """Return own work in drawn steps, (draws, ranks), seconds. `samples` None: equal shares."""
        scale = 1.0 if samples is None else self.estimator.scale_shares(np.asarray(samples, dtype=np.float64))
        return np.asarray(self.healthy_seconds * scale * np.exp(levels + self.noise))

    def estimate_sync_step(self, samples: Sequence[float] | None, levels: Values | float | None = None) -> float:
        """Return the expected synchronous step. `levels` None: as they are drawn from the posterior."""
        own = self.compute_own_work(samples, self.drawn_levels if levels is None else levels)
        return float(own.max(axis=1).mean()) + self.exposed_seconds

    def estimate_without_worker(self, worker: int) -> float:
        """Return the expected synchronous step with equal shares if this worker were healthy."""
        return self.estimate_sync_step(None, self._draw_levels_without(worker))

    def estimate_slowdown(self, worker: int | None) -> float:
        """Return the slowdown of synchronous steps by this worker; None: by a link, or by slow ranks that rotate."""
        if worker is not None:
            return self.estimate_sync_step(None) / self.estimate_without_worker(worker)
        assert self.estimator.baseline_seconds is not None  # since its noise is known
        return self.estimate_rotating_step() / self.estimator.baseline_seconds

    def find_shares(self, current: tuple[int, ...], limits: ShareLimits) -> tuple[int, ...]:
        """Return the shares with the shortest expected step. Ranks that differ only by chance get equal ones."""
        estimator = self.estimator
        layout, levels = estimator.layout, estimator.rank_levels
        per_sample = (1 - estimator.fixed_share) / layout.equal_share * self.healthy_seconds
        cost = per_sample * np.exp(self.drawn_levels + self.noise)
        fixed = estimator.fixed_share * self.healthy_seconds * np.exp(levels)
        highest = np.repeat(estimator.workers.slow_levels.max(axis=1), layout.ranks_per_worker)
        is_slow = np.repeat(estimator.workers.slow >= PROBABLE, layout.ranks_per_worker) & (levels > highest / 2)
        classes = np.where(is_slow, 1 + np.arange(layout.ranks) // layout.ranks_per_worker, 0)
        return shares.optimize_shares(
            cost, current, fixed=fixed, rank_classes=classes, limits=limits, draws=DRAWS
        ).shares

    def estimate_rotating_step(self) -> float:
        """Return the expected synchronous step with slow ranks that rotate, with other ranks at their peers' pace."""
        own = self.compute_own_work(None)
        if self.estimator.rotation.slow[0] > PROBABLE:
            turn = np.random.default_rng(3).integers(0, own.shape[1], len(own))
            own[np.arange(len(own)), turn] *= math.exp(float(self.estimator.rotation.slow_levels[0, 0]))
        return float(own.max(axis=1).mean()) + self.exposed_seconds

    def forecast_local(
        self, reason: Bottleneck, elapsed: float, *, sync_cost: float | None = None, healthy_worker: int | None = None
    ) -> LocalForecast:
        """Return the cheaper Local-SGD mode, for a link or rotating ranks that have been slow for `elapsed` seconds.

        `sync_cost`: transfer of a synchronization as measured; None: the exposed one of a step. `healthy_worker`: as if
        this one were. AsyncEDiT waits for the last rank's current step, EDiT for the slowest rank's whole interval.
        """
        estimator, parameters = self.estimator, self.estimator.parameters
        levels, rotation = self._draw_levels_without(healthy_worker), estimator.rotation
        own = self.compute_own_work(None, levels)
        if rotation.slow[0] > PROBABLE:
            share = parameters.rotation_hit_rate / own.shape[1]
            own = own * (1 + share * math.expm1(float(rotation.slow_levels[0, 0])))
        mean = own.mean(axis=0)
        transfer = self.exposed_seconds if sync_cost is None else sync_cost
        cost = transfer + estimate_sync_wait_seconds(mean)
        wanted = cost / parameters.min_gain
        if reason is Bottleneck.COMMUNICATION:
            # As checkpoints (Young 1974): a link may recover, which only a synchronization shows.
            remaining = elapsed + parameters.fault_duration_scale_seconds
            wanted = math.sqrt(2 * cost * remaining / parameters.inexact_cost_rate)
        interval = _clamp_interval(wanted, float(mean.max()))
        by_clock = LocalForecast(
            SyncMode.ASYNC_EDIT, float(1.0 / (1.0 / mean).mean()) * (1 + cost / interval), interval, 0
        )
        longest = min(interval, MAX_SECONDS_BETWEEN_SYNCS)
        every = max((steps for steps in SYNC_STEP_CHOICES if steps * mean.max() <= longest), default=0)
        if not every:
            return by_clock
        sums = every * mean + math.sqrt(every) * own.std(axis=0) * _draw_normals(own.shape[1])
        by_steps = LocalForecast(SyncMode.EDIT, float(sums.max(axis=1).mean() + transfer) / every, interval, every)
        return by_steps if by_steps.step_seconds < (1 - parameters.min_gain) * by_clock.step_seconds else by_clock

    def _draw_levels_without(self, worker: int | None) -> Values:
        """Return the drawn levels as if this worker were healthy."""
        if worker is None:
            return self.drawn_levels
        members = self.estimator.layout.ranks_per_worker
        levels = self.drawn_levels.copy()
        levels[:, worker * members : (worker + 1) * members] = 0.0
        return levels


@lru_cache(maxsize=4)
def _draw_normals(ranks: int) -> Values:
    return np.random.default_rng(1).standard_normal((DRAWS, ranks))


def _clamp_interval(wanted: float, slowest_seconds: float) -> float:
    """Return the seconds between two synchronizations."""
    shortest, longest = SYNC_INTERVAL_SECONDS_RANGE
    return round(min(longest, max(shortest, MIN_STEPS_BETWEEN_SYNCS * slowest_seconds, wanted)), 1)
