"""A recorded window of a job: some steps of all replicas, ready for what-if scenarios."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper_analysis.whatif.graph import Operation, OperationGraph
from pacekeeper_analysis.whatif.scenario import (
    IDEAL,
    IDEAL_SCENARIO,
    RECORDED,
    DurationQuery,
    OperationSelection,
    WhatIfScenario,
)
from pacekeeper_analysis.whatif.simulate import Array, Timeline, simulate_graph

MAX_COLUMNS_SIMULATED = 32_768
"""Upper limit of columns (scenarios × replicas × steps) simulated together: enough to hide Python, and fits a cache.
"""


@dataclass(frozen=True)
class SkippedStep:
    """A step that was left out, and the reason."""

    step: int
    reason: str


@dataclass(frozen=True)
class RecordedWindow:
    """Recorded durations of every operation, and the graph that orders them. Front ends create it."""

    graph: OperationGraph
    operations: tuple[Operation, ...]
    seconds: Array
    """Durations [operation, *mesh, step], without waits for others. The mesh is usually one axis of replicas."""
    ideal: Array
    """Ideal durations [operation]."""
    steps: tuple[int, ...]
    """Step numbers as in the trace."""
    measured_s: Array | None = None
    """Measured seconds of each step [step]."""
    skipped: tuple[SkippedStep, ...] = field(default=())
    notes: tuple[str, ...] = ()
    """Notes for people: what of the recording is left out, or may be inaccurate."""
    recorded_at: tuple[Array, Array] | None = None
    """When each operation started and ended [operation, *mesh, step], in seconds of its step. None if unknown."""

    @property
    def mesh(self) -> tuple[int, ...]:
        """The shape of the replica mesh."""
        return self.seconds.shape[1:-1]

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return int(np.prod(self.mesh))

    def get_recorded_seconds(self, operation: int) -> Array:
        """Return the recorded seconds of one operation [replica, step]."""
        return np.asarray(self.seconds[operation].reshape(-1, len(self.steps)))

    def compute_seconds_in(self, scenario: WhatIfScenario, operation: int) -> Array:
        """Return the seconds of one operation in the scenario, broadcastable to [replica, step]."""
        target, recorded, ideal = (
            self.operations[operation],
            self.get_recorded_seconds(operation),
            float(self.ideal[operation]),
        )
        seconds = scenario.base(DurationQuery(recorded, ideal, np.ones(len(recorded), dtype=bool), recorded))
        for selection, rule in ((change.where, change.takes) for change in scenario.changes):
            if selection.includes(target):
                replicas = selection.select_replicas(target.stage, len(recorded))
                new = rule(DurationQuery(recorded, ideal, replicas, np.broadcast_to(seconds, recorded.shape)))
                seconds = np.where(replicas[:, None] & selection.select_steps(self.steps), new, seconds)
        return seconds

    def simulate_step_seconds(self, scenarios: Sequence[WhatIfScenario]) -> Array:
        """Return the seconds of each step in each scenario [scenario, step].

        A step ends when its last replica has finished.
        """
        return np.asarray(self.simulate_finish(scenarios).max(axis=1))

    def simulate_finish(self, scenarios: Sequence[WhatIfScenario]) -> Array:
        """Return the seconds in which each replica finishes each step in each scenario [scenario, replica, step]."""
        finish = np.empty((len(scenarios), self.replicas, len(self.steps)))
        for graph, indices in self._group_by_graph(scenarios):
            for block, steps in self._split_blocks(indices):
                columns = _ScenarioColumns(self._select_steps(steps), [scenarios[index] for index in block])
                ends = simulate_graph(graph, columns)
                finish[block, :, steps] = np.broadcast_to(ends, columns.shape).reshape(len(block), self.replicas, -1)
        return finish

    def simulate_timeline(self, scenario: WhatIfScenario, step: int) -> Timeline:
        """Return start and end of each operation in one step: arrays that broadcast to [1, *mesh, 1]."""
        index = self.steps.index(step)
        (graph, _), timeline = next(self._group_by_graph([scenario])), Timeline()
        simulate_graph(graph, _ScenarioColumns(self._select_steps(slice(index, index + 1)), [scenario]), timeline)
        return timeline

    def simulate_single_replicas(self) -> Array:
        """Return the step seconds if one replica took its recorded time, all others ideal [replica, step].

        The other replicas are equal, so two columns simulate the whole job, and the cost is linear in the number of
        replicas. (On a mesh of several axes they are not equal, because their groups differ. There each is simulated.)
        """
        replicas = self.replicas
        if replicas == 1 or len(self.mesh) > 1:
            return self.simulate_step_seconds(
                [
                    IDEAL_SCENARIO.with_change(OperationSelection(replicas=[replica]), takes=RECORDED)
                    for replica in range(replicas)
                ]
            )
        step_s = np.empty((replicas, len(self.steps)))
        width = max(1, MAX_COLUMNS_SIMULATED // (2 * len(self.steps)))
        for first in range(0, replicas, width):
            block = slice(first, min(first + width, replicas))
            pair = _RecordedAndIdealPair(self.seconds, self.ideal, block)
            step_s[block] = np.broadcast_to(simulate_graph(self.graph, pair), pair.shape).max(axis=1)
        return step_s

    def compute_ideal_step_s(self) -> float:
        """Return the seconds of a step in which all operations take ideal time: T_ideal, the same for every step."""
        shape = (-1,) + (1,) * (len(self.mesh) + 2)
        return float(simulate_graph(self.graph, self.ideal.reshape(shape)).max())

    def with_seconds(self, seconds: Array) -> RecordedWindow:
        """Return the window with other durations [operation, *mesh, step]. The ideal ones stay."""
        return replace(self, seconds=seconds)

    def _select_steps(self, steps: slice) -> RecordedWindow:
        """Return the window with some of the steps."""
        return replace(self, seconds=self.seconds[..., steps], steps=self.steps[steps])

    def _group_by_graph(self, scenarios: Sequence[WhatIfScenario]) -> Iterator[tuple[OperationGraph, list[int]]]:
        """Yield the scenarios (their indices) that share a graph. Most share the recorded one."""
        shared = [index for index, scenario in enumerate(scenarios) if not scenario.independent]
        if shared:
            yield self.graph, shared
        for index, scenario in enumerate(scenarios):
            if scenario.independent:
                nodes = [
                    any(selection.includes(node) for selection in scenario.independent) for node in self.operations
                ]
                yield self.graph.with_independent_replicas(nodes), [index]

    def _split_blocks(self, scenarios: list[int]) -> Iterator[tuple[list[int], slice]]:
        """Yield scenarios and steps in blocks of about MAX_COLUMNS_SIMULATED columns."""
        count = len(self.steps)
        steps = min(count, max(1, MAX_COLUMNS_SIMULATED // (len(scenarios) * self.replicas)))
        width = max(1, MAX_COLUMNS_SIMULATED // (steps * self.replicas))
        for first in range(0, len(scenarios), width):
            for start in range(0, count, steps):
                yield scenarios[first : first + width], slice(start, min(start + steps, count))


def compute_ideal_seconds(operations: Sequence[Operation], seconds: Array, mean_types: frozenset[str]) -> Array:
    """Return the ideal duration of each operation [operation]: one per type, over all stages, replicas and steps.

    It is the mean for the types in `mean_types` (computations), and the median for all others (communication, whose
    rare long values have external causes). `seconds` is [operation, *mesh, step].
    """
    ideal = np.empty(len(operations))
    types = np.array([operation.type for operation in operations])
    for name in set(types.tolist()):
        nodes = types == name
        ideal[nodes] = np.mean(seconds[nodes]) if name in mean_types else np.median(seconds[nodes])
    return ideal


class _ScenarioColumns:
    """Durations of some scenarios, computed row by row: a table of all of them would not fit into a cache."""

    def __init__(self, window: RecordedWindow, scenarios: Sequence[WhatIfScenario]) -> None:
        self._window = window
        self._scenarios = scenarios
        self.shape = (len(scenarios), *window.mesh, len(window.steps))
        self._recorded, self._special = _classify_scenarios(window, scenarios)

    def __getitem__(self, operation: int, /) -> Array:
        row = np.empty(self.shape)
        row.fill(self._window.ideal[operation])
        row[self._recorded[operation]] = self._window.seconds[operation]
        for index in self._special[operation]:
            seconds = self._window.compute_seconds_in(self._scenarios[index], operation)
            row[index] = np.broadcast_to(seconds, (self._window.replicas, self.shape[-1])).reshape(self.shape[1:])
        return row


def _classify_scenarios(
    window: RecordedWindow, scenarios: Sequence[WhatIfScenario]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return for each operation the scenarios in which it takes its recorded time, and those to compute.

    In all others it takes its ideal time.
    """
    kinds = {(operation.type, operation.stage): operation for operation in window.operations}
    recorded: dict[tuple[str, int], list[int]] = {kind: [] for kind in kinds}
    special: dict[tuple[str, int], list[int]] = {kind: [] for kind in kinds}
    for index, scenario in enumerate(scenarios):
        for kind, operation in kinds.items():
            rule = scenario.find_uniform_rule(operation)
            if rule is RECORDED:
                recorded[kind].append(index)
            elif rule is not IDEAL:
                special[kind].append(index)
    keys = [(operation.type, operation.stage) for operation in window.operations]
    return [recorded[key] for key in keys], [special[key] for key in keys]


class _RecordedAndIdealPair:
    """Durations of jobs with two replicas, [scenario, 2, step]: one replica of the window, and an ideal one."""

    def __init__(self, seconds: Array, ideal: Array, replicas: slice) -> None:
        self._seconds = seconds
        self._ideal = ideal
        self._replicas = replicas
        self.shape = (replicas.stop - replicas.start, 2, seconds.shape[-1])

    def __getitem__(self, operation: int, /) -> Array:
        row = np.empty(self.shape)
        row[:, 0] = self._seconds[operation, self._replicas]
        row[:, 1] = self._ideal[operation]
        return row
