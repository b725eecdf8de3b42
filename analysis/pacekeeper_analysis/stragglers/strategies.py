"""Training strategies: what slows a job down, and what each other way to train would gain.

    found = diagnose_bottleneck(windows, threshold)           # of a job in mode Sync: its bottleneck and S
    for strategy in propose_strategies(found, threshold=threshold): ...   # best first: each priced, none applied
    plan = strategy.apply_to(plan)
    propose_revert_to_sync(windows, threshold=threshold, bottleneck=…)    # of a job in a Local-SGD mode: back to Sync?
    diagnose_broken_ranks(windows, plan, threshold=3.0)       # of such a job: is a rank better removed?

Everything is pure: windows in, proposals out. `price.choose_remedy` takes `strategy.to_option()` together with the
costly remedies. A `Hysteresis` decides when the mode may change again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..protocol.plan import Plan, SyncMode
from ..protocol.reports import RankWindow
from ..whatif import data_parallel
from . import price, shares
from .length_cost import SequenceCost
from .step_model import (
    KnownRelativeTimes,
    Seconds,
    StepModel,
    balance_lengths,
    compute_fair_parts,
    find_transfer_seconds,
    reconstruct_synchronous_window,
)
from .windows import MAX_STEP_WINDOW_SECONDS, AlignedWindow, align_windows, select_slower_steps

REBALANCE_REMEDY = "Rebalance"
LOCAL_SGD_REMEDY = "LocalSGD"
PLAN_GC_REMEDY = "PlanGC"
BALANCE_LENGTHS_REMEDY = "BalanceLengths"
SYNC_REMEDY = "Sync"

NOT_MANAGED = "the script does not use the library, so its training strategy cannot be changed"

MAX_SYNC_COST_SHARE, MAX_LASTING_SYNC_COST_SHARE = 0.03, 0.01
"""Upper limits of the cost of synchronizations, as a share of the time.

The shortest interval within the limit is chosen. The second limit applies in the long run.
"""
SYNC_INTERVAL_SECONDS_RANGE = (0.5, 30.0)
SYNC_INTERVAL_GROWTH_SHARE = 0.2
"""Share of a bottleneck's duration that may pass between two synchronizations. A long one will not end soon."""
MIN_SYNC_INTERVAL_GROWTH = 1.2
"""Smallest factor by which a change of the plan lengthens the interval."""
SYNC_STEP_CHOICES = (4, 8, 16, 32, 64, 128)
MAX_SECONDS_BETWEEN_SYNCS = 15.0
"""Upper limit of the time of these steps.

Ranks end, suspend and checkpoint only at a synchronization, and a pod has 30 s to end unless its template says more.
"""
MAX_NAMED_VALUES = 16
"""Upper limit of values of a list that a sentence names."""
MIN_STEPS_BETWEEN_SYNCS = 4
"""Smallest number of steps of the slowest rank between two synchronizations."""
MAX_ALIKE_RANKS_RATIO = 1.05
"""Ranks are alike if none takes longer than this multiple of the mean. Then equal numbers of steps suit them."""
MAX_REMAINING_COST_WITH_SHARES = 0.5
"""Shares for a slow rank are preferred to Local-SGD if they leave at most this part of its cost with equal shares."""
MIN_BOTTLENECK_STEPS, MIN_BROKEN_RANK_STEPS = 4, 3
"""Steps that show what a bottleneck costs, and long steps that show that a rank is broken.

With fewer steps, the decision waits for more evidence.
"""
MIN_BROKEN_RANK_SLOWDOWN = 3.0
"""Slowdown over its peers from which on a rank is broken rather than slow."""
MAX_RANKS_NAMED = 8
"""Upper limit of ranks named in a sentence."""
ASSUMED_GC_INTERVAL_STEPS, ASSUMED_GC_PRIOR_STEPS = 50, 50
"""Prior of the interval between two garbage collections of a rank that are worth planning, and its weight, in steps."""
MIN_GC_PAUSE_SHARE = 0.25
"""Share of the longest collection from which on a collection is worth planning."""
MIN_FREE_REMEDY_SLOWDOWN = 1.01
"""Slowdown from which on the bottlenecks of FREE_LASTING_REMEDIES are remedied."""
MAX_SAME_BALANCE_DIFFERENCE = 0.02
"""Two costs balance alike if the ranks' parts of a step differ by less than this."""
MAX_REVERT_STEP_TIME_RATIO = 1.1
"""Limit for a slow rank when reverting to Sync: shares must bring the step time within this multiple of Local-SGD's.

It is below `price.MAX_EXACT_STEP_TIME_RATIO`, so that the job does not switch back at once.
"""


class Bottleneck(StrEnum):
    """Why the steps of a synchronous job take longer than necessary."""

    NONE = "None"
    COMPUTE = "Compute"  # a rank is persistently slow in its own work, or the shares do not fit the ranks
    VOLATILE = "Volatile"  # slow ranks come and go
    COMMUNICATION = "Communication"  # steps exceed the ranks' own work by more than in the job's first steady steps
    GC = "GC"  # different ranks collect garbage in different steps, and all wait for each of them
    LENGTHS = "Lengths"  # cost follows the samples (sequence lengths), which are distributed unevenly


FREE_LASTING_REMEDIES = {Bottleneck.GC: PLAN_GC_REMEDY, Bottleneck.LENGTHS: BALANCE_LENGTHS_REMEDY}
"""Bottlenecks whose remedy costs nothing and stays in force."""


