"""Perturbed copies of a recording: what another run of the same fault might have told.

- times: each step and collective takes a few per cent more or less, the same in all answers that tell of it;
- lost: single steps of a rank, whole answers, polls, one rank's behaviour window;
- late: stalls are told up to a second later;
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

from pacekeeper_analysis.operations import decode_operations, encode_operations

from .hosts import RANKS
from .record import Recording

COPIES = 20
NOISE = (0.01, 0.05)
"""Standard deviation of the logarithm of a time."""
LOST_STEPS, LOST_ANSWERS, LOST_POLLS, LOST_PATTERN = 0.01, 0.08, 0.08, 0.2
LATEST_SECONDS = 1.0
CLOCK_SECONDS = 300.0
BEGINNING_SECONDS = 2.5
BEGIN_SECONDS = (2.0, 14.0)
HORIZON = 1 << 13
"""Steps whose noise is drawn before it comes again."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Beginning:
    """How much more own work each rank had in the first steps of a fault: (steps, ranks), seconds."""

    more: Floats

    @classmethod
    def from_recording(cls, recording: Recording) -> Beginning | None:
        """None: nobody's own work grew."""
        first = step_at(recording, recording.began)
        last = max(first + 1, step_at(recording, recording.began + BEGINNING_SECONDS))
        own = own_work(recording)
        usual = {
            rank: float(np.median([s for step, s in of.items() if step <= first] or [0])) for rank, of in own.items()
        }
        more = np.array(
            [[max(0.0, own[rank].get(step, 0.0) - usual[rank]) for rank in range(RANKS)] for step in range(first, last)]
        )
        return cls(more) if len(own) == RANKS and more.max(initial=0.0) > 0.2 * max(usual.values()) else None


def perturbed(recording: Recording, others: Sequence[Beginning], seed: int) -> Recording:
    """One copy. `others`: beginnings of other faults."""
    return _Copy(recording, others, seed).made


def own_work(recording: Recording) -> dict[int, dict[int, float]]:
    """Rank → step → seconds."""
    found: dict[int, dict[int, float]] = {}
    for words in recording.told:
        for window in words.get("evidence", {}).get("windows", ()):
            found.setdefault(window["rank"], {}).update(zip(window["steps"], window["compute_seconds"], strict=True))
    return found


def step_at(recording: Recording, moment: float) -> int:
    """The newest step that some worker had told of by then."""
    told = (words for words in recording.told if "evidence" in words and words["at"] <= moment)
    return max((w["steps"][-1] for words in told for w in words["evidence"]["windows"] if w["steps"]), default=0)


