"""Perturbed copies of a recording: what another run of the same fault might have reported.

- times: each step and collective takes a few per cent more or less, the same in all answers that hold it;
- lost: single steps of a rank, whole answers, polls, one rank's profile;
- late: stalls are reported up to a second later;
- clocks: each worker's is minutes off;
- another fault begins: in half of the copies the first seconds of another recorded one are laid over some steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.protocol.operations import decode_operations, encode_operations

from .hosts import RANKS
from .record import Recording

COPIES = 20
NOISE_RANGE = (0.01, 0.05)
"""Standard deviation of the logarithm of a time."""
LOST_STEP_SHARE, LOST_ANSWER_SHARE, LOST_POLL_SHARE, LOST_PATTERN_SHARE = 0.01, 0.08, 0.08, 0.2
MAX_LATE_SECONDS = 1.0
MAX_CLOCK_OFFSET_SECONDS = 300.0
BEGINNING_SECONDS = 2.5
BEGIN_SECONDS = (2.0, 14.0)
NOISE_STEPS = 1 << 13
"""Steps whose noise is drawn before it comes again."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Beginning:
    """How much more own work each rank had in the first steps of a fault: (steps, ranks), seconds."""

    more: Floats

    @classmethod
    def from_recording(cls, recording: Recording) -> Beginning | None:
        """None: no rank's own work grew."""
        first_step = find_newest_step(recording, recording.began)
        last_step = max(first_step + 1, find_newest_step(recording, recording.began + BEGINNING_SECONDS))
        work = collect_own_work(recording)
        usual_seconds = {
            rank: float(np.median([seconds for step, seconds in rank_work.items() if step <= first_step] or [0]))
            for rank, rank_work in work.items()
        }
        added = np.array(
            [
                [max(0.0, work[rank].get(step, 0.0) - usual_seconds[rank]) for rank in range(RANKS)]
                for step in range(first_step, last_step)
            ]
        )
        return cls(added) if len(work) == RANKS and added.max(initial=0.0) > 0.2 * max(usual_seconds.values()) else None


def perturb_recording(recording: Recording, beginnings: Sequence[Beginning], seed: int) -> Recording:
    """One copy. `beginnings`: beginnings of other faults."""
    return _Copy(recording, beginnings, seed).perturbed


def collect_own_work(recording: Recording) -> dict[int, dict[int, float]]:
    """Rank → step → seconds."""
    work: dict[int, dict[int, float]] = {}
    for report in recording.reports:
        for window in report.get("evidence", {}).get("windows", ()):
            work.setdefault(window["rank"], {}).update(zip(window["steps"], window["compute_seconds"], strict=True))
    return work


def find_newest_step(recording: Recording, moment: float) -> int:
    """The newest step that a worker had reported by then."""
    reports = (report for report in recording.reports if "evidence" in report and report["at"] <= moment)
    return max(
        (window["steps"][-1] for report in reports for window in report["evidence"]["windows"] if window["steps"]),
        default=0,
    )


