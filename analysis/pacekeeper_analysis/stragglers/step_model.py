"""Model of the ranks' own work in synchronous steps.

It removes one bottleneck after another to find the cost of each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ..protocol.reports import RankWindow
from . import shares
from .windows import (
    MIN_COMMON_STEPS,
    AlignedWindow,
    add_cost_units,
    compute_peers_median,
    find_baseline_exposed,
    find_baseline_seconds,
    find_share_granularity,
    subtract_gc,
)

HIDDEN_TRANSFER_SHARE = 0.33
"""Part of a step's own work that hides a transfer in a synchronous step, but not in a synchronization.

A synchronous step hides transfers behind the backward pass (two thirds of the work), a synchronization behind the
forward pass (one third).
"""
MIN_PERSISTENT_STEPS_SHARE = 0.8
"""Share of the window's steps in which a straggler must be slow. Rarer slowness is noise."""
MAX_EXCEPTIONAL_STEPS_SHARE = 0.1
"""Unusually long steps are exceptions and do not count, up to this part of the window's steps."""
MAX_CHANCE_STANDARD_ERRORS = 3.0
"""Standard errors by which a window's values may differ by chance."""
SYNCHRONOUS_STEP_DRAWS = 256
"""Number of synchronous steps composed from the steps of ranks that do not wait for each other."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class KnownRelativeTimes:
    """Relative times of ranks, known from more steps than a window's."""

    relative_times: Mapping[int, float]  # time per sample over the median of its peers
    error: float  # standard deviation of what one step shows of them


