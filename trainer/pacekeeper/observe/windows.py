"""A rank's last steps, kept from its records: what is measured of a rank, and its window for the operator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.diagnose.windows import count_window_steps
from pacekeeper_analysis.plan import SYNC_MODES, SyncMode
from pacekeeper_analysis.records import RecordKind, Phase
from pacekeeper_analysis.reports import RankWindow

BASELINE_SKIPPED_STEPS = 5
"""The first steps of a job warm caches and allocators up: the baseline comes after them."""
BASELINE_WINDOWS = 8
"""The fastest of so many windows is the baseline: while a job starts, its nodes are busy with more than its steps.
Later ones do not count, or luck would make it ever faster."""
MAX_EARLIER_SHARE_STEPS = 8
"""So many of the steps that had another share than the newest stay in a rank's window: they tell its fixed cost from
that of a sample."""


@dataclass(frozen=True)
class StepTimes:
    """One optimizer step of the rank. `compute_seconds` is its own work: the step without waits for peers."""

    step: int
    step_seconds: float
    compute_seconds: float
    samples: int
    gc_seconds: float
    """Of it, in Python garbage collections."""
    lengths: tuple[float, float] | None = None
    """Of its samples in sum, and their squares in sum (0: not known); None: not known."""


class RankHistory:
    """The last steps of one rank, over all of its rounds here: as many as `count_window_steps` says.

    window_steps: at most.
    """

    def __init__(self, window_steps: int) -> None:
        self._window_steps = window_steps
        self._steps: deque[StepTimes] = deque()
        self._seconds = 0.0  # that they took
        self._earlier: deque[StepTimes] = deque(maxlen=MAX_EARLIER_SHARE_STEPS)
        self._transfers: deque[float] = deque(maxlen=window_steps)
        self._mode = 0
        self._garbage = 0.0  # seconds, since the last step
        self._lengths: tuple[float, float] | None = None  # of the step whose record comes next
        self._is_whole = True  # the step that is under way, as far as it was recorded
        self._skipped = 0
        self._early: list[StepTimes] = []  # of the window that may become the baseline
        self._early_windows = 0
        self._baseline: tuple[float, float] | None = None
        self.steps_total = 0
        self.samples_total = 0
        self.collective_seconds_total = 0.0
        self.gc_seconds_total = 0.0

    def add(self, records: NDArray[np.void], behind_gap: bool = False) -> None:
        """Take in new records (`records.RECORD`), oldest first. The first step of a round is no training yet.

        behind_gap: whether there were others before them that nobody has read. What is known of the step that they
        belong to is a part of it, and enters no window.
        """
        if behind_gap:
            self._garbage, self._lengths, self._is_whole = 0.0, None, False
        collectives = records[records["kind"] == RecordKind.COLLECTIVE]
        self.collective_seconds_total += float((collectives["end_ns"] - collectives["start_ns"]).sum()) * 1e-9
        self.steps_total += int((records["kind"] == RecordKind.STEP).sum())
        # A step's own work is the record with its start: in Local-SGD modes numbers of steps may come again.
        own_work = {int(record["start_ns"]): record for record in records[records["kind"] == RecordKind.COMPUTE]}
        kept = np.isin(records["kind"], (RecordKind.STEP, RecordKind.GARBAGE, RecordKind.SYNCHRONISATION, RecordKind.LENGTHS))
        for record in records[kept]:
            seconds = _compute_duration(record)
            if record["kind"] == RecordKind.GARBAGE:
                self._garbage += seconds
                self.gc_seconds_total += seconds
            elif record["kind"] == RecordKind.SYNCHRONISATION:
                self._transfers.append(float(record["value"]))
            elif record["kind"] == RecordKind.LENGTHS:
                self._lengths = float(record["value"]), float(record["bytes"])
            else:
                garbage, self._garbage = self._garbage, 0.0
                lengths, self._lengths = self._lengths, None
                is_whole, self._is_whole = self._is_whole, True
                if record["phase"] == Phase.TRAIN and is_whole:
                    own = _compute_duration(own_work.get(int(record["start_ns"]), record))
                    step = StepTimes(int(record["step"]), seconds, own, int(record["value"]), garbage, lengths)
                    self.append(step, int(record["flags"]))

    def append(self, step: StepTimes, mode: int) -> None:
        """Take in one step. `mode`: position in plan.SyncMode of the one that was in force."""
        if mode != self._mode:
            self._mode = mode
            self.start_round()
        self._steps.append(step)
        self._seconds += step.step_seconds
        while len(self._steps) > count_window_steps(self._window_steps, self._seconds / len(self._steps)):
            oldest = self._steps.popleft()
            self._seconds -= oldest.step_seconds
            if SYNC_MODES[mode] is SyncMode.SYNC and oldest.samples != step.samples:
                self._earlier.append(oldest)
        self.samples_total += step.samples
        if SYNC_MODES[mode] is SyncMode.SYNC and self._early_windows < BASELINE_WINDOWS:
            self._update_baseline(step)

    def start_round(self) -> None:
        """Steps of another round are no longer comparable: members and shares may differ."""
        self._steps.clear()
        self._seconds = 0.0
        self._earlier.clear()
        self._transfers.clear()

    def build_window(self, rank: int, managed: bool = True, share_granularity: int = 1) -> RankWindow:
        """Of steps in one mode only. `steered`: whether the script has modes."""
        steps = [*self._earlier, *self._steps]
        known = [step.lengths for step in steps if step.lengths is not None]
        lengths = tuple(total for total, _ in known) if len(known) == len(steps) else ()
        squares = tuple(total for _, total in known)
        return RankWindow(
            rank=rank,
            steps=tuple(step.step for step in steps),
            step_seconds=tuple(step.step_seconds for step in steps),
            compute_seconds=tuple(step.compute_seconds for step in steps),
            samples=tuple(step.samples for step in steps),
            garbage_seconds=tuple(step.gc_seconds for step in steps),
            lengths=lengths,
            squares=squares if lengths and min(squares) > 0 else (),
            sync_mode=SYNC_MODES[self._mode] if managed else "",
            transfers=tuple(self._transfers),
            baseline_seconds=self.first_steps_seconds or 0.0,
            baseline_own_seconds=self.first_steps_own_seconds or 0.0,
            share_grain=share_granularity,
        )

    @property
    def step_seconds(self) -> float | None:
        """Mean over the window; None before the first step."""
        return _compute_mean(step.step_seconds for step in self._steps)

    @property
    def compute_seconds(self) -> float | None:
        return _compute_mean(step.compute_seconds for step in self._steps)

    @property
    def wait_seconds(self) -> float | None:
        """Mean wait for peers in a step."""
        step, own = self.step_seconds, self.compute_seconds
        return None if step is None or own is None else max(0.0, step - own)

    @property
    def steps(self) -> Sequence[StepTimes]:
        """Of the window, oldest first."""
        return tuple(self._steps)

    @property
    def compute_seconds_per_sample(self) -> float | None:
        """A script that is only watched tells no samples and counts as one a step."""
        return _compute_mean(step.compute_seconds / max(step.samples, 1) for step in self._steps)

    @property
    def synchronization_seconds(self) -> float | None:
        """Mean time that a synchronisation in Local-SGD modes held the rank up; None: there was none."""
        return _compute_mean(self._transfers)

    @property
    def first_steps_seconds(self) -> float | None:
        """Median step time in the fastest of the first windows; None until there is one."""
        return None if self._baseline is None else self._baseline[0]

    @property
    def first_steps_own_seconds(self) -> float | None:
        """Median own work in it."""
        return None if self._baseline is None else self._baseline[1]

    def _update_baseline(self, step: StepTimes) -> None:
        if self._skipped < BASELINE_SKIPPED_STEPS:
            self._skipped += 1
            return
        self._early.append(step)
        if len(self._early) < self._window_steps:
            return
        found = median(each.step_seconds for each in self._early), median(each.compute_seconds for each in self._early)
        self._baseline = found if self._baseline is None else min(found, self._baseline)
        self._early_windows += 1
        self._early.clear()


def _compute_duration(record: np.void) -> float:
    return float(record["end_ns"] - record["start_ns"]) * 1e-9


def _compute_mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