@dataclass(frozen=True)
class Diagnosis:
    """The bottleneck that costs a synchronous job most, from its ranks' windows."""

    bottleneck: Bottleneck
    slowdown: float  # S: expected step time over that without this bottleneck; of NONE: without the largest effect
    culprits: tuple[int, ...]  # ranks that are persistently slower than most
    evidence: tuple[str, ...]  # sentences for people
    step_seconds: float  # expected step time as things are
    exposed_seconds: float  # part of it: communication that no computation hides
    rank_slowdown: tuple[float, ...]  # each rank's cost at equal shares over its peers' median
    effects: Mapping[Bottleneck, float]  # S of every bottleneck, each alone
    window: AlignedWindow = field(repr=False, compare=False)  # the common steps since the bottleneck began
    known_relative_times: Mapping[int, float] = field(
        default_factory=dict
    )  # relative times of all culprits, if known from more steps


@dataclass(frozen=True)
class Strategy:
    """A way to train from now on, and its expected gain.

    `shares`, `sync_every`, `sync_seconds`, `gc_every` and `sequence_cost` are fields of the plan. None keeps the
    plan's value.
    """

    remedy: str  # Rebalance, LocalSGD, PlanGC, BalanceLengths, or Sync (the revert)
    mode: SyncMode
    step_seconds: float  # expected for one step's worth of samples of the whole job
    slowdown_after: float  # over the same reference as Diagnosis.slowdown; may be below 1 (noise is gained, too)
    reason: str
    shares: tuple[int, ...] | None = None
    sync_every: int | None = None
    sync_seconds: float | None = None
    gc_every: int | None = None
    sequence_cost: tuple[float, float, float] | None = None
    refused: str = ""  # why a plan cannot, or should not, adopt it; "": it may
    min_win: float = price.MIN_REMEDY_WIN  # as of `price.Option`

    def to_option(self, refused: str = "") -> price.Option:
        """Return a free live change for `price.choose_remedy`. `refused` is a further reason against it."""
        exact = self.mode is SyncMode.SYNC
        return price.Option(self.remedy, 0.0, self.slowdown_after, self.refused or refused, exact, self.min_win)

    def apply_to(self, plan: Plan) -> Plan:
        """Return the plan's next version, with this strategy."""
        fields = ("shares", "sync_every", "sync_seconds", "gc_every", "sequence_cost")
        changes: dict[str, Any] = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return replace(plan, version=plan.version + 1, sync_mode=self.mode, **changes)


def diagnose_bottleneck(
    windows: Sequence[RankWindow],
    threshold: float,
    known_relative_times: KnownRelativeTimes | None = None,
    suppressed: Collection[Bottleneck] = (),
) -> Diagnosis | None:
    """Diagnose what costs a synchronous job most.

    The result has `Bottleneck.NONE` if no bottleneck has an S of `threshold` or more, and none of FREE_LASTING_REMEDIES
    has one of MIN_FREE_REMEDY_SLOWDOWN. The result is None if the windows are not sufficient: ranks are missing, there
    are fewer than 8 common steps since the shares last changed, or a Local-SGD mode is in force; or the bottleneck
    began in the last few steps. A bottleneck that began within the windows is judged by the steps since then, because
    earlier ones would dilute it. With the earlier ones, it may not even show; then the steps since must take most of
    the time.

    Ranks in `known_relative_times` are slow by more steps than these, and are judged by those. Bottlenecks in
    `suppressed` are usual for the job, and hide no other.
    """
    if any(window.sync_mode not in {"", SyncMode.SYNC} for window in windows):
        return None
    window = align_windows(windows)
    model = None if window is None else StepModel.from_window(window, threshold)
    if model is None or known_relative_times is None:
        return None if model is None else _diagnose_since_start(model, threshold, suppressed)
    relative_times = model.select_relative_times(known_relative_times, threshold)
    adjusted = StepModel.from_window(
        model.build_window_at(relative_times), threshold, known_relative_times.relative_times
    )
    diagnosis = (
        None
        if adjusted is None
        else _diagnose_since_start(adjusted, threshold, suppressed, known_relative_times.relative_times)
    )
    if diagnosis is None or not {*diagnosis.culprits} <= {*relative_times}:
        return diagnosis
    return replace(diagnosis, known_relative_times={rank: relative_times[rank] for rank in diagnosis.culprits})


def _diagnose_since_start(
    model: StepModel, threshold: float, suppressed: Collection[Bottleneck], slow_ranks: Collection[int] = ()
) -> Diagnosis | None:
    """Diagnose as `diagnose_bottleneck` does. `slow_ranks` are ranks known to be slow."""
    diagnosis = _diagnose_step_model(model, threshold, suppressed)
    recent_window = _select_steps_since_start(model, diagnosis, threshold)
    recent_model = None if recent_window is None else StepModel.from_window(recent_window, threshold, slow_ranks)
    if recent_window is None or recent_model is None:
        return diagnosis
    recent_diagnosis = _diagnose_step_model(recent_model, threshold, suppressed)
    if len(recent_window.steps) >= MIN_BROKEN_RANK_STEPS and _is_broken(recent_diagnosis):
        return recent_diagnosis
    if len(recent_window.steps) < MIN_BOTTLENECK_STEPS:
        return None if diagnosis.bottleneck is not Bottleneck.NONE else diagnosis
    if diagnosis.bottleneck is Bottleneck.NONE and not _fill_most_of(model.window, recent_window):
        return diagnosis
    return recent_diagnosis if diagnosis.bottleneck in {recent_diagnosis.bottleneck, Bottleneck.NONE} else diagnosis


