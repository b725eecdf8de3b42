"""A rank's last steps, from its records: statistics of the rank, and its window for the operator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.protocol.plan import SYNC_MODES, SyncMode
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.stragglers.windows import count_window_steps
from pacekeeper_rank.records import Phase, RecordKind

BASELINE_SKIPPED_STEPS = 5
"""Number of first steps of a job that are excluded from the baseline, because they warm up caches and allocators."""
BASELINE_WINDOWS = 8
"""Number of first windows, the fastest of which is the baseline.

While a job starts, its nodes are busy with other work, too. Later windows do not count, or chance would make the
baseline ever faster.
"""
MAX_EARLIER_SHARE_STEPS = 8
"""Number of steps with an earlier share that stay in a rank's window.

They separate the fixed cost from the cost per sample.
"""


@dataclass(frozen=True)
class StepTimes:
    """Times of one optimizer step of the rank. `compute_seconds` is its own work: the step without waits for peers."""

    step: int
    step_seconds: float
    compute_seconds: float
    samples: int
    gc_seconds: float
    """Part of it in Python garbage collections."""
    lengths: tuple[float, float | None] | None = None
    """Sums of its samples' lengths and of their squares; None: unknown."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps whose own work is known, summed."""

    last_step: int = -1  # number of the newest one; -1: none
    steps: int = 0
    step_seconds: float = 0.0
    compute_seconds: float = 0.0

    def __add__(self, step: StepTimes) -> MeasuredSteps:
        return MeasuredSteps(
            step.step,
            self.steps + 1,
            self.step_seconds + step.step_seconds,
            self.compute_seconds + step.compute_seconds,
        )

    def subtract(self, earlier: MeasuredSteps) -> MeasuredSteps:
        """Return the sums without the steps that `earlier` had summed already."""
        return MeasuredSteps(
            self.last_step,
            self.steps - earlier.steps,
            self.step_seconds - earlier.step_seconds,
            self.compute_seconds - earlier.compute_seconds,
        )


