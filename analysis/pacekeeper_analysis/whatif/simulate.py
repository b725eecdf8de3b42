"""The simulator: computes when each operation ends, given the duration of each one.

Source: "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713), section 3.

Scenarios are columns. The operations are visited once, in the graph's order. Each visit computes the operation's end
for all scenarios, replicas and steps with a few array operations. Axes along which all values are equal may have length
one (numpy broadcasting): an ideal job of 10,000 replicas is simulated as one replica.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.whatif.graph import OperationGraph

Array = NDArray[np.float64]


class Durations(Protocol):
    """Durations by operation: an array [operation, scenario, *mesh, step], or an object that computes rows."""

    def __getitem__(self, operation: int, /) -> Array:
        """Seconds from the instant when all participants are ready, broadcastable to [scenario, *mesh, step]."""


Timeline = dict[int, tuple[Array, Array]]
"""For each operation: when it was ready itself, which traces record as the start, and when it ended.

Both are broadcastable to [scenario, *mesh, step].
"""


def simulate_graph(graph: OperationGraph, durations: Durations, timeline: Timeline | None = None) -> Array:
    """Return when each replica finishes its step, in seconds after the step's start.

    The result is broadcastable to [scenario, *mesh, step]. An operation starts at the latest end of the operations it
    waits for (0 if none). Operations of one unit start at the latest start among them. Each ends after its own
    duration. If `timeline` is given, it receives each start and end.
    """
    ends: dict[int, Array] = {}
    for unit in graph.units:
        start = _compute_latest(unit.predecessors, ends) if unit.predecessors else _STEP_START
        if unit.across and unit.predecessors:
            start = start.max(axis=tuple(axis + 1 for axis in unit.across), keepdims=True)
        for member in unit.members:
            ends[member] = start + durations[member]
        if timeline is None:
            for operation in unit.retire:
                del ends[operation]
    if timeline is not None:
        for operation, after in enumerate(graph.predecessors):
            timeline[operation] = (_compute_latest(after, ends) if after else _STEP_START, ends[operation])
    return _compute_latest(graph.final, ends)


_STEP_START: Array = np.zeros(())


def _compute_latest(operations: tuple[int, ...], ends: dict[int, Array]) -> Array:
    latest = ends[operations[0]]
    for operation in operations[1:]:
        latest = np.maximum(latest, ends[operation])
    return latest