def _fill_most_of(window: AlignedWindow, recent_window: AlignedWindow) -> bool:
    """Return whether the recent steps take most of the window's time. A shorter while may be a hiccup."""
    seconds, recent_seconds = (float(part.step_seconds.max(axis=1).sum()) for part in (window, recent_window))
    return recent_seconds > seconds - recent_seconds


def compute_recovery_threshold(threshold: float) -> float:
    """Return the slowdown below which a bottleneck of `threshold` is over."""
    return 1.0 + (threshold - 1.0) / 2


def _select_steps_since_start(model: StepModel, diagnosis: Diagnosis, threshold: float) -> AlignedWindow | None:
    """Return the steps since the bottleneck began within the window.

    None if it is older, or its start is not visible.
    """
    bottleneck = diagnosis.bottleneck
    if bottleneck is Bottleneck.GC:  # without the first collection itself, after which the window begins
        affected = np.append(False, np.any(_find_gc_pauses(exclude_simultaneous_gc(model.gc_seconds)), axis=1)[:-1])
    elif bottleneck is Bottleneck.LENGTHS:  # other steps, longer or shorter, are in between
        affected = model.gc_free.max(axis=1) >= min(threshold, diagnosis.slowdown) * model.length_balanced.max(axis=1)
    else:
        return select_slower_steps(model.window, threshold, ignore_hiccups=bottleneck is not Bottleneck.VOLATILE)
    first = int(np.argmax(affected)) if affected.any() else len(affected) - 1
    return model.window.select_steps(slice(first, None)) if first else None


def _is_broken(diagnosis: Diagnosis) -> bool:
    seconds = float(diagnosis.window.step_seconds.max(axis=1).sum())
    least_slowdown = min((diagnosis.rank_slowdown[rank] for rank in diagnosis.culprits), default=0.0)
    return (
        diagnosis.bottleneck is Bottleneck.COMPUTE
        and seconds >= MAX_STEP_WINDOW_SECONDS
        and least_slowdown >= MIN_BROKEN_RANK_SLOWDOWN
    )


def diagnose_broken_ranks(
    windows: Sequence[RankWindow], plan: Plan, *, threshold: float, global_batch: int | None = None
) -> Diagnosis | None:
    """Find ranks without which a job in a Local-SGD mode would be better off.

    None if too little is known, or if no rank takes `threshold` times as long as its peers.

    Between synchronizations no rank waits for a slow one, but its samples are missing. At a synchronization all wait
    for its current step (in EDiT, for all of its steps). `windows` and `global_batch` are as in
    `propose_revert_to_sync`.
    """
    if (reconstructed := _reconstruct_synchronous_steps(windows, global_batch, threshold)) is None:
        return None
    model, transfer = reconstructed
    if not model.culprits:
        return None

    def seconds(own: Seconds) -> float:
        slowest = float(own.mean(axis=0).max())
        if plan.sync_mode is SyncMode.EDIT:
            return slowest + transfer / plan.sync_every
        step_seconds, sync_cost = _estimate_timed_sync_costs(own, transfer)
        return step_seconds * (1 + sync_cost / max(plan.sync_seconds, slowest))

    seconds_now, seconds_without = (
        seconds(own + model.gc_seconds) for own in (model.equal_share, model.straggler_free)
    )
    slowdown = seconds_now / seconds_without
    comparison = (
        f"a step's worth of samples takes {_format_milliseconds(seconds_now)} in mode {plan.sync_mode}, "
        f"{_format_milliseconds(seconds_without)} with them at that pace"
    )
    return Diagnosis(
        bottleneck=Bottleneck.COMPUTE,
        slowdown=slowdown,
        culprits=model.culprits,
        evidence=(_describe_bottleneck(model, Bottleneck.COMPUTE), comparison),
        step_seconds=seconds_now,
        exposed_seconds=transfer,
        rank_slowdown=model.rank_slowdown,
        effects={Bottleneck.COMPUTE: slowdown},
        window=model.window,
    )


def propose_strategies(
    diagnosis: Diagnosis,
    *,
    threshold: float,
    sequence_cost: tuple[float, float, float] | None = None,
    gc_every: int = 0,
    smallest_share: int = 1,
    largest_share: int | None = None,
) -> tuple[Strategy, ...]:
    """Return the priced strategies that fit the bottleneck: the recommended ones first, then the refused ones.

    Exact synchronous SGD (other shares, planned garbage collection, samples balanced by cost) precedes Local-SGD if it
    leaves a slowdown below `threshold` or is nearly as good. Without a bottleneck the proposal is other shares, if they
    are uneven and no longer fit. If no rank is slow in most steps, shares are equal, because shares fitted to a few
    steps follow chance.

    `sequence_cost` is the plan's cost for balancing samples. None means the script's own, if any. `gc_every` is
    the plan's interval of collections in steps. 0 means none. `smallest_share` and `largest_share` limit the samples
    that a rank can take in a step (memory).
    """
    model = StepModel.from_window(diagnosis.window, threshold, diagnosis.culprits)
    if model is None:
        return ()
    bottleneck, strategies = diagnosis.bottleneck, list[Strategy]()
    reference = diagnosis.step_seconds / diagnosis.slowdown
    if model.has_slow_ranks and (bottleneck in {Bottleneck.COMPUTE, Bottleneck.VOLATILE} or model.is_uneven):
        strategies.append(
            _propose_rebalance(model, reference, smallest_share, largest_share, diagnosis.known_relative_times)
        )
    elif model.is_uneven:
        strategies.append(_propose_equal_shares(model, reference))
    if bottleneck in {Bottleneck.VOLATILE, Bottleneck.COMMUNICATION} or (
        bottleneck is Bottleneck.COMPUTE and model.has_slow_ranks
    ):
        strategies += _propose_local_sgd(
            model, reference, model.exposed_seconds, has_slow_link=bottleneck is Bottleneck.COMMUNICATION
        )
    if bottleneck is Bottleneck.GC:
        strategies.append(_propose_planned_gc(model, reference, gc_every))
    if bottleneck is Bottleneck.LENGTHS:
        current_cost = None if sequence_cost is None else SequenceCost(*sequence_cost)
        strategies.append(_propose_balanced_lengths(model, reference, current_cost))
    if not model.has_sample_counts:
        strategies = [replace(strategy, refused=NOT_MANAGED) for strategy in strategies]
    return _sort_strategies(strategies, diagnosis.slowdown, threshold)


