"""Weights of the replicas' pseudo-gradients in a Local-SGD synchronization, and which ones do not count.

A pseudo-gradient is the distance that a replica has moved since the last synchronization, Δ = θ_last − θ. Its norm G
separates healthy from bad ones. EDiT (arXiv 2412.07210, section 3.3) drops outliers by a moving z-test, weighs the
others by softmax(−G), and clips their mean. Here, replicas may have done different numbers of steps, and a fast one
must not be mistaken for a bad one: docs/decisions/0007-weigh-local-sgd-replicas-by-samples.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_NORM_DIMENSIONS = 2
"""Units and replicas."""
GROWTH_EXPONENTS = np.array([0.5, 1.0])
"""A healthy norm grows with the steps done as steps^p: p = ½ if the gradients are noise, 1 if all agree."""


@dataclass(frozen=True)
class Penalty:
    """Rules for judging pseudo-gradients. Raises InputError for invalid values."""

    enabled: bool = True
    """False: weights depend only on the data; nothing is dropped, rolled back or clipped."""
    threshold: float = 3.0
    """Standard deviations above its mean from which on a norm is anomalous."""
    alpha: float = 0.02
    """Weight of the newest norm in mean and deviation."""
    warmup: int = 10
    """Synchronizations of a replica that train mean and deviation before they are used."""
    min_deviation: float = 0.1
    """Lower limit of the standard deviation, as a share of the mean. Few norms give a bad estimate."""
    patience: int = 5
    """Number of consecutive anomalous finite norms after which mean and deviation are learned again.

    Then it is the training that has changed.
    """
    temperature: float = 1.0
    """A norm that exceeds its peers' by this share has weight 1/e. A larger value is milder."""
    rho: float = 1.0
    """Influence of the replicas' data: 1 weighs each by its samples, 0 weighs all alike."""
    clip: float = 10.0
    """φ: the largest norm of a unit's mean pseudo-gradient."""
    as_published: bool = False
    """True: follow the published rules (see `from_paper`).

    Norms are judged as they are, for any number of steps, and a replica weighs exp(−G / temperature). Mean and variance
    begin at zero, and each norm moves them by `alpha` from the first on.
    """

    @classmethod
    def from_paper(cls, warmup: int = 100) -> Self:
        """Return the published rules and constants of EDiT (arXiv 2412.07210, section 3.3), without our changes.

        Anomalous is z = (G − μ) / σ > 3, with μ ← αG + (1 − α)μ and σ² ← α(G − μ)² + (1 − α)σ² by the new μ, α = 0.02.
        The others weigh softmax(−G). Their mean is scaled by min(1, φ / (‖Δ̄‖ + ε)), φ = 10. The start at zero, and the
        number of `warmup` synchronizations, follow the authors' code. The paper does not define replicas whose norm is
        not finite: they are anomalous in all units, as in our rules.
        """
        return cls(
            threshold=3.0,
            alpha=0.02,
            warmup=warmup,
            min_deviation=0.0,
            patience=sys.maxsize,
            temperature=1.0,
            rho=0.0,
            clip=10.0,
            as_published=True,
        )

    def __post_init__(self) -> None:
        for name in ("threshold", "temperature", "clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"penalty.{name}={getattr(self, name)} must be above 0")
        if not 0 < self.alpha <= 1:
            raise InputError(f"penalty.alpha={self.alpha} must be above 0, at most 1")
        if not 0 <= self.rho <= 1:
            raise InputError(f"penalty.rho={self.rho} must be between 0 and 1")
        if not self.min_deviation >= 0:
            raise InputError(f"penalty.min_deviation={self.min_deviation} must be 0 or more")
        if self.warmup < 1 or self.patience < 1:
            raise InputError(
                f"penalty.warmup={self.warmup} and penalty.patience={self.patience} must be 1 synchronization or more"
            )


@dataclass(frozen=True)
class NormStatistics:
    """Exponentially weighted mean and variance of each unit's norm on each replica, for each law of growth.

    A norm is first divided by steps^p, p of GROWTH_EXPONENTS, so that the numbers of steps may vary.
    """

    mean: Floats
    """[growths, units, replicas]"""
    variance: Floats
    """[growths, units, replicas]"""
    count: NDArray[np.int64]
    """[units, replicas] number of norms included."""
    strikes: NDArray[np.int64]
    """[units, replicas] number of consecutive anomalous finite norms up to now."""

    @classmethod
    def build_empty(cls, units: int, replicas: int) -> Self:
        shape = (len(GROWTH_EXPONENTS), units, replicas)
        counts = np.zeros(shape[1:], np.int64)
        return cls(np.zeros(shape), np.zeros(shape), counts, counts)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of units and replicas."""
        units, replicas = self.count.shape
        return units, replicas

    def to_dict(self) -> dict[str, Any]:
        """Return lists of numbers, for a checkpoint."""
        return {name: getattr(self, name).tolist() for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the result of `to_dict`. Raises InputError if `data` is malformed."""
        try:
            statistics = cls(
                np.array(data["mean"], np.float64),
                np.array(data["variance"], np.float64),
                np.array(data["count"], np.int64),
                np.array(data["strikes"], np.int64),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not statistics of pseudo-gradients: {error!r}") from error
        counts, norms = statistics.count.shape, statistics.mean.shape
        if (
            len(counts) != _NORM_DIMENSIONS
            or norms != (len(GROWTH_EXPONENTS), *counts)
            or statistics.variance.shape != norms
        ):
            raise InputError(f"not statistics of pseudo-gradients: shapes {norms} and {counts} do not fit")
        return statistics


class ReplicaWeights(NamedTuple):
    """The weights that result from the norms of one synchronization."""

    weights: Floats
    """[units, replicas]; each unit's weights sum to 1, or are all 0 if it is rolled back."""
    anomalous: Flags
    """[units, replicas]; anomalous replicas have weight 0."""
    rolled_back: Flags
    """[units]: no replica has a good pseudo-gradient, and the unit returns to its last state."""


def weigh_replicas(
    norms: ArrayLike,
    steps: ArrayLike,
    statistics: NormStatistics,
    penalty: Penalty,
    samples: ArrayLike | None = None,
) -> tuple[ReplicaWeights, NormStatistics]:
    """Return the weight of each replica's pseudo-gradient in each unit, and the updated statistics.

    `norms` is [units, replicas], ‖Δ‖ over all shards of the replica. A norm that is not finite means a bad replica,
    which is anomalous in all units. `steps` is [replicas], done since the last synchronization. `samples` is
    [replicas], used since then (or their weight). None means as `steps`. Raises InputError if shapes or numbers do not
    fit.
    """
    norms, steps = np.asarray(norms, np.float64), np.asarray(steps, np.float64)
    samples = steps if samples is None else np.asarray(samples, np.float64)
    _check_inputs(norms, steps, samples, statistics)
    data_shares = np.broadcast_to(_compute_data_shares(samples, penalty.rho), norms.shape)
    if not penalty.enabled:
        no_flags = np.zeros(norms.shape, np.bool_)
        return ReplicaWeights(data_shares, no_flags, no_flags[:, 0]), statistics
    finite = np.broadcast_to(np.isfinite(norms).all(axis=0), norms.shape)
    moved = finite & ((norms > 0) | penalty.as_published)
    exponents = np.zeros_like(GROWTH_EXPONENTS) if penalty.as_published else GROWTH_EXPONENTS
    scaled_norms = np.where(moved, norms, 0.0) / np.maximum(steps, 1.0) ** exponents[:, None, None]
    anomalous = ~finite | _find_outliers(scaled_norms, statistics, penalty)
    counted = moved & ~anomalous
    excess = (
        _compute_excess_over_minimum(scaled_norms[0], counted)
        if penalty.as_published
        else _compute_excess(scaled_norms, counted)
    )
    weights = np.where(anomalous, 0.0, data_shares * np.exp(-excess / penalty.temperature))
    total = weights.sum(axis=1, keepdims=True)
    rolled_back = total[:, 0] == 0
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    update = _update_statistics_as_published if penalty.as_published else _update_statistics
    statistics = update(statistics, scaled_norms, counted, penalty.alpha)
    return ReplicaWeights(weights, anomalous, rolled_back), _count_strikes(
        statistics, anomalous, finite, penalty.patience
    )


def _compute_data_shares(samples: Floats, rho: float) -> Floats:
    """Return each replica's share of the data, [replicas], summing to 1."""
    equal_shares = np.full(len(samples), 1 / len(samples))
    total = samples.sum()
    return equal_shares if total == 0 else (1 - rho) * equal_shares + rho * samples / total


def _find_outliers(scaled_norms: Floats, statistics: NormStatistics, penalty: Penalty) -> Flags:
    """Return the norms, [units, replicas], that are far above their own mean under every law of growth."""
    deviation = np.maximum(np.sqrt(statistics.variance), penalty.min_deviation * statistics.mean)
    above = scaled_norms > statistics.mean + penalty.threshold * deviation
    outliers: Flags = above.all(axis=0) & (statistics.count >= penalty.warmup)
    return outliers


def _compute_excess(scaled_norms: Floats, counted: Flags) -> Floats:
    """Return the excess of each norm over the counted replicas' median, relative to it, [units, replicas]. 0 if none.

    The law of growth with the smallest excess counts. The median is the lower one, so that of two replicas the one with
    the larger norm is suspect.
    """
    ordered = np.sort(np.where(counted, scaled_norms, np.inf), axis=2)
    middle = np.maximum(counted.sum(axis=1) - 1, 0) // 2
    median = np.take_along_axis(ordered, middle[None, :, None], axis=2)
    ratio = np.divide(scaled_norms, median, out=np.zeros_like(scaled_norms), where=np.isfinite(median))
    excess: Floats = np.maximum(ratio.min(axis=0) - 1, 0.0)
    return excess


def _compute_excess_over_minimum(norms: Floats, counted: Flags) -> Floats:
    """Return the excess of each norm over the counted replicas' minimum, [units, replicas].

    exp(−excess) is softmax(−norm), scaled so that it never vanishes for all.
    """
    minimum = np.where(counted, norms, np.inf).min(axis=1, keepdims=True)
    return np.where(counted, norms - minimum, 0.0)


def _update_statistics(
    statistics: NormStatistics, scaled_norms: Floats, counted: Flags, alpha: float
) -> NormStatistics:
    """Return the statistics with the counted norms included. The first norms move the mean as a plain average does."""
    rate = np.maximum(alpha, 1 / (statistics.count + 1))
    difference = scaled_norms - statistics.mean
    mean = statistics.mean + rate * difference
    variance = (1 - rate) * (statistics.variance + rate * difference**2)
    return replace(
        statistics,
        mean=np.where(counted, mean, statistics.mean),
        variance=np.where(counted, variance, statistics.variance),
        count=statistics.count + counted,
    )


def _update_statistics_as_published(
    statistics: NormStatistics, scaled_norms: Floats, counted: Flags, alpha: float
) -> NormStatistics:
    """Return the statistics with the counted norms included by `alpha`. The variance uses the new mean."""
    mean = (1 - alpha) * statistics.mean + alpha * scaled_norms
    variance = (1 - alpha) * statistics.variance + alpha * (scaled_norms - mean) ** 2
    return replace(
        statistics,
        mean=np.where(counted, mean, statistics.mean),
        variance=np.where(counted, variance, statistics.variance),
        count=statistics.count + counted,
    )


def _count_strikes(statistics: NormStatistics, anomalous: Flags, finite: Flags, patience: int) -> NormStatistics:
    """Count anomalous norms in a row. Statistics of units with too many of them are learned again."""
    strikes = np.where(anomalous, statistics.strikes + finite, 0)
    is_reset = strikes >= patience
    return NormStatistics(
        np.where(is_reset, 0.0, statistics.mean),
        np.where(is_reset, 0.0, statistics.variance),
        np.where(is_reset, 0, statistics.count),
        np.where(is_reset, 0, strikes),
    )


def _check_inputs(norms: Floats, steps: Floats, samples: Floats, statistics: NormStatistics) -> None:
    if norms.ndim != _NORM_DIMENSIONS or norms.shape[1] < 1:
        raise InputError(f"norms: shape {norms.shape} must be [units, replicas]")
    if steps.shape != norms.shape[1:] or samples.shape != norms.shape[1:]:
        raise InputError(f"steps {steps.shape}, samples {samples.shape}: one for each of {norms.shape[1]} replicas")
    if statistics.shape != norms.shape:
        raise InputError(f"statistics are of {statistics.shape} units and replicas, the norms of {norms.shape}")
    if not (np.isfinite(steps).all() and np.isfinite(samples).all() and min(steps.min(), samples.min()) >= 0):
        raise InputError(f"steps={steps.tolist()}, samples={samples.tolist()} must be 0 or more")
