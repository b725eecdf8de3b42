"""Detection of ranks that are a little slower than their peers in many windows.

One window cannot tell that from chance. A window has as many steps as a worker's statistics cover; the windows used
here are consecutive. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.stragglers.step_model import KnownRelativeTimes
from pacekeeper_analysis.stragglers.windows import MIN_COMMON_STEPS, compute_peers_median

from ..state.job_metrics import JobMetrics, PersistentSlowness
from .rank_metrics import MIN_KNOWN_VALUE, RankRows

WindowTimes = npt.NDArray[np.float32]

MAX_KEPT_WINDOWS, MIN_PERSISTENT_WINDOWS = 16, 4
"""Windows that are kept; and the fewest for a detection: in a single window, ranks are delayed by chance."""
MIN_MEDIAN_EXCESS_SHARE, MIN_WINDOW_EXCESS_SHARE = 0.4, 0.2
"""Shares of the threshold's excess over 1.

A rank exceeds its peers by these in the median of its windows, and in each.
"""
MIN_STANDARD_ERRORS = 5.0
"""Standard errors by which a rank exceeds its peers in most of its windows, at least.

That many because thousands of ranks are tested for days.
"""
NOISY_RANK_RATIO = 2.0
"""Times the noise of all ranks: above it a rank's own noise is used, which a few windows estimate less well."""
MAX_SECONDS_PER_SAMPLE = 1e6
"""Highest plausible seconds per sample."""
MAX_SHARE_RATIO = 1.3
"""Highest ratio of the largest share to the smallest.

The part of a step that does not depend on the samples makes a rank with few of them look slow.
"""
MIN_CHANGED_RANK_SHARE = 0.75
"""Share of the ranks whose statistics must have changed.

They are reported in five digits, so that some stay equal by chance.
"""
MEDIAN_DISTANCE_PER_SIGMA = 0.9539
"""Median distance of two draws from a normal distribution, relative to its standard deviation."""


@dataclass(frozen=True)
class RelativeTimeHistory:
    """The history of the ranks of one membership.

    A value is a rank's own work per sample relative to its peers' median. The newest window is last.
    """

    membership: int = 0
    window_ends: tuple[float, ...] = ()  # seconds since the epoch, when each window was received
    windows: tuple[WindowTimes, ...] = ()  # (ranks,), in the order of the plan
    persistent_slowness: PersistentSlowness | None = None  # ranks that are slow in these windows
    last_seconds_per_sample: npt.NDArray[np.float64] | None = None  # as last received
    next_window_at: float = 0.0  # earliest time of another window, in seconds since the epoch
    has_similar_shares: bool = True  # the shares are similar, so that windows can be compared

    @property
    def needs_more_windows(self) -> bool:
        """Whether more windows are needed to rule out that a rank is a little slow."""
        return self.has_similar_shares and len(self.windows) < MIN_PERSISTENT_WINDOWS

    def add_to_metrics(self, metrics: JobMetrics) -> JobMetrics:
        """Return the metrics with what the history shows."""
        return replace(
            metrics, persistent_slowness=self.persistent_slowness, needs_more_windows=self.needs_more_windows
        )


