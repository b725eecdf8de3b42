"""What each replica's pseudo-gradient weighs in a synchronisation of Local-SGD, and which ones do not count at all.

A pseudo-gradient is how far a replica has moved since the last synchronisation, Δ = θ_last − θ; its norm G tells a
healthy one from a bad one. EDiT (arXiv 2412.07210, section 3.3) drops outliers by a moving z-test, weighs the others
by softmax(−G) and clips their mean. Here, replicas may have done different numbers of steps, and a fast one must not
be taken for a bad one: docs/decisions/0007-weigh-local-sgd-replicas-by-samples.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import InputError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

GROWTH_EXPONENTS = np.array([0.5, 1.0])
"""A healthy norm grows with the steps done as steps^p: p = ½ where the gradients are noise, 1 where all agree."""


@dataclass(frozen=True)
class Penalty:
    """How pseudo-gradients are judged. Raises InputError for values that make no sense."""

    enabled: bool = True
    """False: the data alone weighs; nothing is dropped, rolled back or clipped."""
    threshold: float = 3.0
    """A norm is anomalous from so many standard deviations above its mean on."""
    alpha: float = 0.02
    """How much the newest norm moves mean and deviation."""
    warmup: int = 10
    """Synchronisations that a replica's mean and deviation are learnt from before they judge."""
    least_deviation: float = 0.1
    """The standard deviation is taken for at least this share of the mean: few norms make a bad estimate of it."""
    patience: int = 5
    """After so many anomalous norms in a row, all of them finite, the mean and deviation are learnt anew: it is the
    training that has changed."""
    temperature: float = 1.0
    """A norm that is above its peers' by this share of theirs weighs 1/e; larger is milder."""
    rho: float = 1.0
    """What the replicas' data counts for: 1 weighs each by its samples, 0 all alike."""
    clip: float = 10.0
    """φ: the largest norm of a unit's mean pseudo-gradient."""
    as_published: bool = False
    """True: norms are judged as they are, however many steps a replica has done, and a replica weighs
    exp(−G / temperature); mean and variance begin at zero, and the newest norm moves them by `alpha` from the first on
    (see `paper`)."""

    @classmethod
    def from_paper(cls, warmup: int = 100) -> Self:
        """The rules and constants that EDiT has published (arXiv 2412.07210, section 3.3), without our changes.

        Anomalous is z = (G − μ) / σ > 3, with μ ← αG + (1 − α)μ and σ² ← α(G − μ)² + (1 − α)σ² by the new μ, α = 0.02;
        the others weigh softmax(−G); their mean is scaled by min(1, φ / (‖Δ̄‖ + ε)), φ = 10. What begins at zero, and
        for how many synchronisations `warmup` lasts, is as in the authors' code. What the paper does not treat is
        ours: a replica whose norm is not finite is anomalous in all units.
        """
        return cls(
            threshold=3.0,
            alpha=0.02,
            warmup=warmup,
            least_deviation=0.0,
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
        if not self.least_deviation >= 0:
            raise InputError(f"penalty.least_deviation={self.least_deviation} must be 0 or more")
        if self.warmup < 1 or self.patience < 1:
            raise InputError(
                f"penalty.warmup={self.warmup} and penalty.patience={self.patience} must be 1 synchronisation or more"
            )


@dataclass(frozen=True)
class NormStatistics:
    """Exponentially weighted mean and variance of each unit's norm on each replica, for each law of growth.

    A norm is divided by steps^p first, p of GROWTH_EXPONENTS, so that numbers of steps may vary.
    """

    mean: Floats
    """[growths, units, replicas]"""
    variance: Floats
    """[growths, units, replicas]"""
    count: NDArray[np.int64]
    """[units, replicas] norms that went into them."""
    strikes: NDArray[np.int64]
    """[units, replicas] anomalous finite norms in a row, up to now."""

    @classmethod
    def build_empty(cls, units: int, replicas: int) -> Self:
        shape = (len(GROWTH_EXPONENTS), units, replicas)
        counts = np.zeros(shape[1:], np.int64)
        return cls(np.zeros(shape), np.zeros(shape), counts, counts)

    @property
    def shape(self) -> tuple[int, int]:
        """Units and replicas."""
        units, replicas = self.count.shape
        return units, replicas

    def to_dict(self) -> dict[str, Any]:
        """Lists of numbers, for a checkpoint."""
        return {name: getattr(self, name).tolist() for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Raises InputError where `data` is not what `to_dict` gave."""
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
        if len(counts) != 2 or norms != (len(GROWTH_EXPONENTS), *counts) or statistics.variance.shape != norms:
            raise InputError(f"not statistics of pseudo-gradients: shapes {norms} and {counts} do not fit")
        return statistics


class ReplicaWeights(NamedTuple):
    """What is made of one synchronisation's norms."""

    weights: Floats
    """[units, replicas]; each unit's sum to 1, or are all 0 where it is rolled back."""
    anomalous: Flags
    """[units, replicas]; their weight is 0."""
    rolled_back: Flags
    """[units]: no replica has a good pseudo-gradient, and the unit goes back to where it was."""


def weigh_replicas(
    norms: ArrayLike,
    steps: ArrayLike,
    statistics: NormStatistics,
    penalty: Penalty,
    samples: ArrayLike | None = None,
) -> tuple[ReplicaWeights, NormStatistics]:
    """The weight of each replica's pseudo-gradient in each unit, and the statistics after.

    norms: [units, replicas], ‖Δ‖ over all shards of the replica; not finite: the replica has gone bad.
    steps: [replicas] done since the last synchronisation.
    samples: [replicas] used since then (or their weight); None: as `steps`.
    A replica that has a norm which is not finite is anomalous in all units. Raises InputError where shapes or numbers
    do not fit.
    """
    norms, steps = np.asarray(norms, np.float64), np.asarray(steps, np.float64)
    samples = steps if samples is None else np.asarray(samples, np.float64)
    _check_inputs(norms, steps, samples, statistics)
    base = np.broadcast_to(_compute_data_shares(samples, penalty.rho), norms.shape)
    if not penalty.enabled:
        nothing = np.zeros(norms.shape, np.bool_)
        return ReplicaWeights(base, nothing, nothing[:, 0]), statistics
    finite = np.broadcast_to(np.isfinite(norms).all(axis=0), norms.shape)
    moved = finite & ((norms > 0) | penalty.as_published)
    growths = np.zeros_like(GROWTH_EXPONENTS) if penalty.as_published else GROWTH_EXPONENTS
    grown = np.where(moved, norms, 0.0) / np.maximum(steps, 1.0) ** growths[:, None, None]
    anomalous = ~finite | _find_outliers(grown, statistics, penalty)
    counted = moved & ~anomalous
    excess = _compute_excess_over_minimum(grown[0], counted) if penalty.as_published else _compute_excess(grown, counted)
    weights = np.where(anomalous, 0.0, base * np.exp(-excess / penalty.temperature))
    total = weights.sum(axis=1, keepdims=True)
    rolled_back = total[:, 0] == 0
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    learnt = _update_statistics_as_published if penalty.as_published else _update_statistics
    statistics = learnt(statistics, grown, counted, penalty.alpha)
    return ReplicaWeights(weights, anomalous, rolled_back), _count_strikes(statistics, anomalous, finite, penalty.patience)


def _compute_data_shares(samples: Floats, rho: float) -> Floats:
    """[replicas] that sum to 1."""
    alike = np.full(len(samples), 1 / len(samples))
    total = samples.sum()
    return alike if total == 0 else (1 - rho) * alike + rho * samples / total


def _find_outliers(grown: Floats, statistics: NormStatistics, penalty: Penalty) -> Flags:
    """[units, replicas] norms that are far above their own mean under every law of growth."""
    deviation = np.maximum(np.sqrt(statistics.variance), penalty.least_deviation * statistics.mean)
    above = grown > statistics.mean + penalty.threshold * deviation
    outliers: Flags = above.all(axis=0) & (statistics.count >= penalty.warmup)
    return outliers


def _compute_excess(grown: Floats, counted: Flags) -> Floats:
    """[units, replicas] by how much a norm is above the counted replicas' median, as a share of that; 0: it is not.

    Of the laws of growth, the one that excuses it most. The median is the lower one, so that of two replicas the
    larger norm is the suspect.
    """
    ordered = np.sort(np.where(counted, grown, np.inf), axis=2)
    middle = np.maximum(counted.sum(axis=1) - 1, 0) // 2
    median = np.take_along_axis(ordered, middle[None, :, None], axis=2)
    ratio = np.divide(grown, median, out=np.zeros_like(grown), where=np.isfinite(median))
    excess: Floats = np.maximum(ratio.min(axis=0) - 1, 0.0)
    return excess


def _compute_excess_over_minimum(norms: Floats, counted: Flags) -> Floats:
    """[units, replicas] by how much a norm is above the counted replicas' least.

    exp(−this) is softmax(−norm), scaled so that it never vanishes for all.
    """
    least = np.where(counted, norms, np.inf).min(axis=1, keepdims=True)
    return np.where(counted, norms - least, 0.0)


def _update_statistics(statistics: NormStatistics, grown: Floats, counted: Flags, alpha: float) -> NormStatistics:
    """With the counted norms taken in. The first ones move the mean as a plain average does."""
    rate = np.maximum(alpha, 1 / (statistics.count + 1))
    difference = grown - statistics.mean
    mean = statistics.mean + rate * difference
    variance = (1 - rate) * (statistics.variance + rate * difference**2)
    return replace(
        statistics,
        mean=np.where(counted, mean, statistics.mean),
        variance=np.where(counted, variance, statistics.variance),
        count=statistics.count + counted,
    )


def _update_statistics_as_published(statistics: NormStatistics, grown: Floats, counted: Flags, alpha: float) -> NormStatistics:
    """With the counted norms taken in, each by `alpha`; the variance by the difference from the new mean."""
    mean = (1 - alpha) * statistics.mean + alpha * grown
    variance = (1 - alpha) * statistics.variance + alpha * (grown - mean) ** 2
    return replace(
        statistics,
        mean=np.where(counted, mean, statistics.mean),
        variance=np.where(counted, variance, statistics.variance),
        count=statistics.count + counted,
    )


def _count_strikes(statistics: NormStatistics, anomalous: Flags, finite: Flags, patience: int) -> NormStatistics:
    """What has been anomalous too often in a row is learnt anew."""
    strikes = np.where(anomalous, statistics.strikes + finite, 0)
    forget = strikes >= patience
    return NormStatistics(
        np.where(forget, 0.0, statistics.mean),
        np.where(forget, 0.0, statistics.variance),
        np.where(forget, 0, statistics.count),
        np.where(forget, 0, strikes),
    )


def _check_inputs(norms: Floats, steps: Floats, samples: Floats, statistics: NormStatistics) -> None:
    if norms.ndim != 2 or norms.shape[1] < 1:
        raise InputError(f"norms: shape {norms.shape} must be [units, replicas]")
    if steps.shape != norms.shape[1:] or samples.shape != norms.shape[1:]:
        raise InputError(f"steps {steps.shape}, samples {samples.shape}: one for each of {norms.shape[1]} replicas")
    if statistics.shape != norms.shape:
        raise InputError(f"statistics are of {statistics.shape} units and replicas, the norms of {norms.shape}")
    if not (np.isfinite(steps).all() and np.isfinite(samples).all() and min(steps.min(), samples.min()) >= 0):
        raise InputError(f"steps={steps.tolist()}, samples={samples.tolist()} must be 0 or more")