class RankHistory:
    """The last steps of one rank in all its rounds here, as many as `count_window_steps` returns.

    `window_steps`: largest number of steps.
    """

    def __init__(self, window_steps: int) -> None:
        self._window_steps = window_steps
        self._steps: deque[StepTimes] = deque()
        self._seconds = 0.0  # sum of the steps' times
        self._earlier: deque[StepTimes] = deque(maxlen=MAX_EARLIER_SHARE_STEPS)
        self._transfers: deque[float] = deque(maxlen=window_steps)
        self._mode = 0
        self._garbage = 0.0  # seconds of gc since the last step
        self._lengths: tuple[float, float | None] | None = None  # of the step whose record comes next
        self._is_whole = True  # whether the present step was recorded completely so far
        self._unmeasured: StepTimes | None = None  # newest step, if the record of its own work was not there yet
        self._unmeasured_start_ns = self._unmeasured_mode = 0
        self._skipped = 0
        self._early: list[StepTimes] = []  # steps of the window that may become the baseline
        self._early_windows = 0
        self._baseline: tuple[float, float] | None = None
        self.steps_total = 0
        self.samples_total = 0
        self.collective_seconds_total = 0.0
        self.gc_seconds_total = 0.0
        self.measured = MeasuredSteps()

    def add(self, records: NDArray[np.void], behind_gap: bool = False) -> None:
        """Add new records (`records.RING_RECORD`), oldest first. The first step of a round does not count as training.

        `behind_gap`: whether records before them were lost. The step that they belong to is then incomplete, and enters
        no window.
        """
        if behind_gap:
            self._garbage, self._lengths, self._is_whole = 0.0, None, False
        collectives = records[records["kind"] == RecordKind.COLLECTIVE]
        self.collective_seconds_total += float((collectives["end_ns"] - collectives["start_ns"]).sum()) * 1e-9
        self.steps_total += int((records["kind"] == RecordKind.STEP).sum())
        # A step's own work is the record with the same start: in Local-SGD modes step numbers may repeat.
        own_work = {int(record["start_ns"]): record for record in records[records["kind"] == RecordKind.COMPUTE]}
        self._append_unmeasured(own_work)
        is_relevant = np.isin(
            records["kind"], (RecordKind.STEP, RecordKind.GC, RecordKind.SYNCHRONIZATION, RecordKind.LENGTHS)
        )
        for record in records[is_relevant]:
            seconds = _compute_duration(record)
            if record["kind"] == RecordKind.GC:
                self._garbage += seconds
                self.gc_seconds_total += seconds
            elif record["kind"] == RecordKind.SYNCHRONIZATION:
                self._transfers.append(float(record["value"]))
            elif record["kind"] == RecordKind.LENGTHS:
                self._lengths = float(record["value"]), float(record["bytes"]) or None
            else:
                gc_seconds, self._garbage = self._garbage, 0.0
                lengths, self._lengths = self._lengths, None
                is_whole, self._is_whole = self._is_whole, True
                self._unmeasured = None
                if record["phase"] == Phase.TRAIN and is_whole:
                    start_ns = int(record["start_ns"])
                    step = StepTimes(int(record["step"]), seconds, 0.0, int(record["value"]), gc_seconds, lengths)
                    self._unmeasured, self._unmeasured_start_ns = step, start_ns
                    self._unmeasured_mode = int(record["flags"])
                    self._append_unmeasured(own_work)

    def _append_unmeasured(self, own_work: Mapping[int, np.void]) -> None:
        """Add the newest step once its own work is known. A step whose own work is never recorded enters no window."""
        record = own_work.get(self._unmeasured_start_ns)
        if self._unmeasured is not None and record is not None:
            step, self._unmeasured = replace(self._unmeasured, compute_seconds=_compute_duration(record)), None
            self.append(step, self._unmeasured_mode)

    def append(self, step: StepTimes, mode: int) -> None:
        """Add one step. `mode`: position of its mode in plan.SYNC_MODES."""
        if mode != self._mode:
            self._mode = mode
            self.start_round()
        self._steps.append(step)
        self._seconds += step.step_seconds
        self.measured += step
        while len(self._steps) > count_window_steps(self._window_steps, self._seconds / len(self._steps)):
            oldest = self._steps.popleft()
            self._seconds -= oldest.step_seconds
            if SYNC_MODES[mode] is SyncMode.SYNC and oldest.samples != step.samples:
                self._earlier.append(oldest)
        self.samples_total += step.samples
        if SYNC_MODES[mode] is SyncMode.SYNC and self._early_windows < BASELINE_WINDOWS:
            self._update_baseline(step)

    def start_round(self) -> None:
        """Discard the steps of the previous round, which are not comparable: members and shares may differ."""
        self._steps.clear()
        self._seconds = 0.0
        self._earlier.clear()
        self._transfers.clear()

    def build_window(self, rank: int, managed: bool = True, share_granularity: int = 1) -> RankWindow:
        """Build the window, of steps in one mode only. `managed`: whether the script has modes."""
        steps = [*self._earlier, *self._steps]
        known_lengths = [step.lengths for step in steps if step.lengths is not None]
        lengths = tuple(total for total, _ in known_lengths) if len(known_lengths) == len(steps) else ()
        squares = tuple(total for _, total in known_lengths if total is not None)
        return RankWindow(
            rank=rank,
            steps=tuple(step.step for step in steps),
            step_seconds=tuple(step.step_seconds for step in steps),
            compute_seconds=tuple(step.compute_seconds for step in steps),
            samples=tuple(step.samples for step in steps),
            gc_seconds=tuple(step.gc_seconds for step in steps),
            lengths=lengths,
            squares=squares if len(squares) == len(lengths) else (),
            sync_mode=SYNC_MODES[self._mode] if managed else "",
            transfers=tuple(self._transfers),
            baseline_seconds=self.first_steps_seconds,
            baseline_own_seconds=self.first_steps_own_seconds,
            share_granularity=share_granularity,
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
        step, own_work = self.step_seconds, self.compute_seconds
        return None if step is None or own_work is None else max(0.0, step - own_work)

    @property
    def steps(self) -> Sequence[StepTimes]:
        """Steps of the window, oldest first."""
        return tuple(self._steps)

    @property
    def compute_seconds_per_sample(self) -> float | None:
        """Mean per sample. A script that is only monitored reports no samples; a step then counts as one sample."""
        return _compute_mean(step.compute_seconds / max(step.samples, 1) for step in self._steps)

    @property
    def synchronization_seconds(self) -> float | None:
        """Mean time that a synchronization in a Local-SGD mode blocked the rank; None: there was none."""
        return _compute_mean(self._transfers)

    @property
    def first_steps_seconds(self) -> float | None:
        """Median step time in the fastest of the first windows; None until there is one."""
        return None if self._baseline is None else self._baseline[0]

    @property
    def first_steps_own_seconds(self) -> float | None:
        """Median own work in that window."""
        return None if self._baseline is None else self._baseline[1]

    def _update_baseline(self, step: StepTimes) -> None:
        if self._skipped < BASELINE_SKIPPED_STEPS:
            self._skipped += 1
            return
        self._early.append(step)
        if len(self._early) < self._window_steps:
            return
        medians = (
            median(early_step.step_seconds for early_step in self._early),
            median(early_step.compute_seconds for early_step in self._early),
        )
        self._baseline = medians if self._baseline is None else min(medians, self._baseline)
        self._early_windows += 1
        self._early.clear()


def _compute_duration(record: np.void) -> float:
    return float(record["end_ns"] - record["start_ns"]) * 1e-9


def _compute_mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None
