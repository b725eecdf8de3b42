"""Ranks that are a little slower than their peers, window after window: one window could not tell that from luck.

Pure. A window is so many steps as a worker's figures are of; those that are looked at here follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.diagnose.windows import MIN_COMMON_STEPS, compute_peers_median
from pacekeeper_analysis.diagnose.work import KnownRelativeTimes

from ..observation import PersistentSlowness, JobMetrics
from .figures import MIN_KNOWN_VALUE, RankRows

WindowTimes = npt.NDArray[np.float32]

MAX_KEPT_WINDOWS, MIN_PERSISTENT_WINDOWS = 16, 4
"""That are kept; and that it takes to tell: one by one, ranks are held up by accident."""
MIN_MEDIAN_EXCESS_SHARE, MIN_WINDOW_EXCESS_SHARE = 0.4, 0.2
"""Of the threshold's excess: what a rank takes more than its peers by all of its windows, at least; and by each."""
MIN_STANDARD_ERRORS = 5.0
"""Standard errors above its peers that a rank is in most of its windows, at least: among thousands, looked at for
days."""
NOISY_RANK_RATIO = 2.0
"""Times the noise of all ranks: from here on a rank's own counts, which its few windows tell less well."""
MAX_SECONDS_PER_SAMPLE = 1e6
"""Seconds a sample that somebody may mean."""
MAX_SHARE_RATIO = 1.3
"""Times the smallest share. What a step costs whatever its samples makes a rank with few of them look slow."""
MIN_CHANGED_RANK_SHARE = 0.75
"""Share of the ranks whose figures have to be others: they are told in five digits, so that some are the same by
chance."""
MEDIAN_DISTANCE_PER_SIGMA = 0.9539
"""Median distance of two draws from a normal distribution, over its standard deviation."""


@dataclass(frozen=True)
class RelativeTimeHistory:
    """Of the ranks of one membership: own work a sample over their peers' median, the newest window last."""

    membership: int = 0
    window_ends: tuple[float, ...] = ()  # seconds since the epoch, when each window was told of
    windows: tuple[WindowTimes, ...] = ()  # (ranks,), in the order of the plan
    persistent_slowness: PersistentSlowness | None = None  # ranks that are slow in them
    last_seconds_per_sample: npt.NDArray[np.float64] | None = None  # seconds a sample, as the newest of them was told
    next_window_at: float = 0.0  # from when on there may be another
    has_similar_shares: bool = True  # the shares are, so that windows can be compared

    @property
    def needs_more_windows(self) -> bool:
        """Whether it is not known yet that no rank is a little slow."""
        return self.has_similar_shares and len(self.windows) < MIN_PERSISTENT_WINDOWS

    def add_to_metrics(self, metrics: JobMetrics) -> JobMetrics:
        """With what is known of them."""
        return replace(metrics, lasting=self.persistent_slowness, unsettled=self.needs_more_windows)


def add_window(before: RelativeTimeHistory, rows: RankRows, membership: int, threshold: float, now: float) -> RelativeTimeHistory:
    """With what all ranks tell now, where that is of steps that nothing before was of.

    rows: of all ranks, in the order of the plan. threshold: so many times its peers' time makes a rank slow. Under
    shares that differ by more than MAX_SHARE_RATIO nothing is told.
    """
    window = before.next_window_at - before.window_ends[-1] if before.window_ends else 0.0
    if membership != before.membership or now > before.next_window_at + MAX_KEPT_WINDOWS * window:
        before = RelativeTimeHistory(membership)  # other ranks, or nobody knows how they were in between
    if not len(rows):
        return before
    if rows["share"].max() > MAX_SHARE_RATIO * rows["share"].min():
        return RelativeTimeHistory(membership, has_similar_shares=False)
    if now < before.next_window_at or rows["steps"].min() < MIN_COMMON_STEPS:
        return before
    told = rows["compute_seconds_per_sample"].copy()
    if not (told.min() > MIN_KNOWN_VALUE and told.max() < MAX_SECONDS_PER_SAMPLE):
        return before
    if before.last_seconds_per_sample is not None and (told != before.last_seconds_per_sample).mean() < MIN_CHANGED_RANK_SHARE:
        return before
    ends = (*before.window_ends, now)[-MAX_KEPT_WINDOWS:]
    windows = (*before.windows, (told / compute_peers_median(told[None])[0]).astype(np.float32))[-MAX_KEPT_WINDOWS:]
    found = None
    if len(windows) >= MIN_PERSISTENT_WINDOWS:
        found = _find_persistently_slow(windows, ends, rows["rank"].tolist(), int(rows["steps"].min()), threshold - 1.0)
    return RelativeTimeHistory(membership, ends, windows, found, told, now + float(rows["steps"].max() * rows["step_seconds"].max()))


def _find_persistently_slow(
    windows: Sequence[WindowTimes], ends: Sequence[float], ranks: Sequence[int], steps: int, excess: float
) -> PersistentSlowness | None:
    """Ranks that take more than their peers' time, by MIN_MEDIAN_EXCESS_SHARE and the lower median of their newest windows, of as
    many as tell it: in half of them, they may have been held up. A single step that takes long lengthens its whole
    window, so that three of four have to be CLEARLY above their peers. None: there are none, or it may be luck. One
    that the newest window does not show may have recovered: it is as slow as it shows there. steps: of a window."""
    paces = np.stack(windows)[::-1]  # the newest first
    away = np.abs(np.diff(paces, axis=0)) / MEDIAN_DISTANCE_PER_SIGMA
    noise, own = float(np.median(away)), np.median(away, axis=0)
    error = np.where(own > NOISY_RANK_RATIO * noise, own, noise)
    shows = paces >= 1.0 + MIN_WINDOW_EXCESS_SHARE * excess
    in_a_row = np.logical_and.accumulate(_bridge_single_gaps(shows), axis=0).sum(axis=0)
    told, pace = np.zeros_like(in_a_row), paces[0]
    for count in range(MIN_PERSISTENT_WINDOWS, len(paces) + 1):
        newest = np.sort(paces[:count], axis=0)
        median, most = newest[(count - 1) // 2], newest[(count - 1) // 4]
        surely = (median >= 1.0 + MIN_MEDIAN_EXCESS_SHARE * excess) & (most >= 1.0 + MIN_STANDARD_ERRORS * error / math.sqrt(count))
        is_told = surely & (in_a_row >= count)
        told, pace = np.where(is_told, count, told), np.where(is_told, median, pace)
    found = np.flatnonzero(told).tolist()
    if not found:
        return None
    stands_out = shows & (np.arange(len(paces))[:, None] < told)
    first = int(np.flatnonzero(stands_out[:, found].any(axis=1)).max())
    now = np.where(shows[0], pace, paces[0])
    known = KnownRelativeTimes({ranks[at]: float(now[at]) for at in found}, noise * math.sqrt(steps))
    return PersistentSlowness(known, ends[-1 - first])


def _bridge_single_gaps(shows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """With single windows between others that show it taken for such, too; the newest may be one. (windows, ranks)."""
    newer = np.vstack([np.ones_like(shows[:1]), shows[:-1]])
    older = np.vstack([shows[1:], np.zeros_like(shows[:1])])
    return np.asarray(shows | (newer & older))
