"""Faults for synthetic jobs: each takes the durations of a healthy job and returns them with the fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.whatif.causes import SlowdownCause
from pacekeeper_analysis.whatif.graph import Operation
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.synthetic import JobShape, draw_healthy_seconds, list_operations, make_trace
from pacekeeper_analysis.whatif.trace import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    REDUCE_SCATTER,
    JobTrace,
)

FaultModel = Callable[[Sequence[Operation], Array, float, np.random.Generator], Array]
"""(operations, seconds [operation, dp_rank, step], strength 0 to 1, random numbers) -> seconds with the fault."""
GC_PAUSE_PROBABILITY = 0.015
"""Probability that a forward is interrupted by a garbage collection."""
FLAPPING_STEP_PROBABILITY = 0.4
"""Probability that a flapping link is slow in a step."""


def inject_stage_imbalance(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """Make the last stage, which computes the loss, 1.2 to 2 times as long as the others."""
    del rng
    last = max(operation.stage for operation in operations)
    chunks = max(operation.chunk for operation in operations)
    slow = [
        _is_computation(operation) and operation.stage == last and operation.chunk == chunks for operation in operations
    ]
    return _scale_operations(seconds, np.array(slow), 1.0 + (0.2 + 0.8 * strength) * (chunks + 1))


def inject_length_imbalance(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """Draw lengths from a long-tailed distribution. A microbatch costs the same factor in every stage and direction."""
    count = max(operation.microbatch or 0 for operation in operations) + 1
    factor = rng.lognormal(0.0, 0.2 + 0.5 * strength, (count, *seconds.shape[1:]))
    changed = seconds.copy()
    for node, operation in enumerate(operations):
        if operation.microbatch is not None and _is_computation(operation):
            changed[node] *= factor[operation.microbatch]
    return changed


def inject_garbage_collection(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """Let every worker collect at its own times: some forwards pause for 2 to 10 times their own length."""
    changed = seconds.copy()
    forwards = np.array([operation.type == FORWARD for operation in operations])
    pause = (2.0 + 8.0 * strength) * float(seconds[forwards].mean())
    is_paused = rng.random(changed[forwards].shape) < GC_PAUSE_PROBABILITY
    changed[forwards] += is_paused * pause * rng.uniform(0.8, 1.2, is_paused.shape)
    return changed


def inject_slow_worker(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """Make one worker compute 1.2 to 2.5 times as long as its peers."""
    replica = int(rng.integers(seconds.shape[1]))
    stage = int(rng.integers(max(operation.stage for operation in operations) + 1))
    slow = np.array([_is_computation(operation) and operation.stage == stage for operation in operations])
    changed = seconds.copy()
    changed[slow, replica] *= 1.2 + 1.3 * strength
    return changed


def inject_slow_communication(
    operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator
) -> Array:
    """Make a link flap: in two of five steps the transfers of one worker take 20 to 100 times as long."""
    replica = int(rng.integers(seconds.shape[1]))
    stage = int(rng.integers(max(operation.stage for operation in operations) + 1))
    kinds = (FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV, REDUCE_SCATTER)
    slow = np.array([operation.type in kinds and operation.stage == stage for operation in operations])
    steps = np.flatnonzero(rng.random(seconds.shape[2]) < FLAPPING_STEP_PROBABILITY)
    steps = steps if steps.size else np.array([0])
    changed = seconds.copy()
    changed[np.ix_(np.flatnonzero(slow), np.array([replica]), steps)] *= 20.0 + 80.0 * strength
    return changed


def inject_nothing(operations: Sequence[Operation], seconds: Array, strength: float, rng: np.random.Generator) -> Array:
    """Return the durations unchanged."""
    del operations, strength, rng
    return seconds


FAULT_MODELS: dict[SlowdownCause, FaultModel] = {
    SlowdownCause.STAGE_IMBALANCE: inject_stage_imbalance,
    SlowdownCause.SEQUENCE_LENGTH_IMBALANCE: inject_length_imbalance,
    SlowdownCause.GARBAGE_COLLECTION: inject_garbage_collection,
    SlowdownCause.SLOW_WORKER: inject_slow_worker,
    SlowdownCause.SLOW_COMMUNICATION: inject_slow_communication,
    SlowdownCause.NONE: inject_nothing,
}
"""The fault for each cause."""


@dataclass(frozen=True)
class SyntheticJob:
    """A synthetic job with one known fault."""

    cause: SlowdownCause
    shape: JobShape
    strength: float
    """From 0 (weak) to 1 (strong)."""
    noise: float
    """Relative standard deviation of every operation."""
    seed: int

    def build_trace(self) -> JobTrace:
        """Build the job's trace."""
        rng = np.random.default_rng(self.seed)
        operations = list_operations(self.shape)
        seconds = draw_healthy_seconds(operations, self.shape, self.noise, rng)
        return make_trace(self.shape, operations, FAULT_MODELS[self.cause](operations, seconds, self.strength, rng))


def generate_jobs(count: int, seed: int = 0) -> list[SyntheticJob]:
    """Generate `count` jobs: every cause in turn, with several shapes, strengths and noise levels."""
    shapes = (
        JobShape(dp=4, pp=4, microbatches=8, steps=12),
        JobShape(dp=8, pp=2, microbatches=4, steps=16),
        JobShape(dp=2, pp=8, microbatches=8, steps=12),
        JobShape(dp=4, pp=2, vpp=2, microbatches=8, steps=10),
        JobShape(dp=16, pp=4, microbatches=4, steps=8),
        JobShape(dp=8, pp=1, microbatches=4, steps=24),
        JobShape(dp=4, pp=4, vpp=2, microbatches=8, steps=8, overlapped=True),
    )
    rng = np.random.default_rng(seed)
    jobs: list[SyntheticJob] = []
    while len(jobs) < count:
        cause = list(FAULT_MODELS)[len(jobs) % len(FAULT_MODELS)]
        candidates = [shape for shape in shapes if shape.pp > 1 or cause is not SlowdownCause.STAGE_IMBALANCE]
        shape = candidates[int(rng.integers(len(candidates)))]
        noise = float(rng.uniform(0.005, 0.08))
        jobs.append(SyntheticJob(cause, shape, float(rng.uniform()), noise, seed=1000 * seed + len(jobs)))
    return jobs


def _is_computation(operation: Operation) -> bool:
    return operation.type in (FORWARD, BACKWARD)


def _scale_operations(seconds: Array, operations: np.ndarray[tuple[int], np.dtype[np.bool_]], factor: float) -> Array:
    changed = seconds.copy()
    changed[operations] *= factor
    return changed
