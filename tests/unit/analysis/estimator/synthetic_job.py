"""A job whose ranks take the times that a test wants, seen as step windows and means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.estimator.estimator import JobLayout, StragglerEstimator
from pacekeeper_analysis.estimator.observations import MetricsWindow, StepWindow
from pacekeeper_analysis.estimator.parameters import EstimatorParameters

Values = npt.NDArray[np.float64]
STEP_SECONDS, TRANSFER_SECONDS, FIXED_SHARE = 0.5, 0.05, 0.05
WINDOW_STEPS = 8
FIRST_WINDOWS, FIRST_WINDOW_STEPS = 8, 32
"""Of the first steps, as a rank reports them: the fastest of these windows."""


@dataclass
class SyntheticJob:
    """`slowdowns`: of ranks, from now on. `rotating`: of another rank in each step. `transfer`: added seconds."""

    ranks: int = 4
    ranks_per_worker: int = 1
    samples: int = 8
    noise: float = 0.02
    autocorrelation: float = 0.0
    managed: bool = True
    roles: tuple[int, ...] = ()
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    rotating: float = 1.0
    transfer: float = 0.0
    parameters: EstimatorParameters = field(default_factory=EstimatorParameters)
    seed: int = 0

    def __post_init__(self) -> None:
        layout = JobLayout(
            self.ranks, self.ranks_per_worker, self.samples if self.managed else 1.0, self.managed, self.roles
        )
        self.estimator = StragglerEstimator.create(layout, 0.0, self.parameters)
        self.rng = np.random.default_rng(self.seed)
        self.now, self.step = 0.0, 0
        self.shares: Values = np.full(self.ranks, float(self.samples if self.managed else 0))
        self.synchronous = True
        self.first_own: tuple[float, ...] = ()
        self.transfers: list[float] = []
        self.deviations: Values = self.rng.standard_normal(self.ranks) if self.autocorrelation else np.zeros(self.ranks)

    def draw_steps(self, count: int) -> StepWindow:
        """Train for `count` steps."""
        own = STEP_SECONDS * np.exp(self.noise * self.draw_deviations(count))
        if self.roles:
            own *= 1.0 + np.array(self.roles)
        if self.managed:
            own *= FIXED_SHARE + (1 - FIXED_SHARE) * self.shares / self.samples
        for rank, slowdown in self.slowdowns.items():
            own[:, rank] *= slowdown
        own[np.arange(count), self.rng.integers(0, self.ranks, count)] *= self.rotating
        took = np.repeat(own.max(axis=1, keepdims=True) + TRANSFER_SECONDS + self.transfer, self.ranks, axis=1)
        if not self.synchronous:
            took = own
        numbers = np.arange(self.step + 1, self.step + count + 1)
        self.step += count
        self.now += float(took.max(axis=1).sum())
        return StepWindow(
            numbers=numbers,
            compute_seconds=own,
            gc_seconds=np.zeros_like(own),
            step_seconds=took,
            samples=np.repeat(self.shares[None], count, axis=0),
            weights=np.ones_like(own),
            synchronous=self.synchronous,
            baseline_seconds=STEP_SECONDS + TRANSFER_SECONDS,
            baseline_exposed=TRANSFER_SECONDS,
            baseline_own_seconds=self.first_own,
            transfer_seconds=TRANSFER_SECONDS + self.transfer if not self.synchronous else None,
        )

    def train_unobserved(self) -> None:
        """Train before the estimator begins. It knows these steps only as the job's first ones."""
        windows = [self.draw_steps(FIRST_WINDOW_STEPS) for _ in range(FIRST_WINDOWS)]
        fastest = min(windows, key=lambda window: float(np.median(window.step_seconds)))
        self.first_own = tuple(np.median(fastest.compute_seconds, axis=0).tolist())

    def draw_deviations(self, count: int) -> Values:
        """Draw deviations from the mean, (count, ranks): an autoregression with a standard deviation of 1."""
        deviations: Values = self.rng.standard_normal((count, self.ranks)) * np.sqrt(1 - self.autocorrelation**2)
        for row in deviations:
            row += self.autocorrelation * self.deviations
            self.deviations = row
        return deviations

    def observe(self, steps: int = WINDOW_STEPS) -> StragglerEstimator:
        """Train, and show each step."""
        self.estimator = self.estimator.observe_steps(self.draw_steps(steps), self.now)
        return self.estimator

    def observe_means(self, steps: int = WINDOW_STEPS) -> StragglerEstimator:
        """Train, and show only means."""
        self.estimator = self.estimator.observe_metrics(build_means(self.draw_steps(steps)), self.step, self.now)
        return self.estimator


def build_means(window: StepWindow) -> MetricsWindow:
    return MetricsWindow(
        last_step=int(window.numbers[-1]),
        steps=len(window.numbers),
        compute_seconds=window.compute_seconds.mean(axis=0),
        step_seconds=window.step_seconds.mean(axis=0),
        wait_seconds=(window.step_seconds - window.compute_seconds).mean(axis=0),
        samples=window.samples[-1],
        baseline_seconds=window.baseline_seconds,
        synchronous=window.synchronous,
    )