@dataclass(frozen=True)
class StepModel:
    """Own work of the ranks without one bottleneck after another. Arrays are seconds, of shape (steps, ranks)."""

    window: AlignedWindow
    own: Seconds  # own work as measured
    gc_free: Seconds  # without garbage collections
    length_balanced: Seconds  # … and with samples of equal cost in proportion to each rank's share
    equal_share: Seconds  # … and with equal shares
    straggler_free: Seconds  # … and with the culprits at their peers' speed
    typical_steps: npt.NDArray[np.bool_]  # (steps,): not exceptionally long
    shares: tuple[int, ...]
    culprits: tuple[int, ...]  # persistently slower than most ranks
    ranks_differ: (
        bool  # whether the ranks' speeds differ persistently; without culprits if they are not a few slow ranks
    )
    rank_slowdown: tuple[float, ...]  # median cost at equal shares over the peers' median
    exposed_seconds: float  # seconds of communication in a step that no computation hides

    @classmethod
    def from_window(cls, window: AlignedWindow, threshold: float, slow_ranks: Collection[int] = ()) -> StepModel | None:
        """Build the model. None if seconds are not finite and positive.

        A rank is slow from `threshold` times its peers' time on. Ranks in `slow_ranks` are known to be slow anyway.
        """
        if not _are_sound(window.compute_seconds, window.step_seconds) or window.samples.min() < 0:
            return None
        samples = window.samples if window.samples.min() > 0 else np.ones_like(window.samples)
        gc_free = subtract_gc(window)
        balanced = balance_lengths(window, samples)
        costs = window.costs or shares.fit_costs(balanced, samples)
        equal_share = (
            balanced / costs.compute_seconds(samples) * costs.compute_seconds(samples.mean(axis=1, keepdims=True))
        )
        relative = equal_share / compute_peers_median(equal_share)
        culprits = _find_persistent(relative >= threshold)
        all_slow = culprits | np.isin(np.arange(culprits.size), list(slow_ranks))
        culprits = culprits if all_slow.all() else all_slow
        common_seconds = 1.0 / np.mean(1.0 / equal_share, axis=1, keepdims=True)  # what the best shares approach
        ranks_differ = bool(_find_persistent(equal_share / common_seconds >= threshold).any())
        straggler_free = equal_share.copy()
        if culprits.any():
            straggler_free[:, culprits] /= np.maximum(np.median(relative[:, culprits], axis=0), 1.0)
        elif ranks_differ:
            straggler_free *= np.median(common_seconds / equal_share, axis=0)
        waits = np.min(window.step_seconds - window.compute_seconds, axis=1)  # of the rank that arrives last
        return cls(
            window=window,
            own=window.compute_seconds,
            gc_free=gc_free,
            length_balanced=balanced,
            equal_share=equal_share,
            straggler_free=straggler_free,
            typical_steps=_find_typical_steps(gc_free.max(axis=1)),
            shares=window.shares,
            culprits=tuple(int(rank) for rank in np.flatnonzero(culprits)),
            ranks_differ=ranks_differ,
            rank_slowdown=tuple(float(value) for value in np.median(relative, axis=0)),
            exposed_seconds=max(0.0, float(np.median(waits))),
        )

    @property
    def gc_seconds(self) -> Seconds:
        return self.own - self.gc_free

    @property
    def has_sample_counts(self) -> bool:
        return min(self.shares) > 0

    def select_relative_times(self, known: KnownRelativeTimes, threshold: float) -> dict[int, float]:
        """Return the known ranks whose time here differs from the known one only by chance.

        If it differs by more, the rank's time is what it is here: it has recovered, or has become slow by `threshold`.
        """
        error = known.error * np.sqrt(np.pi / 2 / len(self.equal_share))  # of a median
        observed = self.rank_slowdown
        return {
            rank: relative_time
            for rank, relative_time in known.relative_times.items()
            if rank < len(observed)
            and abs(relative_time - observed[rank]) < MAX_CHANCE_STANDARD_ERRORS * error
            and observed[rank] < threshold
        }

    def build_window_at(self, relative_times: Mapping[int, float]) -> AlignedWindow:
        """Return the window with these ranks at their known relative times (`select_relative_times`).

        In the few steps of the window their times differ from that by chance.
        """
        before, factor = self.window.compute_seconds, np.ones(len(self.rank_slowdown))
        for rank, relative_time in relative_times.items():
            factor[rank] = relative_time / self.rank_slowdown[rank]
        compute = before + (factor - 1.0) * subtract_gc(self.window)
        extra_seconds = compute.max(axis=1) - before.max(axis=1)  # per step, whose transfer is unchanged
        return replace(
            self.window, compute_seconds=compute, step_seconds=self.window.step_seconds + extra_seconds[:, None]
        )

    @property
    def has_slow_ranks(self) -> bool:
        """Whether ranks are slow in most steps, so that other shares would fit them."""
        return bool(self.culprits) or self.ranks_differ

    @property
    def is_uneven(self) -> bool:
        """Whether the shares differ by more than an equal division leaves over."""
        return max(self.shares) - min(self.shares) > self.window.share_granularity

    @property
    def step_seconds(self) -> float:
        """Expected step time as things are."""
        return self.compute_longest_mean(self.own) + self.exposed_seconds

    @property
    def steady_seconds(self) -> float:
        """Mean own work of the slowest rank without any bottleneck except slow ranks that come and go.

        If the steps were drawn repeatedly from few steps of ranks that do not wait for each other, the slowest rank's
        mean is too high by chance. Then its standard error is subtracted, but the result is not below the mean of all.
        """
        steady = self.straggler_free[self.typical_steps]
        means = steady.mean(axis=0)
        if not self.window.drawn_from:
            return float(means.max())
        return float(max(means.mean(), (means - steady.std(axis=0) / np.sqrt(self.window.drawn_from)).max()))

    @property
    def waits_by_chance(self) -> float:
        """Seconds of a step that a typical rank waits for the last one if only noise makes them differ.

        It is the largest of as many normal draws as ranks (Blom 1958), with the deviation of most steps.
        """
        typical_seconds = np.median(self.equal_share, axis=0)
        deviation = 1.4826 * float(np.median(np.abs(self.equal_share / typical_seconds - 1.0)))
        ranks = self.equal_share.shape[1]
        return float(np.median(typical_seconds)) * deviation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    def compute_longest_mean(self, seconds: Seconds) -> float:
        """Return the mean of the last rank's time over the usual steps."""
        return float(seconds[self.typical_steps].max(axis=1).mean())

    def with_shares(self, new_shares: tuple[int, ...]) -> StepModel:
        """Return the same steps with other shares, if the whole cost is per sample."""
        factor = np.array(new_shares) / np.array(self.shares)
        gc_free = self.gc_free * factor
        return replace(
            self,
            own=gc_free + self.gc_seconds,
            gc_free=gc_free,
            length_balanced=self.length_balanced * factor,
            shares=new_shares,
        )


