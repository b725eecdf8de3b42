"""A recorded window of a job: some steps of all replicas, ready for questions of the form "what if?"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper_analysis.whatif.graph import Graph, Operation
from pacekeeper_analysis.whatif.scenario import ALL_IDEAL, IDEAL, RECORDED, Asked, Scenario, Where
from pacekeeper_analysis.whatif.simulate import Array, Timeline, simulate

COLUMNS_AT_ONCE = 32_768
"""Columns (scenarios x replicas x steps) simulated together: enough to hide Python, few enough for the cache."""


@dataclass(frozen=True)
class Skipped:
    """A step that was left out, and why."""

    step: int
    reason: str


@dataclass(frozen=True)
class Window:
    """Recorded durations of every operation, and the graph that orders them: what front ends make and analyses
    ask."""

    graph: Graph
    operations: tuple[Operation, ...]
    seconds: Array
    """Durations [operation, *mesh, step], waits for others taken out. The mesh is usually one axis of replicas."""
    ideal: Array
    """Ideal durations [operation]."""
    steps: tuple[int, ...]
    """Step numbers as in the trace."""
    measured_s: Array | None = None
    """Measured seconds of each step [step]."""
    skipped: tuple[Skipped, ...] = field(default=())
    notes: tuple[str, ...] = ()
    """What of the recording is left out, or to be read with care, in words."""
    recorded_at: tuple[Array, Array] | None = None
    """When each operation started and ended [operation, *mesh, step], in seconds of its step; None where unknown."""

    @property
    def mesh(self) -> tuple[int, ...]:
        """Shape of the replica mesh."""
        return self.seconds.shape[1:-1]

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return int(np.prod(self.mesh))

    def recorded(self, operation: int) -> Array:
        """Recorded seconds of one operation [replica, step]."""
        return np.asarray(self.seconds[operation].reshape(-1, len(self.steps)))

    def seconds_in(self, scenario: Scenario, operation: int) -> Array:
        """Seconds of one operation in the scenario, broadcastable to [replica, step]."""
        what, recorded, ideal = self.operations[operation], self.recorded(operation), float(self.ideal[operation])
        seconds = scenario.base(Asked(recorded, ideal, np.ones(len(recorded), dtype=bool), recorded))
        for where, pace in ((change.where, change.takes) for change in scenario.changes):
            if where.includes(what):
                replicas = where.replicas_at(what.stage, len(recorded))
                new = pace(Asked(recorded, ideal, replicas, np.broadcast_to(seconds, recorded.shape)))
                seconds = np.where(replicas[:, None] & where.steps_of(self.steps), new, seconds)
        return seconds

    def step_seconds(self, scenarios: Sequence[Scenario]) -> Array:
        """Seconds of each step in each scenario [scenario, step]; a step ends when its last replica has finished."""
        return np.asarray(self.finish(scenarios).max(axis=1))

    def finish(self, scenarios: Sequence[Scenario]) -> Array:
        """Seconds in which each replica finishes each step in each scenario [scenario, replica, step]."""
        finish = np.empty((len(scenarios), self.replicas, len(self.steps)))
        for graph, which in self._by_graph(scenarios):
            for part, steps in self._blocks(which):
                columns = _Columns(self._part(steps), [scenarios[index] for index in part])
                ends = simulate(graph, columns)
                finish[part, :, steps] = np.broadcast_to(ends, columns.shape).reshape(len(part), self.replicas, -1)
        return finish

    def timeline(self, scenario: Scenario, step: int) -> Timeline:
        """Start and end of each operation in one step: arrays that broadcast to [1, *mesh, 1]."""
        at = self.steps.index(step)
        (graph, _), timeline = next(self._by_graph([scenario])), Timeline()
        simulate(graph, _Columns(self._part(slice(at, at + 1)), [scenario]), timeline)
        return timeline

    def each_replica_alone(self) -> Array:
        """Seconds of each step if only one replica took its recorded time and all others were ideal [replica, step].

        The other replicas are all alike, so that two columns simulate the whole job and the cost is linear in the
        number of replicas. (On a mesh of several axes they are not: whose group it is matters. Each is simulated.)
        """
        replicas = self.replicas
        if replicas == 1 or len(self.mesh) > 1:
            return self.step_seconds(
                [ALL_IDEAL.but(Where(replicas=[replica]), takes=RECORDED) for replica in range(replicas)]
            )
        alone = np.empty((replicas, len(self.steps)))
        width = max(1, COLUMNS_AT_ONCE // (2 * len(self.steps)))
        for first in range(0, replicas, width):
            block = slice(first, min(first + width, replicas))
            pair = _AloneAndIdeal(self.seconds, self.ideal, block)
            alone[block] = np.broadcast_to(simulate(self.graph, pair), pair.shape).max(axis=1)
        return alone

    def ideal_step_s(self) -> float:
        """Seconds of a step in which everything takes its ideal time: T_ideal, the same for every step."""
        shape = (-1,) + (1,) * (len(self.mesh) + 2)
        return float(simulate(self.graph, self.ideal.reshape(shape)).max())

    def with_seconds(self, seconds: Array) -> Window:
        """The window with other durations [operation, *mesh, step]; the ideal ones stay."""
        return replace(self, seconds=seconds)

    def _part(self, steps: slice) -> Window:
        """The window of some of the steps."""
        return replace(self, seconds=self.seconds[..., steps], steps=self.steps[steps])

    def _by_graph(self, scenarios: Sequence[Scenario]) -> Iterator[tuple[Graph, list[int]]]:
        """The scenarios (their indices) that share a graph: most share the recorded one."""
        together = [index for index, scenario in enumerate(scenarios) if not scenario.alone]
        if together:
            yield self.graph, together
        for index, scenario in enumerate(scenarios):
            if scenario.alone:
                nodes = [any(where.includes(node) for where in scenario.alone) for node in self.operations]
                yield self.graph.apart(nodes), [index]

    def _blocks(self, scenarios: list[int]) -> Iterator[tuple[list[int], slice]]:
        """Scenarios and steps in blocks of about COLUMNS_AT_ONCE columns."""
        count = len(self.steps)
        steps = min(count, max(1, COLUMNS_AT_ONCE // (len(scenarios) * self.replicas)))
        width = max(1, COLUMNS_AT_ONCE // (steps * self.replicas))
        for first in range(0, len(scenarios), width):
            for start in range(0, count, steps):
                yield scenarios[first : first + width], slice(start, min(start + steps, count))


def ideal_seconds(operations: Sequence[Operation], seconds: Array, mean_types: frozenset[str]) -> Array:
    """Ideal duration of each operation [operation]: one per type, over all stages, replicas and steps.

    The mean for the types in `mean_types` (computations), the median for all others (communication, whose rare long
    values are not the operation's own). seconds: [operation, *mesh, step].
    """
    ideal = np.empty(len(operations))
    types = np.array([operation.type for operation in operations])
    for name in set(types.tolist()):
        nodes = types == name
        ideal[nodes] = np.mean(seconds[nodes]) if name in mean_types else np.median(seconds[nodes])
    return ideal


class _Columns:
    """Durations of some scenarios, made row by row: a table of all of them would not fit a cache."""

    def __init__(self, window: Window, scenarios: Sequence[Scenario]) -> None:
        self._window = window
        self._scenarios = scenarios
        self.shape = (len(scenarios), *window.mesh, len(window.steps))
        self._recorded, self._special = _kinds(window, scenarios)

    def __getitem__(self, operation: int, /) -> Array:
        row = np.empty(self.shape)
        row.fill(self._window.ideal[operation])
        row[self._recorded[operation]] = self._window.seconds[operation]
        for index in self._special[operation]:
            seconds = self._window.seconds_in(self._scenarios[index], operation)
            row[index] = np.broadcast_to(seconds, (self._window.replicas, self.shape[-1])).reshape(self.shape[1:])
        return row


def _kinds(window: Window, scenarios: Sequence[Scenario]) -> tuple[list[list[int]], list[list[int]]]:
    """By operation: the scenarios in which it takes its recorded time, and those that have to be asked.

    In all others it takes its ideal time.
    """
    sorts = {(operation.type, operation.stage): operation for operation in window.operations}
    recorded: dict[tuple[str, int], list[int]] = {sort: [] for sort in sorts}
    special: dict[tuple[str, int], list[int]] = {sort: [] for sort in sorts}
    for index, scenario in enumerate(scenarios):
        for sort, operation in sorts.items():
            pace = scenario.pace(operation)
            if pace is RECORDED:
                recorded[sort].append(index)
            elif pace is not IDEAL:
                special[sort].append(index)
    keys = [(operation.type, operation.stage) for operation in window.operations]
    return [recorded[key] for key in keys], [special[key] for key in keys]


class _AloneAndIdeal:
    """Durations of jobs of two replicas, [scenario, 2, step]: one replica of the window, and an ideal one."""

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
