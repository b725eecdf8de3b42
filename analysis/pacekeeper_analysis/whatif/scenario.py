"""Questions to a recorded window: "how long would the steps take if …?"

A scenario says how long each operation takes: as recorded, ideally, or something else for a selection of operations.
Scenarios are values: each change returns a new one.

    AS_RECORDED.but(Where(replicas=[12]), takes=PEERS)              rank 12 at its peers' pace
    ALL_IDEAL.but(Where(types=["backward-compute"]), takes=RECORDED)   only backward as it was
    AS_RECORDED.but(Where(types=["forward-compute"]), takes=UNINTERRUPTED)   without pauses for garbage collection
    AS_RECORDED.apart(Where(types=["grads-reduce-scatter"]))        replicas do not wait for each other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.simulate import Array


class Where:
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
        self._at: dict[tuple[int, int], NDArray[np.bool_]] = {}  # what `replicas_at` has found

    def includes(self, operation: Operation) -> bool:
        """Whether the operation is meant, in at least one replica and step; it goes by its type and stage."""
        return (
            (self.types is None or operation.type in self.types)
            and (self.stages is None or operation.stage in self.stages)
            and (self.workers is None or any(stage == operation.stage for _, stage in self.workers))
        )

    def whole(self) -> bool:
        """Whether the selection goes by operation only: what it includes is meant in every replica and step."""
        return self.replicas is None and self.workers is None and self.steps is None

    def replicas_at(self, stage: int, count: int) -> NDArray[np.bool_]:
        """Which of `count` replicas are meant for operations of this stage.

        Raises ValueError where one does not exist.
        """
        found = self._at.get((stage, count))
        if found is None:
            found = self._at[stage, count] = self._replicas_at(stage, count)
            found.flags.writeable = False  # every operation of the stage is given the same
        return found

    def _replicas_at(self, stage: int, count: int) -> NDArray[np.bool_]:
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

    def steps_of(self, numbers: tuple[int, ...]) -> NDArray[np.bool_]:
        """Which of the steps with these numbers are meant."""
        if self.steps is None:
            return np.ones(len(numbers), dtype=bool)
        return np.array([number in self.steps for number in numbers])


@dataclass(frozen=True)
class Asked:
    """The operation that a pace is asked for."""

    recorded: Array
    """Seconds it took, without waiting for others [replica, step]."""
    ideal: float
    """Seconds that its type ideally takes."""
    chosen: NDArray[np.bool_]
    """The replicas that the change is about [replica]."""
    so_far: Array
    """Seconds in the scenario before this change [replica, step]."""


Pace = Callable[[Asked], Array]
"""How long an operation takes in a scenario: seconds, broadcastable to [replica, step]."""


def _recorded(asked: Asked) -> Array:
    return asked.recorded


def _ideal(asked: Asked) -> Array:
    return np.full((1, 1), asked.ideal)


def _peers(asked: Asked) -> Array:
    if asked.chosen.all():
        raise ValueError("there are no peers left to take the pace from: choose fewer replicas, or use IDEAL")
    return np.asarray(np.median(asked.recorded[~asked.chosen], axis=0, keepdims=True))


def _uninterrupted(asked: Asked) -> Array:
    usual = np.median(asked.so_far, axis=1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(asked.so_far - usual), axis=1, keepdims=True)
    return np.where(asked.so_far - usual > np.maximum(6.0 * spread, 0.15 * usual), usual, asked.so_far)


RECORDED: Pace = _recorded
"""As long as it took, without waiting for others."""

IDEAL: Pace = _ideal
"""As long as its type ideally takes (arXiv 2505.05713: the mean of computations, the median of communication)."""

PEERS: Pace = _peers
"""As long as the same operation took in the same step on the replicas that are not chosen (their median)."""

UNINTERRUPTED: Pace = _uninterrupted
"""As long as before, but where a step took far longer than that replica usually does (a pause for garbage
collection: six standard deviations, 15 % at least), its usual time."""


@dataclass(frozen=True)
class Seconds:
    """A pace: a fixed number of seconds."""

    value: float

    def __call__(self, asked: Asked) -> Array:
        return np.full_like(asked.so_far, self.value)


@dataclass(frozen=True)
class Scaled:
    """A pace: `factor` times as long, apart from a fixed cost: fixed + factor · (seconds - fixed).

    `factor` is one number, or one for each replica (batch shares).
    """

    factor: float | tuple[float, ...]
    fixed: float = 0.0

    def __call__(self, asked: Asked) -> Array:
        factor = np.asarray(self.factor, dtype=np.float64).reshape(-1, 1)
        fixed = np.minimum(self.fixed, asked.so_far)
        return np.asarray(fixed + factor * (asked.so_far - fixed))


@dataclass(frozen=True)
class Change:
    """The chosen operations take this long."""

    where: Where
    takes: Pace


@dataclass(frozen=True)
class Scenario:
    """How long each operation takes, and which collectives wait for nobody. Later changes go over earlier ones."""

    base: Pace = RECORDED
    changes: tuple[Change, ...] = field(default=())
    alone: tuple[Where, ...] = field(default=())

    def but(self, where: Where, takes: Pace) -> Scenario:
        """The same, but the chosen operations take `takes`."""
        return replace(self, changes=(*self.changes, Change(where, takes)))

    def apart(self, where: Where) -> Scenario:
        """The same, but the chosen collectives do not wait for other replicas (Local-SGD between
        synchronisations)."""
        return replace(self, alone=(*self.alone, where))

    def pace(self, operation: Operation) -> Pace | None:
        """The one pace of an operation in all replicas and steps; None where it depends on them, or on earlier
        changes."""
        pace: Pace | None = self.base
        for change in self.changes:
            if change.where.includes(operation):
                pace = change.takes if change.where.whole() and change.takes in (RECORDED, IDEAL) else None
        return pace


AS_RECORDED = Scenario(RECORDED)
"""Everything took as long as it did, nothing was launched late: T of the paper."""

ALL_IDEAL = Scenario(IDEAL)
"""Everything took its ideal time: T_ideal of the paper."""
