"""Takes computations apart: what is the stage's, what the worker's, what the microbatch's, and what is a pause?

    seconds = usual seconds of the stage x factor of the worker x factor of the microbatch + pause + noise

Every part is a median, so that the others do not leak into it. A root cause is tested by taking its part out of the
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


@dataclass(frozen=True)
class Computations:
    """All computations of one direction, taken apart. Places are (stage, chunk) in the order of the model."""

    nodes: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    """The operation of each [place, microbatch]."""
    stages: tuple[int, ...]
    """The stage of each place."""
    seconds: Array
    """[place, microbatch, replica, step]"""
    usual: Array
    """Usual seconds of each place [place], on a replica that is not slow."""
    worker: Array
    """Factor of each worker against its peers [place, replica]."""

    @property
    def residual(self) -> Array:
        """What the microbatch, pauses and noise leave [place, microbatch, replica, step]; 1 is usual."""
        return self.seconds / np.maximum(self.usual[:, None] * self.worker, 1e-12)[:, None, :, None]


def collect_computations(window: RecordedWindow, type_: str) -> Computations | None:
    """The computations of one type; None where the window has none, or stages differ in their number."""
    by_place: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for node, operation in enumerate(window.operations):
        if operation.type == type_:
            microbatch = operation.microbatch if operation.microbatch >= 0 else operation.index
            by_place.setdefault((operation.chunk, operation.stage), []).append((microbatch, node))
    if not by_place or len({len(nodes) for nodes in by_place.values()}) > 1:
        return None
    places = sorted(by_place)
    nodes = np.array([[node for _, node in sorted(by_place[place])] for place in places])
    seconds = window.seconds[nodes].reshape(*nodes.shape, window.replicas, len(window.steps))
    of_worker = np.median(seconds, axis=(1, 3))
    # The lower median: of two replicas the faster one is the healthy one.
    usual = np.quantile(of_worker, 0.5, axis=1, method="lower")
    worker = of_worker / np.maximum(usual[:, None], 1e-12)
    return Computations(nodes, tuple(stage for _, stage in places), seconds, usual, worker)


@dataclass(frozen=True)
class DurationModel:
    """Forwards and backwards taken apart, and what they have in common."""

    forward: Computations
    backward: Computations | None
    microbatch: Array
    """Factor of each microbatch [microbatch, replica, step]: how much longer it takes everywhere, in both
    directions."""
    correlation: float
    """Correlation between forward and backward times of the same microbatch, over all microbatches, replicas and
    steps."""


def fit_duration_model(window: RecordedWindow) -> DurationModel | None:
    """The parts of a window's computations; None where it has none that can be compared."""
    forward, backward = collect_computations(window, FORWARD), collect_computations(window, BACKWARD)
    if forward is None:
        forward = collect_computations(window, COMPUTE)
    if forward is None:
        return None
    ahead = np.median(forward.residual, axis=0)
    if backward is None or backward.nodes.shape[1] != forward.nodes.shape[1]:
        return DurationModel(forward, backward, np.ones_like(ahead), 0.0)
    back = np.median(backward.residual, axis=0)
    # What both directions agree on; a pause hits one of them only.
    agreed = np.where((ahead > 1) & (back > 1), np.minimum(ahead, back), 1.0)
    agreed = np.where((ahead < 1) & (back < 1), np.maximum(ahead, back), agreed)
    return DurationModel(forward, backward, agreed, _compute_rank_correlation(ahead.ravel(), back.ravel()))


def find_pauses(part: Computations, microbatch: Array) -> Array:
    """Seconds by which single computations exceed what stage, worker and microbatch explain, far beyond the noise.

    [place, microbatch, replica, step]; 0 where there is no pause.
    """
    expected = part.seconds / np.maximum(part.residual, 1e-12) * microbatch
    excess = part.seconds - expected
    spread = MAD_TO_SIGMA * np.median(np.abs(excess), axis=(1, 2, 3), keepdims=True)
    limit = np.maximum(6.0 * spread, 0.15 * part.usual[:, None, None, None])
    return np.where(excess > limit, excess, 0.0)


def _compute_rank_correlation(first: Array, second: Array) -> float:
    """Spearman's correlation, which a few extreme values do not decide."""
    if len(first) < 3:
        return 0.0
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
