"""The ranks' own work in synchronous steps, with one trouble after the other taken out: what each of them costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .. import shares
from ..reports import RankWindow
from .windows import (
    MIN_COMMON_STEPS,
    AlignedWindow,
    find_baseline_seconds,
    find_baseline_exposed,
    compute_peers_median,
    find_share_granularity,
    add_cost_units,
    subtract_gc,
)

HIDDEN_TRANSFER_SHARE = 0.33
"""Part of a step's own work that hides more of a transfer in a synchronous step than in a synchronisation: a backward
pass (two thirds of the work) instead of a forward pass (one third)."""
MIN_PERSISTENT_STEPS_SHARE = 0.8
"""Share of the window's steps in which a rank must be slow to be called a straggler: what comes and goes is noise."""
MAX_EXCEPTIONAL_STEPS_SHARE = 0.1
"""Unusually long steps are exceptions, and not judged, while they are at most this part of the window's."""
MAX_CHANCE_STANDARD_ERRORS = 3.0
"""Standard errors that what a window shows may be off by luck."""
SYNCHRONOUS_STEP_DRAWS = 256
"""Synchronous steps that are put together from the steps of ranks that do not wait for each other."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class KnownRelativeTimes:
    """Of ranks, as they are known by more steps than a window's."""

    of_rank: Mapping[int, float]  # time a sample over that of its peers' median
    error: float  # standard deviation of what one step shows of them


