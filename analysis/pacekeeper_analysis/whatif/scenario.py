"""Scenarios: how long a recorded window's steps would take under other durations.

A scenario defines the duration of each operation: as recorded, ideal, or something else for a selection of operations.
Scenarios are values: each change returns a new one.

    slow = OperationSelection(replicas=[12])
    RECORDED_SCENARIO.with_change(slow, takes=PEERS)                     # rank 12 at its peers' speed
    backward = OperationSelection(types=["backward-compute"])
    IDEAL_SCENARIO.with_change(backward, takes=RECORDED)                 # only backward as recorded
    forward = OperationSelection(types=["forward-compute"])
    RECORDED_SCENARIO.with_change(forward, takes=UNINTERRUPTED)          # without pauses for garbage collection
    reduce = OperationSelection(types=["grads-reduce-scatter"])
    RECORDED_SCENARIO.with_independent_replicas(reduce)                  # replicas do not wait for each other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.simulate import Array


class OperationSelection:
    """A selection of operations: those that meet all given conditions. Without conditions, all.

    `types` are operation types, and `stages` pipeline stages. `replicas` are data-parallel ranks (flat index into the
    replica mesh). `workers` are pairs (replica, stage). `steps` are step numbers as in the trace.
    """

    __slots__ = ("_at", "replicas", "stages", "steps", "types", "workers")

    def __init__(
        self,
        *,
        types: Iterable[str] | None = None,
        stages: Iterable[int] | None = None,
        replicas: Iterable[int] | None = None,
        workers: Iterable[tuple[int, int]] | None = None,
        steps: Iterable[int] | None = None,
    ) -> None:
        self.types = None if types is None else frozenset(types)
        self.stages = None if stages is None else frozenset(stages)
        self.replicas = None if replicas is None else frozenset(replicas)
        self.workers = None if workers is None else frozenset(workers)
        self.steps = None if steps is None else frozenset(steps)
        self._at: dict[tuple[int, int], NDArray[np.bool_]] = {}  # cache of `select_replicas`

    def includes(self, operation: Operation) -> bool:
        """Return whether the operation is selected in at least one replica and step, by its type and stage."""
        return (
            (self.types is None or operation.type in self.types)
            and (self.stages is None or operation.stage in self.stages)
            and (self.workers is None or any(stage == operation.stage for _, stage in self.workers))
        )

    def is_unconditional(self) -> bool:
        """Return whether the selection depends only on the operation, and applies to every replica and step."""
        return self.replicas is None and self.workers is None and self.steps is None

    def select_replicas(self, stage: int, count: int) -> NDArray[np.bool_]:
        """Return which of `count` replicas are selected for operations of this stage.

        Raises ValueError if a selected replica does not exist.
        """
        selected = self._at.get((stage, count))
        if selected is None:
            selected = self._at[stage, count] = self._find_replicas(stage, count)
            selected.flags.writeable = False  # all operations of the stage share this array
        return selected

    def _find_replicas(self, stage: int, count: int) -> NDArray[np.bool_]:
        if self.replicas is None and self.workers is None:
            return np.ones(count, dtype=bool)
        indices = set(range(count)) if self.replicas is None else set(self.replicas)
        if self.workers is not None:
            indices &= {replica for replica, worker_stage in self.workers if worker_stage == stage}
        if indices and not 0 <= min(indices) <= max(indices) < count:
            raise ValueError(f"replicas {sorted(indices)} of a job with {count}; they are numbered from 0")
        chosen = np.zeros(count, dtype=bool)
        chosen[list(indices)] = True
        return chosen

    def select_steps(self, numbers: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return which of the steps with these numbers are selected."""
        if self.steps is None:
            return np.ones(len(numbers), dtype=bool)
        return np.array([number in self.steps for number in numbers])


@dataclass(frozen=True)
class DurationQuery:
    """The operation for which a duration rule is evaluated."""

    recorded: Array
    """Seconds it took, without waits for others [replica, step]."""
    ideal: float
    """Ideal seconds of its type."""
    chosen: NDArray[np.bool_]
    """The replicas to which the change applies [replica]."""
    current: Array
    """Seconds in the scenario before this change [replica, step]."""


