"""Statistics of the what-if analysis: what stragglers cost, and where they are (arXiv 2505.05713, sections 3 to 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.whatif.scenario import (
    IDEAL,
    IDEAL_SCENARIO,
    RECORDED,
    RECORDED_SCENARIO,
    OperationSelection,
    WhatIfScenario,
)
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import BACKWARD_RECV, BACKWARD_SEND, FORWARD_RECV, FORWARD_SEND
from pacekeeper_analysis.whatif.window import RecordedWindow, SkippedStep

MIN_DECOMPOSED_SLOWDOWN = 1.03
"""Slowdown below which nothing is attributed to types, ranks or stages."""

WORST_PERCENT = 3
"""Percentage of the workers that M_W makes ideal."""

MAX_SIMULATION_ERROR = 0.05
"""Error of the simulation above which its results are doubtful (arXiv 2505.05713, section 3.4)."""

MERGED_TYPES = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}
"""Types that are merged in the results: the two ends of a transfer."""


@dataclass(frozen=True)
class WorkerSetImpact:
    """The part of the slowdown that disappears if a set of workers is ideal, and the part that they cause alone."""

    workers: tuple[tuple[int, int], ...]
    """Pairs (dp_rank, stage)."""
    ideal_step_s: Array
    """Seconds of each step if the workers were ideal [step]."""
    only_step_s: Array
    """Seconds of each step if all others were ideal [step]."""
    share: float
    """M of the paper: (T - T[they ideal]) / (T - T_ideal)."""


@dataclass(frozen=True)
class Decomposition:
    """The causes of the slowdown. Slowdowns are relative to T_ideal, each with everything else ideal."""

    slowdown_by_type: dict[str, float]
    """S_t by operation type."""
    slowdown_by_replica: Array
    """S_dp [replica]."""
    slowdown_by_stage: Array
    """S_stage [stage]."""
    slowdown_by_worker: Array
    """S_w = min(S_dp, S_stage) [replica, stage]."""
    type_slowdown_per_step: dict[str, Array]
    """S_t of each step [step]."""
    replica_slowdown_per_step: Array
    """S_dp of each step [replica, step]."""
    stage_slowdown_per_step: Array
    """S_stage of each step [stage, step]."""
    worst_workers: WorkerSetImpact
    """M_W: the slowest 3 % of the workers."""
    last_stage: WorkerSetImpact
    """M_S: the last pipeline stage, where the loss is computed."""


@dataclass(frozen=True)
class WhatIf:
    """The analysis of a window. `simulate_scenario` answers further questions."""

    window: RecordedWindow
    step_s: Array
    """T: simulated seconds of each step as recorded, without launch delays [step]."""
    ideal_step_s: float
    """T_ideal: seconds of a step in which all operations take their ideal time."""
    decomposition: Decomposition | None
    """None if the slowdown is too small to be decomposed."""

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
        """The share of the time that stragglers cost."""
        return 1.0 - 1.0 / self.slowdown

    @property
    def launch_slowdown(self) -> float | None:
        """Measured over simulated step time: the error of the simulation. None if steps were not measured."""
        measured = self.window.measured_s
        return None if measured is None else float(measured.mean() / self.step_s.mean())

    @property
    def launch_slowdown_per_step(self) -> Array | None:
        """The launch slowdown of each step [step]."""
        measured = self.window.measured_s
        return None if measured is None else measured / self.step_s

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the analyzed steps."""
        return self.window.steps

    @property
    def skipped(self) -> tuple[SkippedStep, ...]:
        """Steps that were left out."""
        return self.window.skipped

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the results are doubtful."""
        warnings = list(self.window.notes)
        launch = self.launch_slowdown
        if launch is not None and abs(launch - 1.0) > MAX_SIMULATION_ERROR:
            warnings.append(
                f"measured steps take {launch:.2f} times as long as simulated ones: something that the trace does not "
                "record costs time, or its clocks are wrong; the results leave it out"
            )
        if len(self.skipped) > len(self.steps):
            warnings.append(f"{len(self.skipped)} of {len(self.skipped) + len(self.steps)} steps are left out")
        return tuple(warnings)

    def simulate_scenario(self, scenario: WhatIfScenario) -> Array:
        """Return the seconds of each step in a scenario [step]."""
        return np.asarray(self.window.simulate_step_seconds([scenario])[0])

    def compute_gain(self, scenario: WhatIfScenario) -> float:
        """Return the ratio of the recorded step time to that in a scenario."""
        return float(self.step_s.mean() / self.simulate_scenario(scenario).mean())


def analyze_window(window: RecordedWindow, worker_rank: Mapping[tuple[int, int], int] | None = None) -> WhatIf:
    """Compute all statistics of a window. Raises InputError if its operations take no time.

    `worker_rank` is the global rank of each worker (dp_rank, stage), which decides ties between workers. By default
    workers are numbered by stage, then dp_rank.
    """
    ideal = window.compute_ideal_step_s()
    if ideal <= 0:
        raise InputError("the operations take no time at all; is the trace in seconds?")
    stages = sorted({operation.stage for operation in window.operations})
    types = sorted({MERGED_TYPES.get(operation.type, operation.type) for operation in window.operations})
    last_stage = OperationSelection(stages=stages[-1:])
    scenarios = {
        "recorded": RECORDED_SCENARIO,
        "last stage ideal": RECORDED_SCENARIO.with_change(last_stage, takes=IDEAL),
        **{
            f"type {name}": IDEAL_SCENARIO.with_change(
                OperationSelection(types=_list_merged_types(name)), takes=RECORDED
            )
            for name in types
        },
        **{
            f"stage {stage}": IDEAL_SCENARIO.with_change(OperationSelection(stages=[stage]), takes=RECORDED)
            for stage in stages
        },
    }
    seconds = dict(zip(scenarios, window.simulate_step_seconds(list(scenarios.values())), strict=True))
    step_s = seconds["recorded"]
    if step_s.mean() / ideal < MIN_DECOMPOSED_SLOWDOWN:
        return WhatIf(window, step_s, ideal, None)

    by_replica_s = window.simulate_single_replicas()
    by_stage_s = np.array([seconds[f"stage {stage}"] for stage in stages])
    by_replica, by_stage = by_replica_s.mean(axis=1) / ideal, by_stage_s.mean(axis=1) / ideal
    by_worker = np.minimum(by_replica[:, None], by_stage[None, :])
    worst = _find_worst_workers(by_worker, worker_rank)
    worst_ideal, worst_only = window.simulate_step_seconds(
        [
            RECORDED_SCENARIO.with_change(OperationSelection(workers=worst), takes=IDEAL),
            IDEAL_SCENARIO.with_change(OperationSelection(workers=worst), takes=RECORDED),
        ]
    )

    def share(without_s: Array) -> float:
        return float((step_s.mean() - without_s.mean()) / (step_s.mean() - ideal))

    return WhatIf(
        window,
        step_s,
        ideal,
        Decomposition(
            slowdown_by_type={name: float(seconds[f"type {name}"].mean() / ideal) for name in types},
            slowdown_by_replica=by_replica,
            slowdown_by_stage=by_stage,
            slowdown_by_worker=by_worker,
            type_slowdown_per_step={name: seconds[f"type {name}"] / ideal for name in types},
            replica_slowdown_per_step=by_replica_s / ideal,
            stage_slowdown_per_step=by_stage_s / ideal,
            worst_workers=WorkerSetImpact(tuple(worst), worst_ideal, worst_only, share(worst_ideal)),
            last_stage=WorkerSetImpact(
                tuple((replica, stages[-1]) for replica in range(window.replicas)),
                seconds["last stage ideal"],
                by_stage_s[-1],
                share(seconds["last stage ideal"]),
            ),
        ),
    )


def _list_merged_types(name: str) -> list[str]:
    """Return the operation types with this name in the results."""
    return [member for member, merged in MERGED_TYPES.items() if merged == name] or [name]


def _find_worst_workers(by_worker: Array, worker_rank: Mapping[tuple[int, int], int] | None) -> list[tuple[int, int]]:
    """Return the slowest workers. Ties go to the lowest rank."""
    replicas, stages = by_worker.shape
    workers = [(replica, stage) for stage in range(stages) for replica in range(replicas)]
    rank = worker_rank or {worker: number for number, worker in enumerate(workers)}
    count = math.ceil(WORST_PERCENT * len(workers) / 100)
    return sorted(workers, key=lambda worker: (-by_worker[worker], rank[worker]))[:count]
