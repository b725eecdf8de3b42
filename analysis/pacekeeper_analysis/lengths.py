"""What a sequence costs, by its length: fixed, linear (matrices) and quadratic (attention), after arXiv 2505.05713."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from .errors import InputError

Numbers = npt.NDArray[np.float64]

_TERMS = 3
_ROUNDS = 5
_OUTLIER = 3.0
"""Steps whose residual is so many standard deviations (estimated by the median) off tell of something else."""
_SIGMA_PER_MAD = 1.4826


@dataclass(frozen=True)
class SequenceCost:
    """Seconds of one sequence: fixed + per_token · length + per_token_squared · length². Only ratios matter."""

    fixed: float = 0.0
    per_token: float = 1.0
    per_token_squared: float = 0.0

    def __post_init__(self) -> None:
        terms = (self.fixed, self.per_token, self.per_token_squared)
        if not all(np.isfinite(terms)) or min(terms) < 0 or max(terms) == 0:
            raise InputError(f"cost: {self} must have finite terms, none below 0 and one above")

    def of(self, lengths: npt.ArrayLike) -> Numbers:
        """Seconds of each, in the shape of `lengths`."""
        length = np.asarray(lengths, dtype=np.float64)
        seconds: Numbers = self.fixed + self.per_token * length + self.per_token_squared * (length * length)
        return seconds


def fit(steps: Sequence[npt.ArrayLike], seconds: npt.ArrayLike) -> SequenceCost:
    """The cost that explains best what steps took: least squares with no term below 0, without outliers.

    steps: the lengths of a rank's sequences in each step. seconds: its own work in each of them, without waits: shape
    (steps,). Raises InputError where they do not fit each other, or all steps are alike in every term.
    """
    took = np.asarray(seconds, dtype=np.float64)
    if took.shape != (len(steps),) or len(steps) < _TERMS:
        raise InputError(
            f"seconds: shape {took.shape} for {len(steps)} steps; give one a step, of {_TERMS} steps or more"
        )
    sequences = [np.asarray(lengths, dtype=np.float64) for lengths in steps]
    if (
        not all((np.isfinite(lengths) & (lengths >= 0)).all() for lengths in sequences)
        or not (np.isfinite(took) & (took > 0)).all()
    ):
        raise InputError("steps, seconds: lengths must be finite and 0 or more, seconds finite and above 0")
    sums = np.array([_sums(lengths) for lengths in sequences])
    if np.ptp(sums, axis=0).max() == 0:
        raise InputError("steps: all have the same lengths, which tells nothing; take steps with different ones")
    kept = np.ones(len(took), dtype=bool)
    for _ in range(_ROUNDS):
        terms = _non_negative(sums[kept], took[kept])
        residual = took - sums @ terms
        spread = _SIGMA_PER_MAD * float(np.median(np.abs(residual[kept] - np.median(residual[kept]))))
        still = np.abs(residual - np.median(residual[kept])) <= _OUTLIER * spread + 1e-12 * took
        if (still == kept).all() or still.sum() < _TERMS:
            break
        kept = still
    return SequenceCost(*(float(term) for term in terms))


def _sums(lengths: Numbers) -> tuple[float, float, float]:
    return float(lengths.size), float(lengths.sum()), float((lengths * lengths).sum())


def _non_negative(sums: Numbers, took: Numbers) -> Numbers:
    """Least squares with no negative term: the best of the few sets of terms whose free solution has none."""
    scale = np.linalg.norm(sums, axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(_TERMS), np.inf
    for count in range(1, _TERMS + 1):
        for chosen in combinations(range(_TERMS), count):
            columns = list(chosen)
            found, *_ = np.linalg.lstsq(sums[:, columns] / scale[columns], took, rcond=None)
            error = float(np.square(sums[:, columns] / scale[columns] @ found - took).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(_TERMS), error
                best[columns] = found / scale[columns]
    return best