DurationRule = Callable[[DurationQuery], Array]
"""Returns the duration of an operation in a scenario: seconds, broadcastable to [replica, step]."""


def _take_recorded(query: DurationQuery) -> Array:
    return query.recorded


def _take_ideal(query: DurationQuery) -> Array:
    return np.full((1, 1), query.ideal)


def _take_peers_median(query: DurationQuery) -> Array:
    if query.chosen.all():
        raise ValueError("there are no peers left to compare with: choose fewer replicas, or use IDEAL")
    return np.asarray(np.median(query.recorded[~query.chosen], axis=0, keepdims=True))


def _take_uninterrupted(query: DurationQuery) -> Array:
    usual = np.median(query.current, axis=1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(query.current - usual), axis=1, keepdims=True)
    return np.where(query.current - usual > np.maximum(6.0 * spread, 0.15 * usual), usual, query.current)


RECORDED: DurationRule = _take_recorded
"""The recorded duration, without waits for others."""

IDEAL: DurationRule = _take_ideal
"""The ideal duration of the type (arXiv 2505.05713: the mean of computations, the median of communication)."""

PEERS: DurationRule = _take_peers_median
"""The median duration of the same operation in the same step on the replicas that are not chosen."""

UNINTERRUPTED: DurationRule = _take_uninterrupted
"""The previous duration, but the usual time in steps that took far longer than is usual for the replica.

Such a step is a pause for garbage collection, for example. The limit is six standard deviations, at least 15 %.
"""


@dataclass(frozen=True)
class FixedSeconds:
    """A duration rule: a fixed number of seconds."""

    value: float

    def __call__(self, query: DurationQuery) -> Array:
        return np.full_like(query.current, self.value)


@dataclass(frozen=True)
class ScaledSeconds:
    """A duration rule: `factor` times as long, except a fixed cost: fixed + factor · (seconds - fixed).

    `factor` is one number, or one per replica (batch shares).
    """

    factor: float | tuple[float, ...]
    fixed: float = 0.0

    def __call__(self, query: DurationQuery) -> Array:
        factor = np.asarray(self.factor, dtype=np.float64).reshape(-1, 1)
        fixed = np.minimum(self.fixed, query.current)
        return np.asarray(fixed + factor * (query.current - fixed))


@dataclass(frozen=True)
class ScenarioChange:
    """A duration rule for the chosen operations."""

    where: OperationSelection
    takes: DurationRule


@dataclass(frozen=True)
class WhatIfScenario:
    """The duration of each operation, and the collectives that do not wait for other replicas.

    Later changes override earlier ones.
    """

    base: DurationRule = RECORDED
    changes: tuple[ScenarioChange, ...] = field(default=())
    independent: tuple[OperationSelection, ...] = field(default=())

    def with_change(self, where: OperationSelection, takes: DurationRule) -> WhatIfScenario:
        """Return a scenario in which the chosen operations take `takes`."""
        return replace(self, changes=(*self.changes, ScenarioChange(where, takes)))

    def with_independent_replicas(self, where: OperationSelection) -> WhatIfScenario:
        """Return a scenario in which the chosen collectives do not wait for other replicas.

        This is Local-SGD between synchronizations.
        """
        return replace(self, independent=(*self.independent, where))

    def find_uniform_rule(self, operation: Operation) -> DurationRule | None:
        """Return the rule of an operation if it is the same in all replicas and steps.

        None if it depends on them, or on earlier changes.
        """
        rule: DurationRule | None = self.base
        for change in self.changes:
            if change.where.includes(operation):
                rule = change.takes if change.where.is_unconditional() and change.takes in (RECORDED, IDEAL) else None
        return rule


RECORDED_SCENARIO = WhatIfScenario(RECORDED)
"""All durations as recorded, without late launches: T of the paper."""

IDEAL_SCENARIO = WhatIfScenario(IDEAL)
"""All durations ideal: T_ideal of the paper."""
