"""Ranks that are a little slower than their peers, window after window: one window could not tell that from luck.

Pure. A window is so many steps as a worker's figures are of; those that are looked at here follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.diagnose.windows import MINIMAL_STEPS, peers_median
from pacekeeper_analysis.diagnose.work import KnownPaces

from ..observation import Lasting, Metrics
from .figures import SHORTEST, Rows

Values = npt.NDArray[np.float32]

MOST_WINDOWS, LEAST_WINDOWS = 16, 4
"""That are kept; and that it takes to tell: one by one, ranks are held up by accident."""
OF_THE_EXCESS, SHOWING = 0.4, 0.2
"""Of the threshold's excess: what a rank takes more than its peers by all of its windows, at least; and by each."""
CLEARLY = 5.0
"""Standard errors above its peers that a rank is in most of its windows, at least: among thousands, looked at for
days."""
UNSTEADY = 2.0
"""Times the noise of all ranks: from here on a rank's own counts, which its few windows tell less well."""
LONGEST = 1e6
"""Seconds a sample that somebody may mean."""
SIMILAR = 1.3
"""Times the smallest share. What a step costs whatever its samples makes a rank with few of them look slow."""
HAVE_SPOKEN = 0.75
"""Share of the ranks whose figures have to be others: they are told in five digits, so that some are the same by
chance."""
NORMAL = 0.9539
"""Median distance of two draws from a normal distribution, over its standard deviation."""


@dataclass(frozen=True)
class Paces:
    """Of the ranks of one membership: own work a sample over their peers' median, the newest window last."""

    membership: int = 0
    ends: tuple[float, ...] = ()  # seconds since the epoch, when each window was told of
    windows: tuple[Values, ...] = ()  # (ranks,), in the order of the plan
    lasting: Lasting | None = None  # ranks that are slow in them
    told: npt.NDArray[np.float64] | None = None  # seconds a sample, as the newest of them was told
    next_at: float = 0.0  # from when on there may be another
    similar: bool = True  # the shares are, so that windows can be compared

    @property
    def unsettled(self) -> bool:
        """Whether it is not known yet that no rank is a little slow."""
        return self.similar and len(self.windows) < LEAST_WINDOWS

    def beside(self, metrics: Metrics) -> Metrics:
        """With what is known of them."""
        return replace(metrics, lasting=self.lasting, unsettled=self.unsettled)


def seen(before: Paces, rows: Rows, membership: int, threshold: float, now: float) -> Paces:
    """With what all ranks tell now, where that is of steps that nothing before was of.

    rows: of all ranks, in the order of the plan. threshold: so many times its peers' time makes a rank slow. Under
    shares that differ by more than SIMILAR nothing is told.
    """
    window = before.next_at - before.ends[-1] if before.ends else 0.0
    if membership != before.membership or now > before.next_at + MOST_WINDOWS * window:
        before = Paces(membership)  # other ranks, or nobody knows how they were in between
    if not len(rows):
        return before
    if rows["share"].max() > SIMILAR * rows["share"].min():
        return Paces(membership, similar=False)
    if now < before.next_at or rows["steps"].min() < MINIMAL_STEPS:
        return before
    told = rows["compute_seconds_per_sample"].copy()
    if not (told.min() > SHORTEST and told.max() < LONGEST):
        return before
    if before.told is not None and (told != before.told).mean() < HAVE_SPOKEN:
        return before
    ends = (*before.ends, now)[-MOST_WINDOWS:]
    windows = (*before.windows, (told / peers_median(told[None])[0]).astype(np.float32))[-MOST_WINDOWS:]
    found = None
    if len(windows) >= LEAST_WINDOWS:
        found = _lasting(windows, ends, rows["rank"].tolist(), int(rows["steps"].min()), threshold - 1.0)
    return Paces(membership, ends, windows, found, told, now + float(rows["steps"].max() * rows["step_seconds"].max()))


def _lasting(
    windows: Sequence[Values], ends: Sequence[float], ranks: Sequence[int], steps: int, excess: float
) -> Lasting | None:
    """Ranks that take more than their peers' time, by OF_THE_EXCESS and the lower median of their newest windows, of as
    many as tell it: in half of them, they may have been held up. A single step that takes long lengthens its whole
    window, so that three of four have to be CLEARLY above their peers. None: there are none, or it may be luck. One
    that the newest window does not show may have recovered: it is as slow as it shows there. steps: of a window."""
    paces = np.stack(windows)[::-1]  # the newest first
    away = np.abs(np.diff(paces, axis=0)) / NORMAL
    noise, own = float(np.median(away)), np.median(away, axis=0)
    error = np.where(own > UNSTEADY * noise, own, noise)
    shows = paces >= 1.0 + SHOWING * excess
    in_a_row = np.logical_and.accumulate(_but_for_one(shows), axis=0).sum(axis=0)
    told, pace = np.zeros_like(in_a_row), paces[0]
    for count in range(LEAST_WINDOWS, len(paces) + 1):
        newest = np.sort(paces[:count], axis=0)
        median, most = newest[(count - 1) // 2], newest[(count - 1) // 4]
        surely = (median >= 1.0 + OF_THE_EXCESS * excess) & (most >= 1.0 + CLEARLY * error / math.sqrt(count))
        is_told = surely & (in_a_row >= count)
        told, pace = np.where(is_told, count, told), np.where(is_told, median, pace)
    found = np.flatnonzero(told).tolist()
    if not found:
        return None
    stands_out = shows & (np.arange(len(paces))[:, None] < told)
    first = int(np.flatnonzero(stands_out[:, found].any(axis=1)).max())
    now = np.where(shows[0], pace, paces[0])
    known = KnownPaces({ranks[at]: float(now[at]) for at in found}, noise * math.sqrt(steps))
    return Lasting(known, ends[-1 - first])


def _but_for_one(shows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """With single windows between others that show it taken for such, too; the newest may be one. (windows, ranks)."""
    newer = np.vstack([np.ones_like(shows[:1]), shows[:-1]])
    older = np.vstack([shows[1:], np.zeros_like(shows[:1])])
    return np.asarray(shows | (newer & older))