@dataclass(frozen=True)
class StepModel:
    """Arrays are seconds, of shape (steps, ranks)."""

    window: AlignedWindow
    own: Seconds  # own work as it is
    working: Seconds  # without garbage collections
    level: Seconds  # … and with samples that cost each rank the same for its share
    even: Seconds  # … and with equal shares
    paced: Seconds  # … and with the culprits at their peers' pace
    usual: npt.NDArray[np.bool_]  # (steps,): not exceptionally long
    shares: tuple[int, ...]
    culprits: tuple[int, ...]  # persistently slower than most ranks
    differ: bool  # persistently, the ranks' paces; without culprits where it is not a few that are slower than the rest
    rank_slowdown: tuple[float, ...]  # median cost at equal shares over the peers' median
    exposed: float  # seconds of communication in a step that no computation hides

    @classmethod
    def from_window(cls, window: AlignedWindow, threshold: float, slow: Collection[int] = ()) -> StepModel | None:
        """None where seconds are not finite and positive.

        threshold: so many times its peers' time makes a rank slow. slow: ranks that are known to be so anyway.
        """
        if not _are_sound(window.compute_seconds, window.step_seconds) or window.samples.min() < 0:
            return None
        samples = window.samples if window.samples.min() > 0 else np.ones_like(window.samples)
        working = subtract_gc(window)
        level = balance_lengths(window, samples)
        costs = window.costs or shares.fit_costs(level, samples)
        even = level / costs.compute_seconds(samples) * costs.compute_seconds(samples.mean(axis=1, keepdims=True))
        relative = even / compute_peers_median(even)
        culprits = _find_persistent(relative >= threshold)
        named = culprits | np.isin(np.arange(culprits.size), list(slow))
        culprits = culprits if named.all() else named
        common = 1.0 / np.mean(1.0 / even, axis=1, keepdims=True)  # what the best shares come near to
        differ = bool(_find_persistent(even / common >= threshold).any())
        paced = even.copy()
        if culprits.any():
            paced[:, culprits] /= np.maximum(np.median(relative[:, culprits], axis=0), 1.0)
        elif differ:
            paced *= np.median(common / even, axis=0)
        waits = np.min(window.step_seconds - window.compute_seconds, axis=1)  # of the rank that comes last
        return cls(
            window=window,
            own=window.compute_seconds,
            working=working,
            level=level,
            even=even,
            paced=paced,
            usual=_find_typical_steps(working.max(axis=1)),
            shares=window.shares,
            culprits=tuple(int(rank) for rank in np.flatnonzero(culprits)),
            differ=differ,
            rank_slowdown=tuple(float(value) for value in np.median(relative, axis=0)),
            exposed=max(0.0, float(np.median(waits))),
        )

    @property
    def gc_seconds(self) -> Seconds:
        return self.own - self.working

    @property
    def has_sample_counts(self) -> bool:
        return min(self.shares) > 0

    def select_relative_times(self, known: KnownRelativeTimes, threshold: float) -> dict[int, float]:
        """Of those known ranks that differ from it here by luck. Where that would be too much luck, a rank is what it
        is here: it has recovered, or become slow by `threshold`."""
        error = known.error * np.sqrt(np.pi / 2 / len(self.even))  # of a median
        shown = self.rank_slowdown
        return {
            rank: pace
            for rank, pace in known.of_rank.items()
            if rank < len(shown) and abs(pace - shown[rank]) < MAX_CHANCE_STANDARD_ERRORS * error and shown[rank] < threshold
        }

    def build_window_at(self, paces: Mapping[int, float]) -> AlignedWindow:
        """With these ranks as slow as is known by more steps (`select_relative_times`): in these few they are more or less so by
        luck."""
        before, factor = self.window.compute_seconds, np.ones(len(self.rank_slowdown))
        for rank, pace in paces.items():
            factor[rank] = pace / self.rank_slowdown[rank]
        compute = before + (factor - 1.0) * subtract_gc(self.window)
        longer = compute.max(axis=1) - before.max(axis=1)  # a step, whose transfer is as it was
        return replace(self.window, compute_seconds=compute, step_seconds=self.window.step_seconds + longer[:, None])

    @property
    def has_slow_ranks(self) -> bool:
        """In most steps, so that other shares would fit them."""
        return bool(self.culprits) or self.differ

    @property
    def is_uneven(self) -> bool:
        """The shares, by more than what an equal division leaves over."""
        return max(self.shares) - min(self.shares) > self.window.share_grain

    @property
    def step_seconds(self) -> float:
        """Expected of a step as things are."""
        return self.compute_longest_mean(self.own) + self.exposed

    @property
    def steady_seconds(self) -> float:
        """Mean own work of the slowest rank, with every trouble taken out but that slow ranks come and go.

        Of ranks that did not wait for each other, whose few steps were put together again and again, the slowest one's
        mean is high by luck: less its standard error, but not less than the mean of all.
        """
        paced = self.paced[self.usual]
        means = paced.mean(axis=0)
        if not self.window.drawn_from:
            return float(means.max())
        return float(max(means.mean(), (means - paced.std(axis=0) / np.sqrt(self.window.drawn_from)).max()))

    @property
    def waits_by_chance(self) -> float:
        """Seconds of a step that the usual rank waits for the last one, where nothing but noise makes them differ: the
        largest of as many normal draws (Blom 1958), whose deviation is that of most steps."""
        usual = np.median(self.even, axis=0)
        deviation = 1.4826 * float(np.median(np.abs(self.even / usual - 1.0)))
        ranks = self.even.shape[1]
        return float(np.median(usual)) * deviation * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    def compute_longest_mean(self, seconds: Seconds) -> float:
        """Mean over the usual steps of the last rank's time."""
        return float(seconds[self.usual].max(axis=1).mean())

    def with_shares(self, new: tuple[int, ...]) -> StepModel:
        """The same steps with other shares, as far as the whole cost is per sample."""
        factor = np.array(new) / np.array(self.shares)
        working = self.working * factor
        return replace(self, own=working + self.gc_seconds, working=working, level=self.level * factor, shares=new)


