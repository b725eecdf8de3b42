"""The constants that steer decisions about slowness, all of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..stragglers import price, shares

PROBABLE = 0.5
"""Posterior from which on something is more probable than not."""


@dataclass(frozen=True)
class EstimatorParameters:
    """Each has a meaning outside of the estimator, from which it can be derived. Levels are logarithms of slowdowns."""

    # What is expected before anything is seen.
    faults_per_day: float = 1.0  # onsets of each kind in one job: the budget of false alarms
    fault_duration_scale_seconds: float = 60.0  # median duration of a fault
    rotation_hit_rate: float = 0.9  # share of the steps that have a slow rank while slow ranks rotate
    min_rotation_level: float = 0.1  # what rotates below it costs less than it takes to show
    max_rank_offset: float = 0.03  # level: by how much healthy ranks may differ permanently
    noise: float = 0.03  # level: standard deviation of a rank's own work in a step
    correlation: float = 4.0  # variance of means of consecutive steps over that of independent ones
    transfer_noise: float = 0.01  # the same of a transfer, as a share of a step
    outlier_rate: float = 0.001  # share of a rank's steps that are longer by chance, without any fault
    fixed_share: float = shares.ASSUMED_FIXED_COST_SHARE  # part of own work that no share changes
    fixed_share_error: float = 0.03  # its standard deviation
    # How fast what is learned changes.
    noise_values: float = 500.0  # values (steps times ranks) over which the noise is averaged
    learning_windows: float = 20.0  # windows of steps over which correlation and offsets are averaged
    loss_decay_seconds: float = 600.0  # time constant at which the loss by a worker that is healthy is forgotten
    # What an act has to win.
    action_probability: float = 0.95  # posterior for what is inexact or cannot be undone
    min_gain: float = 0.01  # share of a step: the price of a change of the plan
    min_lasting_gain: float = price.MIN_LASTING_WIN  # the same of a change that stays in force
    exact_preference_ratio: float = price.MAX_EXACT_STEP_TIME_RATIO  # what exact training is worth
    inexact_cost_rate: float = 0.1  # s/s: price of inexact training for longer than there is a reason
    request_false_positive_rate: float = 0.01  # of requests for step windows, per check of a healthy job
    answer_seconds: float = 3.0  # age of step windows up to which they show the present

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is no probability, or not positive."""
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; it has to be positive")
        if not PROBABLE < self.action_probability < 1 or not self.rotation_hit_rate < 1:
            raise ValueError("action_probability and rotation_hit_rate are probabilities; the first is above 0.5")

    @property
    def doubt_probability(self) -> float:
        """Posterior below which nothing is asked, and nothing is done."""
        return 1 - self.action_probability