def add_window(
    history: RelativeTimeHistory, rows: RankRows, membership: int, threshold: float, now: float
) -> RelativeTimeHistory:
    """Return the history with the present statistics of all ranks, if they cover only steps of no earlier window.

    `rows` has all ranks, in the order of the plan. `threshold` is the relative time from which a rank is slow. If
    shares differ by more than MAX_SHARE_RATIO, the history is empty.
    """
    window = history.next_window_at - history.window_ends[-1] if history.window_ends else 0.0
    if membership != history.membership or now > history.next_window_at + MAX_KEPT_WINDOWS * window:
        history = RelativeTimeHistory(membership)  # other ranks, or a gap in the history
    if not len(rows):
        return history
    if rows["share"].max() > MAX_SHARE_RATIO * rows["share"].min():
        return RelativeTimeHistory(membership, has_similar_shares=False)
    if now < history.next_window_at or rows["steps"].min() < MIN_COMMON_STEPS:
        return history
    seconds_per_sample = rows["compute_seconds_per_sample"].copy()
    if not (seconds_per_sample.min() > MIN_KNOWN_VALUE and seconds_per_sample.max() < MAX_SECONDS_PER_SAMPLE):
        return history
    if (
        history.last_seconds_per_sample is not None
        and (seconds_per_sample != history.last_seconds_per_sample).mean() < MIN_CHANGED_RANK_SHARE
    ):
        return history
    ends = (*history.window_ends, now)[-MAX_KEPT_WINDOWS:]
    windows = (
        *history.windows,
        (seconds_per_sample / compute_peers_median(seconds_per_sample[None])[0]).astype(np.float32),
    )[-MAX_KEPT_WINDOWS:]
    slowness = None
    if len(windows) >= MIN_PERSISTENT_WINDOWS:
        slowness = _find_persistently_slow(
            windows, ends, rows["rank"].tolist(), int(rows["steps"].min()), threshold - 1.0
        )
    return RelativeTimeHistory(
        membership,
        ends,
        windows,
        slowness,
        seconds_per_sample,
        now + float(rows["steps"].max() * rows["step_seconds"].max()),
    )


def _find_persistently_slow(
    windows: Sequence[WindowTimes], ends: Sequence[float], ranks: Sequence[int], steps: int, excess: float
) -> PersistentSlowness | None:
    """Return the persistently slow ranks; None: there are none, or it may be chance.

    A rank counts if the lower median of its newest windows exceeds its peers by MIN_MEDIAN_EXCESS_SHARE. Any number of
    newest windows will do, from MIN_PERSISTENT_WINDOWS on. In half of them it may have been delayed by others. A single
    long step lengthens its whole window, so three of four have to exceed the peers by MIN_STANDARD_ERRORS. A rank that
    the newest window does not show may have recovered: it is as slow as it is there. `steps` is the number of steps of
    a window.
    """
    relative_times = np.stack(windows)[::-1]  # the newest first
    distances = np.abs(np.diff(relative_times, axis=0)) / MEDIAN_DISTANCE_PER_SIGMA
    noise, rank_noise = float(np.median(distances)), np.median(distances, axis=0)
    error = np.where(rank_noise > NOISY_RANK_RATIO * noise, rank_noise, noise)
    exceeds = relative_times >= 1.0 + MIN_WINDOW_EXCESS_SHARE * excess
    streaks = np.logical_and.accumulate(_bridge_single_gaps(exceeds), axis=0).sum(axis=0)
    slow_counts, median_times = np.zeros_like(streaks), relative_times[0]
    for count in range(MIN_PERSISTENT_WINDOWS, len(relative_times) + 1):
        newest = np.sort(relative_times[:count], axis=0)
        median, lower_quartile = newest[(count - 1) // 2], newest[(count - 1) // 4]
        is_significant = (median >= 1.0 + MIN_MEDIAN_EXCESS_SHARE * excess) & (
            lower_quartile >= 1.0 + MIN_STANDARD_ERRORS * error / math.sqrt(count)
        )
        is_slow = is_significant & (streaks >= count)
        slow_counts, median_times = np.where(is_slow, count, slow_counts), np.where(is_slow, median, median_times)
    indexes = np.flatnonzero(slow_counts).tolist()
    if not indexes:
        return None
    slow_windows = exceeds & (np.arange(len(relative_times))[:, None] < slow_counts)
    first_window = int(np.flatnonzero(slow_windows[:, indexes].any(axis=1)).max())
    current = np.where(exceeds[0], median_times, relative_times[0])
    known_times = KnownRelativeTimes(
        {ranks[index]: float(current[index]) for index in indexes}, noise * math.sqrt(steps)
    )
    return PersistentSlowness(known_times, ends[-1 - first_window])


def _bridge_single_gaps(exceeds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return `exceeds`, of shape (windows, ranks), with single gaps between windows that show it filled.

    The newest may be a gap.
    """
    newer = np.vstack([np.ones_like(exceeds[:1]), exceeds[:-1]])
    older = np.vstack([exceeds[1:], np.zeros_like(exceeds[:1])])
    return np.asarray(exceeds | (newer & older))
