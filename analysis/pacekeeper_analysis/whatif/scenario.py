"""Questions to a recorded window: "how long would the steps take if …?"

A scenario says how long each operation takes: as recorded, ideally, or something else for a selection of operations.
Scenarios are values: each change returns a new one.

    RECORDED_SCENARIO.but(Where(replicas=[12]), takes=PEERS)              rank 12 at its peers' pace
    IDEAL_SCENARIO.but(Where(types=["backward-compute"]), takes=RECORDED)   only backward as it was
    RECORDED_SCENARIO.but(Where(types=["forward-compute"]), takes=UNINTERRUPTED)   without pauses for garbage collection
    RECORDED_SCENARIO.apart(Where(types=["grads-reduce-scatter"]))        replicas do not wait for each other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.simulate import Array


class OperationSelection:
    """A selection of operations: those that meet every condition given. Without conditions, all.

    types: operation types. stages: pipeline stages. replicas: data-parallel ranks (flat index into the replica mesh).
    workers: pairs (replica, stage). steps: step numbers as in the trace.
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
        self._at: dict[tuple[int, int], NDArray[np.bool_]] = {}  # what `select_replicas` has found

    def includes(self, operation: Operation) -> bool:
        """Whether the operation is meant, in at least one replica and step; it goes by its type and stage."""
        return (
            (self.types is None or operation.type in self.types)
            and (self.stages is None or operation.stage in self.stages)
            and (self.workers is None or any(stage == operation.stage for _, stage in self.workers))
        )

    def is_unconditional(self) -> bool:
        """Whether the selection goes by operation only: what it includes is meant in every replica and step."""
        return self.replicas is None and self.workers is None and self.steps is None

    def select_replicas(self, stage: int, count: int) -> NDArray[np.bool_]:
        """Which of `count` replicas are meant for operations of this stage.

        Raises ValueError where one does not exist.
        """
        found = self._at.get((stage, count))
        if found is None:
            found = self._at[stage, count] = self._find_replicas(stage, count)
            found.flags.writeable = False  # every operation of the stage is given the same
        return found

    def _find_replicas(self, stage: int, count: int) -> NDArray[np.bool_]:
        if self.replicas is None and self.workers is None:
            return np.ones(count, dtype=bool)
        named = set(range(count)) if self.replicas is None else set(self.replicas)
        if self.workers is not None:
            named &= {replica for replica, at in self.workers if at == stage}
        if named and not 0 <= min(named) <= max(named) < count:
            raise ValueError(f"replicas {sorted(named)} of a job with {count}; they are numbered from 0")
        chosen = np.zeros(count, dtype=bool)
        chosen[list(named)] = True
        return chosen

    def select_steps(self, numbers: tuple[int, ...]) -> NDArray[np.bool_]:
        """Which of the steps with these numbers are meant."""
        if self.steps is None:
            return np.ones(len(numbers), dtype=bool)
        return np.array([number in self.steps for number in numbers])


@dataclass(frozen=True)
class DurationQuery:
    """The operation that a pace is asked for."""

    recorded: Array
    """Seconds it took, without waiting for others [replica, step]."""
    ideal: float
    """Seconds that its type ideally takes."""
    chosen: NDArray[np.bool_]
    """The replicas that the change is about [replica]."""
    so_far: Array
    """Seconds in the scenario before this change [replica, step]."""


DurationRule = Callable[[DurationQuery], Array]
"""How long an operation takes in a scenario: seconds, broadcastable to [replica, step]."""


def _take_recorded(asked: DurationQuery) -> Array:
    return asked.recorded


def _take_ideal(asked: DurationQuery) -> Array:
    return np.full((1, 1), asked.ideal)


def _take_peers_median(asked: DurationQuery) -> Array:
    if asked.chosen.all():
        raise ValueError("there are no peers left to take the pace from: choose fewer replicas, or use IDEAL")
    return np.asarray(np.median(asked.recorded[~asked.chosen], axis=0, keepdims=True))


def _take_uninterrupted(asked: DurationQuery) -> Array:
    usual = np.median(asked.so_far, axis=1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(asked.so_far - usual), axis=1, keepdims=True)
    return np.where(asked.so_far - usual > np.maximum(6.0 * spread, 0.15 * usual), usual, asked.so_far)


RECORDED: DurationRule = _take_recorded
"""As long as it took, without waiting for others."""

IDEAL: DurationRule = _take_ideal
"""As long as its type ideally takes (arXiv 2505.05713: the mean of computations, the median of communication)."""

PEERS: DurationRule = _take_peers_median
"""As long as the same operation took in the same step on the replicas that are not chosen (their median)."""

UNINTERRUPTED: DurationRule = _take_uninterrupted
"""As long as before, but where a step took far longer than that replica usually does (a pause for garbage
collection: six standard deviations, 15 % at least), its usual time."""


@dataclass(frozen=True)
class FixedSeconds:
    """A pace: a fixed number of seconds."""

    value: float

    def __call__(self, asked: DurationQuery) -> Array:
        return np.full_like(asked.so_far, self.value)


@dataclass(frozen=True)
class ScaledSeconds:
    """A pace: `factor` times as long, apart from a fixed cost: fixed + factor · (seconds - fixed).

    `factor` is one number, or one for each replica (batch shares).
    """

    factor: float | tuple[float, ...]
    fixed: float = 0.0

    def __call__(self, asked: DurationQuery) -> Array:
        factor = np.asarray(self.factor, dtype=np.float64).reshape(-1, 1)
        fixed = np.minimum(self.fixed, asked.so_far)
        return np.asarray(fixed + factor * (asked.so_far - fixed))


@dataclass(frozen=True)
class ScenarioChange:
    """The chosen operations take this long."""

    where: OperationSelection
    takes: DurationRule


@dataclass(frozen=True)
class WhatIfScenario:
    """How long each operation takes, and which collectives wait for nobody. Later changes go over earlier ones."""

    base: DurationRule = RECORDED
    changes: tuple[ScenarioChange, ...] = field(default=())
    alone: tuple[OperationSelection, ...] = field(default=())

    def with_change(self, where: OperationSelection, takes: DurationRule) -> WhatIfScenario:
        """The same, but the chosen operations take `takes`."""
        return replace(self, changes=(*self.changes, ScenarioChange(where, takes)))

    def with_independent_replicas(self, where: OperationSelection) -> WhatIfScenario:
        """The same, but the chosen collectives do not wait for other replicas (Local-SGD between
        synchronisations)."""
        return replace(self, alone=(*self.alone, where))

    def find_uniform_rule(self, operation: Operation) -> DurationRule | None:
        """The one pace of an operation in all replicas and steps; None where it depends on them, or on earlier
        changes."""
        pace: DurationRule | None = self.base
        for change in self.changes:
            if change.where.includes(operation):
                pace = change.takes if change.where.is_unconditional() and change.takes in (RECORDED, IDEAL) else None
        return pace


RECORDED_SCENARIO = WhatIfScenario(RECORDED)
"""Everything took as long as it did, nothing was launched late: T of the paper."""

IDEAL_SCENARIO = WhatIfScenario(IDEAL)
"""Everything took its ideal time: T_ideal of the paper."""
