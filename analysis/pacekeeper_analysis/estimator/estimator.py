"""The estimator: what is slow, since when, and by how much, from all that was observed of a job."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ..stragglers.windows import compute_peers_median
from .chain import LEVEL_WIDTHS, LEVELS, MAX_LEVEL, HiddenChain, Values
from .noise import MIN_DENSITY, NoiseModel, compute_density
from .observations import MetricsWindow, StepWindow
from .parameters import PROBABLE, EstimatorParameters

GRID: Values = np.concatenate([[0.0], LEVELS])
GRID_WIDTHS: Values = np.concatenate([[0.0], LEVEL_WIDTHS])
MAX_RECENT_STEPS = 32
"""Steps that are kept for what a strategy would win."""
MIN_SHARE_CHANGE = 0.2
"""Relative change of a rank's share from which on it tells the fixed part of a step."""
MAX_FIXED_SHARE = 0.4
"""Part of own work that can be fixed. More shows that a rank's pace has changed along with its share."""
MIN_STEP_GROUP = 3
"""Steps before and after a change of shares that tell the fixed part of a step."""


@dataclass(frozen=True)
class JobLayout:
    """The ranks of a job, in the order of its workers."""

    ranks: int
    ranks_per_worker: int
    equal_share: float = 1.0  # samples of each rank with equal shares; 1 for a monitored script
    managed: bool = True  # the script uses the library. Ranks of others may differ by nature
    roles: tuple[int, ...] = ()  # of each rank: ranks compare with those of their role; (): all are alike

    @property
    def workers(self) -> int:
        return self.ranks // self.ranks_per_worker

    @cached_property
    def peer_groups(self) -> Sequence[npt.NDArray[np.intp]]:
        """The ranks of each role."""
        roles = np.array(self.roles or (0,) * self.ranks)
        return [np.flatnonzero(roles == role) for role in np.unique(roles)]


