"""Whether a figure grows: the slope of a line through its samples, held against what the samples differ from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

HOUR_SECONDS = 3600.0
MIN_SAMPLES, MIN_HOURS = 8, 0.5
WARM_UP_SHARE = 0.25
"""Of the time that is known: until then memory fills that is kept and used again."""
MAX_GROWTH_SHARE = 0.02
"""Of its level per hour: less growth cannot be distinguished from settling."""
STANDARD_ERRORS = 3.0
"""Standard errors: the slope that is at least there."""


@dataclass(frozen=True)
class Growth:
    """Of one figure. `slope`, `error`: a hour, in its own unit; `error`: the slope's standard error."""

    level: float
    slope: float
    error: float
    hours: float

    @property
    def grows(self) -> bool:
        return self.slope - STANDARD_ERRORS * self.error > MAX_GROWTH_SHARE * self.level

    def to_json(self) -> dict[str, Any]:
        rounded = {"level": self.level, "an_hour": self.slope, "error": self.error, "hours": self.hours}
        return {name: float(f"{value:.3g}") for name, value in rounded.items()} | {"grows": self.grows}


def estimate_growth(samples: Sequence[tuple[float, float]]) -> Growth | None:
    """samples: (seconds, value), in the order of time. None: there are too few, or of too short a time."""
    if not samples:
        return None
    warm_at = samples[0][0] + WARM_UP_SHARE * (samples[-1][0] - samples[0][0])
    steady = [(second, value) for second, value in samples if second >= warm_at]
    if len(steady) < MIN_SAMPLES:
        return None
    hours = (np.array([second for second, _ in steady]) - steady[0][0]) / HOUR_SECONDS
    values = np.array([value for _, value in steady])
    from_mean = hours - hours.mean()
    if hours[-1] < MIN_HOURS:
        return None
    spread = float((from_mean**2).sum())
    slope = float((from_mean * values).sum()) / spread
    residuals = values - values.mean() - slope * from_mean
    error = math.sqrt(float((residuals**2).sum()) / (len(steady) - 2) / spread)
    return Growth(float(values.mean()), slope, error, float(hours[-1]))