def estimate_remaining_slowdown(diagnosis: Diagnosis, slow_ranks: Collection[int], threshold: float) -> float:
    """Return the remaining slowdown if, of the culprits, only the ranks `slow_ranks` stay slow."""
    model = StepModel.from_window(diagnosis.window, threshold, diagnosis.culprits)
    if model is None:
        return 1.0
    stays_slow = np.isin(np.arange(model.equal_share.shape[1]), list(slow_ranks))
    saved_seconds = model.compute_longest_mean(model.length_balanced) - model.compute_longest_mean(
        np.where(stays_slow, model.equal_share, model.straggler_free)
    )
    return max(1.0, diagnosis.slowdown * (1.0 - saved_seconds / diagnosis.step_seconds))


def explain_exact_preference(diagnosis: Diagnosis, strategies: Sequence[Strategy]) -> str:
    """Explain why a slow rank needs no Local-SGD: exact training mends, or has mended, most of it. "" if it does not.

    `strategies` are the results of `propose_strategies`, with those refused that the job's policy forbids.
    """
    if diagnosis.bottleneck is not Bottleneck.COMPUTE or min(diagnosis.window.shares) < 1:
        return ""
    exact_slowdowns = (
        strategy.slowdown_after for strategy in strategies if strategy.mode is SyncMode.SYNC and not strategy.refused
    )
    remaining = min(exact_slowdowns, default=diagnosis.slowdown)  # what has been mended stays mended
    unshared_slowdown = max(diagnosis.slowdown, *diagnosis.rank_slowdown)
    return (
        "shares recover most of it, and training stays exact"
        if remaining - 1 <= MAX_REMAINING_COST_WITH_SHARES * (unshared_slowdown - 1)
        else ""
    )


def propose_revert_to_sync(
    windows: Sequence[RankWindow],
    *,
    threshold: float,
    bottleneck: Bottleneck = Bottleneck.NONE,
    global_batch: int | None = None,
    smallest_share: int = 1,
    largest_share: int | None = None,
    usual_slowdowns: Mapping[Bottleneck, float] | None = None,
) -> Strategy | None:
    """Propose to revert to synchronous SGD if the bottleneck that led to a Local-SGD mode is over. None means stay.

    `windows` are those of all ranks in a Local-SGD mode. They need no common steps: synchronous steps are composed from
    the steps that each rank did alone, and judged as such. The S of `bottleneck`, which led here, must fall below half
    of the threshold's excess (1.05 for 1.1). Any other S must fall below the threshold. With NONE, each must fall below
    half. A rank that stays slow does not matter if shares mend it nearly as well. `global_batch` is the number of
    samples of a synchronous step; None means the sum of the ranks' local batches. `usual_slowdowns` are values of S
    that do not count below them, because the job or its shared machines have always had them.

    New shares are proposed only for ranks that are slow in most of their steps.
    """
    if (reconstructed := _reconstruct_synchronous_steps(windows, global_batch, threshold)) is None:
        return None
    model, transfer = reconstructed
    new_shares = None
    if model.has_slow_ranks:
        rebalance = _propose_rebalance(model, 1.0, smallest_share, largest_share)
        new_shares = None if rebalance.refused else rebalance.shares
    if new_shares is not None:
        model = model.with_shares(new_shares)
    diagnosis = _diagnose_step_model(model, threshold)
    recovery_threshold = compute_recovery_threshold(threshold)
    limits = {
        kind: recovery_threshold if bottleneck in {kind, Bottleneck.NONE} else threshold for kind in diagnosis.effects
    }
    limits |= {kind: max(limits[kind], usual_slowdown) for kind, usual_slowdown in (usual_slowdowns or {}).items()}
    (by_clock,) = _propose_local_sgd(model, 1.0, transfer, has_slow_link=False)
    recovered_seconds = diagnosis.step_seconds / diagnosis.effects[Bottleneck.COMPUTE]
    if diagnosis.step_seconds <= MAX_REVERT_STEP_TIME_RATIO * max(by_clock.step_seconds, recovered_seconds):
        limits[Bottleneck.COMPUTE] = np.inf
    if any(effect >= limits[kind] for kind, effect in diagnosis.effects.items()):
        return None
    largest = max(diagnosis.effects.values())
    return Strategy(
        SYNC_REMEDY,
        SyncMode.SYNC,
        step_seconds=diagnosis.step_seconds,
        slowdown_after=largest,
        reason=f"a synchronous step would take {_format_milliseconds(diagnosis.step_seconds)} now, {largest:.2f} × its "
        f"time without bottlenecks; under Local-SGD it is {_format_milliseconds(by_clock.step_seconds)}",
        shares=new_shares,
    )


