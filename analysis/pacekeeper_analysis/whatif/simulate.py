"""The simulator: when does each operation end, given how long each one takes?

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713), section 3.

Scenarios are columns. The operations are visited once, in the graph's order, and each visit computes the
operation's end for all scenarios, replicas and steps with a handful of array operations. Axes along which all
values are equal may have length one (numpy broadcasting): an ideal job of 10,000 replicas is simulated as one
replica.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.whatif.graph import OperationGraph

Array = NDArray[np.float64]


class Durations(Protocol):
    """Durations by operation. An array [operation, scenario, *mesh, step] is one; others make each row when asked
    for it."""

    def __getitem__(self, operation: int, /) -> Array:
        """Seconds from the instant when all that take part are there, broadcastable to [scenario, *mesh, step]."""


Timeline = dict[int, tuple[Array, Array]]
"""By operation: when it was ready itself, as traces record the start, and when it ended.

Each is broadcastable to [scenario, *mesh, step].
"""


def simulate_graph(graph: OperationGraph, durations: Durations, timeline: Timeline | None = None) -> Array:
    """When each replica finishes its step: seconds after the step's start, broadcastable to [scenario, *mesh, step].

    An operation starts at the latest end of what it waits for (0 if nothing), operations of one unit at the latest
    start among them, and each ends its own duration later. With `timeline` given, every start and end is put there.
    """
    ends: dict[int, Array] = {}
    for unit in graph.units:
        start = _compute_latest(unit.after, ends) if unit.after else _STEP_START
        if unit.across and unit.after:
            start = start.max(axis=tuple(axis + 1 for axis in unit.across), keepdims=True)
        for member in unit.members:
            ends[member] = start + durations[member]
        if timeline is None:
            for operation in unit.retire:
                del ends[operation]
    if timeline is not None:
        for operation, after in enumerate(graph.after):
            timeline[operation] = (_compute_latest(after, ends) if after else _STEP_START, ends[operation])
    return _compute_latest(graph.final, ends)


_STEP_START: Array = np.zeros(())


def _compute_latest(operations: tuple[int, ...], ends: dict[int, Array]) -> Array:
    latest = ends[operations[0]]
    for operation in operations[1:]:
        latest = np.maximum(latest, ends[operation])
    return latest
