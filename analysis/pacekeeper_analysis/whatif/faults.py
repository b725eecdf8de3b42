"""Faults for synthetic jobs: each takes the durations of a healthy job and returns them as they are with the
fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.whatif.causes import Cause
from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.synthetic import Shape, make_trace, operations_of, usual_seconds
from pacekeeper_analysis.whatif.trace import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    REDUCE_SCATTER,
    Trace,
)

Fault = Callable[[Sequence[Operation], Array, float, np.random.Generator], Array]
"""(operations, seconds [operation, dp_rank, step], strength 0 to 1, random numbers) -> seconds with the fault."""


def stage_imbalance(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """The last stage computes the loss: it takes 1.2 to 2 times as long as the others."""
    del rng
    last = max(operation.stage for operation in operations)
    chunks = max(operation.chunk for operation in operations)
    slow = [_computes(operation) and operation.stage == last and operation.chunk == chunks for operation in operations]
    return _multiplied(seconds, np.array(slow), 1.0 + (0.2 + 0.8 * strength) * (chunks + 1))


def sequence_length_imbalance(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """Lengths follow a long-tailed distribution; a microbatch costs the same factor in every stage and direction."""
    count = max(operation.microbatch for operation in operations) + 1
    factor = rng.lognormal(0.0, 0.2 + 0.5 * strength, (count, *seconds.shape[1:]))
    changed = seconds.copy()
    for node, operation in enumerate(operations):
        if _computes(operation):
            changed[node] *= factor[operation.microbatch]
    return changed


def garbage_collection(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """Every worker collects when it likes: a forward now and then pauses for 2 to 10 times its own length."""
    changed = seconds.copy()
    forwards = np.array([operation.type == FORWARD for operation in operations])
    pause = (2.0 + 8.0 * strength) * float(seconds[forwards].mean())
    hit = rng.random(changed[forwards].shape) < 0.015
    changed[forwards] += hit * pause * rng.uniform(0.8, 1.2, hit.shape)
    return changed


def slow_worker(operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator) -> Array:
    """One worker computes 1.2 to 2.5 times as long as its peers."""
    replica = int(rng.integers(seconds.shape[1]))
    stage = int(rng.integers(max(operation.stage for operation in operations) + 1))
    slow = np.array([_computes(operation) and operation.stage == stage for operation in operations])
    changed = seconds.copy()
    changed[slow, replica] *= 1.2 + 1.3 * strength
    return changed


def slow_communication(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """A link that flaps: in every third step the transfers of one worker take 20 to 100 times as long."""
    replica = int(rng.integers(seconds.shape[1]))
    stage = int(rng.integers(max(operation.stage for operation in operations) + 1))
    kinds = (FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV, REDUCE_SCATTER)
    slow = np.array([operation.type in kinds and operation.stage == stage for operation in operations])
    steps = np.flatnonzero(rng.random(seconds.shape[2]) < 0.4)
    steps = steps if steps.size else np.array([0])
    changed = seconds.copy()
    changed[np.ix_(np.flatnonzero(slow), np.array([replica]), steps)] *= 20.0 + 80.0 * strength
    return changed


def healthy(operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator) -> Array:
    """No fault."""
    del operations, strength, rng
    return seconds


FAULTS: dict[Cause, Fault] = {
    Cause.STAGE_IMBALANCE: stage_imbalance,
    Cause.SEQUENCE_LENGTH_IMBALANCE: sequence_length_imbalance,
    Cause.GARBAGE_COLLECTION: garbage_collection,
    Cause.SLOW_WORKER: slow_worker,
    Cause.SLOW_COMMUNICATION: slow_communication,
    Cause.NONE: healthy,
}
"""The fault behind each cause."""


@dataclass(frozen=True)
class Case:
    """A synthetic job with one known fault."""

    cause: Cause
    shape: Shape
    strength: float
    """0 weak to 1 strong."""
    noise: float
    """Relative standard deviation of every operation."""
    seed: int

    def trace(self) -> Trace:
        """The job's trace."""
        rng = np.random.default_rng(self.seed)
        operations = operations_of(self.shape)
        seconds = usual_seconds(operations, self.shape, self.noise, rng)
        return make_trace(self.shape, operations, FAULTS[self.cause](operations, seconds, self.strength, rng))


def cases(count: int, seed: int = 0) -> list[Case]:
    """`count` jobs: every cause in turn, of several shapes, strengths and noise levels."""
    shapes = (
        Shape(dp=4, pp=4, microbatches=8, steps=12),
        Shape(dp=8, pp=2, microbatches=4, steps=16),
        Shape(dp=2, pp=8, microbatches=8, steps=12),
        Shape(dp=4, pp=2, vpp=2, microbatches=8, steps=10),
        Shape(dp=16, pp=4, microbatches=4, steps=8),
        Shape(dp=8, pp=1, microbatches=4, steps=24),
        Shape(dp=4, pp=4, vpp=2, microbatches=8, steps=8, overlapped=True),
    )
    rng = np.random.default_rng(seed)
    made: list[Case] = []
    while len(made) < count:
        cause = list(FAULTS)[len(made) % len(FAULTS)]
        fitting = [shape for shape in shapes if shape.pp > 1 or cause is not Cause.STAGE_IMBALANCE]
        shape = fitting[int(rng.integers(len(fitting)))]
        noise = float(rng.uniform(0.005, 0.08))
        made.append(Case(cause, shape, float(rng.uniform()), noise, seed=1000 * seed + len(made)))
    return made


def _computes(operation: Operation) -> bool:
    return operation.type in (FORWARD, BACKWARD)


def _multiplied(seconds: Array, operations: np.ndarray[tuple[int], np.dtype[np.bool_]], factor: float) -> Array:
    changed = seconds.copy()
    changed[operations] *= factor
    return changed