def lengthen_sync_interval(
    windows: Sequence[RankWindow],
    interval: float,
    lasted_seconds: float,
    *,
    threshold: float,
    global_batch: int | None = None,
) -> float:
    """Return the new interval of synchronizations in mode AsyncEDiT, in seconds.

    The interval grows with the duration of the bottleneck, until synchronizations cost at most
    MAX_LASTING_SYNC_COST_SHARE. `windows` and `global_batch` are as in `propose_revert_to_sync`. `interval` is the
    plan's interval in seconds. `lasted_seconds` is how long the bottleneck has lasted.
    """
    if (reconstructed := _reconstruct_synchronous_steps(windows, global_batch, threshold)) is None:
        return interval
    model, transfer = reconstructed
    own = model.equal_share + model.gc_seconds
    _, cost = _estimate_timed_sync_costs(own, transfer)
    seconds = min(
        _clamp_sync_interval(own, cost / MAX_LASTING_SYNC_COST_SHARE),
        round(SYNC_INTERVAL_GROWTH_SHARE * lasted_seconds, 2),
    )
    return seconds if seconds >= min(MIN_SYNC_INTERVAL_GROWTH * interval, SYNC_INTERVAL_SECONDS_RANGE[1]) else interval


@dataclass(frozen=True)
class Hysteresis:
    """Decides when the mode may change again. Each change soon after another doubles the wait, up to `longest`.

    It holds plain numbers, to be stored with the job. Times are seconds of any one clock.
    """

    first: float = 60.0
    longest: float = 3600.0
    hold_seconds: float = 0.0  # after the last change
    changed_at: float | None = None  # None: not yet

    def allows(self, now: float) -> bool:
        return self.changed_at is None or now >= self.changed_at + self.hold_seconds

    def with_change(self, now: float) -> Hysteresis:
        """Return the state after a change of mode at `now`.

        A change long after the previous one starts from `first` again.
        """
        is_flap = self.changed_at is not None and now < self.changed_at + 4 * self.hold_seconds
        hold = min(2 * self.hold_seconds, self.longest) if is_flap else self.first
        return replace(self, hold_seconds=hold, changed_at=now)


def _reconstruct_synchronous_steps(
    windows: Sequence[RankWindow], global_batch: int | None, threshold: float
) -> tuple[StepModel, float] | None:
    """Return the model of synchronous steps of ranks in a Local-SGD mode, and the seconds of a transfer.

    None if too little is known.
    """
    window = reconstruct_synchronous_window(windows, global_batch)
    model = None if window is None else StepModel.from_window(window, threshold)
    transfer = find_transfer_seconds(windows)
    return None if model is None or transfer is None else (model, transfer)


def _diagnose_step_model(model: StepModel, threshold: float, suppressed: Collection[Bottleneck] = ()) -> Diagnosis:
    seconds_now = model.step_seconds
    staggered_gc = exclude_simultaneous_gc(model.gc_seconds)
    _, planned_gc_seconds = plan_gc_interval(staggered_gc)
    needs_rebalance = model.has_slow_ranks or model.is_uneven
    lost_seconds = {
        Bottleneck.GC: _estimate_gc_wait_seconds(staggered_gc, model) - planned_gc_seconds,
        Bottleneck.LENGTHS: model.compute_longest_mean(model.gc_free)
        - model.compute_longest_mean(model.length_balanced),
        Bottleneck.COMPUTE: model.compute_longest_mean(model.length_balanced)
        - model.compute_longest_mean(model.straggler_free)
        if needs_rebalance
        else 0.0,
        Bottleneck.VOLATILE: model.compute_longest_mean(model.straggler_free) - model.steady_seconds,
        Bottleneck.COMMUNICATION: _estimate_communication_growth(model),
    }
    effects = {
        bottleneck: seconds_now / (seconds_now - min(max(0.0, seconds), 0.99 * seconds_now))
        for bottleneck, seconds in lost_seconds.items()
    }
    worst = max((kind for kind in effects if kind not in suppressed), key=lambda kind: effects[kind])
    bottleneck = worst if effects[worst] >= threshold else Bottleneck.NONE
    lasting = max(FREE_LASTING_REMEDIES, key=lambda kind: effects[kind])
    if bottleneck is Bottleneck.NONE and effects[lasting] >= max(MIN_FREE_REMEDY_SLOWDOWN, effects[Bottleneck.COMPUTE]):
        bottleneck = worst = lasting
    return Diagnosis(
        bottleneck=bottleneck,
        slowdown=effects[worst],
        culprits=model.culprits,
        evidence=_build_evidence(model, bottleneck, effects),
        step_seconds=seconds_now,
        exposed_seconds=model.exposed_seconds,
        rank_slowdown=model.rank_slowdown,
        effects=effects,
        window=model.window,
    )


def _estimate_communication_growth(model: StepModel) -> float:
    """Return by how much exposed communication has grown since the job's first steady steps.

    If only the total time of those steps is known, the result is 0 if the own work alone exceeds it, because the own
    work may have grown. Part of a typical rank's waits in those steps was for others, by chance. This part may have
    grown, too, so it is subtracted only if the exposed communication exceeds the whole.
    """
    baseline_seconds, baseline_exposed = model.window.baseline_seconds, model.window.baseline_exposed
    if baseline_seconds is None:
        return 0.0
    if baseline_exposed is None:
        baseline_exposed = baseline_seconds - model.steady_seconds
        if baseline_exposed <= 0:
            return 0.0
    elif model.exposed_seconds > baseline_exposed:
        baseline_exposed = max(0.0, baseline_exposed - model.waits_by_chance)
    return min(model.exposed_seconds - baseline_exposed, model.step_seconds - baseline_seconds)


