"""The figures of the what-if analysis: how much stragglers cost, and where they are (arXiv 2505.05713, sections 3
to 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.whatif.scenario import ALL_IDEAL, AS_RECORDED, IDEAL, RECORDED, Scenario, Where
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import BACKWARD_RECV, BACKWARD_SEND, FORWARD_RECV, FORWARD_SEND
from pacekeeper_analysis.whatif.window import Skipped, Window

NOTHING_TO_DECOMPOSE = 1.03
"""Below this slowdown there is nothing to attribute to types, ranks or stages."""

WORST_PERCENT = 3
"""Percentage of the workers that M_W idealises."""

TRUSTED_ERROR = 0.05
"""Beyond this error of the simulation its figures are doubtful (arXiv 2505.05713, section 3.4)."""

MERGED_TYPES = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}
"""Types that are one in the figures: the two ends of a transfer."""


@dataclass(frozen=True)
class Blame:
    """How much of the slowdown goes when a set of workers is made ideal, and how much they cause alone."""

    workers: tuple[tuple[int, int], ...]
    """(dp_rank, stage)."""
    without_s: Array
    """Seconds of each step if they were ideal [step]."""
    alone_s: Array
    """Seconds of each step if all others were ideal [step]."""
    share: float
    """M of the paper: (T - T[they ideal]) / (T - T_ideal)."""


@dataclass(frozen=True)
class Decomposition:
    """Who causes the slowdown. Slowdowns are relative to T_ideal; each with everything else ideal."""

    by_type: dict[str, float]
    """S_t by operation type."""
    by_replica: Array
    """S_dp [replica]."""
    by_stage: Array
    """S_stage [stage]."""
    by_worker: Array
    """S_w = min(S_dp, S_stage) [replica, stage]."""
    by_type_per_step: dict[str, Array]
    """S_t of each step [step]."""
    by_replica_per_step: Array
    """S_dp of each step [replica, step]."""
    by_stage_per_step: Array
    """S_stage of each step [stage, step]."""
    worst_workers: Blame
    """M_W: the slowest 3 % of the workers."""
    last_stage: Blame
    """M_S: the last pipeline stage, where the loss is computed."""


@dataclass(frozen=True)
class WhatIf:
    """The analysis of a window. `ask` answers any further question."""

    window: Window
    step_s: Array
    """T: simulated seconds of each step as recorded, without launch delays [step]."""
    ideal_step_s: float
    """T_ideal: seconds of a step in which everything takes its ideal time."""
    decomposition: Decomposition | None
    """None where the slowdown is too small to be decomposed."""

    @property
    def slowdown(self) -> float:
        """S = T / T_ideal."""
        return float(self.step_s.mean() / self.ideal_step_s)

    @property
    def slowdown_per_step(self) -> Array:
        """S of each step [step]."""
        return self.step_s / self.ideal_step_s

    @property
    def waste(self) -> float:
        """Share of the time that stragglers cost."""
        return 1.0 - 1.0 / self.slowdown

    @property
    def launch_slowdown(self) -> float | None:
        """Measured over simulated step time: the simulation's own error. None where steps were not measured."""
        measured = self.window.measured_s
        return None if measured is None else float(measured.mean() / self.step_s.mean())

    @property
    def launch_slowdown_per_step(self) -> Array | None:
        """The launch slowdown of each step [step]."""
        measured = self.window.measured_s
        return None if measured is None else measured / self.step_s

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps analysed."""
        return self.window.steps

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Steps left out."""
        return self.window.skipped

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the figures doubtful."""
        found = list(self.window.notes)
        launch = self.launch_slowdown
        if launch is not None and abs(launch - 1.0) > TRUSTED_ERROR:
            found.append(
                f"measured steps take {launch:.2f} times as long as simulated ones: something that the trace does not "
                "record costs time, or its clocks are wrong, and the figures leave it out"
            )
        if len(self.skipped) > len(self.steps):
            found.append(f"{len(self.skipped)} of {len(self.skipped) + len(self.steps)} steps are left out")
        return tuple(found)

    def ask(self, scenario: Scenario) -> Array:
        """Seconds of each step in a scenario [step]."""
        return np.asarray(self.window.step_seconds([scenario])[0])

    def gain(self, scenario: Scenario) -> float:
        """How many times faster than as recorded the job would be in a scenario."""
        return float(self.step_s.mean() / self.ask(scenario).mean())


def analyse(window: Window, worker_rank: Mapping[tuple[int, int], int] | None = None) -> WhatIf:
    """All figures of a window. Raises InputError where its operations take no time.

    worker_rank: the global rank of each worker (dp_rank, stage), which decides ties between workers; by default
    workers are numbered by stage, then dp_rank.
    """
    ideal = window.ideal_step_s()
    if ideal <= 0:
        raise InputError("the operations take no time at all; is the trace in seconds?")
    stages = sorted({operation.stage for operation in window.operations})
    types = sorted({MERGED_TYPES.get(operation.type, operation.type) for operation in window.operations})
    last_stage = Where(stages=stages[-1:])
    scenarios = {
        "recorded": AS_RECORDED,
        "last stage ideal": AS_RECORDED.but(last_stage, takes=IDEAL),
        **{f"type {name}": ALL_IDEAL.but(Where(types=_members(name)), takes=RECORDED) for name in types},
        **{f"stage {stage}": ALL_IDEAL.but(Where(stages=[stage]), takes=RECORDED) for stage in stages},
    }
    seconds = dict(zip(scenarios, window.step_seconds(list(scenarios.values())), strict=True))
    step_s = seconds["recorded"]
    if step_s.mean() / ideal < NOTHING_TO_DECOMPOSE:
        return WhatIf(window, step_s, ideal, None)

    by_replica_s = window.each_replica_alone()
    by_stage_s = np.array([seconds[f"stage {stage}"] for stage in stages])
    by_replica, by_stage = by_replica_s.mean(axis=1) / ideal, by_stage_s.mean(axis=1) / ideal
    by_worker = np.minimum(by_replica[:, None], by_stage[None, :])
    worst = _worst(by_worker, worker_rank)
    worst_ideal, worst_alone = window.step_seconds(
        [AS_RECORDED.but(Where(workers=worst), takes=IDEAL), ALL_IDEAL.but(Where(workers=worst), takes=RECORDED)]
    )

    def share(without_s: Array) -> float:
        return float((step_s.mean() - without_s.mean()) / (step_s.mean() - ideal))

    return WhatIf(
        window,
        step_s,
        ideal,
        Decomposition(
            by_type={name: float(seconds[f"type {name}"].mean() / ideal) for name in types},
            by_replica=by_replica,
            by_stage=by_stage,
            by_worker=by_worker,
            by_type_per_step={name: seconds[f"type {name}"] / ideal for name in types},
            by_replica_per_step=by_replica_s / ideal,
            by_stage_per_step=by_stage_s / ideal,
            worst_workers=Blame(tuple(worst), worst_ideal, worst_alone, share(worst_ideal)),
            last_stage=Blame(
                tuple((replica, stages[-1]) for replica in range(window.replicas)),
                seconds["last stage ideal"],
                by_stage_s[-1],
                share(seconds["last stage ideal"]),
            ),
        ),
    )


def _members(name: str) -> list[str]:
    """The operation types that go by this name in the figures."""
    return [member for member, merged in MERGED_TYPES.items() if merged == name] or [name]


def _worst(by_worker: Array, worker_rank: Mapping[tuple[int, int], int] | None) -> list[tuple[int, int]]:
    """The slowest workers, ties to the lowest rank."""
    replicas, stages = by_worker.shape
    workers = [(replica, stage) for stage in range(stages) for replica in range(replicas)]
    rank = worker_rank or {worker: number for number, worker in enumerate(workers)}
    count = math.ceil(WORST_PERCENT * len(workers) / 100)
    return sorted(workers, key=lambda worker: (-by_worker[worker], rank[worker]))[:count]
