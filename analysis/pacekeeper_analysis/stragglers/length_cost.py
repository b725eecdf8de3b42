"""The cost of a sequence by its length: fixed, linear (matrices) and quadratic (attention), after arXiv 2505.05713."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ..errors import InputError

Numbers = npt.NDArray[np.float64]

_TERM_COUNT = 3
_FIT_ROUNDS = 5
_OUTLIER_DEVIATIONS = 3.0
"""Standard deviations (estimated by the median) of the residual from which on a step is an outlier."""
_SIGMA_PER_MAD = 1.4826


@dataclass(frozen=True)
class SequenceCost:
    """Seconds of one sequence: fixed + per_token · length + per_token_squared · length². Only ratios matter."""

    fixed: float = 0.0
    per_token: float = 1.0
    per_token_squared: float = 0.0

    def __post_init__(self) -> None:
        if not all(np.isfinite(self.terms)) or min(self.terms) < 0 or max(self.terms) == 0:
            raise InputError(f"cost: {self} must have finite terms, none below 0 and at least one above 0")

    @property
    def terms(self) -> tuple[float, float, float]:
        return self.fixed, self.per_token, self.per_token_squared

    def compute_seconds(self, lengths: npt.ArrayLike) -> Numbers:
        """Return the seconds of each sequence, in the shape of `lengths`."""
        length = np.asarray(lengths, dtype=np.float64)
        return self.compute_seconds_from_sums(np.ones_like(length), length, length * length)

    def compute_seconds_from_sums(
        self, count: npt.ArrayLike, lengths: npt.ArrayLike, squares: npt.ArrayLike
    ) -> Numbers:
        """Return the seconds of `count` sequences, from the sums of their lengths and of the squares of these."""
        sums = (np.asarray(values, dtype=np.float64) for values in (count, lengths, squares))
        fixed, linear, quadratic = (term * values for term, values in zip(self.terms, sums, strict=True))
        seconds: Numbers = fixed + linear + quadratic  # added one by one, which gives the same bits on every processor
        return seconds


def fit_sequence_cost(steps: Sequence[npt.ArrayLike], seconds: npt.ArrayLike) -> SequenceCost:
    """Fit the cost to measured steps: least squares with no term below 0, without outliers.

    `steps` are the lengths of a rank's sequences in each step. `seconds` is its own work in each of them, without
    waits, of shape (steps,). Raises InputError if they do not fit each other, or all steps are equal in every term.
    """
    sequences = [np.asarray(lengths, dtype=np.float64) for lengths in steps]
    if not all((lengths >= 0).all() for lengths in sequences):
        raise InputError("steps: lengths must be finite and 0 or more")
    return fit_cost_to_sums([_sum_powers(lengths) for lengths in sequences], seconds)


def fit_cost_to_sums(sums: npt.ArrayLike, seconds: npt.ArrayLike) -> SequenceCost:
    """Fit the cost if only the sums of each step are known: number of sequences, lengths, squares; shape (steps, 3)."""
    steps, measured = np.asarray(sums, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if measured.shape != (len(steps),) or len(steps) < _TERM_COUNT:
        raise InputError(
            f"seconds: shape {measured.shape} for {len(steps)} steps; give one a step, of {_TERM_COUNT} steps or more"
        )
    if not (np.isfinite(steps) & (steps >= 0)).all() or not (np.isfinite(measured) & (measured > 0)).all():
        raise InputError("steps, seconds: lengths must be finite and 0 or more, seconds finite and above 0")
    if np.ptp(steps, axis=0).max() == 0:
        raise InputError("steps: all have the same lengths, which identifies no cost; take steps with different ones")
    included = np.ones(len(measured), dtype=bool)
    for _ in range(_FIT_ROUNDS):
        terms = _solve_non_negative(steps[included], measured[included])
        residual = measured - steps @ terms
        spread = _SIGMA_PER_MAD * float(np.median(np.abs(residual[included] - np.median(residual[included]))))
        inliers = np.abs(residual - np.median(residual[included])) <= _OUTLIER_DEVIATIONS * spread + 1e-12 * measured
        if (inliers == included).all() or inliers.sum() < _TERM_COUNT:
            break
        included = inliers
    return SequenceCost(*(float(term) for term in terms))


def fit_cost_across_ranks(
    samples: npt.ArrayLike, lengths: npt.ArrayLike, squares: npt.ArrayLike, seconds: npt.ArrayLike
) -> SequenceCost:
    """Fit the cost on a rank of usual speed, from the steps of ranks whose speeds may differ.

    Arrays have the shape (steps, ranks). `samples`, `lengths` and `squares` are the number of a step's sequences, the
    sums of their lengths, and of the squares of these. `seconds` is the own work without waits and pauses. Costs and
    speeds are fitted alternately. Raises InputError as `fit_cost_to_sums` does.
    """
    count, own = np.asarray(samples, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    sums = np.stack([count, np.asarray(lengths), np.asarray(squares)], axis=-1)
    expected = np.maximum(count, 1.0)
    for _ in range(_FIT_ROUNDS):
        relative_time = np.median(own / expected, axis=0)
        cost = fit_cost_to_sums(
            sums.reshape(-1, _TERM_COUNT), (own / (relative_time / np.median(relative_time))).ravel()
        )
        expected = np.maximum(sums @ cost.terms, 1e-12)
    return cost


def _sum_powers(lengths: Numbers) -> tuple[float, float, float]:
    return float(lengths.size), float(lengths.sum()), float((lengths * lengths).sum())


def _solve_non_negative(sums: Numbers, seconds: Numbers) -> Numbers:
    """Solve least squares with no negative term: the best of the few sets of terms whose free solution has none."""
    scale = np.linalg.norm(sums, axis=0)
    scale[scale == 0] = 1.0
    best, least_error = np.zeros(_TERM_COUNT), np.inf
    for count in range(1, _TERM_COUNT + 1):
        for chosen in combinations(range(_TERM_COUNT), count):
            columns = list(chosen)
            solution, *_ = np.linalg.lstsq(sums[:, columns] / scale[columns], seconds, rcond=None)
            error = float(np.square(sums[:, columns] / scale[columns] @ solution - seconds).sum())
            if (solution >= 0).all() and error < least_error * (1 - 1e-9):
                best, least_error = np.zeros(_TERM_COUNT), error
                best[columns] = solution / scale[columns]
    return best
