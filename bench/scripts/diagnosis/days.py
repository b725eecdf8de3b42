"""Days on which nothing is wrong, put together from healthy recordings, and what is blamed on them all the same.

Blocks of recorded steps follow each other at random (block bootstrap, all ranks together), and what happens on a day is
laid over them: checkpoints, compilations, cold caches after an evaluation, noisy neighbors, short congestion. The
operator is run where it would act at all: around every second in which the ranks' metrics leave their tolerance, each
time without memory, which makes a false accusation more likely.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacekeeper_operator.api.training_job import DetectionSpec

from . import rules
from .agent import WINDOW_STEPS
from .hosts import HOSTS, RANKS, RANKS_A_HOST
from .operator_replay import replay_operator
from .record import Recording

DAYS = 15
DAY_SECONDS = 86_400.0
BLOCK_STEPS = 40
BEFORE_SECONDS, AFTER_SECONDS = 10, 45
"""Of a conspicuous second, in which the operator is run."""
CHECKPOINT_SECONDS = 1800.0
COMPILATIONS, EVALUATIONS, NOISY_NEIGHBORS, CONGESTIONS = 4, 12, 24, 24
"""A day, in the mean."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Steps:
    """(steps, ranks), seconds."""

    step: Floats
    own: Floats

    @property
    def end_times(self) -> NDArray[np.float64]:
        """When each step ends."""
        return np.cumsum(self.step.max(axis=1), dtype=np.float64)


@dataclass(frozen=True)
class Found:
    """On some days."""

    seconds: float
    passes: int  # stretches that the operator was run on
    alarms: tuple[str, ...]  # incidents that it opened
    naive: Mapping[str, int]


def run_healthy_days(recordings: Sequence[Recording], days: int) -> Found:
    with ProcessPoolExecutor() as pool:
        day_results = list(pool.map(_run_day, range(days), repeat(recordings)))
    return Found(
        seconds=sum(day_result.seconds for day_result in day_results),
        passes=sum(day_result.passes for day_result in day_results),
        alarms=tuple(alarm for day_result in day_results for alarm in day_result.alarms),
        naive={name: sum(day_result.naive[name] for day_result in day_results) for name in rules.RULES},
    )


def _run_day(seed: int, recordings: Sequence[Recording]) -> Found:
    logging.disable(logging.CRITICAL)
    rng = np.random.default_rng(seed)
    template = _Template(recordings[seed % len(recordings)])
    usual_seconds = template.early_step
    blocks = [
        block
        for recording in recordings
        for block in scale_to_step_time(list(_iterate_blocks(recording)), usual_seconds)
    ]
    count = int(DAY_SECONDS / usual_seconds / BLOCK_STEPS)
    chosen = rng.integers(len(blocks), size=count)
    day = Steps(*(np.concatenate([getattr(blocks[index], name) for index in chosen]) for name in ("step", "own")))
    _add_disturbances(day, rng, usual_seconds)
    alarms: list[str] = []
    pass_count = 0
    for first, last in _find_conspicuous(day, usual_seconds):
        pass_count += 1
        alarms += sorted(
            {
                version.incident
                for version in replay_operator(template.build_recording(day, first, last), knows_the_job=False)
            }
        )
    return Found(float(day.end_times[-1]), pass_count, tuple(alarms), _count_naive_alarms(day, template))


