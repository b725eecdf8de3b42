"""A rank's collectives of its last steps, from its records, on the operator's request. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.protocol.operations import MAX_OPERATIONS, NO_GROUP, OPERATION
from pacekeeper_rank.records import Phase, RecordKind

MAX_OPERATIONS_PER_WORKER = 16 * MAX_OPERATIONS
"""Limit for a worker. The operator would refuse a larger body."""


def select_last_operations(
    records: NDArray[np.void], positions: Mapping[int, int], max_operations: int = MAX_OPERATIONS
) -> NDArray[np.void]:
    """Return the newest complete training steps with at most `max_operations` operations, oldest first.

    The operations have the type `operations.OPERATION`.

    `records`: records of a ring, oldest first; `positions`: positions of the groups in the evidence's list, by
    identity.
    """
    training = records[records["phase"] == Phase.TRAIN]
    steps = training[training["kind"] == RecordKind.STEP]
    collectives = training[training["kind"] == RecordKind.COLLECTIVE]
    complete = collectives[np.isin(collectives["step"], steps["step"])]
    numbers, counts = np.unique(complete["step"], return_counts=True)
    fitting = numbers[::-1][np.cumsum(counts[::-1]) <= max_operations]
    # The oldest step in the ring may have lost its beginning to newer records.
    selected = complete[np.isin(complete["step"], fitting) & (complete["step"] > records["step"][:1].max(initial=0))]
    return _make_times_relative(selected[np.argsort(selected["start_ns"], kind="stable")], steps, positions)


def _make_times_relative(
    selected: NDArray[np.void], steps: NDArray[np.void], positions: Mapping[int, int]
) -> NDArray[np.void]:
    """Convert times to seconds from the step's beginning, or from its first operation if that is earlier.

    A step's record excludes time that another phase took of it.
    """
    step_starts = {int(step["step"]): int(step["start_ns"]) for step in steps}
    numbers, step_indices = np.unique(selected["step"], return_inverse=True)
    origins = np.array([step_starts[int(number)] for number in numbers], dtype=np.int64)
    np.minimum.at(origins, step_indices, selected["start_ns"])
    operations = np.zeros(len(selected), OPERATION)
    for name in ("step", "collective", "flags", "sequence", "peer", "bytes"):
        operations[name] = selected[name]
    operations["group"] = [positions.get(int(group), NO_GROUP) for group in selected["group"]]
    operations["start"] = (selected["start_ns"] - origins[step_indices]) * 1e-9
    operations["end"] = np.maximum((selected["end_ns"] - origins[step_indices]) * 1e-9, operations["start"])
    operations["wait"] = np.clip(selected["value"], 0.0, operations["end"] - operations["start"])
    return operations
