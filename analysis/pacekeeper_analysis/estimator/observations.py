"""What the estimator observes: the means that heartbeats carry, and single steps where they were requested.

Arrays are by rank in their last dimension. Seconds are of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..protocol.plan import SyncMode
from ..protocol.reports import RankWindow
from ..stragglers.length_cost import SequenceCost
from ..stragglers.step_model import compute_fair_parts, find_transfer_seconds
from ..stragglers.windows import (
    AlignedWindow,
    add_cost_units,
    find_baseline_exposed,
    find_baseline_own,
    find_baseline_seconds,
    find_share_granularity,
    subtract_gc,
)
from .chain import Values


@dataclass(frozen=True)
class MetricsWindow:
    """Means over each rank's last steps with its present share, from the heartbeats."""

    last_step: int  # number of the last step that all ranks have completed
    steps: int  # of the window
    compute_seconds: Values  # own work, without waits for peers
    step_seconds: Values
    wait_seconds: Values
    samples: Values  # in a step
    baseline_seconds: float | None  # step time of the job's first steady steps
    synchronous: bool = True


@dataclass(frozen=True)
class StepWindow:
    """Single steps of all ranks, shape (steps, ranks). In a Local-SGD mode, a row has each rank's n-th last step."""

    numbers: npt.NDArray[np.int64]  # (steps,), ascending
    compute_seconds: Values
    gc_seconds: Values
    step_seconds: Values
    samples: Values
    weights: Values  # cost of the samples over that of as many usual ones
    synchronous: bool
    granularity: int = 1  # of shares
    baseline_seconds: float | None = None
    baseline_exposed: float | None = None  # of it, communication that no computation hid
    baseline_own_seconds: tuple[float, ...] = ()  # own work of each rank in the same steps; (): not known of all
    transfer_seconds: float | None = None  # of the newest synchronization in a Local-SGD mode
    sequence_cost: SequenceCost | None = None  # behind `weights`; None: the loader could not balance by it

    @classmethod
    def from_rank_windows(cls, windows: Sequence[RankWindow]) -> StepWindow | None:
        """Align the ranks' answers. None: ranks are missing, share no step, or have times that cannot be."""
        by_rank = sorted(windows, key=lambda window: window.rank)
        if not by_rank or [window.rank for window in by_rank] != list(range(len(by_rank))):
            return None
        synchronous = all(window.sync_mode in {"", SyncMode.SYNC} for window in by_rank)
        rows = _find_common_rows(by_rank) if synchronous else _find_last_rows(by_rank)
        if not len(rows[0]):
            return None

        def select(name: str) -> Values:
            columns = [getattr(window, name) or (0.0,) * len(window.steps) for window in by_rank]
            return np.stack(
                [np.asarray(c, dtype=np.float64)[row] for c, row in zip(columns, rows, strict=True)], axis=1
            )

        compute, step_seconds, samples = select("compute_seconds"), select("step_seconds"), select("samples")
        if not (np.isfinite(compute).all() and compute.min() > 0 and step_seconds.min() > 0):
            return None
        numbers = np.asarray(by_rank[0].steps, dtype=np.int64)[rows[0]]
        aligned = AlignedWindow(
            numbers,
            compute,
            np.maximum(samples, 1).astype(np.int64),
            step_seconds,
            gc_seconds=select("gc_seconds"),
            lengths=select("lengths") if all(window.lengths for window in by_rank) else None,
            squares=select("squares") if all(window.squares for window in by_rank) else None,
        )
        weights, cost = _compute_weights(aligned)
        return cls(
            numbers=numbers,
            compute_seconds=compute,
            gc_seconds=compute - subtract_gc(aligned),
            step_seconds=step_seconds,
            samples=samples,
            weights=weights,
            synchronous=synchronous,
            granularity=find_share_granularity(by_rank, *(int(count) for count in samples[-1])),
            baseline_seconds=find_baseline_seconds(by_rank),
            baseline_exposed=find_baseline_exposed(by_rank),
            baseline_own_seconds=find_baseline_own(by_rank),
            transfer_seconds=find_transfer_seconds(by_rank),
            sequence_cost=cost if aligned.squares is not None else None,
        )

    @property
    def has_shares(self) -> bool:
        """Whether the script reports its samples. A monitored one does not."""
        return bool(self.samples.min() > 0)

    @property
    def balanced_seconds(self) -> Values:
        """Own work without garbage collections, with samples of equal cost."""
        return np.asarray((self.compute_seconds - self.gc_seconds) / self.weights)

    @property
    def exposed_seconds(self) -> Values:
        """Communication of each step that no computation hides: the waits of the rank that arrives last, (steps,)."""
        return np.asarray(np.min(self.step_seconds - self.compute_seconds, axis=1))

    def select(self, rows: slice | npt.NDArray[np.bool_ | np.intp]) -> StepWindow:
        """Return the window with only these steps."""
        return replace(self, **{name: value[rows] for name, value in self._list_arrays()})

    def with_older(self, older: StepWindow | None, max_steps: int) -> StepWindow:
        """Return the window with the steps of `older` before its first one. Steps of another mode are dropped."""
        if older is None or older.synchronous != self.synchronous:
            return self
        before = dict(older.select(older.numbers < self.numbers[0])._list_arrays())
        joined: dict[str, Any] = {
            name: np.concatenate([before[name], value])[-max_steps:] for name, value in self._list_arrays()
        }
        return replace(self, **joined)

    def _list_arrays(self) -> Iterable[tuple[str, Any]]:
        return ((name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray))


def _find_common_rows(by_rank: Sequence[RankWindow]) -> list[npt.NDArray[np.intp]]:
    common = np.array(sorted(set.intersection(*(set(window.steps) for window in by_rank))), dtype=np.int64)
    return [np.searchsorted(np.asarray(window.steps, dtype=np.int64), common) for window in by_rank]


def _find_last_rows(by_rank: Sequence[RankWindow]) -> list[npt.NDArray[np.intp]]:
    count = min(len(window.steps) for window in by_rank)
    return [np.arange(len(window.steps) - count, len(window.steps)) for window in by_rank]


def _compute_weights(window: AlignedWindow) -> tuple[Values, SequenceCost | None]:
    try:
        window = add_cost_units(window)
    except InputError:
        return np.ones_like(window.compute_seconds), None
    units = window.sample_cost_units
    if units is None or not (np.isfinite(units).all() and units.min() > 0):
        return np.ones_like(window.compute_seconds), None
    return np.asarray(units / compute_fair_parts(units, window.samples)), window.sequence_cost