def reconstruct_synchronous_window(windows: Sequence[RankWindow], global_batch: int = 0) -> AlignedWindow | None:
    """Synchronous steps put together at random from the steps that each rank did alone; None: too little is known.

    windows: of all ranks in a Local-SGD mode. global_batch: samples of a synchronous step; 0: as many as the ranks'
    local batches together. A transfer shows in a synchronous step as far as the backward pass cannot hide it, and as
    far as it did in the job's first steady steps.
    """
    by_rank = sorted(windows, key=lambda window: window.rank)
    transfer = find_transfer_seconds(by_rank)
    if transfer is None or [window.rank for window in by_rank] != list(range(len(by_rank))):
        return None
    alike = [np.flatnonzero(np.asarray(window.samples) == window.samples[-1:]) for window in by_rank]
    if min(len(steps) for steps in alike) < MIN_COMMON_STEPS:
        return None
    random = np.random.default_rng(0)
    rows = [random.choice(steps, size=SYNCHRONOUS_STEP_DRAWS) for steps in alike]

    def drawn(values: Sequence[Sequence[float]]) -> Seconds:
        return np.stack([np.asarray(of, dtype=np.float64)[row] for of, row in zip(values, rows, strict=True)], axis=1)

    compute = drawn([window.compute_seconds for window in by_rank])
    if not _are_sound(compute):
        return None
    local_batch = np.array([window.samples[-1] for window in by_rank], dtype=np.int64)
    factor = np.ones(len(by_rank))
    grain = find_share_granularity(by_rank, global_batch, *local_batch.tolist())
    if local_batch.min() > 0 and global_batch >= len(by_rank) * grain and global_batch != local_batch.sum():
        share = np.array(shares.divide_equally(global_batch, len(by_rank), grain), dtype=np.int64)
        factor, local_batch = share / local_batch, share
    compute = compute * factor
    own, first, before = float(np.median(compute)), find_baseline_seconds(by_rank), find_baseline_exposed(by_rank)
    exposed = max(transfer - HIDDEN_TRANSFER_SHARE * own, min(transfer, max(0.0, first - own) if before is None else before))
    window = add_cost_units(
        AlignedWindow(
            steps=np.arange(SYNCHRONOUS_STEP_DRAWS),
            compute_seconds=compute,
            samples=np.broadcast_to(local_batch, compute.shape),
            step_seconds=compute,
            garbage_seconds=drawn([w.garbage_seconds for w in by_rank])
            if all(w.garbage_seconds for w in by_rank)
            else None,
            lengths=drawn([w.lengths for w in by_rank]) * factor if all(w.lengths for w in by_rank) else None,
            squares=drawn([w.squares for w in by_rank]) * factor if all(w.squares for w in by_rank) else None,
            baseline_seconds=first,
            baseline_exposed=before,
            share_grain=grain,
            drawn_from=min(len(steps) for steps in alike),
        )
    )
    if window.squares is not None:
        window = _balance_by_cost(window)
    together = window.compute_seconds.max(axis=1, keepdims=True) + exposed
    return replace(window, step_seconds=np.repeat(together, len(by_rank), axis=1))


def find_transfer_seconds(windows: Sequence[RankWindow]) -> float | None:
    """What a synchronisation takes once all ranks are there; None: there were too few.

    Whoever comes last waits for nobody, so its time inside is the transfer alone. It is the newest that counts: those
    before, which may be minutes old, say how the links were. A rank that is one ahead changes little.
    """
    if min((len(window.transfers) for window in windows), default=0) < 2:
        return None
    return min(window.transfers[-1] for window in windows)


def _balance_by_cost(window: AlignedWindow) -> AlignedWindow:
    """As the loader deals in synchronous steps, which it balances: leases are balanced within a replica only."""
    own = window.compute_seconds - subtract_gc(window) + balance_lengths(window, window.samples)
    return replace(window, compute_seconds=own, lengths=None, squares=None, weight=None, sequence_cost=None)


def balance_lengths(window: AlignedWindow, samples: npt.NDArray[np.int64]) -> Seconds:
    """Own work without garbage, as it would be had each step's cost units been dealt in proportion to the samples."""
    working, weight = subtract_gc(window), window.weight
    if weight is None or not _are_sound(weight):
        return working
    return np.asarray(working * compute_fair_parts(weight, samples) / weight)


def compute_fair_parts(weight: Seconds, samples: npt.NDArray[np.int64]) -> Seconds:
    """Each step's cost units, dealt in proportion to the ranks' samples."""
    return np.asarray(weight.sum(axis=1, keepdims=True) * samples / samples.sum(axis=1, keepdims=True))


def _find_persistent(slow: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(ranks,): slow in most steps. slow: (steps, ranks)."""
    return np.asarray(slow.mean(axis=0) >= MIN_PERSISTENT_STEPS_SHARE)


def _find_typical_steps(seconds: Seconds) -> npt.NDArray[np.bool_]:
    """Which steps are not exceptionally long (a hiccup, a pause that nobody recorded). seconds: (steps,)."""
    median = float(np.median(seconds))
    spread = 1.4826 * float(np.median(np.abs(seconds - median)))
    long = seconds > median + max(6.0 * spread, 0.15 * median)
    return ~long if long.sum() <= max(2.0, MAX_EXCEPTIONAL_STEPS_SHARE * len(seconds)) else np.ones_like(long)


def _are_sound(*seconds: Seconds) -> bool:
    return all(bool(np.isfinite(each).all() and (each > 0).all()) for each in seconds)
