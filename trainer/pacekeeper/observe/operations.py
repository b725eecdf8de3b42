"""A rank's collectives of its last steps, from its records, as the operator asks for them. Starts without torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.operations import MAX_OPERATIONS, NO_GROUP, OPERATION
from pacekeeper_analysis.records import RecordKind, Phase

MAX_OPERATIONS_PER_WORKER = 16 * MAX_OPERATIONS
"""More would be a body that the operator refuses."""


def select_last_operations(
    records: NDArray[np.void], positions: Mapping[int, int], most: int = MAX_OPERATIONS
) -> NDArray[np.void]:
    """Of the newest whole training steps that `most` operations hold (`operations.OPERATION`), oldest first.

    `records`: of a ring, oldest first; `positions`: of the groups in the evidence's list, by identity.
    """
    training = records[records["phase"] == Phase.TRAIN]
    steps = training[training["kind"] == RecordKind.STEP]
    entered = training[training["kind"] == RecordKind.COLLECTIVE]
    whole = entered[np.isin(entered["step"], steps["step"])]
    numbers, counts = np.unique(whole["step"], return_counts=True)
    fit = numbers[::-1][np.cumsum(counts[::-1]) <= most]
    # The oldest step that the ring holds may have lost its beginning to newer records.
    kept = whole[np.isin(whole["step"], fit) & (whole["step"] > records["step"][:1].max(initial=0))]
    return _make_times_relative(kept[np.argsort(kept["start_ns"], kind="stable")], steps, positions)


def _make_times_relative(kept: NDArray[np.void], steps: NDArray[np.void], positions: Mapping[int, int]) -> NDArray[np.void]:
    """Times count from the step's beginning, or from its first operation where that is earlier: a step's record leaves
    out what another phase took of it."""
    began = {int(step["step"]): int(step["start_ns"]) for step in steps}
    numbers, where = np.unique(kept["step"], return_inverse=True)
    origins = np.array([began[int(number)] for number in numbers], dtype=np.int64)
    np.minimum.at(origins, where, kept["start_ns"])
    found = np.zeros(len(kept), OPERATION)
    for name in ("step", "collective", "flags", "sequence", "peer", "bytes"):
        found[name] = kept[name]
    found["group"] = [positions.get(int(group), NO_GROUP) for group in kept["group"]]
    found["start"] = (kept["start_ns"] - origins[where]) * 1e-9
    found["end"] = np.maximum((kept["end_ns"] - origins[where]) * 1e-9, found["start"])
    found["held"] = np.clip(kept["value"], 0.0, found["end"] - found["start"])
    return found