def _build_evidence(model: StepModel, bottleneck: Bottleneck, effects: Mapping[Bottleneck, float]) -> tuple[str, ...]:
    ranked = ", ".join(f"{kind} {effects[kind]:.2f}" for kind in sorted(effects, key=lambda kind: -effects[kind]))
    return (
        _describe_bottleneck(model, bottleneck),
        f"a step takes {_format_milliseconds(model.step_seconds)} over {len(model.own)} steps; S of each bottleneck "
        f"alone: {ranked}",
        *(_describe_whatif(model) if bottleneck is Bottleneck.COMPUTE and model.culprits else ()),
    )


def _describe_whatif(model: StepModel) -> tuple[str, ...]:
    """Describe S_w of the slowest ranks, and the gain of replacing the culprits (arXiv 2505.05713).

    The result is () if no work could be distributed among the ranks.
    """
    whatif = data_parallel.analyze_compute_seconds(model.own, model.exposed_seconds)
    if whatif.decomposition is None:
        return ()
    by_rank = whatif.decomposition.slowdown_by_replica
    slowest = sorted(range(len(by_rank)), key=lambda rank: -by_rank[rank])[:MAX_RANKS_NAMED]
    listed = ", ".join(f"rank {rank} {by_rank[rank]:.2f}" for rank in slowest)
    gain = whatif.compute_gain(data_parallel.build_replacement_scenario(model.culprits))
    return (
        f"simulated without stragglers: S {whatif.slowdown:.2f}; with every other rank ideal, S_w: {listed}; "
        f"the slow ones at their peers' speed: {gain:.2f} × as fast",
    )


def _describe_bottleneck(model: StepModel, bottleneck: Bottleneck) -> str:
    match bottleneck:
        case Bottleneck.COMPUTE if model.culprits:
            slow_ranks = [f"rank {rank} {model.rank_slowdown[rank]:.2f} ×" for rank in model.culprits]
            more = f" and {len(slow_ranks) - MAX_RANKS_NAMED} more" if len(slow_ranks) > MAX_RANKS_NAMED else ""
            named = ", ".join(slow_ranks[:MAX_RANKS_NAMED])
            return f"slow in their own work in most steps, at equal shares over their peers: {named}{more}"
        case Bottleneck.COMPUTE if model.ranks_differ:
            ratio = max(model.rank_slowdown) / min(model.rank_slowdown)
            return f"the ranks' own work differs by {ratio:.2f} × at equal shares"
        case Bottleneck.COMPUTE:
            return "no rank is slow any longer, and the shares are uneven"
        case Bottleneck.VOLATILE:
            return (
                f"the last rank of a step takes "
                f"{_format_milliseconds(model.compute_longest_mean(model.straggler_free))}, "
                "and no rank on average more than "
                f"{_format_milliseconds(model.steady_seconds)}: slow ranks come and go"
            )
        case Bottleneck.COMMUNICATION:
            return (
                f"{_format_milliseconds(model.exposed_seconds)} of a step are communication that no computation hides; "
                "the job's first steady "
                f"steps took {_format_milliseconds(model.window.baseline_seconds or 0.0)} altogether"
            )
        case Bottleneck.GC:
            wait_seconds = _estimate_gc_wait_seconds(exclude_simultaneous_gc(model.gc_seconds), model)
            return (
                f"garbage collection takes {_format_milliseconds(float(model.gc_seconds.mean()))} a step on each "
                "rank, and all wait for "
                f"{_format_milliseconds(wait_seconds)}: ranks collect in different steps"
            )
        case Bottleneck.LENGTHS:
            return (
                f"own work follows the samples' cost: with an even distribution, the last rank of a step would take "
                f"{_format_milliseconds(model.compute_longest_mean(model.length_balanced))} instead of "
                f"{_format_milliseconds(model.compute_longest_mean(model.gc_free))}"
            )
        case Bottleneck.NONE:
            return "no bottleneck costs enough to act on"


def _propose_rebalance(
    model: StepModel,
    reference: float,
    smallest_share: int,
    largest_share: int | None,
    known_relative_times: Mapping[int, float] | None = None,
) -> Strategy:
    seconds_now = model.step_seconds
    strategy = Strategy(
        REBALANCE_REMEDY, SyncMode.SYNC, seconds_now, seconds_now / reference, "batch shares that fit the ranks"
    )
    if not model.has_sample_counts:
        return replace(strategy, refused=NOT_MANAGED)
    try:
        balance = shares.rebalance_shares(
            balance_lengths(model.window, model.window.samples),
            model.window.samples,
            costs=model.window.costs,
            limits=shares.ShareLimits(smallest_share, largest_share, model.window.share_granularity),
            known_relative_times=known_relative_times,
        )
    except InputError as error:
        return replace(strategy, refused=str(error))
    seconds_after = seconds_now - (balance.seconds_now - balance.seconds_after)
    return Strategy(
        REBALANCE_REMEDY,
        SyncMode.SYNC,
        seconds_after,
        seconds_after / reference,
        f"shares {_format_values(model.shares)} → {_format_values(balance.shares)}: steps of "
        f"{_format_milliseconds(seconds_after)} instead of {_format_milliseconds(seconds_now)}",
        shares=balance.shares,
        refused="" if balance.is_worthwhile else f"other shares would win only {balance.win:.1%}",
        min_win=balance.min_win,
    )


