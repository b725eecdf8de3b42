"""What a healthy job's observations look like, learned while it is healthy: noise, outliers, correlation, offsets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .chain import MAX_LEVEL, Values
from .parameters import EstimatorParameters

OUTLIER_DEVIATIONS = 6.0
"""Scaled median absolute deviations from which on a value is no noise (Huber 1964)."""
MIN_NOISE = 0.003
"""Smallest noise: clocks and rounding."""
MIN_DENSITY = 1e-6
"""Of any value: what no model explains leads to no certainty."""
MIN_LEARNING_STEPS = 4
"""Steps of one window from which noise and correlation can be learned."""
PRIOR_VALUES = 16
"""Values of the first steps that the prior counts as."""
MAX_CORRELATION = 50.0


@dataclass(frozen=True)
class NoiseModel:
    """Levels (logarithms) of own work relative to that of healthy peers, of shape (ranks,) where by rank."""

    parameters: EstimatorParameters
    sigma: float  # standard deviation of one step of a rank
    step_sigma: float  # the same of the step time of the whole job
    outliers: float  # outliers seen, of `outlier_steps` steps of ranks (beta-binomial)
    outlier_steps: float
    correlation_mean: float  # variance of means of consecutive steps, over that of independent ones
    offsets: Values  # permanent difference of each rank
    offset_windows: int = 0
    offset_steps: Values | None = None  # of each rank, that its offset is the mean of; None: it has a prior
    independent_scale: float = field(default=1.0, repr=False)  # of `_compute_trimmed_square` under normal noise

    @classmethod
    def create(cls, parameters: EstimatorParameters, ranks: int) -> NoiseModel:
        normals = np.random.default_rng(2).standard_normal((400, ranks))
        if ranks > 1:
            normals -= np.median(normals, axis=1, keepdims=True)
        return cls(
            parameters,
            sigma=parameters.noise,
            step_sigma=parameters.noise,
            outliers=300 * parameters.outlier_rate,
            outlier_steps=300,
            correlation_mean=parameters.correlation,
            offsets=np.zeros(ranks),
            independent_scale=_compute_trimmed_square(normals / normals.std()),
        )

    @property
    def outlier_rate(self) -> float:
        return self.outliers / self.outlier_steps

    @property
    def correlation(self) -> float:
        """Number of consecutive steps that tell as much as one independent step (batch means, Geyer 1992)."""
        return max(1.0, self.correlation_mean)

    @property
    def step_error(self) -> float:
        """Standard deviation to assume of one step, such that n steps have that of their mean."""
        return self.sigma * math.sqrt(self.correlation)

    @property
    def offset_errors(self) -> Values:
        """Standard deviations of the offsets of ranks that differ by nature, (ranks,). Else 0: the prior is narrow."""
        if self.offset_steps is None:
            return np.zeros_like(self.offsets)
        return np.asarray(self.step_error / np.sqrt(self.offset_steps))

    def learn_first_steps(self, levels: Values, step_seconds: Values, offsets: Values | None = None) -> NoiseModel:
        """`levels`: (steps, ranks); `step_seconds`: (steps,). The prior counts as PRIOR_VALUES values.

        `offsets`: (ranks,), of ranks that may differ by nature, by any level; None: they are alike. Few steps tell
        them badly, so later ones improve them.
        """
        away = levels - np.median(levels, axis=0)
        scale, weight = compute_scale(away), PRIOR_VALUES / (levels.size + PRIOR_VALUES)
        sigma = math.sqrt(weight * self.sigma**2 + (1 - weight) * scale**2)
        found = _estimate_correlation(np.clip(away, -3 * scale, 3 * scale))
        correlation = weight * self.correlation_mean + (1 - weight) * found
        step_sigma = compute_scale(np.log(step_seconds))
        noise = replace(self, sigma=sigma, step_sigma=step_sigma, correlation_mean=correlation)
        if offsets is None:
            return noise
        steps = np.ones(levels.shape[1])  # until their correlation is known, they may tell as little as one
        return replace(noise, offsets=offsets, offset_steps=steps)

    def learn_steps(self, residuals: Values, step_seconds: Values, *, healthy: bool) -> NoiseModel:
        """Learn from new steps: `residuals` (steps, ranks) are levels without those of slow ranks.

        `healthy`: no rank is probably slow, so that long steps are outliers.
        """
        noise = self
        if len(residuals) >= MIN_LEARNING_STEPS:
            # An outlier is no correlation.
            clipped = np.clip(residuals, -3 * self.sigma, 3 * self.sigma)
            noise = noise.learn_correlation(clipped.mean(axis=0) * math.sqrt(len(residuals)) / self.sigma)
        weight = min(0.3, residuals.size / self.parameters.noise_values)
        sigma = _mix_logarithms(self.sigma, compute_scale(residuals), weight)
        outliers, steps = self.outliers, self.outlier_steps
        if healthy:
            outliers += float((residuals > max(0.2, 5 * sigma)).sum())
            steps += residuals.size
            if steps > 40 * self.parameters.noise_values:
                outliers, steps = outliers / 2, steps / 2
        step_sigma = self.step_sigma
        if len(step_seconds) >= MIN_LEARNING_STEPS:
            step_sigma = _mix_logarithms(step_sigma, compute_scale(np.log(step_seconds)), 0.2)
        return replace(noise, sigma=sigma, outliers=outliers, outlier_steps=steps, step_sigma=step_sigma)

    def learn_correlation(self, means: Values) -> NoiseModel:
        """`means`: (ranks,), of a window of steps, in standard errors of as many independent steps.

        The largest is left out: a slow rank is no correlation.
        """
        found = min(MAX_CORRELATION, _compute_trimmed_square(means[None]) / self.independent_scale)
        weight = 1.0 / self.parameters.learning_windows
        return replace(self, correlation_mean=(1 - weight) * self.correlation_mean + weight * found)

    def learn_offsets(self, levels: Values, is_healthy: npt.NDArray[np.bool_], steps: int) -> NoiseModel:
        """Learn the permanent differences of healthy ranks from means of `steps` steps: `levels` (ranks,)."""
        if self.offset_steps is not None:
            limit = 3 * self.step_error / math.sqrt(steps)  # an outlier is no offset
            known = self.offset_steps + np.where(is_healthy, steps, 0)
            change = np.where(is_healthy, np.clip(levels, -limit, limit) * steps / known, 0.0)
            return replace(self, offsets=self.offsets + change, offset_steps=known)
        windows, limit = self.offset_windows + 1, self.parameters.max_rank_offset
        change = np.clip(levels, -3 * limit, 3 * limit) / (windows + self.parameters.learning_windows)
        largest = np.maximum(limit, np.abs(self.offsets))
        offsets = np.clip(self.offsets + np.where(is_healthy, change, 0.0), -largest, largest)
        return replace(self, offsets=offsets, offset_windows=windows)


def compute_density(
    values: Values,
    means: Values,
    sigma: Values | float,
    outlier_rate: float,
    hit: tuple[float, Values | float] = (0.0, 0.0),
    steps: int = 1,
) -> Values:
    """Return the density of means of `steps` steps: normal around `means`, or longer, by an outlier (Huber 1964).

    An outlier adds at most log(core / outlier rate) to a log-likelihood ratio, so that no rule has to count steps. It
    is as long as any fault. `hit`: probability that a value is longer by the second number: it is this rank's turn.
    """
    away = values - means
    tail = math.log1p(math.expm1(MAX_LEVEL) / steps)
    rate = -math.expm1(steps * math.log1p(-outlier_rate))
    core = np.exp(-0.5 * np.square(away / sigma)) / (sigma * math.sqrt(2 * math.pi))
    density = (1 - rate) * core + rate / tail * ((away > 0) & (away < tail)) + MIN_DENSITY
    probability, level = hit
    if probability > MIN_DENSITY:
        rotated = np.exp(-0.5 * np.square((away - level) / sigma)) / (sigma * math.sqrt(2 * math.pi))
        density = (1 - probability) * density + probability * rotated
    return np.asarray(density)


def compute_scale(values: Values) -> float:
    """Return the standard deviation of most values: outliers are left out."""
    away = np.abs(values - np.median(values))
    near = away <= OUTLIER_DEVIATIONS * 1.4826 * float(np.median(away)) + 1e-12
    return max(MIN_NOISE, float(np.sqrt(np.mean(np.square(away[near])))))


def _estimate_correlation(away: Values) -> float:
    """Return the variance of means of many consecutive steps over that of independent ones, from few of them.

    `away`: (steps, ranks), around the ranks' medians. As of an AR(1) process; its autocorrelation is estimated too low
    in few steps (Marriott & Pope 1954).
    """
    steps = len(away)
    if steps < MIN_LEARNING_STEPS:
        return 1.0
    found = float((away[1:] * away[:-1]).mean() / max(np.square(away).mean(), MIN_NOISE**2))
    found = min(found + (1 + 3 * found) / steps, (steps - 1) / (steps + 1))  # of so few steps, no more can be told
    return (1 + found) / (1 - found)


def _compute_trimmed_square(away: Values) -> float:
    """Return the mean square of each row without its largest value."""
    squares = np.minimum(np.sort(np.square(away), axis=1), 25.0)
    return float(squares[:, :-1].mean()) if squares.shape[1] > 1 else float(squares.mean())


def _mix_logarithms(old: float, new: float, weight: float) -> float:
    return math.exp((1 - weight) * math.log(old) + weight * math.log(new))