class _Copy:
    def __init__(self, recording: Recording, others: Sequence[Beginning], seed: int) -> None:
        self._recording = recording
        self._random = random.Random(seed)
        self._draw = np.random.default_rng(seed)
        sigma = self._random.uniform(*NOISE)
        self._noise = np.exp(self._draw.normal(0.0, sigma, (HORIZON, RANKS)))
        self._common = np.exp(self._draw.normal(0.0, sigma / 2, HORIZON))
        self._link_noise = self._random.uniform(0.0, 0.1)
        self._lost = self._draw.random((HORIZON, RANKS)) < LOST_STEPS
        self._clocks = {worker: self._random.uniform(-CLOCK_SECONDS, CLOCK_SECONDS) for worker in self._workers}
        self._more = np.zeros((HORIZON, RANKS))
        if others and self._random.random() < 0.5:
            self._lay_over(self._random.choice(others).more)
        self._factors: dict[int, tuple[float, float]] = {}
        """By rank: how its newest window's mean step and own work have changed."""

    @property
    def made(self) -> Recording:
        told = sorted(self._copy_reports(), key=lambda words: words["at"])
        patterns = dict(self._recording.patterns)
        if patterns and self._random.random() < LOST_PATTERN:
            del patterns[self._random.choice(sorted(patterns))]
        return replace(self._recording, told=told, patterns=patterns)

    @cached_property
    def _workers(self) -> list[str]:
        return sorted({words["worker"] for words in self._recording.told})

    def _lay_over(self, more: Floats) -> None:
        began = self._recording.began or self._recording.told[0]["at"]
        first = step_at(self._recording, began + self._random.uniform(*BEGIN_SECONDS))
        steps = np.arange(first, first + len(more)) % HORIZON
        self._more[steps] = more[:, self._draw.permutation(RANKS)]

    def _copy_reports(self) -> Iterator[dict[str, Any]]:
        for words in self._recording.told:
            clock = self._clocks[words["worker"]]
            changed = {**words, "clock": clock}
            if "evidence" in words:
                changed["evidence"] = self._evidence(words["evidence"])
                if self._random.random() < LOST_ANSWERS:
                    continue
            elif "heartbeat" in words:
                changed["heartbeat"] = self._heartbeat(words["heartbeat"], clock)
                if self._random.random() < LOST_POLLS:
                    continue
            elif "fault" in words:
                changed["at"] = words["at"] + self._random.uniform(0.0, LATEST_SECONDS)
                changed["fault"] = {**words["fault"], "noticed_at": words["fault"]["noticed_at"] + clock}
            yield changed

    def _evidence(self, evidence: Mapping[str, Any]) -> dict[str, Any]:
        windows = [self._window(window) for window in evidence["windows"]]
        operations = [self._operations(of) for of in evidence["operations"]]
        links = [
            {
                **link,
                "busy_seconds": link.get("busy_seconds", 0.0)
                * float(np.exp(self._random.gauss(0.0, self._link_noise))),
            }
            for link in evidence["links"]
        ]
        return {**evidence, "windows": windows, "operations": operations, "links": links}

    def _window(self, window: Mapping[str, Any]) -> dict[str, Any]:
        rank, steps = window["rank"], np.array(window["steps"], dtype=np.int64) % HORIZON
        if not len(steps):
            return dict(window)
        step, own = np.array(window["step_seconds"]), np.array(window["compute_seconds"])
        more = self._more[steps]
        new_own = (own * self._noise[steps, rank] + more[:, rank]) * self._common[steps]
        waits = np.maximum(step - own, 0.0) + more.max(axis=1) - more[:, rank]
        new_step = new_own + waits * self._common[steps]
        self._factors[rank] = float(new_step.mean() / step.mean()), float(new_own.mean() / own.mean())
        kept = ~self._lost[steps, rank]
        if kept.sum() < len(kept) // 2:
            kept[:] = True
        changed = dict(window)
        for name, values in window.items():
            if isinstance(values, (list, tuple)) and len(values) == len(kept) and name != "transfers":
                changed[name] = [value for value, keep in zip(values, kept, strict=True) if keep]
        changed["step_seconds"], changed["compute_seconds"] = new_step[kept].tolist(), new_own[kept].tolist()
        return changed

    def _operations(self, of: Mapping[str, Any]) -> dict[str, Any]:
        found = decode_operations(of["operations"]).copy()
        steps = found["step"].astype(np.int64) % HORIZON
        factor = (self._noise[steps, of["rank"]] * self._common[steps]).astype(np.float32)
        for name in ("start", "end", "held"):
            found[name] *= factor
        return {**of, "operations": encode_operations(found[~self._lost[steps, of["rank"]]])}

    def _heartbeat(self, beat: Mapping[str, Any], clock: float) -> dict[str, Any]:
        changed = {**beat, "figures": [self._scale_metrics(figures) for figures in beat["figures"]]}
        for name in ("first_step_at", "round_started_at"):
            changed[name] = beat[name] + clock if beat[name] else 0.0
        return changed

    def _scale_metrics(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """As the rank's newest window has changed."""
        step, own = self._factors.get(figures["rank"], (1.0, 1.0))
        changed = dict(figures)
        changed["step_seconds"] *= step
        for name in ("compute_seconds", "compute_seconds_per_sample"):
            changed[name] *= own
        changed["wait_seconds"] = max(0.0, changed["step_seconds"] - changed["compute_seconds"])
        return changed