def _propose_equal_shares(model: StepModel, reference: float) -> Strategy:
    """Propose equal shares for ranks none of which is slow in most steps."""
    seconds_after = model.step_seconds
    strategy = Strategy(REBALANCE_REMEDY, SyncMode.SYNC, seconds_after, seconds_after / reference, "equal shares")
    if not model.has_sample_counts:
        return replace(strategy, refused=NOT_MANAGED)
    equal_shares = shares.divide_equally(sum(model.shares), len(model.shares), model.window.share_granularity)
    rebalanced = model.with_shares(equal_shares)
    seconds_after, savings = rebalanced.step_seconds, 1.0 - rebalanced.own.max(axis=1) / model.own.max(axis=1)
    is_sure = min(savings[0::2].mean(), savings[1::2].mean()) >= shares.MIN_HALF_WINDOW_WIN
    return replace(
        strategy,
        step_seconds=seconds_after,
        slowdown_after=seconds_after / reference,
        reason=f"shares {_format_values(model.shares)} → {_format_values(equal_shares)}: no rank is slow in most steps",
        shares=equal_shares,
        refused="" if is_sure else "other shares shorten steps only by chance, if at all",
    )


def _propose_local_sgd(model: StepModel, reference: float, transfer: float, *, has_slow_link: bool) -> list[Strategy]:
    """Propose Local-SGD by the clock (AsyncEDiT) and, if applicable, by the number of steps (EDiT).

    EDiT is proposed if `has_slow_link` is set, so the reason is a slow link, and the ranks are alike.
    """
    own = model.equal_share + model.gc_seconds
    rank_seconds = own.mean(axis=0)
    equal_shares = None
    if model.is_uneven and model.has_sample_counts:
        equal_shares = shares.divide_equally(sum(model.shares), len(rank_seconds), model.window.share_granularity)
    step_seconds, sync_cost = _estimate_timed_sync_costs(own, transfer)
    seconds = _clamp_sync_interval(own, sync_cost / MAX_SYNC_COST_SHARE)
    seconds_after = step_seconds * (1 + sync_cost / seconds)
    by_clock = Strategy(
        LOCAL_SGD_REMEDY,
        SyncMode.ASYNC_EDIT,
        seconds_after,
        seconds_after / reference,
        f"AsyncEDiT, synchronizing every {seconds:g} s: no rank waits for a slower one in between",
        shares=equal_shares,
        sync_seconds=seconds,
    )
    allowed = [steps for steps in SYNC_STEP_CHOICES if steps * float(rank_seconds.max()) <= MAX_SECONDS_BETWEEN_SYNCS]
    if not has_slow_link or not allowed or rank_seconds.max() > MAX_ALIKE_RANKS_RATIO * rank_seconds.mean():
        return [by_clock]
    sync_every = next(
        (steps for steps in allowed if transfer <= MAX_SYNC_COST_SHARE * steps * rank_seconds.mean()), allowed[-1]
    )
    # A window may be shorter than an interval.
    rows = np.random.default_rng(0).integers(0, len(own), size=4 * sync_every)
    seconds_after = data_parallel.estimate_local_sgd_step_seconds(
        data_parallel.analyze_compute_seconds(own[rows]), sync_every, transfer
    )
    lasting_seconds = step_seconds * (
        1 + sync_cost / _clamp_sync_interval(own, sync_cost / MAX_LASTING_SYNC_COST_SHARE)
    )  # by the clock, once the interval is as long
    by_clock_suffices = (
        price.outweighs_exact(model.step_seconds / reference, by_clock.slowdown_after)
        and seconds_after > lasting_seconds
    )
    by_steps = Strategy(
        LOCAL_SGD_REMEDY,
        SyncMode.EDIT,
        seconds_after,
        seconds_after / reference,
        f"EDiT, synchronizing every {sync_every} steps: the ranks are alike",
        shares=equal_shares,
        sync_every=sync_every,
        refused="AsyncEDiT will be as fast, and stays fast if a rank becomes slow" if by_clock_suffices else "",
    )
    return [by_clock, by_steps]


def _estimate_timed_sync_costs(own: Seconds, transfer: float) -> tuple[float, float]:
    """Return the seconds of a step between two synchronizations by the clock, and the cost of each synchronization.

    The step is one step's worth of samples of ranks with this own work. The cost is the transfer plus the wait for the
    last rank's current step.
    """
    step_seconds = data_parallel.estimate_local_sgd_step_seconds(
        data_parallel.analyze_compute_seconds(own), 1, 0.0, by_clock=True
    )
    return step_seconds, transfer + data_parallel.estimate_sync_wait_seconds(own.mean(axis=0))


def _clamp_sync_interval(own: Seconds, wanted: float) -> float:
    """Return the wanted interval of synchronizations by the clock in seconds, within limits."""
    shortest, longest = SYNC_INTERVAL_SECONDS_RANGE
    return round(min(longest, max(shortest, wanted, MIN_STEPS_BETWEEN_SYNCS * float(own.mean(axis=0).max()))), 2)


