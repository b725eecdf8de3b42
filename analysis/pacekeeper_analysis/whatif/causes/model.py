"""Decomposes computations into the effects of stage, worker, microbatch and pauses.

    seconds = usual seconds of the stage x factor of the worker x factor of the microbatch + pause + noise

Every part is a median, so that the other parts do not affect it. A root cause is tested by removing its part from the
recorded durations and simulating again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.whatif.data_parallel import BACKWARD, COMPUTE, FORWARD
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.window import RecordedWindow

MAD_TO_SIGMA = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""

MIN_CORRELATED_VALUES = 3
"""Smallest number of values for a correlation: two always have one of 1 or -1."""


@dataclass(frozen=True)
class Computations:
    """All computations of one direction, decomposed. Places are (stage, chunk) in the order of the model."""

    nodes: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    """The operation of each [place, microbatch]."""
    stages: tuple[int, ...]
    """The stage of each place."""
    seconds: Array
    """[place, microbatch, replica, step]"""
    usual: Array
    """Usual seconds of each place [place], on a replica that is not slow."""
    worker: Array
    """Factor of each worker relative to its peers [place, replica]."""

    @property
    def residual(self) -> Array:
        """The rest: microbatch, pauses and noise [place, microbatch, replica, step]. 1 is usual."""
        return self.seconds / np.maximum(self.usual[:, None] * self.worker, 1e-12)[:, None, :, None]


def collect_computations(window: RecordedWindow, type_: str) -> Computations | None:
    """Collect the computations of one type. None if the window has none, or stages differ in their number."""
    by_place: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for node, operation in enumerate(window.operations):
        if operation.type == type_:
            microbatch = operation.index if operation.microbatch is None else operation.microbatch
            by_place.setdefault((operation.chunk, operation.stage), []).append((microbatch, node))
    if not by_place or len({len(nodes) for nodes in by_place.values()}) > 1:
        return None
    places = sorted(by_place)
    nodes = np.array([[node for _, node in sorted(by_place[place])] for place in places])
    seconds = window.seconds[nodes].reshape(*nodes.shape, window.replicas, len(window.steps))
    worker_seconds = np.median(seconds, axis=(1, 3))
    # The lower median: of two replicas the faster one is the healthy one.
    usual = np.quantile(worker_seconds, 0.5, axis=1, method="lower")
    worker = worker_seconds / np.maximum(usual[:, None], 1e-12)
    return Computations(nodes, tuple(stage for _, stage in places), seconds, usual, worker)


@dataclass(frozen=True)
class DurationModel:
    """Decomposed forwards and backwards, and their common part."""

    forward: Computations
    backward: Computations | None
    microbatch: Array
    """Factor of each microbatch [microbatch, replica, step]: how much longer it takes everywhere, in both directions.
    """
    correlation: float
    """Correlation between forward and backward times of the same microbatch, over all microbatches, replicas and steps.
    """


def fit_duration_model(window: RecordedWindow) -> DurationModel | None:
    """Decompose a window's computations. None if it has none that can be compared."""
    forward, backward = collect_computations(window, FORWARD), collect_computations(window, BACKWARD)
    if forward is None:
        forward = collect_computations(window, COMPUTE)
    if forward is None:
        return None
    forward_residual = np.median(forward.residual, axis=0)
    if backward is None or backward.nodes.shape[1] != forward.nodes.shape[1]:
        return DurationModel(forward, backward, np.ones_like(forward_residual), 0.0)
    backward_residual = np.median(backward.residual, axis=0)
    # The part on which both directions agree. A pause affects only one of them.
    common = np.where(
        (forward_residual > 1) & (backward_residual > 1), np.minimum(forward_residual, backward_residual), 1.0
    )
    common = np.where(
        (forward_residual < 1) & (backward_residual < 1), np.maximum(forward_residual, backward_residual), common
    )
    return DurationModel(
        forward, backward, common, _compute_rank_correlation(forward_residual.ravel(), backward_residual.ravel())
    )


def find_pauses(computations: Computations, microbatch: Array) -> Array:
    """Return seconds by which computations far exceed the effects of stage, worker, microbatch and noise.

    The result is [place, microbatch, replica, step], and 0 without a pause.
    """
    expected = computations.seconds / np.maximum(computations.residual, 1e-12) * microbatch
    excess = computations.seconds - expected
    spread = MAD_TO_SIGMA * np.median(np.abs(excess), axis=(1, 2, 3), keepdims=True)
    limit = np.maximum(6.0 * spread, 0.15 * computations.usual[:, None, None, None])
    return np.where(excess > limit, excess, 0.0)


def _compute_rank_correlation(first: Array, second: Array) -> float:
    """Return Spearman's correlation, which is robust against a few extreme values."""
    if len(first) < MIN_CORRELATED_VALUES:
        return 0.0
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