class _Copy:
    def __init__(self, recording: Recording, beginnings: Sequence[Beginning], seed: int) -> None:
        self._recording = recording
        self._random = random.Random(seed)
        self._draw = np.random.default_rng(seed)
        sigma = self._random.uniform(*NOISE_RANGE)
        self._noise = np.exp(self._draw.normal(0.0, sigma, (NOISE_STEPS, RANKS)))
        self._common = np.exp(self._draw.normal(0.0, sigma / 2, NOISE_STEPS))
        self._link_noise = self._random.uniform(0.0, 0.1)
        self._lost = self._draw.random((NOISE_STEPS, RANKS)) < LOST_STEP_SHARE
        self._clocks = {
            worker: self._random.uniform(-MAX_CLOCK_OFFSET_SECONDS, MAX_CLOCK_OFFSET_SECONDS)
            for worker in self._workers
        }
        self._more = np.zeros((NOISE_STEPS, RANKS))
        if beginnings and self._random.random() < 0.5:
            self._add_beginning(self._random.choice(beginnings).more)
        self._factors: dict[int, tuple[float, float]] = {}
        """By rank: how its newest window's mean step and own work have changed."""

    @property
    def perturbed(self) -> Recording:
        reports = sorted(self._copy_reports(), key=lambda report: report["at"])
        patterns = dict(self._recording.patterns)
        if patterns and self._random.random() < LOST_PATTERN_SHARE:
            del patterns[self._random.choice(sorted(patterns))]
        return replace(self._recording, reports=reports, patterns=patterns)

    @cached_property
    def _workers(self) -> list[str]:
        return sorted({report["worker"] for report in self._recording.reports})

    def _add_beginning(self, added: Floats) -> None:
        began_at = self._recording.began or self._recording.reports[0]["at"]
        first_step = find_newest_step(self._recording, began_at + self._random.uniform(*BEGIN_SECONDS))
        steps = np.arange(first_step, first_step + len(added)) % NOISE_STEPS
        self._more[steps] = added[:, self._draw.permutation(RANKS)]

    def _copy_reports(self) -> Iterator[dict[str, Any]]:
        for report in self._recording.reports:
            clock = self._clocks[report["worker"]]
            changed = {**report, "clock": clock}
            if "evidence" in report:
                changed["evidence"] = self._perturb_evidence(report["evidence"])
                if self._random.random() < LOST_ANSWER_SHARE:
                    continue
            elif "heartbeat" in report:
                changed["heartbeat"] = self._perturb_heartbeat(report["heartbeat"], clock)
                if self._random.random() < LOST_POLL_SHARE:
                    continue
            elif "fault" in report:
                changed["at"] = report["at"] + self._random.uniform(0.0, MAX_LATE_SECONDS)
                changed["fault"] = {**report["fault"], "noticed_at": report["fault"]["noticed_at"] + clock}
            yield changed

    def _perturb_evidence(self, evidence: Mapping[str, Any]) -> dict[str, Any]:
        windows = [self._perturb_window(window) for window in evidence["windows"]]
        operations = [self._perturb_operations(rank_operations) for rank_operations in evidence["operations"]]
        links = [
            {
                **link,
                "busy_seconds": link.get("busy_seconds", 0.0)
                * float(np.exp(self._random.gauss(0.0, self._link_noise))),
            }
            for link in evidence["links"]
        ]
        return {**evidence, "windows": windows, "operations": operations, "links": links}

    def _perturb_window(self, window: Mapping[str, Any]) -> dict[str, Any]:
        rank, steps = window["rank"], np.array(window["steps"], dtype=np.int64) % NOISE_STEPS
        if not len(steps):
            return dict(window)
        step, own = np.array(window["step_seconds"]), np.array(window["compute_seconds"])
        added = self._more[steps]
        new_own = (own * self._noise[steps, rank] + added[:, rank]) * self._common[steps]
        waits = np.maximum(step - own, 0.0) + added.max(axis=1) - added[:, rank]
        new_step = new_own + waits * self._common[steps]
        self._factors[rank] = float(new_step.mean() / step.mean()), float(new_own.mean() / own.mean())
        retained = ~self._lost[steps, rank]
        if retained.sum() < len(retained) // 2:
            retained[:] = True
        changed = dict(window)
        for name, values in window.items():
            if isinstance(values, (list, tuple)) and len(values) == len(retained) and name != "transfers":
                changed[name] = [value for value, is_retained in zip(values, retained, strict=True) if is_retained]
        changed["step_seconds"], changed["compute_seconds"] = new_step[retained].tolist(), new_own[retained].tolist()
        return changed

    def _perturb_operations(self, rank_operations: Mapping[str, Any]) -> dict[str, Any]:
        operations = decode_operations(rank_operations["operations"]).copy()
        steps = operations["step"].astype(np.int64) % NOISE_STEPS
        factor = (self._noise[steps, rank_operations["rank"]] * self._common[steps]).astype(np.float32)
        for name in ("start", "end", "wait"):
            operations[name] *= factor
        return {
            **rank_operations,
            "operations": encode_operations(operations[~self._lost[steps, rank_operations["rank"]]]),
        }

    def _perturb_heartbeat(self, heartbeat: Mapping[str, Any], clock: float) -> dict[str, Any]:
        changed = {**heartbeat, "rank_metrics": [self._scale_metrics(metrics) for metrics in heartbeat["rank_metrics"]]}
        start = heartbeat["start"]
        moved = {name: start[name] + clock for name in ("first_step_at", "started_at") if start.get(name) is not None}
        return {**changed, "start": {**start, **moved}}

    def _scale_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """As the rank's newest window has changed."""
        step_factor, own_factor = self._factors.get(metrics["rank"], (1.0, 1.0))
        changed = dict(metrics)
        changed["step_seconds"] *= step_factor
        for name in ("compute_seconds", "compute_seconds_per_sample"):
            changed[name] *= own_factor
        changed["wait_seconds"] = max(0.0, changed["step_seconds"] - changed["compute_seconds"])
        return changed
