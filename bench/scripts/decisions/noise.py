"""How ranks' own work varies from step to step, as it is observed.

All models have the same standard deviation, but for their outliers. What a job costs (`world`) is by the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from .salts import create_rng
from .world import HICCUP_FACTOR, HICCUP_INTERVAL_STEPS, CostModel

AUTOCORRELATION, INNOVATIONS = 0.9, 44
"""Between two steps of a rank; and steps back to which it is followed, where 1 % of it is left."""
DEGREES_OF_FREEDOM = 3
"""Of Student's t: the fewest with a standard deviation."""
HICCUP_RATE_FACTOR = 4
"""Times the rate of a job with hiccups."""
MIN_STEP_FACTOR = 0.2
"""A step takes no less than this multiple of its mean."""
FIRST_STEPS_DRAWS = 256
INNOVATION_STREAM, FIRST_STEPS_STREAM = 21, 22
"""Distinguish the generators of a seed."""

Values = npt.NDArray[np.float64]


class NoiseModel(StrEnum):
    """What the deviation of a rank's step from its mean is drawn from."""

    INDEPENDENT = "independent"  # a normal distribution
    CORRELATED = "correlated"  # an autoregression of the first order, over the steps of a rank
    HEAVY = "heavy"  # Student's t
    HICCUPS = "hiccups"  # a normal distribution, with frequent outliers of any length


@dataclass
class NoiseSource:
    """The noise of one job. That of a step is a function of seed, salt, and the step's number."""

    world: CostModel
    model: NoiseModel
    seed: int
    salt: str = ""
    _innovations: dict[int, Values] = field(default_factory=dict)

    def draw_step(self, number: int, rng: np.random.Generator) -> Values:
        """Return how many times its mean each rank's own work takes. rng: of this step."""
        ranks = (self.world.job.ranks,)
        if self.model is NoiseModel.CORRELATED:
            return self._add_outliers(self._combine_innovations(number), rng)
        return self._add_outliers(self._draw_deviations(rng, ranks), rng)

    def measure_first_steps(self) -> tuple[float, float]:
        """Return the medians of the job's first steady steps: of a step, and of own work in it."""
        job = self.world.job
        if self.model in {NoiseModel.INDEPENDENT, NoiseModel.CORRELATED}:  # one step alone has the same distribution
            return self.world.first_steps
        rng = create_rng(self.seed, FIRST_STEPS_STREAM, salt=self.salt)
        own = job.own_seconds * self._add_outliers(self._draw_deviations(rng, (FIRST_STEPS_DRAWS, job.ranks)), rng)
        return float(np.median(own.max(axis=1))) + job.transfer_seconds, float(np.median(own))

    def _draw_deviations(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Values:
        """Draw independent deviations with a standard deviation of 1."""
        if self.model is NoiseModel.HEAVY:
            return np.asarray(
                rng.standard_t(DEGREES_OF_FREEDOM, shape) / np.sqrt(DEGREES_OF_FREEDOM / (DEGREES_OF_FREEDOM - 2))
            )
        return rng.standard_normal(shape)

    def _combine_innovations(self, number: int) -> Values:
        """Return the deviations of a step as the moving average that the autoregression is: no step needs another."""
        numbers = range(max(0, number - INNOVATIONS + 1), number + 1)
        if len(self._innovations) > 8 * INNOVATIONS:
            self._innovations = {known: self._innovations[known] for known in numbers if known in self._innovations}
        for missing in numbers:
            if missing not in self._innovations:
                rng = create_rng(self.seed, missing, INNOVATION_STREAM, salt=self.salt)
                self._innovations[missing] = rng.standard_normal(self.world.job.ranks)
        weights = AUTOCORRELATION ** np.arange(len(numbers) - 1, -1, -1.0)
        innovations = np.array([self._innovations[each] for each in numbers])
        return np.asarray(weights @ innovations / np.sqrt((weights**2).sum()))

    def _add_outliers(self, deviations: Values, rng: np.random.Generator) -> Values:
        job = self.world.job
        noise = np.maximum(MIN_STEP_FACTOR, 1.0 + job.noise * deviations)
        if self.model is not NoiseModel.HICCUPS:
            return np.where(rng.random(noise.shape) < job.hiccups, HICCUP_FACTOR, noise)
        rate = HICCUP_RATE_FACTOR / (HICCUP_INTERVAL_STEPS * job.ranks)
        lengths = 1.0 + rng.exponential(HICCUP_FACTOR - 1.0, noise.shape)
        return np.where(rng.random(noise.shape) < rate, lengths, noise)