def _iterate_blocks(recording: Recording) -> Iterator[Steps]:
    steps: dict[int, dict[int, tuple[float, float]]] = {rank: {} for rank in range(RANKS)}
    for report in recording.reports:
        for window in report.get("evidence", {}).get("windows", ()):
            times = zip(window["step_seconds"], window["compute_seconds"], strict=True)
            steps[window["rank"]].update(zip(window["steps"], times, strict=True))
    common_steps = sorted(set.intersection(*(set(rank_steps) for rank_steps in steps.values())))
    table = np.array([[steps[rank][step] for rank in range(RANKS)] for step in common_steps], np.float32)
    for first in range(0, len(common_steps) - BLOCK_STEPS + 1, BLOCK_STEPS // 2):
        yield Steps(table[first : first + BLOCK_STEPS, :, 0], table[first : first + BLOCK_STEPS, :, 1])


def scale_to_step_time(blocks: Sequence[Steps], usual_seconds: float) -> Iterator[Steps]:
    """As on a machine on which a step takes `usual_seconds` seconds: how much else its processors had to do while this
    was recorded is an artifact of the bench. No cluster has a day that changes between such paces every few seconds."""
    factor = np.float32(usual_seconds / np.median([block.step.mean() for block in blocks]))
    for block in blocks:
        yield Steps(factor * block.step, factor * block.own)


def _add_disturbances(day: Steps, rng: np.random.Generator, usual_seconds: float) -> None:
    """Lays over it what happens on a day."""
    count = len(day.step)

    def hold_up(first: int, steps: int, seconds: float) -> None:
        day.own[first : first + steps] += seconds
        day.step[first : first + steps] += seconds

    for first in range(0, count, int(CHECKPOINT_SECONDS / usual_seconds)):
        hold_up(first, 1, rng.uniform(0.2, 2.0))
    for first in rng.integers(count, size=rng.poisson(COMPILATIONS)):
        hold_up(first, int(rng.integers(1, 5)), rng.uniform(2.0, 15.0))
    for first in rng.integers(count, size=rng.poisson(EVALUATIONS)):
        hold_up(first, 5, usual_seconds * rng.uniform(0.1, 0.5))
    for first in rng.integers(count, size=rng.poisson(NOISY_NEIGHBORS)):
        steps = int(min(10.0, rng.exponential(4.0)) / usual_seconds)
        host = int(rng.integers(HOSTS))
        host_ranks = slice(RANKS_A_HOST * host, RANKS_A_HOST * (host + 1))
        added = day.own[first : first + steps, host_ranks] * (rng.uniform(1.1, 1.6) - 1)
        day.own[first : first + steps, host_ranks] += added
        day.step[first : first + steps] += added.max(axis=1, keepdims=True)
    for first in rng.integers(count, size=rng.poisson(CONGESTIONS)):
        steps = int(rng.uniform(1.0, 4.0) / usual_seconds)
        day.step[first : first + steps] += usual_seconds * rng.uniform(0.5, 2.0)


def _find_conspicuous(day: Steps, early_step: float) -> Iterator[tuple[float, float]]:
    """Stretches of seconds around those in which a rank's mean own work over its window is slow compared with the
    others', or all their steps are slow compared with the early ones."""
    step, own = _compute_window_means(day.step), _compute_window_means(day.own)
    relative_times = own.max(axis=1) / np.median(own, axis=1)
    is_slow = np.maximum(relative_times, step.min(axis=1) / early_step) >= DetectionSpec().straggler_slowdown
    moments = day.end_times[WINDOW_STEPS - 1 :][is_slow]
    while len(moments):
        gaps = np.flatnonzero(np.diff(moments) > BEFORE_SECONDS + AFTER_SECONDS)
        last = int(gaps[0]) if len(gaps) else len(moments) - 1
        yield float(moments[0]) - BEFORE_SECONDS, float(moments[last]) + AFTER_SECONDS
        moments = moments[last + 1 :]


def _compute_window_means(values: Floats) -> NDArray[np.float64]:
    """Over each window."""
    sums = np.cumsum(np.vstack([np.zeros((1, RANKS)), values]), axis=0, dtype=np.float64)
    return np.asarray((sums[WINDOW_STEPS:] - sums[:-WINDOW_STEPS]) / WINDOW_STEPS)


def _count_naive_alarms(day: Steps, template: _Template) -> dict[str, int]:
    windows = len(day.own) // WINDOW_STEPS
    medians = np.median(day.own[: windows * WINDOW_STEPS].reshape(windows, WINDOW_STEPS, RANKS), axis=1)
    return {
        name: rules.count_alarms(medians.astype(np.float64), template.early_own, rule)
        for name, rule in rules.RULES.items()
    }


class _Template:
    """How the workers of a recording report."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        reports = list(recording.reports)
        self._heartbeats = {report["worker"]: report["heartbeat"] for report in reports if "heartbeat" in report}
        self._evidence = {report["worker"]: report["evidence"] for report in reports if "evidence" in report}
        windows = {window["rank"]: window for evidence in self._evidence.values() for window in evidence["windows"]}
        self.early_own = np.array([windows[rank]["baseline_own_seconds"] for rank in range(RANKS)])
        self.early_step = float(np.median([windows[rank]["baseline_seconds"] for rank in range(RANKS)]))

    def build_recording(self, day: Steps, first: float, last: float) -> Recording:
        """A second at a time, from one moment of the day to another."""
        end_times = day.end_times
        reports = []
        for second in np.arange(max(first, end_times[WINDOW_STEPS]), min(last, end_times[-1])):
            index = int(np.searchsorted(end_times, second))
            for worker in sorted(self._heartbeats):
                reports.append(
                    {"at": float(second), "worker": worker, "heartbeat": self._build_heartbeat(worker, day, index)}
                )
                reports.append(
                    {"at": float(second), "worker": worker, "evidence": self._build_evidence(worker, day, index)}
                )
        return Recording("healthy", 0, 0.0, last, reports, {}, 0.0, 0.0)

    def _build_heartbeat(self, worker: str, day: Steps, index: int) -> dict[str, Any]:
        heartbeat, rows = self._heartbeats[worker], slice(index - WINDOW_STEPS, index)
        metrics = []
        for rank_metrics in heartbeat["rank_metrics"]:
            step, own = (
                float(day.step[rows, rank_metrics["rank"]].mean()),
                float(day.own[rows, rank_metrics["rank"]].mean()),
            )
            changes = {"step_seconds": step, "compute_seconds": own, "compute_seconds_per_sample": own}
            metrics.append({**rank_metrics, **changes, "wait_seconds": max(0.0, step - own)})
        progress = {**heartbeat["progress"], "step": index, "steps_in_round": index}
        start = {**heartbeat["start"], "first_step_at": 0.1}
        return {**heartbeat, "rank_metrics": metrics, "progress": progress, "start": start}

    def _build_evidence(self, worker: str, day: Steps, index: int) -> dict[str, Any]:
        rows, windows = slice(index - WINDOW_STEPS, index), []
        for window in self._evidence[worker]["windows"]:
            step, own = day.step[rows, window["rank"]], day.own[rows, window["rank"]]
            changes = {"steps": list(range(index - WINDOW_STEPS, index)), "step_seconds": step.tolist()}
            gc_changes = {name: [0.0] * WINDOW_STEPS for name in ("gc_seconds",)}
            samples = {"samples": [window["samples"][-1]] * WINDOW_STEPS}
            windows.append({**window, **changes, **gc_changes, **samples, "compute_seconds": own.tolist()})
        return {**self._evidence[worker], "windows": windows, "operations": []}
