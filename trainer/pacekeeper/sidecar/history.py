"""A rank's last steps, kept from its records: what is measured of a rank, and its window for the operator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.records import Kind, Phase
from pacekeeper_analysis.reports import RankWindow

FIRST_STEPS_SKIPPED = 5
"""The first steps of a job warm caches and allocators up: the baseline comes after them."""


@dataclass(frozen=True)
class StepTimes:
    """One optimizer step of the rank. `compute_seconds` is its own work: the step without waits for peers."""

    step: int
    step_seconds: float
    compute_seconds: float
    samples: int


class RankHistory:
    """The last steps of one rank, over all of its rounds here."""

    def __init__(self, window_steps: int) -> None:
        self._window_steps = window_steps
        self._steps: deque[StepTimes] = deque(maxlen=window_steps)
        self._first: list[float] = []
        self._skipped = 0
        self.steps_total = 0
        self.samples_total = 0
        self.collective_seconds_total = 0.0

    def add(self, records: NDArray[np.void]) -> None:
        """Take in new records (`records.RECORD`), oldest first. The first step of a round is no training yet."""
        collectives = records[records["kind"] == Kind.COLLECTIVE]
        self.collective_seconds_total += float((collectives["end_ns"] - collectives["start_ns"]).sum()) * 1e-9
        self.steps_total += int((records["kind"] == Kind.STEP).sum())
        training = records[records["phase"] == Phase.TRAIN]
        computed = {int(record["step"]): record for record in training[training["kind"] == Kind.COMPUTE]}
        for record in training[training["kind"] == Kind.STEP]:
            own = computed.get(int(record["step"]), record)
            self._append(StepTimes(int(record["step"]), _seconds(record), _seconds(own), int(record["value"])))

    def start_round(self) -> None:
        """Steps of another round are no longer comparable: members and shares may differ."""
        self._steps.clear()

    def window(self, rank: int) -> RankWindow:
        return RankWindow(
            rank=rank,
            steps=tuple(step.step for step in self._steps),
            step_seconds=tuple(step.step_seconds for step in self._steps),
            compute_seconds=tuple(step.compute_seconds for step in self._steps),
            samples=tuple(step.samples for step in self._steps),
        )

    @property
    def step_seconds(self) -> float | None:
        """Mean over the window; None before the first step."""
        return _mean(step.step_seconds for step in self._steps)

    @property
    def compute_seconds(self) -> float | None:
        return _mean(step.compute_seconds for step in self._steps)

    @property
    def compute_seconds_per_sample(self) -> float | None:
        """A script that is only watched tells no samples and counts as one a step."""
        return _mean(step.compute_seconds / max(step.samples, 1) for step in self._steps)

    @property
    def first_steps_seconds(self) -> float | None:
        """Median step time of the first steady steps that were seen; None until there are enough."""
        return median(self._first) if len(self._first) == self._window_steps else None

    def _append(self, step: StepTimes) -> None:
        self._steps.append(step)
        self.samples_total += step.samples
        if self._skipped < FIRST_STEPS_SKIPPED:
            self._skipped += 1
        elif len(self._first) < self._window_steps:
            self._first.append(step.step_seconds)


def _seconds(record: np.void) -> float:
    return float(record["end_ns"] - record["start_ns"]) * 1e-9


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
