"""Days on which nothing is wrong, put together from healthy recordings, and what is blamed on them all the same.

Blocks of recorded steps follow each other at random (block bootstrap, all ranks together), and what happens on a day is
laid over them: checkpoints, compilations, cold caches after an evaluation, noisy neighbours, short congestion. The
operator is run where it would look at all: around every second in which the ranks' figures leave what it lets be, each
time with nothing remembered, which makes it the more ready to blame.
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

from pacekeeper_operator.api import DetectionSpec

from . import rules
from .agent import WINDOW_STEPS
from .hosts import HOSTS, RANKS, RANKS_A_HOST
from .judge import replay_operator
from .record import Recording

DAYS = 15
DAY_SECONDS = 86_400.0
BLOCK = 40
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


def healthy_days(recordings: Sequence[Recording], days: int) -> Found:
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(_day, range(days), repeat(recordings)))
    return Found(
        seconds=sum(each.seconds for each in found),
        passes=sum(each.passes for each in found),
        alarms=tuple(alarm for each in found for alarm in each.alarms),
        naive={name: sum(each.naive[name] for each in found) for name in rules.RULES},
    )


def _day(seed: int, recordings: Sequence[Recording]) -> Found:
    logging.disable(logging.CRITICAL)
    draw = np.random.default_rng(seed)
    template = _Template(recordings[seed % len(recordings)])
    usual = template.early_step
    blocks = [block for recording in recordings for block in scale_to_step_time(list(_blocks(recording)), usual)]
    count = int(DAY_SECONDS / usual / BLOCK)
    chosen = draw.integers(len(blocks), size=count)
    day = Steps(*(np.concatenate([getattr(blocks[at], name) for at in chosen]) for name in ("step", "own")))
    _happen(day, draw, usual)
    alarms: list[str] = []
    looks = 0
    for first, last in _conspicuous(day, usual):
        looks += 1
        alarms += sorted({told.incident for told in replay_operator(template.stretch(day, first, last), knows_the_job=False)})
    return Found(float(day.end_times[-1]), looks, tuple(alarms), _naive(day, template))


def _blocks(recording: Recording) -> Iterator[Steps]:
    steps: dict[int, dict[int, tuple[float, float]]] = {rank: {} for rank in range(RANKS)}
    for words in recording.told:
        for window in words.get("evidence", {}).get("windows", ()):
            times = zip(window["step_seconds"], window["compute_seconds"], strict=True)
            steps[window["rank"]].update(zip(window["steps"], times, strict=True))
    common = sorted(set.intersection(*(set(of) for of in steps.values())))
    table = np.array([[steps[rank][step] for rank in range(RANKS)] for step in common], np.float32)
    for first in range(0, len(common) - BLOCK + 1, BLOCK // 2):
        yield Steps(table[first : first + BLOCK, :, 0], table[first : first + BLOCK, :, 1])


def scale_to_step_time(blocks: Sequence[Steps], usual: float) -> Iterator[Steps]:
    """As on a machine on which a step takes `usual` seconds: how much else its processors had to do while this was
    recorded is the bench's trouble, and a day that changes between such paces every few seconds is nobody's."""
    factor = np.float32(usual / np.median([block.step.mean() for block in blocks]))
    for block in blocks:
        yield Steps(factor * block.step, factor * block.own)


def _happen(day: Steps, draw: np.random.Generator, usual: float) -> None:
    """Lays over it what happens on a day."""
    count = len(day.step)

    def hold_up(first: int, steps: int, seconds: float) -> None:
        day.own[first : first + steps] += seconds
        day.step[first : first + steps] += seconds

    for first in range(0, count, int(CHECKPOINT_SECONDS / usual)):
        hold_up(first, 1, draw.uniform(0.2, 2.0))
    for first in draw.integers(count, size=draw.poisson(COMPILATIONS)):
        hold_up(first, int(draw.integers(1, 5)), draw.uniform(2.0, 15.0))
    for first in draw.integers(count, size=draw.poisson(EVALUATIONS)):
        hold_up(first, 5, usual * draw.uniform(0.1, 0.5))
    for first in draw.integers(count, size=draw.poisson(NOISY_NEIGHBORS)):
        steps = int(min(10.0, draw.exponential(4.0)) / usual)
        host = int(draw.integers(HOSTS))
        its = slice(RANKS_A_HOST * host, RANKS_A_HOST * (host + 1))
        more = day.own[first : first + steps, its] * (draw.uniform(1.1, 1.6) - 1)
        day.own[first : first + steps, its] += more
        day.step[first : first + steps] += more.max(axis=1, keepdims=True)
    for first in draw.integers(count, size=draw.poisson(CONGESTIONS)):
        steps = int(draw.uniform(1.0, 4.0) / usual)
        day.step[first : first + steps] += usual * draw.uniform(0.5, 2.0)


def _conspicuous(day: Steps, early_step: float) -> Iterator[tuple[float, float]]:
    """Stretches of seconds around those in which a rank's mean own work over its window is slow beside the others', or
    all their steps are slow beside the early ones."""
    step, own = _means(day.step), _means(day.own)
    pace = own.max(axis=1) / np.median(own, axis=1)
    slow = np.maximum(pace, step.min(axis=1) / early_step) >= DetectionSpec().straggler_slowdown
    moments = day.end_times[WINDOW_STEPS - 1 :][slow]
    while len(moments):
        gaps = np.flatnonzero(np.diff(moments) > BEFORE_SECONDS + AFTER_SECONDS)
        last = int(gaps[0]) if len(gaps) else len(moments) - 1
        yield float(moments[0]) - BEFORE_SECONDS, float(moments[last]) + AFTER_SECONDS
        moments = moments[last + 1 :]


def _means(values: Floats) -> NDArray[np.float64]:
    """Over each window."""
    sums = np.cumsum(np.vstack([np.zeros((1, RANKS)), values]), axis=0, dtype=np.float64)
    return np.asarray((sums[WINDOW_STEPS:] - sums[:-WINDOW_STEPS]) / WINDOW_STEPS)


def _naive(day: Steps, template: _Template) -> dict[str, int]:
    windows = len(day.own) // WINDOW_STEPS
    now = np.median(day.own[: windows * WINDOW_STEPS].reshape(windows, WINDOW_STEPS, RANKS), axis=1)
    return {name: rules.alarms(now.astype(np.float64), template.early_own, rule) for name, rule in rules.RULES.items()}


class _Template:
    """How the workers of a recording tell of themselves."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        told = list(recording.told)
        self._heartbeats = {words["worker"]: words["heartbeat"] for words in told if "heartbeat" in words}
        self._evidence = {words["worker"]: words["evidence"] for words in told if "evidence" in words}
        windows = {window["rank"]: window for e in self._evidence.values() for window in e["windows"]}
        self.early_own = np.array([windows[rank]["baseline_own_seconds"] for rank in range(RANKS)])
        self.early_step = float(np.median([windows[rank]["baseline_seconds"] for rank in range(RANKS)]))

    def stretch(self, day: Steps, first: float, last: float) -> Recording:
        """A second at a time, from one moment of the day to another."""
        moments = day.end_times
        told = []
        for second in np.arange(max(first, moments[WINDOW_STEPS]), min(last, moments[-1])):
            at = int(np.searchsorted(moments, second))
            for worker in sorted(self._heartbeats):
                told.append({"at": float(second), "worker": worker, "heartbeat": self._heartbeat(worker, day, at)})
                told.append({"at": float(second), "worker": worker, "evidence": self._answer(worker, day, at)})
        return Recording("healthy", 0, 0.0, last, told, {}, 0.0, 0.0)

    def _heartbeat(self, worker: str, day: Steps, at: int) -> dict[str, Any]:
        beat, rows = self._heartbeats[worker], slice(at - WINDOW_STEPS, at)
        figures = []
        for known in beat["figures"]:
            step, own = float(day.step[rows, known["rank"]].mean()), float(day.own[rows, known["rank"]].mean())
            now = {"step_seconds": step, "compute_seconds": own, "compute_seconds_per_sample": own}
            figures.append({**known, **now, "wait_seconds": max(0.0, step - own)})
        return {**beat, "figures": figures, "step": at, "steps_in_round": at, "first_step_at": 0.1}

    def _answer(self, worker: str, day: Steps, at: int) -> dict[str, Any]:
        rows, windows = slice(at - WINDOW_STEPS, at), []
        for known in self._evidence[worker]["windows"]:
            step, own = day.step[rows, known["rank"]], day.own[rows, known["rank"]]
            now = {"steps": list(range(at - WINDOW_STEPS, at)), "step_seconds": step.tolist()}
            even = {name: [0.0] * WINDOW_STEPS for name in ("garbage_seconds",)}
            samples = {"samples": [known["samples"][-1]] * WINDOW_STEPS}
            windows.append({**known, **now, **even, **samples, "compute_seconds": own.tolist()})
        return {**self._evidence[worker], "windows": windows, "operations": []}
