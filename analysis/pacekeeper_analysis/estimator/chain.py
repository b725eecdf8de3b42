"""Hidden Markov chains over slowdown levels (Rabiner 1989), with durations that have a heavy tail.

A chain has independent groups (workers) of members (their ranks). A group is healthy, or all of its members are slow at
one level, or one member alone is. A level is the logarithm of a slowdown. All arrays are immutable by convention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

LEVELS: Values = np.concatenate(
    [np.arange(0.03, 0.34, 0.02), np.arange(0.36, 0.8, 0.04), np.arange(0.84, 1.8, 0.07), np.arange(1.9, 2.8, 0.15)]
)
"""Levels of a fault, shape (K,): from 1.03 × to 14 ×, finer where they are small."""
LEVEL_PRIOR: Values = np.gradient(np.log(np.expm1(LEVELS))) / np.gradient(np.log(np.expm1(LEVELS))).sum()
"""Uniform in log(slowdown - 1): small slowdowns are the most frequent."""
LEVEL_WIDTHS: Values = np.gradient(LEVELS) / math.sqrt(12)
"""Standard deviation of what a level stands for: all values nearer to it than to its neighbors."""
MAX_LEVEL = 3.0
"""Of an outlier."""
MAX_END_PROBABILITY = 0.5
"""Of a fault in one interval, however long: the observation decides."""


@dataclass(frozen=True)
class HiddenChain:
    """The posterior of each group. H hypotheses: healthy, K levels of all members, K levels of each member alone."""

    onset_rate: float  # faults per second and group
    duration_scale: float  # seconds: D of the Lomax distribution
    prior: Values  # (H,): of a fault that begins; 0 for healthy
    member_levels: Values  # (H, members): of each member under each hypothesis
    probabilities: Values  # (groups, H)
    onsets: Values  # (groups, H): mean time at which the hypothesis began, seconds

    @classmethod
    def create(
        cls, groups: int, members: int, onset_rate: float, duration_scale: float, min_level: float = 0.0
    ) -> HiddenChain:
        """Return the chain of groups that are healthy. Faults below `min_level` do not occur.

        A chain of the job as a whole has one group of one member.
        """
        level_prior = np.where(min_level <= LEVELS, LEVEL_PRIOR, 0.0)
        level_prior = level_prior / level_prior.sum()
        together = np.repeat(LEVELS[:, None], members, axis=1)
        if members == 1:
            prior, levels = level_prior, together
        else:
            alone = np.zeros((members, len(LEVELS), members))
            alone[np.arange(members), :, np.arange(members)] = LEVELS
            prior = np.concatenate([level_prior / 2, np.tile(level_prior, members) / (2 * members)])
            levels = np.concatenate([together, alone.reshape(-1, members)])
        hypotheses = 1 + len(prior)
        probabilities = np.zeros((groups, hypotheses))
        probabilities[:, 0] = 1.0
        return cls(
            onset_rate,
            duration_scale,
            np.concatenate([[0.0], prior]),
            np.concatenate([np.zeros((1, members)), levels]),
            probabilities,
            np.zeros((groups, hypotheses)),
        )

    def predict(self, seconds: float, onset: float, now: float) -> HiddenChain:
        """Return the prior of an observation at `now`, `seconds` after the last one.

        A fault ends with hazard 1 / (elapsed + D): Lomax 1954, shape 1. What has lasted long is expected to last. A
        new one begins with the onset rate (Shiryaev 1963), at `onset`.
        """
        end = np.minimum(MAX_END_PROBABILITY, seconds / (np.maximum(0.0, now - self.onsets) + self.duration_scale))
        end[:, 0] = 0.0
        begin = -math.expm1(-self.onset_rate * seconds)
        stays = self.probabilities * (1.0 - end) * (1.0 - begin)
        begins = begin * self.prior
        total = stays + begins
        onsets = np.where(total > 0, (stays * self.onsets + begins * onset) / (total + 1e-300), onset)
        total[:, 0] += (self.probabilities * end).sum(axis=1)
        return replace(self, probabilities=total / total.sum(axis=1, keepdims=True), onsets=onsets)

    def update_by_members(self, log_likelihood: Values) -> HiddenChain:
        """`log_likelihood`: (groups, members, 1 + K), of each member's observation if healthy, and at each level."""
        healthy = log_likelihood[:, :, 0].sum(axis=1, keepdims=True)
        parts = [healthy, log_likelihood[:, :, 1:].sum(axis=1)]
        if self.member_levels.shape[1] > 1:
            alone = healthy[:, :, None] - log_likelihood[:, :, :1] + log_likelihood[:, :, 1:]
            parts.append(alone.reshape(len(alone), -1))
        return self.update(np.concatenate(parts, axis=1))

    def update(self, log_likelihood: Values) -> HiddenChain:
        """`log_likelihood`: (groups, H) of an observation of the whole group."""
        posterior = np.log(self.probabilities + 1e-300) + log_likelihood
        posterior = np.exp(posterior - posterior.max(axis=1, keepdims=True))
        return replace(self, probabilities=posterior / posterior.sum(axis=1, keepdims=True))

    def discard_below(self, level: Values) -> HiddenChain:
        """Return the chain in which levels below `level` (groups,) count as healthy: something else explains them."""
        if level.max() <= LEVELS[0]:
            return self
        is_low = self.member_levels.max(axis=1)[None] < level[:, None]
        is_low[:, 0] = False
        probabilities = np.where(is_low, 0.0, self.probabilities)
        probabilities[:, 0] += np.where(is_low, self.probabilities, 0.0).sum(axis=1)
        return replace(self, probabilities=probabilities)

    def reset(self, groups: slice | list[int] = slice(None)) -> HiddenChain:
        """Return the chain in which these groups are healthy."""
        probabilities = self.probabilities.copy()
        probabilities[groups] = 0.0
        probabilities[groups, 0] = 1.0
        return replace(self, probabilities=probabilities)

    def draw_levels(self, rng: np.random.Generator, draws: int) -> Values:
        """Return levels of all members, (draws, groups * members), from the posterior."""
        cumulative = self.probabilities.cumsum(axis=1)
        chosen = np.stack([np.searchsorted(row, rng.random(draws)) for row in cumulative], axis=1)
        chosen = np.minimum(chosen, len(self.prior) - 1)
        return np.asarray(self.member_levels[chosen].reshape(draws, -1))

    @cached_property
    def slow(self) -> Values:
        """Probability that a group is not healthy, (groups,)."""
        return np.asarray(1.0 - self.probabilities[:, 0])

    @cached_property
    def mean_levels(self) -> Values:
        """Expected level of each member, (groups, members)."""
        return np.asarray(self.probabilities @ self.member_levels)

    @cached_property
    def level_variances(self) -> Values:
        """Variance of each member's level, (groups, members)."""
        return np.maximum(0.0, self.probabilities @ self.member_levels**2 - self.mean_levels**2)

    def describe_slow_members(self) -> tuple[Values, Values, Values]:
        """Return for each member: probability that it is slow, and mean and variance of its level if it is.

        Each has the shape (groups, members).
        """
        slow = self.probabilities @ (self.member_levels > 0)
        mean = self.mean_levels / np.maximum(slow, 1e-9)
        square = (self.probabilities @ self.member_levels**2) / np.maximum(slow, 1e-9)
        return np.asarray(slow), np.asarray(mean), np.maximum(0.0, square - mean**2)

    @property
    def slow_levels(self) -> Values:
        """Expected level of each member if its group is not healthy, (groups, members)."""
        return np.asarray(self.mean_levels / np.maximum(self.slow, 1e-9)[:, None])

    @property
    def slow_onsets(self) -> Values:
        """Expected onset if the group is not healthy, (groups,), seconds."""
        weights = self.probabilities[:, 1:]
        return np.asarray((weights * self.onsets[:, 1:]).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-300))