def _propose_planned_gc(model: StepModel, reference: float, planned_interval: int) -> Strategy:
    """Propose planned garbage collection.

    Under such a plan only the script itself still collects, at any interval of the plan.
    """
    staggered_gc = exclude_simultaneous_gc(model.gc_seconds)
    interval, cost = plan_gc_interval(staggered_gc)
    simultaneous_seconds = model.compute_longest_mean(model.gc_seconds - staggered_gc)
    seconds_after = model.compute_longest_mean(model.gc_free) + cost + simultaneous_seconds + model.exposed_seconds
    return Strategy(
        PLAN_GC_REMEDY,
        SyncMode.SYNC,
        seconds_after,
        seconds_after / reference,
        f"garbage collection every {interval} steps, on all ranks in the same step",
        gc_every=interval,
        min_win=price.MIN_LASTING_WIN,
        refused="garbage collection is planned already, and the script collects in addition"
        if planned_interval
        else "",
    )


def plan_gc_interval(gc_seconds: Seconds) -> tuple[int, float]:
    """Return the interval of planned collections in steps, and their cost per step.

    All ranks collect in the same step, so the longest pause counts once. `gc_seconds` has the shape (steps, ranks). The
    interval combines these steps with a prior of ASSUMED_GC_INTERVAL_STEPS, weighted as ASSUMED_GC_PRIOR_STEPS steps: a
    window is examined because of its pauses, and a short one has many by chance.
    """
    if gc_seconds.max() <= 0:
        return 1, 0.0
    pauses = _find_gc_pauses(gc_seconds)
    rate = (float(pauses.sum()) + ASSUMED_GC_PRIOR_STEPS / ASSUMED_GC_INTERVAL_STEPS) / (
        gc_seconds.size + ASSUMED_GC_PRIOR_STEPS
    )
    durations = np.where(pauses, gc_seconds, 0.0).sum(axis=0) / np.maximum(pauses.sum(axis=0), 1)
    return max(1, round(1.0 / rate)), rate * float(durations.max()) + float(gc_seconds[~pauses].sum()) / gc_seconds.size


def exclude_simultaneous_gc(gc_seconds: Seconds) -> Seconds:
    """Remove collections that all ranks do in the same step: no rank waits for those."""
    is_simultaneous = ((gc_seconds >= MIN_GC_PAUSE_SHARE * gc_seconds.max(axis=0)) & (gc_seconds > 0)).all(
        axis=1, keepdims=True
    )
    return np.where(is_simultaneous, 0.0, gc_seconds)


def _estimate_gc_wait_seconds(gc_seconds: Seconds, model: StepModel) -> float:
    """Return the seconds by which these collections lengthen a step."""
    return model.compute_longest_mean(model.own) - model.compute_longest_mean(model.own - gc_seconds)


def _find_gc_pauses(gc_seconds: Seconds) -> npt.NDArray[np.bool_]:
    return np.asarray((gc_seconds >= MIN_GC_PAUSE_SHARE * gc_seconds.max()) & (gc_seconds > 0))


def _propose_balanced_lengths(model: StepModel, reference: float, current_cost: SequenceCost | None) -> Strategy:
    """Propose to balance samples by the cost that fits these steps.

    Another cost leaves as much imbalance as the present one leaves of what it balances, because single sequences may
    outweigh the others. Without a present cost, the gain is an upper bound.
    """
    cost, balanced, refused = model.window.sequence_cost, model.length_balanced, ""
    assert cost is not None
    if model.window.squares is None:
        refused = "the script's loader does not know how long samples are: give its dataloader their lengths"
    elif current_cost is not None:
        unevenness = _compute_unevenness(model, current_cost)
        balanced = balanced * unevenness
        if np.abs(_compute_unevenness(model, cost) - unevenness).max(axis=1).mean() <= MAX_SAME_BALANCE_DIFFERENCE:
            refused = "samples are balanced by this cost already, but single samples outweigh the others"
    seconds_after = (
        model.compute_longest_mean(balanced)
        + model.compute_longest_mean(model.own)
        - model.compute_longest_mean(model.gc_free)
        + model.exposed_seconds
    )
    return Strategy(
        BALANCE_LENGTHS_REMEDY,
        SyncMode.SYNC,
        seconds_after,
        seconds_after / reference,
        "samples distributed for equal costs of all ranks: one costs {:.3g} s + {:.3g} s × its length + {:.3g} s × its "
        "length²".format(*cost.terms),
        sequence_cost=cost.terms,
        refused=refused,
        min_win=price.MIN_LASTING_WIN,
    )


def _compute_unevenness(model: StepModel, cost: SequenceCost) -> Seconds:
    """Return the imbalance of the ranks' parts of each step under this sequence cost.

    1 means proportional to the share.
    """
    window = model.window
    assert window.lengths is not None
    assert window.squares is not None
    weight = cost.compute_seconds_from_sums(window.samples, window.lengths, window.squares)
    return np.asarray(weight / compute_fair_parts(weight, window.samples))


def _sort_strategies(strategies: Sequence[Strategy], slowdown: float, threshold: float) -> tuple[Strategy, ...]:
    """Sort strategies: the preferred one first, then alternatives, then those refused or not worth a change."""
    choice = price.choose_remedy(
        [strategy.to_option() for strategy in strategies], slowdown, 0.0, sufficient_slowdown=threshold
    )
    entries = [
        (
            option_price is choice.chosen,
            strategy if option_price.due else replace(strategy, refused=strategy.refused or option_price.reason),
        )
        for strategy, option_price in zip(strategies, choice.prices, strict=True)
    ]
    entries.sort(key=lambda entry: (not entry[0], bool(entry[1].refused), entry[1].step_seconds))
    return tuple(strategy for _, strategy in entries)


def _format_values(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values[:MAX_NAMED_VALUES]))}{', …' if len(values) > MAX_NAMED_VALUES else ''}]"


def _format_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
