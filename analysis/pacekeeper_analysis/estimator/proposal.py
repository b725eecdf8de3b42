"""The decision rule: what is free and exact follows the posterior; the rest needs certainty, or has to pay.

Costly acts follow ski rental (Karlin, Manasse, Rudolph & Sleator 1988): a worker is replaced once its expected loss has
reached the price of a spare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from ..protocol.plan import SyncMode
from ..stragglers import strategies
from ..stragglers.shares import NO_SHARE_LIMITS, ShareLimits, divide_equally
from ..stragglers.strategies import Bottleneck
from .chain import Values
from .estimator import StragglerEstimator
from .forecast import StepForecast
from .parameters import PROBABLE

REPLACE_REMEDY = "ReplaceWorker"
MAX_BACKDATED_STEPS = 32
"""Steps before the last look that may have been slow already: those of a window."""


@dataclass(frozen=True)
class TrainingSetup:
    """How the job trains now, and what may be changed."""

    mode: SyncMode = SyncMode.SYNC
    shares: tuple[int, ...] | None = None  # None: equal ones
    gc_every: int = 0  # steps; 0: each rank by itself
    balanced: bool = False  # samples are dealt by their cost
    sync_seconds: float = 30.0  # in mode AsyncEDiT
    sync_every: int = 16  # in mode EDiT
    permitted: frozenset[str] = frozenset()  # remedies
    replace_seconds: float | None = None  # price of a spare; None: there is none
    limits: ShareLimits = NO_SHARE_LIMITS


@dataclass(frozen=True)
class Proposal:
    """A change that is worth it now. None in a field: it stays."""

    remedy: str
    bottleneck: Bottleneck
    seconds_before: float  # of a step
    seconds_after: float
    seconds_without: float  # without the bottleneck
    rank: int | None = None  # the slowest one
    worker: int | None = None
    shares: tuple[int, ...] | None = None
    mode: SyncMode | None = None
    sync_seconds: float | None = None
    sync_every: int | None = None
    gc_every: int | None = None

    @property
    def slowdown_before(self) -> float:
        return max(1.0, self.seconds_before / self.seconds_without)

    @property
    def slowdown_after(self) -> float:
        return max(1.0, self.seconds_after / self.seconds_without)


@dataclass(frozen=True)
class LocalMode:
    """Why and since when a job trains in a Local-SGD mode."""

    since: float
    reason: Bottleneck
    began: float  # onset of what it was left for
    growth_seconds: float  # by which the exposed communication exceeded the usual one
    slowdown: float  # of a synchronous step
    longest_sync: float = 0.0


@dataclass(frozen=True)
class Account:
    """What the decision remembers between passes. Times are seconds of one clock."""

    lost_seconds: Values = field(default_factory=lambda: np.zeros(0))  # by each worker
    slow: frozenset[int] = frozenset()  # workers that were probably slow at the last call
    counted_step: int = -1
    healthy_step: int = -1  # up to which no worker was probably slow
    local: LocalMode | None = None
    returned_at: float | None = None  # from a Local-SGD mode
    absences: tuple[float, ...] = ()  # seconds from each return to the next entry
    observed_at: float = -math.inf  # of the newest step windows


@dataclass(frozen=True)
class DecisionResult:
    proposals: tuple[Proposal, ...]
    account: Account
    wants_steps: bool = False  # what is proposed next depends on the newest steps


def propose_strategies(
    estimator: StragglerEstimator, training: TrainingSetup, account: Account, *, fresh: bool
) -> DecisionResult:
    """Return what to change now. `fresh`: step windows have come since the last call."""
    if len(account.lost_seconds) != estimator.layout.workers:
        position = estimator.position
        account = replace(
            account,
            lost_seconds=np.zeros(estimator.layout.workers),
            slow=frozenset(),
            counted_step=position,
            healthy_step=position,
        )
    if fresh:
        account = replace(account, observed_at=estimator.now)
    if not estimator.knows_noise:
        return DecisionResult((), account)
    forecast = StepForecast(estimator)
    account = _follow_mode(forecast, training, account)
    if account.local is not None:
        return _propose_in_local_mode(forecast, training, account, account.local, fresh=fresh)
    result = _consider_replacement(forecast, training, account)
    if result.proposals or not fresh:
        return result
    lasting = (_propose_planned_gc(forecast, training), _propose_balanced_lengths(forecast, training))
    rebalance = _propose_shares(forecast, training)
    local = _propose_local_mode(forecast)
    found = (*lasting, rebalance if local is None else local)
    return replace(result, proposals=tuple(p for p in found if p is not None and p.remedy in training.permitted))


def _follow_mode(forecast: StepForecast, training: TrainingSetup, account: Account) -> Account:
    """Record that the job has entered or left a Local-SGD mode."""
    estimator, is_local = forecast.estimator, training.mode is not SyncMode.SYNC
    if is_local == (account.local is not None):
        return account
    if not is_local:
        return replace(account, local=None, returned_at=estimator.now)
    by_link = estimator.transfer.slow[0] >= estimator.rotation.slow[0]
    chain = estimator.transfer if by_link else estimator.rotation
    away = () if account.returned_at is None else (estimator.now - account.returned_at,)
    local = LocalMode(
        since=estimator.now,
        reason=Bottleneck.COMMUNICATION if by_link else Bottleneck.VOLATILE,
        began=min(estimator.now, float(chain.slow_onsets[0])),
        growth_seconds=forecast.exposed_seconds - (estimator.baseline_exposed or 0.0),
        slowdown=forecast.estimate_rotating_step() / (estimator.baseline_seconds or 1.0),
    )
    return replace(account, local=local, absences=(*account.absences, *away)[-16:])


# ---- exact training ---------------------------------------------------------------------------------------------


def _propose_planned_gc(forecast: StepForecast, training: TrainingSetup) -> Proposal | None:
    """Collections are recorded exactly, so they need no chain, and planned ones do not flap."""
    window, parameters = forecast.window, forecast.estimator.parameters
    if training.gc_every or window.gc_seconds.max() <= 0:
        return None
    apart = strategies.exclude_simultaneous_gc(window.gc_seconds)
    first = int(np.argmax((window.gc_seconds > 0).any(axis=1)))
    since = slice(min(first + 1, len(apart) - 1), None)  # the window may begin because of the first one
    if not (apart[since] > 0).any() and len(apart) - first < strategies.MIN_BOTTLENECK_STEPS:
        return None
    own = window.compute_seconds[since]
    waited = float((own.max(axis=1) - (own - apart[since]).max(axis=1)).mean())
    every, cost = strategies.plan_gc_interval(apart[since] if (apart[since] > 0).any() else apart)
    step = float(window.step_seconds[since].max(axis=1).mean())
    if waited - cost <= parameters.min_lasting_gain * step:
        return None
    return Proposal(strategies.PLAN_GC_REMEDY, Bottleneck.GC, step, step - waited + cost, step - waited, gc_every=every)


def _propose_balanced_lengths(forecast: StepForecast, training: TrainingSetup) -> Proposal | None:
    window, parameters = forecast.window, forecast.estimator.parameters
    uneven = ~np.isclose(window.weights, 1.0).all(axis=1)
    if training.balanced or window.sequence_cost is None or uneven.sum() < strategies.MIN_BROKEN_RANK_STEPS:
        return None
    own, weights = window.compute_seconds[uneven], window.weights[uneven]
    waited = float((own.max(axis=1) - (own / weights).max(axis=1)).mean())
    step = float(window.step_seconds[uneven].max(axis=1).mean())
    if waited <= parameters.min_lasting_gain * step:
        return None
    return Proposal(strategies.BALANCE_LENGTHS_REMEDY, Bottleneck.LENGTHS, step, step - waited, step - waited)


def _propose_shares(forecast: StepForecast, training: TrainingSetup) -> Proposal | None:
    """Return the shares with the shortest expected step: present, equal, or new ones."""
    estimator, window = forecast.estimator, forecast.window
    if not window.has_shares:
        return None
    batch = round(estimator.layout.equal_share * estimator.layout.ranks)
    equal = divide_equally(batch, estimator.layout.ranks, window.granularity)
    current = training.shares or equal
    options = {current, equal}
    if estimator.workers.slow.max() >= estimator.parameters.doubt_probability:
        options.add(forecast.find_shares(current, replace(training.limits, granularity=window.granularity)))
    elif current == equal:
        return None
    seconds = {option: forecast.estimate_sync_step(option) for option in options}
    best = min(seconds, key=seconds.__getitem__)
    if seconds[best] > (1 - estimator.parameters.min_gain) * seconds[current]:
        return None
    return Proposal(
        strategies.REBALANCE_REMEDY,
        Bottleneck.COMPUTE,
        seconds[current],
        seconds[best],
        forecast.estimate_sync_step(equal, 0.0),
        rank=int(estimator.rank_levels.argmax()),
        shares=best,
    )


# ---- a spare ----------------------------------------------------------------------------------------------------


def _consider_replacement(forecast: StepForecast, training: TrainingSetup, account: Account) -> DecisionResult:
    """Charge the expected loss to the worst worker, and replace it once that has reached the price of a spare."""
    estimator, parameters = forecast.estimator, forecast.estimator.parameters
    slow, steps = estimator.workers.slow, max(0.0, float(estimator.position - account.counted_step))
    account = replace(account, counted_step=max(account.counted_step, estimator.position))
    worst = int(estimator.workers.mean_levels.max(axis=1).argmax())
    if slow[worst] < PROBABLE:
        seconds = steps * (estimator.baseline_seconds or 0.0)
        lost = account.lost_seconds * math.exp(-seconds / parameters.loss_decay_seconds)
        account = replace(account, lost_seconds=lost, slow=frozenset(), healthy_step=estimator.position)
        return DecisionResult((), account)
    now, without = _estimate_exchange(forecast, training, account, worst)
    lost_per_step = max(0.0, now - without)
    if worst not in account.slow:  # its first steps were before this was known
        since = (estimator.now - float(estimator.workers.slow_onsets[worst])) / now
        steps = min(max(0.0, since), estimator.position - account.healthy_step + MAX_BACKDATED_STEPS)
    lost = account.lost_seconds.copy()
    lost[worst] += lost_per_step * steps
    is_slow = frozenset(np.flatnonzero(slow >= PROBABLE).tolist())
    account = replace(account, lost_seconds=lost, slow=(account.slow | {worst}) & is_slow)
    price = training.replace_seconds
    if (
        price is None
        or REPLACE_REMEDY not in training.permitted
        or slow[worst] < parameters.action_probability
        or lost_per_step < parameters.min_lasting_gain * now
        or account.lost_seconds[worst] < price
    ):
        return DecisionResult((), account)
    if estimator.now - account.observed_at > parameters.answer_seconds:
        return DecisionResult((), account, wants_steps=True)  # is it still slow?
    rank = int(estimator.rank_levels.argmax())
    return DecisionResult(
        (Proposal(REPLACE_REMEDY, Bottleneck.COMPUTE, now, without, without, rank=rank, worker=worst),), account
    )


def _estimate_exchange(
    forecast: StepForecast, training: TrainingSetup, account: Account, worker: int
) -> tuple[float, float]:
    """Return the expected step as it is, and without the slowness of this worker."""
    if account.local is None:
        return forecast.estimate_sync_step(training.shares), forecast.estimate_without_worker(worker)
    reason, elapsed = account.local.reason, forecast.estimator.now - account.local.began
    now = forecast.forecast_local(reason, elapsed).step_seconds
    return now, forecast.forecast_local(reason, elapsed, healthy_worker=worker).step_seconds


# ---- inexact training -------------------------------------------------------------------------------------------


def _propose_local_mode(forecast: StepForecast) -> Proposal | None:
    """Leave exact training for a slow link or rotating ranks, if that is certain and exact steps are much longer."""
    estimator, parameters = forecast.estimator, forecast.estimator.parameters
    by_link = estimator.transfer.slow[0] >= parameters.action_probability
    slow = estimator.workers.slow
    contested = bool(
        ((slow >= PROBABLE) & (slow < parameters.action_probability)).any()
    )  # one slow rank may explain it
    by_rotation = estimator.rotation.slow[0] >= parameters.action_probability and not contested
    if not (by_link or by_rotation):
        return None
    chain = estimator.transfer if by_link else estimator.rotation
    elapsed = estimator.now - float(chain.slow_onsets[0])
    step = forecast.estimate_rotating_step()
    if not by_link and elapsed < strategies.MIN_BOTTLENECK_STEPS * step:
        return None
    reason = Bottleneck.COMMUNICATION if by_link else Bottleneck.VOLATILE
    local = forecast.forecast_local(reason, elapsed)
    usual = estimator.baseline_seconds or step
    if step < parameters.exact_preference_ratio * max(usual, local.step_seconds):
        return None
    healthy = float(forecast.compute_own_work(None).max(axis=1).mean()) + (estimator.baseline_exposed or 0.0)
    return Proposal(
        strategies.LOCAL_SGD_REMEDY,
        reason,
        step,
        local.step_seconds,
        healthy,
        mode=local.mode,
        sync_seconds=local.sync_seconds,
        sync_every=local.sync_every or None,
    )


def _propose_in_local_mode(
    forecast: StepForecast, training: TrainingSetup, account: Account, local: LocalMode, *, fresh: bool
) -> DecisionResult:
    """Revert to exact training once the reason is over; lengthen the interval while it lasts; or replace a worker."""
    estimator, parameters, window = forecast.estimator, forecast.estimator.parameters, forecast.window
    elapsed = estimator.now - local.since
    by_link = local.reason is Bottleneck.COMMUNICATION
    pause = max(1.5, parameters.doubt_probability * elapsed, training.sync_seconds / 2 if by_link else 0.0)
    wants_steps = estimator.now - account.observed_at >= min(pause, parameters.fault_duration_scale_seconds)
    if not fresh or window.synchronous:
        return DecisionResult((), account, wants_steps)
    result = _consider_replacement(forecast, training, account)
    account = result.account
    if result.proposals:
        return result
    if by_link:
        if window.transfer_seconds is None:
            return replace(result, wants_steps=wants_steps)
        newest = window.transfer_seconds
        local = replace(local, longest_sync=max(local.longest_sync, newest))
        account = replace(account, local=local)
        half, usual = 0.5 * local.growth_seconds, estimator.baseline_exposed or 0.0
        is_over = newest <= local.longest_sync - half or newest < usual + half
    else:
        is_over = bool(estimator.rotation.slow[0] < parameters.doubt_probability)
    # A fault that returns costs the time until it is noticed. To stay costs the price of inexact training.
    away = sum(account.absences)
    return_rate = len(account.absences) / (away + parameters.loss_decay_seconds)
    noticed_seconds = max(1.0, local.since - local.began)
    stays = return_rate * noticed_seconds * (1 - 1 / max(1.0, local.slowdown)) > parameters.inexact_cost_rate
    if is_over and not stays and strategies.SYNC_REMEDY in training.permitted:
        step = forecast.estimate_sync_step(None, 0.0)
        revert = Proposal(strategies.SYNC_REMEDY, local.reason, step, step, step, mode=SyncMode.SYNC)
        return DecisionResult((revert,), account)
    longer = forecast.forecast_local(
        local.reason, estimator.now - local.began, sync_cost=window.transfer_seconds
    ).sync_seconds
    if is_over or training.mode is not SyncMode.ASYNC_EDIT or longer <= 1.2 * training.sync_seconds:
        return DecisionResult((), account, wants_steps)
    step = forecast.forecast_local(local.reason, estimator.now - local.began).step_seconds
    interval = Proposal(
        strategies.LOCAL_SGD_REMEDY, local.reason, step, step, step, mode=training.mode, sync_seconds=longer
    )
    return DecisionResult((interval,), account, wants_steps)