@dataclass(frozen=True)
class StragglerEstimator:
    """The state of the filter. Times are seconds of one clock, steps are their numbers."""

    layout: JobLayout
    parameters: EstimatorParameters
    workers: HiddenChain  # slow workers, or single ranks of them
    rotation: HiddenChain  # another rank is slow in each step
    transfer: HiddenChain  # exposed communication, as growth of the usual step
    noise: NoiseModel
    fixed_share: float
    fixed_share_variance: float
    baseline_seconds: float | None = None  # step time of the first steady steps
    baseline_exposed: float | None = None  # exposed communication in them
    expected_step: float | None = None  # step time in the newest step windows; None: not known
    expected_wait: float = 0.0
    now: float = 0.0
    position: int = -1  # newest step that counts already
    requested_step: int = -1  # newest completed step at the last request
    probe_step: int | None = None  # once it is completed, the steps since a change of shares tell the fixed part
    wants_steps: bool = False
    recent: StepWindow | None = field(default=None, repr=False)
    levels_by_step: dict[int, Values] = field(default_factory=dict, repr=False)  # of the newest step windows
    before_metrics: tuple[int, HiddenChain] | None = field(default=None, repr=False)
    known_share_changes: frozenset[tuple[int, ...]] = frozenset()

    @classmethod
    def create(cls, layout: JobLayout, now: float, parameters: EstimatorParameters | None = None) -> StragglerEstimator:
        parameters = parameters or EstimatorParameters()
        rate, scale = parameters.faults_per_day / 86_400, parameters.fault_duration_scale_seconds
        return cls(
            layout,
            parameters,
            workers=HiddenChain.create(layout.workers, layout.ranks_per_worker, rate / layout.workers, scale),
            rotation=HiddenChain.create(1, 1, rate, scale, parameters.min_rotation_level),
            transfer=HiddenChain.create(1, 1, rate, scale),
            noise=NoiseModel.create(parameters, layout.ranks),
            fixed_share=parameters.fixed_share,
            fixed_share_variance=parameters.fixed_share_error**2,
            now=now,
        )

    # ---- what is known ------------------------------------------------------------------------------------------

    @property
    def knows_noise(self) -> bool:
        return self.recent is not None

    @property
    def rank_levels(self) -> Values:
        """Expected level of each rank, (ranks,)."""
        return self.workers.mean_levels.ravel()

    @property
    def is_doubtful(self) -> bool:
        """Whether some fault is neither certain nor excluded."""
        low, high = self.parameters.doubt_probability, self.parameters.action_probability
        slow = np.concatenate([self.workers.slow, self.rotation.slow, self.transfer.slow])
        return bool(((slow > low) & (slow < high)).any())

    def level_work(self, seconds: Values, samples: Values) -> Values:
        """Return own work at equal shares: own / (φ + (1 - φ) · share / equal share)."""
        if not samples.min() > 0:
            return seconds
        return np.asarray(seconds / self.scale_shares(samples))

    def scale_shares(self, samples: Values) -> Values:
        """Return the own work with these samples over that with an equal share."""
        return np.asarray(self.fixed_share + (1 - self.fixed_share) * samples / self.layout.equal_share)

    def compute_levels(self, seconds: Values, samples: Values) -> Values:
        """Return z: log own work over that of healthy peers, without offsets. Without such peers: over that of all."""
        work = np.log(np.atleast_2d(self.level_work(seconds, samples))) - self.noise.offsets
        is_healthy = np.repeat(self.workers.slow < PROBABLE, self.layout.ranks_per_worker)
        reference = np.empty_like(work)
        for ranks in self.layout.peer_groups:
            reference[:, ranks] = compute_peers_median(work[:, ranks])
            healthy = ranks[is_healthy[ranks]]
            if 1 < len(healthy) < len(ranks):
                reference[:, ranks] = np.median(work[:, healthy], axis=1, keepdims=True)
                reference[:, healthy] = compute_peers_median(work[:, healthy])
            elif len(healthy) == 1:
                reference[:, ranks[ranks != healthy[0]]] = work[:, healthy]
        return np.asarray((work - reference).reshape(np.shape(seconds)))

    # ---- changes from outside -----------------------------------------------------------------------------------

    def begin_round(self, replaced_workers: Collection[int], now: float) -> StragglerEstimator:
        """Return the state at the start of a round. Nothing is known of workers that are new."""
        estimator = self.forget_steps()
        if replaced_workers:
            estimator = replace(estimator, workers=self.workers.reset(sorted(replaced_workers)))
        return replace(estimator, now=now, position=-1, requested_step=-1)

    def forget_steps(self) -> StragglerEstimator:
        """Return the state without single steps, whose numbers mean nothing any more."""
        return replace(self.forget_expectations(), levels_by_step={}, before_metrics=None)

    def forget_expectations(self) -> StragglerEstimator:
        """Return the state after a change of the plan: steps take another time from now on."""
        return replace(self, expected_step=None)

    def return_to_sync(self) -> StragglerEstimator:
        """Return the state after the job has left a Local-SGD mode: its reason is over."""
        estimator = replace(self, transfer=self.transfer.reset(), rotation=self.rotation.reset())
        return estimator.forget_steps()

    def probe_fixed_share(self, old: Sequence[int], new: Sequence[int]) -> StragglerEstimator:
        """Return the state after a change of shares. The steps after a large one tell the fixed part of a step."""
        change = max(abs(after / before - 1) for after, before in zip(new, old, strict=True))
        return replace(self, probe_step=self.position + 5) if change > MIN_SHARE_CHANGE else self

    def request_steps(self, newest_step: int) -> StragglerEstimator:
        """Return the state once step windows have been requested."""
        return replace(self, wants_steps=False, requested_step=newest_step)

    # ---- observations -------------------------------------------------------------------------------------------

    def observe_metrics(self, window: MetricsWindow, newest_step: int, now: float) -> StragglerEstimator:
        """Weigh the heartbeats' means, and decide whether single steps are needed.

        `newest_step`: the last completed step, which stale metrics may lack.
        """
        state = replace(self, now=now)
        if state.baseline_seconds is None and window.baseline_seconds:
            state = replace(state, baseline_seconds=window.baseline_seconds)
        if not state.knows_noise:
            return replace(state, wants_steps=newest_step > state.requested_step)
        if window.last_step <= state.position:
            return replace(state, wants_steps=state._is_due(newest_step, surprising=False))
        new_share = min(1.0, (window.last_step - state.position) / window.steps)
        levels = state.compute_levels(window.compute_seconds, window.samples)
        seconds = float(np.median(window.step_seconds))
        surprising = state._is_surprising(window, levels, seconds, new_share)
        if new_share >= 1.0:  # otherwise some of its steps count already
            state = state._weigh_metrics(window, levels, seconds)
        return replace(state, wants_steps=state._is_due(newest_step, surprising=surprising))

    def _is_surprising(self, window: MetricsWindow, levels: Values, seconds: float, new_share: float) -> bool:
        """Return whether the means are improbable under the posterior (Bonferroni over ranks and the step time)."""
        noise, steps = self.noise, window.steps
        mean, rotated, hit_level = self.rank_levels, *self._expect_rotation()
        known = [
            self.levels_by_step[number]
            for number in range(window.last_step - steps + 1, self.position + 1)
            if number in self.levels_by_step
        ]
        expected = new_share * (mean + rotated * hit_level) + (1 - new_share) * (
            np.mean(known, axis=0) if known else mean
        )
        variance = noise.correlation * noise.sigma**2 + rotated * hit_level**2 + self.workers.level_variances.ravel()
        spread = np.sqrt(new_share * variance / steps)
        limit = NormalDist().inv_cdf(1 - self.parameters.request_false_positive_rate / (self.layout.ranks + 1))
        # Where outliers are frequent, one of them is no surprise.
        has_outliers = self.layout.ranks * steps * noise.outlier_rate > 3 * self.parameters.request_false_positive_rate
        tail = math.expm1(MAX_LEVEL / 2) / steps if has_outliers else 0.0
        away = levels - expected
        if bool(((away > limit * spread + tail) | (away < -limit * spread)).any()):
            return True
        if self.expected_step is None or not window.synchronous:
            return False
        longer, error = (
            math.log(seconds / self.expected_step),
            noise.step_sigma * math.sqrt(new_share * noise.correlation / steps),
        )
        waits = (float(window.wait_seconds.min()) - self.expected_wait) / seconds
        margin = limit * error + 2 * self.parameters.transfer_noise
        return longer > limit * error + tail or longer < -margin or abs(waits) > margin

    def _expect_rotation(self) -> tuple[float, float]:
        """Return the probability that it is a rank's turn in a step, and by how much longer its work takes then."""
        hit = float(self.rotation.slow[0]) * self.parameters.rotation_hit_rate / self.layout.ranks
        return hit, math.expm1(min(2.0, float(self.rotation.slow_levels[0, 0])))

    def _weigh_metrics(self, window: MetricsWindow, levels: Values, seconds: float) -> StragglerEstimator:
        """Weigh means of steps that are all new. Step windows of the same steps replace them."""
        steps, noise = window.steps, self.noise
        elapsed = (window.last_step - self.position if self.position >= 0 else steps) * seconds
        state = replace(self, before_metrics=(self.position, self.workers), position=window.last_step)
        rotates = self.rotation.slow[0] >= PROBABLE
        away = levels - self.rank_levels
        if np.abs(away).max() < 1.5 / steps and not rotates:  # no outlier is among them
            noise = noise.learn_correlation(away * math.sqrt(steps) / noise.sigma)
        is_healthy = np.repeat(self.workers.slow < self.parameters.doubt_probability, self.layout.ranks_per_worker)
        noise = noise.learn_offsets(levels, is_healthy, steps)
        workers, onset = self.workers, self.now - elapsed / 2
        if not rotates:
            error = np.hypot(noise.step_error / math.sqrt(steps), self._compute_level_errors(window.samples))
            workers = workers.predict(elapsed, onset, self.now)
            workers = workers.update_by_members(self._compute_log_likelihood(levels, error, steps=steps))
            workers = self._discard_unclear(workers, window.samples)
        expected_step, expected_wait = self.expected_step, self.expected_wait
        if window.synchronous and expected_step is None:
            expected_step, expected_wait = seconds, float(window.wait_seconds.min())
        return replace(state, noise=noise, workers=workers, expected_step=expected_step, expected_wait=expected_wait)

    def _is_due(self, newest_step: int, *, surprising: bool) -> bool:
        """Return whether step windows are needed: the means are improbable, or a fault is in doubt."""
        if self.probe_step is not None and newest_step >= self.probe_step:
            return True
        return newest_step > self.requested_step and (surprising or self.is_doubtful)

    def observe_steps(self, window: StepWindow, now: float) -> StragglerEstimator:
        """Weigh single steps. What means said of the same steps counts no more."""
        state = replace(self, now=now, wants_steps=False, before_metrics=None)
        if state.probe_step is not None and int(window.numbers[-1]) >= state.probe_step:
            state = replace(state, probe_step=None)
        state = state._revert_metrics(self.before_metrics, window.numbers)._learn_fixed_share(window)
        levels = state.compute_levels(window.balanced_seconds, window.samples)
        longest = window.step_seconds.max(axis=1)
        seconds = float(longest.mean())
        if not state.knows_noise:
            state = state._learn_first_steps(window, levels)
            levels = levels - state.noise.offsets
        is_new = window.numbers > state.position
        state = replace(state, recent=window.with_older(state.recent, MAX_RECENT_STEPS))
        moments = now - (window.numbers[-1] - window.numbers) * seconds
        elapsed = seconds * np.diff(window.numbers, prepend=max(state.position, window.numbers[0] - MAX_RECENT_STEPS))
        onsets = moments - (elapsed + seconds) / 2  # between the last step that counts and this one's start
        for row in np.flatnonzero(is_new):
            times = float(elapsed[row]), float(onsets[row]), float(moments[row])
            state = state._weigh_step(levels[row], window.samples[row], *times)
            if window.synchronous:
                state = state._weigh_transfer(float(window.exposed_seconds[row]), *times)
        state = replace(state, workers=state._discard_unclear(state.workers, window.samples[-1]))
        if is_new.any():
            state = state._learn_noise(levels[is_new], longest[is_new])
            state = replace(state, position=int(window.numbers[-1]))
        state = replace(state, levels_by_step=dict(zip(window.numbers.tolist(), levels, strict=True)))
        if window.synchronous and is_new.any() and state.expected_step is not None:
            state = state._learn_expected_step(window)
        return state

    def _revert_metrics(
        self, before: tuple[int, HiddenChain] | None, numbers: npt.NDArray[np.int64]
    ) -> StragglerEstimator:
        """Return the state of before the last means if these steps cover what they covered."""
        if before is None or before[0] >= self.position or not numbers[0] <= self.position:
            return self
        if numbers[-1] <= before[0] or any(n in self.levels_by_step for n in numbers.tolist() if n > before[0]):
            return self
        return replace(self, position=before[0], workers=before[1])

    def _learn_first_steps(self, window: StepWindow, levels: Values) -> StragglerEstimator:
        offsets = None if self.layout.managed else self._find_first_offsets(window, levels)
        noise = self.noise.learn_first_steps(levels, window.step_seconds.max(axis=1), offsets)
        baseline = self.baseline_seconds or window.baseline_seconds or float(window.step_seconds.max(axis=1).mean())
        state = replace(self, noise=noise, baseline_seconds=baseline)
        if not window.synchronous:
            return state
        exposed = float(np.median(window.exposed_seconds))
        if window.baseline_exposed is not None:
            exposed = min(exposed, window.baseline_exposed)
        waits = (window.step_seconds - window.compute_seconds).mean(axis=0)
        return replace(
            state,
            baseline_exposed=max(0.0, exposed),
            expected_step=float(window.step_seconds.max(axis=1).mean()),
            expected_wait=float(waits.min()),
        )

    def _find_first_offsets(self, window: StepWindow, levels: Values) -> Values:
        """Return the differences by nature. The job's first steps are from before a fault that these steps may show."""
        if window.baseline_own_seconds:
            return self.compute_levels(np.array(window.baseline_own_seconds), window.samples[-1])
        return np.asarray(np.median(levels, axis=0))

    def _weigh_step(
        self, levels: Values, samples: Values, seconds: float, onset: float, moment: float
    ) -> StragglerEstimator:
        """Weigh one step of all ranks, for slow workers and for slow ranks that rotate.

        `seconds`: since the step before it that counts. `onset`: of what it is the first sign of.
        """
        parameters = self.parameters
        error = np.hypot(self.noise.step_error, self._compute_level_errors(samples))
        rotation = self.rotation.predict(seconds, onset, moment).update(
            self._compute_rotation_likelihood(levels, error)
        )
        hit = float(self.rotation.slow[0]) * parameters.rotation_hit_rate / self.layout.ranks
        likelihood = self._compute_log_likelihood(levels, error, (hit, float(self.rotation.slow_levels[0, 0])))
        workers = self.workers.predict(seconds, onset, moment).update_by_members(likelihood)
        return replace(self, workers=workers, rotation=rotation)

    def _compute_log_likelihood(
        self, levels: Values, error: Values, hit: tuple[float, float] = (0.0, 0.0), steps: int = 1
    ) -> Values:
        """Return the log-likelihood of each rank's level if healthy, and at each level: (workers, members, 1 + K)."""
        by_member = levels.reshape(self.layout.workers, self.layout.ranks_per_worker, 1)
        errors = np.hypot(error.reshape(by_member.shape), GRID_WIDTHS)
        density = compute_density(by_member, GRID, errors, self.noise.outlier_rate, hit, steps)
        likelihood = np.log(density)
        for ranks in self.layout.peer_groups:
            if len(ranks) == 1:  # it has no peers, so its level tells nothing
                likelihood.reshape(self.layout.ranks, -1)[ranks] = 0.0
        return np.asarray(likelihood)

    def _compute_rotation_likelihood(self, levels: Values, errors: Values) -> Values:
        """Return log likelihood ratios (1, 1 + K): one rank of the step is longer by a level, over that none is.

        With probability ρ it is some rank's turn, each with the same probability. What is expected of a rank is a
        mixture: healthy, or slow as far as that is known of its worker. Within the noise nothing can be told.
        """
        slow, mean, variance = (values.ravel()[:, None] for values in self.workers.describe_slow_members())
        away, error, parameters = levels[:, None], errors[:, None], self.parameters
        some = slow[:, 0] > MIN_DENSITY
        rate = self.noise.outlier_rate

        def expect(shift: Values, width: Values | float) -> Values:
            density = compute_density(away, shift, np.hypot(error, width), rate)
            if some.any():
                sigma = np.sqrt(error[some] ** 2 + np.square(width) + variance[some])
                known = compute_density(away[some], mean[some] + shift, sigma, rate)
                density[some] = (1 - slow[some]) * density[some] + slow[some] * known
            return density

        ratio = (expect(LEVELS, LEVEL_WIDTHS) / expect(np.zeros(1), 0.0)).mean(axis=0)
        ratio = (1 - parameters.rotation_hit_rate) + parameters.rotation_hit_rate * ratio
        ratio = np.where(3 * errors.max() <= LEVELS, ratio, 1e-3)
        return np.asarray(np.log(np.concatenate([[1.0], ratio]))[None])

    def _weigh_transfer(self, exposed: float, seconds: float, onset: float, moment: float) -> StragglerEstimator:
        """Weigh by how much the exposed communication of a step exceeds that of the first steps."""
        if self.baseline_exposed is None or not self.baseline_seconds or self.layout.ranks == 1:
            return self
        growth = (exposed - self.baseline_exposed) / self.baseline_seconds
        parameters = self.parameters
        density = compute_density(
            np.array(math.log1p(max(-0.5, growth))),
            GRID,
            np.hypot(parameters.transfer_noise, GRID_WIDTHS),
            5 * parameters.outlier_rate,
        )
        return replace(self, transfer=self.transfer.predict(seconds, onset, moment).update(np.log(density)[None]))

    def _compute_level_errors(self, samples: Values) -> Values:
        """Return the standard deviation of each rank's level, (ranks,), that later steps with these samples share.

        It comes from the fixed part of a step with an uneven share, or in a monitored script from the ranks' offsets.
        """
        if not samples.min() > 0:
            return self.noise.offset_errors
        away = np.abs(1 - samples / self.layout.equal_share) / self.scale_shares(samples)
        return np.asarray(math.sqrt(self.fixed_share_variance) * away)

    def _discard_unclear(self, workers: HiddenChain, samples: Values) -> HiddenChain:
        """Return the chain without levels that such an error explains.

        With uneven shares, these are 2 standard deviations. A fault since a monitored script's first steps is less
        probable than that: there, they reach up to where it is as certain as an act has to be.
        """
        errors, deviations = self._compute_level_errors(samples), 2.0
        if self.noise.offset_steps is not None:
            assert self.baseline_seconds is not None  # known since the first steps
            days = float(self.noise.offset_steps.max()) * self.baseline_seconds / 86_400
            odds = self.parameters.action_probability / self.parameters.doubt_probability
            deviations = math.sqrt(2 * math.log(odds / min(PROBABLE, self.parameters.faults_per_day * days)))
        by_worker = errors.reshape(self.layout.workers, self.layout.ranks_per_worker)
        return workers.discard_below(deviations * by_worker.max(axis=1))

    def _learn_fixed_share(self, window: StepWindow) -> StragglerEstimator:
        """Learn the part of a step that no share changes, from a rank whose share fell much (Kalman 1960)."""
        samples = window.samples
        changed = np.flatnonzero((samples != samples[-1]).any(axis=1))
        if not window.has_shares or not len(changed) or len(samples) - changed[-1] - 1 < MIN_STEP_GROUP:
            return self
        old, new = changed[-8:], np.arange(changed[-1] + 1, len(samples))
        before, after = samples[old[-1]], samples[-1]
        change = (*before.astype(int).tolist(), *after.astype(int).tolist())
        ratio = after / before
        rank = int(np.argmin(ratio))
        if (
            len(old) < MIN_STEP_GROUP
            or (samples[old] != before).any()
            or change in self.known_share_changes
            or ratio[rank] > 1 - MIN_SHARE_CHANGE
        ):
            return self
        seconds, others = window.balanced_seconds, np.delete(np.arange(samples.shape[1]), rank)
        took = np.median(seconds[new][:, rank]) / np.median(seconds[old][-MIN_STEP_GROUP:][:, rank])
        pace = np.median(seconds[new][:, others] / samples[new][:, others]) / np.median(
            seconds[old][:, others] / samples[old][:, others]
        )
        fixed = (took / pace - ratio[rank]) / (1 - ratio[rank])
        variance = 1.6 * (self.noise.sigma * took / (1 - ratio[rank])) ** 2 * (1 / len(new) + 1 / MIN_STEP_GROUP)
        if not abs(fixed - MAX_FIXED_SHARE / 2) <= MAX_FIXED_SHARE / 2 + self.parameters.fixed_share_error:
            # Its pace has changed, too.
            return self
        gain = self.fixed_share_variance / (self.fixed_share_variance + variance)
        return replace(
            self,
            fixed_share=float(self.fixed_share + gain * (max(0.0, fixed) - self.fixed_share)),
            fixed_share_variance=float((1 - gain) * self.fixed_share_variance),
            known_share_changes=self.known_share_changes | {change},
        )

    def _learn_noise(self, levels: Values, longest: Values) -> StragglerEstimator:
        if self.rotation.slow[0] > PROBABLE:
            return self  # what rotates is no noise
        is_healthy = np.repeat(self.workers.slow < PROBABLE, self.layout.ranks_per_worker)
        if is_healthy.sum() <= 1:
            return self  # without healthy peers, levels mirror those of slow ranks
        noise = self.noise.learn_steps(levels - self.rank_levels, longest, healthy=bool(is_healthy.all()))
        return replace(self, noise=noise)

    def _learn_expected_step(self, window: StepWindow) -> StragglerEstimator:
        """Learn what the next means have to show if nothing changes. What step windows show is known."""
        same = (window.samples == window.samples[-1]).all(axis=1)
        newest = window.select(np.flatnonzero(same)[-8:])
        waits = (newest.step_seconds - newest.compute_seconds).mean(axis=0)
        return replace(
            self,
            expected_step=float(newest.step_seconds.max(axis=1).mean()),
            expected_wait=float(waits.min()),
        )