def reconstruct_synchronous_window(
    windows: Sequence[RankWindow], global_batch: int | None = None
) -> AlignedWindow | None:
    """Return synchronous steps composed at random from the steps that each rank did alone. None if too little is known.

    `windows` are those of all ranks in a Local-SGD mode. `global_batch` is the number of samples of a synchronous step.
    None means the sum of the ranks' local batches. A transfer is exposed in a synchronous step to the extent that the
    backward pass cannot hide it, and that it was in the job's first steady steps.
    """
    by_rank = sorted(windows, key=lambda window: window.rank)
    transfer = find_transfer_seconds(by_rank)
    if transfer is None or [window.rank for window in by_rank] != list(range(len(by_rank))):
        return None
    same_batch_steps = [np.flatnonzero(np.asarray(window.samples) == window.samples[-1:]) for window in by_rank]
    if min(len(steps) for steps in same_batch_steps) < MIN_COMMON_STEPS:
        return None
    rng = np.random.default_rng(0)
    rows = [rng.choice(steps, size=SYNCHRONOUS_STEP_DRAWS) for steps in same_batch_steps]

    def drawn(values: Sequence[Sequence[float]]) -> Seconds:
        return np.stack(
            [np.asarray(series, dtype=np.float64)[row] for series, row in zip(values, rows, strict=True)], axis=1
        )

    compute = drawn([window.compute_seconds for window in by_rank])
    if not _are_sound(compute):
        return None
    local_batch = np.array([window.samples[-1] for window in by_rank], dtype=np.int64)
    factor = np.ones(len(by_rank))
    wanted = int(local_batch.sum()) if global_batch is None else global_batch
    granularity = find_share_granularity(by_rank, wanted, *local_batch.tolist())
    if local_batch.min() > 0 and wanted >= len(by_rank) * granularity and wanted != local_batch.sum():
        equal_shares = np.array(shares.divide_equally(wanted, len(by_rank), granularity), dtype=np.int64)
        factor, local_batch = equal_shares / local_batch, equal_shares
    compute = compute * factor
    own_seconds, baseline_seconds, baseline_exposed = (
        float(np.median(compute)),
        find_baseline_seconds(by_rank),
        find_baseline_exposed(by_rank),
    )
    usual_exposed = baseline_exposed
    if usual_exposed is None:
        usual_exposed = 0.0 if baseline_seconds is None else max(0.0, baseline_seconds - own_seconds)
    exposed = max(transfer - HIDDEN_TRANSFER_SHARE * own_seconds, min(transfer, usual_exposed))
    window = add_cost_units(
        AlignedWindow(
            steps=np.arange(SYNCHRONOUS_STEP_DRAWS),
            compute_seconds=compute,
            samples=np.broadcast_to(local_batch, compute.shape),
            step_seconds=compute,
            gc_seconds=drawn([w.gc_seconds for w in by_rank]) if all(w.gc_seconds for w in by_rank) else None,
            lengths=drawn([w.lengths for w in by_rank]) * factor if all(w.lengths for w in by_rank) else None,
            squares=drawn([w.squares for w in by_rank]) * factor if all(w.squares for w in by_rank) else None,
            baseline_seconds=baseline_seconds,
            baseline_exposed=baseline_exposed,
            share_granularity=granularity,
            drawn_from=min(len(steps) for steps in same_batch_steps),
        )
    )
    if window.squares is not None:
        window = _balance_by_cost(window)
    step_seconds = window.compute_seconds.max(axis=1, keepdims=True) + exposed
    return replace(window, step_seconds=np.repeat(step_seconds, len(by_rank), axis=1))


def find_transfer_seconds(windows: Sequence[RankWindow]) -> float | None:
    """Return the seconds of a synchronization once all ranks have arrived. None if there were too few synchronizations.

    The last rank to arrive waits for no other rank, so its time inside is only the transfer. Only the newest one
    counts: earlier ones may be minutes old, and show the former state of the links. A rank that is one ahead changes
    little.
    """
    if min((len(window.transfers) for window in windows), default=0) <= 1:
        return None
    return min(window.transfers[-1] for window in windows)


def _balance_by_cost(window: AlignedWindow) -> AlignedWindow:
    """Balance as the loader does in synchronous steps. In Local-SGD, leases are balanced within a replica only."""
    own = window.compute_seconds - subtract_gc(window) + balance_lengths(window, window.samples)
    return replace(window, compute_seconds=own, lengths=None, squares=None, sample_cost_units=None, sequence_cost=None)


def balance_lengths(window: AlignedWindow, samples: npt.NDArray[np.int64]) -> Seconds:
    """Return the own work without garbage if each step's cost units were distributed in proportion to the samples."""
    gc_free, weight = subtract_gc(window), window.sample_cost_units
    if weight is None or not _are_sound(weight):
        return gc_free
    return np.asarray(gc_free * compute_fair_parts(weight, samples) / weight)


def compute_fair_parts(weight: Seconds, samples: npt.NDArray[np.int64]) -> Seconds:
    """Return each step's cost units, distributed in proportion to the ranks' samples."""
    return np.asarray(weight.sum(axis=1, keepdims=True) * samples / samples.sum(axis=1, keepdims=True))


def _find_persistent(is_slow: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which ranks, shape (ranks,), are slow in most steps. `is_slow` has the shape (steps, ranks)."""
    return np.asarray(is_slow.mean(axis=0) >= MIN_PERSISTENT_STEPS_SHARE)


def _find_typical_steps(seconds: Seconds) -> npt.NDArray[np.bool_]:
    """Return which steps are not exceptionally long (an unrecorded pause, for example).

    `seconds` has the shape (steps,).
    """
    median = float(np.median(seconds))
    spread = 1.4826 * float(np.median(np.abs(seconds - median)))
    long = seconds > median + max(6.0 * spread, 0.15 * median)
    return ~long if long.sum() <= max(2.0, MAX_EXCEPTIONAL_STEPS_SHARE * len(seconds)) else np.ones_like(long)


def _are_sound(*seconds: Seconds) -> bool:
    return all(bool(np.isfinite(values).all() and (values > 0).all()) for values in seconds)
