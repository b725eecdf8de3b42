"""Training that adapts: what holds a job back, and which ways to train would win what.

    found = diagnose(windows, threshold)                 # of a job in mode Sync: its trouble and S
    for way in ways(found, threshold=threshold): ...     # best first: each priced, none applied
    plan = way.apply_to(plan)
    way_back(windows, threshold=threshold, trouble=…)    # of a job in a Local-SGD mode: back to Sync?
    broken(windows, plan, threshold=3.0)                 # of such a job: a rank that it is better without?

Everything is pure: windows in, proposals out. `price.choose` takes `way.option()` beside the dearer remedies, and a
`Hysteresis` says when the mode may change again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from . import price, shares
from .diagnose.windows import MAX_STEP_WINDOW_SECONDS, AlignedWindow, align_windows, select_slower_steps
from .diagnose.work import KnownRelativeTimes, Seconds, StepModel, reconstruct_synchronous_window, compute_fair_parts, balance_lengths, find_transfer_seconds
from .errors import InputError
from .lengths import SequenceCost
from .plan import Plan, SyncMode
from .reports import RankWindow
from .whatif import data_parallel

REBALANCE_REMEDY = "Rebalance"
LOCAL_SGD_REMEDY = "LocalSGD"
PLAN_GC_REMEDY = "PlanGarbage"
BALANCE_LENGTHS_REMEDY = "BalanceLengths"
SYNC_REMEDY = "Sync"

NOT_MANAGED = "the script does not use the library, so the way it trains cannot be changed"

MAX_SYNC_COST_SHARE, MAX_LASTING_SYNC_COST_SHARE = 0.03, 0.01
"""What synchronisations may cost: the shortest interval is chosen that keeps them within this part of the time; the
second one in the long run."""
SYNC_INTERVAL_SECONDS_RANGE = (0.5, 30.0)
LINK_CHECK_SYNC_SECONDS, MAX_LINK_CHECK_SYNC_COST_SHARE = 10.0, 0.1
"""So often there is a synchronisation all the same for a slow link, as long as they stay within this part of the time:
each shows whether it is well again."""
SYNC_INTERVAL_GROWTH_SHARE = 0.2
"""Of the time that a trouble has lasted: as long may pass between two synchronisations. What has gone on for long will
not be over soon."""
MIN_SYNC_INTERVAL_GROWTH = 1.2
"""Times as rare they get by a change of the plan, at least."""
SYNC_STEP_CHOICES = (4, 8, 16, 32, 64, 128)
MAX_SECONDS_BETWEEN_SYNCS = 15.0
"""Seconds that so many steps may take: ranks end, suspend and checkpoint at a synchronisation only, and a pod has 30 s
to end in unless its template says more."""
MIN_STEPS_BETWEEN_SYNCS = 4
"""Steps that the slowest rank does between two synchronisations at least."""
MAX_ALIKE_RANKS_RATIO = 1.05
"""Ranks none of which takes longer than this many times the mean are alike: equal numbers of steps suit them."""
MAX_REMAINING_COST_WITH_SHARES = 0.5
"""Shares for a slow rank are preferred to Local-SGD where they leave no more than this part of what it costs with equal
ones."""
MIN_BOTTLENECK_STEPS, MIN_BROKEN_RANK_STEPS = 4, 3
"""So many steps of a trouble tell what it costs, and so many long ones that a rank is broken; of fewer, the next answer
will."""
MIN_BROKEN_RANK_SLOWDOWN = 3.0
"""A rank so many times slower than its peers is broken rather than slow."""
MAX_RANKS_NAMED = 8
"""Ranks in a sentence at most."""
ASSUMED_GC_INTERVAL_STEPS, ASSUMED_GC_PRIOR_STEPS = 50, 50
"""Steps of a rank between two garbage collections that are worth planning, before any is seen, and of how many steps
that is taken to be known."""
MIN_GC_PAUSE_SHARE = 0.25
"""Of the longest collection, at least, is one that is worth planning."""
MIN_FREE_REMEDY_SLOWDOWN = 1.01
"""From this slowdown on what is FREE_LASTING_REMEDIES is dealt with."""
MAX_SAME_BALANCE_DIFFERENCE = 0.02
"""Costs by which the ranks' parts of a step differ by less balance alike."""
MAX_REVERT_STEP_TIME_RATIO = 1.1
"""A slow rank does not bar the way back where shares mend it to within this many times Local-SGD's steps: less than
`price.NEARLY`, so that it does not lead away again at once."""


class Bottleneck(StrEnum):
    """Why the steps of a synchronous job take longer than they need."""

    NONE = "None"
    COMPUTE = "Compute"  # some rank is persistently slow in its own work, or the shares do not fit the ranks
    VOLATILE = "Volatile"  # slow ranks come and go
    COMMUNICATION = "Communication"  # steps outlast the ranks' own work by more than in the job's first steady steps
    GARBAGE = "Garbage"  # garbage collections of different ranks fall into different steps, and all wait for each
    LENGTHS = "Lengths"  # cost follows the samples (sequence lengths), which are dealt unevenly


FREE_LASTING_REMEDIES = {Bottleneck.GARBAGE: PLAN_GC_REMEDY, Bottleneck.LENGTHS: BALANCE_LENGTHS_REMEDY}
"""Troubles, and what is done about them for nothing, and stays."""


@dataclass(frozen=True)
class Diagnosis:
    """The trouble that costs a synchronous job most, judged from its ranks' windows."""

    trouble: Bottleneck
    slowdown: float  # S: expected step time over that without this trouble; of NONE: without the largest effect
    culprits: tuple[int, ...]  # ranks that are persistently slower than most
    evidence: tuple[str, ...]  # sentences for people
    step_seconds: float  # expected of a step as things are
    exposed_seconds: float  # of them: communication that no computation hides
    rank_slowdown: tuple[float, ...]  # each rank's cost at equal shares over its peers' median
    effects: Mapping[Bottleneck, float]  # S of every trouble, each by itself
    window: AlignedWindow = field(repr=False, compare=False)  # the common steps, since the trouble began
    known: Mapping[int, float] = field(default_factory=dict)  # all culprits' paces, if more steps than these tell them


@dataclass(frozen=True)
class Strategy:
    """A way to train from now on, and what it is expected to win.

    `shares`, `sync_every`, `sync_seconds`, `garbage_every` and `sequence_cost` are the plan's fields; None: as the plan
    has it.
    """

    remedy: str  # Rebalance, LocalSGD, PlanGarbage, BalanceLengths, or Sync (the way back)
    mode: SyncMode
    step_seconds: float  # expected for one step's worth of samples of the whole job
    slowdown_after: float  # over the same reference as Diagnosis.slowdown; may be below 1 (noise is won, too)
    reason: str
    shares: tuple[int, ...] | None = None
    sync_every: int | None = None
    sync_seconds: float | None = None
    garbage_every: int | None = None
    sequence_cost: tuple[float, float, float] | None = None
    refused: str = ""  # why a plan cannot, or should not, take it; "": it may
    least_win: float = price.MIN_REMEDY_WIN  # as of `price.Option`

    def to_option(self, refused: str = "") -> price.Option:
        """For `price.choose`: a free live change. refused: a further reason why it may not be taken."""
        exact = self.mode is SyncMode.SYNC
        return price.Option(self.remedy, 0.0, self.slowdown_after, self.refused or refused, exact, self.least_win)

    def apply_to(self, plan: Plan) -> Plan:
        """The plan's next version, with this way to train."""
        fields = ("shares", "sync_every", "sync_seconds", "garbage_every", "sequence_cost")
        told: dict[str, Any] = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return replace(plan, version=plan.version + 1, sync_mode=self.mode, **told)


def diagnose_bottleneck(
    windows: Sequence[RankWindow],
    threshold: float,
    known_relative_times: KnownRelativeTimes | None = None,
    suppressed: Collection[Bottleneck] = (),
) -> Diagnosis | None:
    """What costs the synchronous job most.

    `Trouble.NONE` where no trouble has an S of `threshold` or more, and none that is FREE_LASTING_REMEDIES of LITTLE. None
    where the windows cannot tell: ranks are missing, fewer than 8 common steps since the shares last changed, or a
    Local-SGD mode is in force; or it has begun in the last few steps. One that has begun within the windows is judged
    by the steps since: those before would only make it look less.

    known: ranks that are slow by more steps than these; they are judged by those. usual: troubles that are the job's
    own way, and hide no other.
    """
    if any(window.sync_mode not in {"", SyncMode.SYNC} for window in windows):
        return None
    window = align_windows(windows)
    work = None if window is None else StepModel.from_window(window, threshold)
    if work is None or known_relative_times is None:
        return None if work is None else _diagnose_since_start(work, threshold, suppressed)
    paces = work.select_relative_times(known_relative_times, threshold)
    paced = StepModel.from_window(work.build_window_at(paces), threshold, known_relative_times.of_rank)
    found = None if paced is None else _diagnose_since_start(paced, threshold, suppressed, known_relative_times.of_rank)
    if found is None or not {*found.culprits} <= {*paces}:
        return found
    return replace(found, known={rank: paces[rank] for rank in found.culprits})


def _diagnose_since_start(
    work: StepModel, threshold: float, usual: Collection[Bottleneck], slow: Collection[int] = ()
) -> Diagnosis | None:
    """As `diagnose`. slow: ranks that are known to be so."""
    found = _diagnose_step_model(work, threshold, usual)
    since = _select_steps_since_start(work, found, threshold)
    later = None if since is None else StepModel.from_window(since, threshold, slow)
    if since is None or later is None:
        return found
    alone = _diagnose_step_model(later, threshold, usual)
    if len(since.steps) >= MIN_BROKEN_RANK_STEPS and _is_broken(alone):
        return alone
    if len(since.steps) < MIN_BOTTLENECK_STEPS:
        return None if found.trouble is not Bottleneck.NONE else found
    return alone if alone.trouble is found.trouble else found


def compute_recovery_threshold(threshold: float) -> float:
    """The slowdown below which a trouble of `threshold` is over."""
    return 1.0 + (threshold - 1.0) / 2


def _select_steps_since_start(work: StepModel, found: Diagnosis, threshold: float) -> AlignedWindow | None:
    """The steps since the trouble began, within the window; None: it is older, or it does not show when."""
    trouble = found.trouble
    if trouble is Bottleneck.GARBAGE:  # without the first collection itself, after which the window begins
        shows = np.append(False, np.any(_find_gc_pauses(_exclude_simultaneous_gc(work.gc_seconds)), axis=1)[:-1])
    elif trouble is Bottleneck.LENGTHS:  # other steps, longer or shorter, are between
        shows = work.working.max(axis=1) >= min(threshold, found.slowdown) * work.level.max(axis=1)
    else:
        return select_slower_steps(work.window, threshold, hiccups=trouble is not Bottleneck.VOLATILE)
    first = int(np.argmax(shows)) if shows.any() else len(shows) - 1
    return work.window.select_steps(slice(first, None)) if first else None


def _is_broken(found: Diagnosis) -> bool:
    seconds = float(found.window.step_seconds.max(axis=1).sum())
    slowest = min((found.rank_slowdown[rank] for rank in found.culprits), default=0.0)
    return found.trouble is Bottleneck.COMPUTE and seconds >= MAX_STEP_WINDOW_SECONDS and slowest >= MIN_BROKEN_RANK_SLOWDOWN


def diagnose_broken_ranks(windows: Sequence[RankWindow], plan: Plan, *, threshold: float, global_batch: int = 0) -> Diagnosis | None:
    """Ranks that a job in a Local-SGD mode is better without; None: too little is known, or none takes `threshold` ×
    its peers' time.

    In between nobody waits for a slow rank, but its samples are missing, and at a synchronisation all wait for the step
    that it has in hand (in EDiT, for all of its steps). windows, global_batch: as of `way_back`.
    """
    if (known := _reconstruct_synchronous_steps(windows, global_batch, threshold)) is None:
        return None
    work, transfer = known
    if not work.culprits:
        return None

    def seconds(own: Seconds) -> float:
        slowest = float(own.mean(axis=0).max())
        if plan.sync_mode is SyncMode.EDIT:
            return slowest + transfer / plan.sync_every
        free, cost = _estimate_timed_sync_costs(own, transfer)
        return free * (1 + cost / max(plan.sync_seconds, slowest))

    now, mended = (seconds(own + work.gc_seconds) for own in (work.even, work.paced))
    slowdown = now / mended
    said = f"a step's worth of samples takes {_format_milliseconds(now)} in mode {plan.sync_mode}, {_format_milliseconds(mended)} with them at that pace"
    return Diagnosis(
        trouble=Bottleneck.COMPUTE,
        slowdown=slowdown,
        culprits=work.culprits,
        evidence=(_describe_bottleneck(work, Bottleneck.COMPUTE), said),
        step_seconds=now,
        exposed_seconds=transfer,
        rank_slowdown=work.rank_slowdown,
        effects={Bottleneck.COMPUTE: slowdown},
        window=work.window,
    )


def propose_strategies(
    diagnosis: Diagnosis,
    *,
    threshold: float,
    sequence_cost: tuple[float, float, float] | None = None,
    garbage_every: int = 0,
    smallest_share: int = 1,
    largest_share: int | None = None,
) -> tuple[Strategy, ...]:
    """The ways to train that fit the trouble, priced: those to take first, best first, then those that are refused.

    Exact synchronous SGD (other shares, planned garbage collection, samples balanced by cost) comes before Local-SGD
    where it leaves a slowdown below `threshold` or mends nearly as well. Where there is no trouble: shares, if they are
    uneven and no longer fit. Where no rank is slow in most steps they are equal: those that fit a few steps fit their
    luck.
    sequence_cost: by which the plan has samples balanced; None: by the script's own, if at all. garbage_every: steps
    between two collections that the plan has; 0: it has none.
    smallest_share, largest_share: samples that a rank can take in a step (memory).
    """
    work = StepModel.from_window(diagnosis.window, threshold, diagnosis.culprits)
    if work is None:
        return ()
    trouble, found = diagnosis.trouble, list[Strategy]()
    reference = diagnosis.step_seconds / diagnosis.slowdown
    if work.has_slow_ranks and (trouble in {Bottleneck.COMPUTE, Bottleneck.VOLATILE} or work.is_uneven):
        found.append(_propose_rebalance(work, reference, smallest_share, largest_share, diagnosis.known))
    elif work.is_uneven:
        found.append(_propose_equal_shares(work, reference))
    if trouble in {Bottleneck.VOLATILE, Bottleneck.COMMUNICATION} or (trouble is Bottleneck.COMPUTE and work.has_slow_ranks):
        found += _propose_local_sgd(work, reference, work.exposed, counted=trouble is Bottleneck.COMMUNICATION)
    if trouble is Bottleneck.GARBAGE:
        found.append(_propose_planned_gc(work, reference, garbage_every))
    if trouble is Bottleneck.LENGTHS:
        in_force = None if sequence_cost is None else SequenceCost(*sequence_cost)
        found.append(_propose_balanced_lengths(work, reference, in_force))
    if not work.has_sample_counts:
        found = [replace(way, refused=NOT_MANAGED) for way in found]
    return _sort_strategies(found, diagnosis.slowdown, threshold)


def estimate_remaining_slowdown(diagnosis: Diagnosis, slow: Collection[int], threshold: float) -> float:
    """What is left of the slowdown where, of the culprits, these alone stay as slow as they are. slow: ranks."""
    work = StepModel.from_window(diagnosis.window, threshold, diagnosis.culprits)
    if work is None:
        return 1.0
    stay = np.isin(np.arange(work.even.shape[1]), list(slow))
    won = work.compute_longest_mean(work.level) - work.compute_longest_mean(np.where(stay, work.even, work.paced))
    return max(1.0, diagnosis.slowdown * (1.0 - won / diagnosis.step_seconds))


def explain_exact_preference(diagnosis: Diagnosis, found: Sequence[Strategy]) -> str:
    """Why a slow rank needs no Local-SGD: what exact training may do, or has done, mends most of it; "": it does not.

    found: the `ways`, refused as far as the job's own policy refuses them, too.
    """
    if diagnosis.trouble is not Bottleneck.COMPUTE or min(diagnosis.window.shares) < 1:
        return ""
    exact = (way.slowdown_after for way in found if way.mode is SyncMode.SYNC and not way.refused)
    left = min(exact, default=diagnosis.slowdown)  # what has been mended stays mended
    equal = max(diagnosis.slowdown, *diagnosis.rank_slowdown)
    return "shares mend most of it, and stay exact" if left - 1 <= MAX_REMAINING_COST_WITH_SHARES * (equal - 1) else ""


def propose_revert_to_sync(
    windows: Sequence[RankWindow],
    *,
    threshold: float,
    bottleneck: Bottleneck = Bottleneck.NONE,
    global_batch: int = 0,
    smallest_share: int = 1,
    largest_share: int | None = None,
    usual_slowdowns: Mapping[Bottleneck, float] | None = None,
) -> Strategy | None:
    """Synchronous SGD again, where the trouble that led to a Local-SGD mode is over; None: stay.

    windows: of all ranks, in a Local-SGD mode; they need no steps in common. The steps that these ranks would do
    together are put together from the steps that each did alone, and judged as synchronous ones are. trouble: that led
    here; its S has to fall below half of the threshold's excess (1.05 for 1.1), any other only below the threshold;
    NONE: every one below half. A rank that stays slow does not matter where shares mend it nearly as well.
    global_batch: samples of a synchronous step; 0: as many as the ranks' local batches together. usual: S of troubles
    that are none below it, because the job, or the machines that it shares, have always had them.

    It has new shares only for ranks that are slow in most of their steps.
    """
    if (known := _reconstruct_synchronous_steps(windows, global_batch, threshold)) is None:
        return None
    work, transfer = known
    new_shares = None
    if work.has_slow_ranks:
        mended = _propose_rebalance(work, 1.0, smallest_share, largest_share)
        new_shares = None if mended.refused else mended.shares
    if new_shares is not None:
        work = work.with_shares(new_shares)
    found = _diagnose_step_model(work, threshold)
    lower = compute_recovery_threshold(threshold)
    limits = {each: lower if bottleneck in {each, Bottleneck.NONE} else threshold for each in found.effects}
    limits |= {each: max(limits[each], s) for each, s in (usual_slowdowns or {}).items()}
    (by_clock,) = _propose_local_sgd(work, 1.0, transfer, counted=False)
    mended_seconds = found.step_seconds / found.effects[Bottleneck.COMPUTE]
    if found.step_seconds <= MAX_REVERT_STEP_TIME_RATIO * max(by_clock.step_seconds, mended_seconds):
        limits[Bottleneck.COMPUTE] = np.inf
    if any(effect >= limits[each] for each, effect in found.effects.items()):
        return None
    largest = max(found.effects.values())
    return Strategy(
        SYNC_REMEDY,
        SyncMode.SYNC,
        step_seconds=found.step_seconds,
        slowdown_after=largest,
        reason=f"a synchronous step would take {_format_milliseconds(found.step_seconds)} now, {largest:.2f} × its time without "
        f"trouble; under Local-SGD it is {_format_milliseconds(by_clock.step_seconds)}",
        shares=new_shares,
    )


def lengthen_sync_interval(
    windows: Sequence[RankWindow], in_force: float, lasted_seconds: float, *, threshold: float, global_batch: int = 0
) -> float:
    """Seconds between two synchronisations in mode AsyncEDiT from now on, while it is needed: the rarer the longer it
    has been, until they cost no more than MAX_LASTING_SYNC_COST_SHARE.

    windows, global_batch: as of `way_back`. in_force: seconds as the plan has them. stayed: that the trouble lasts.
    """
    if (known := _reconstruct_synchronous_steps(windows, global_batch, threshold)) is None:
        return in_force
    work, transfer = known
    own = work.even + work.gc_seconds
    _, cost = _estimate_timed_sync_costs(own, transfer)
    seconds = min(_clamp_sync_interval(own, cost / MAX_LASTING_SYNC_COST_SHARE), round(SYNC_INTERVAL_GROWTH_SHARE * lasted_seconds, 2))
    return seconds if seconds >= min(MIN_SYNC_INTERVAL_GROWTH * in_force, SYNC_INTERVAL_SECONDS_RANGE[1]) else in_force


@dataclass(frozen=True)
class Hysteresis:
    """When the mode may change again: each change soon after the one before doubles the wait, up to `longest`.

    Plain numbers, to be kept with the job; times are seconds of any one clock.
    """

    first: float = 60.0
    longest: float = 3600.0
    hold_seconds: float = 0.0  # after the last change; 0: there was none
    changed_at: float = 0.0

    def allows(self, now: float) -> bool:
        return now >= self.changed_at + self.hold_seconds or self.hold_seconds == 0

    def with_change(self, now: float) -> Hysteresis:
        """After a change of mode at `now`. One that comes long after its predecessor starts from `first` again."""
        is_flap = self.hold_seconds > 0 and now < self.changed_at + 4 * self.hold_seconds
        hold = min(2 * self.hold_seconds, self.longest) if is_flap else self.first
        return replace(self, hold_seconds=hold, changed_at=now)


def _reconstruct_synchronous_steps(windows: Sequence[RankWindow], global_batch: int, threshold: float) -> tuple[StepModel, float] | None:
    """Of ranks in a Local-SGD mode: what they would do in synchronous steps, and the seconds of an exchange; None: too
    little is known."""
    window = reconstruct_synchronous_window(windows, global_batch)
    work = None if window is None else StepModel.from_window(window, threshold)
    transfer = find_transfer_seconds(windows)
    return None if work is None or transfer is None else (work, transfer)


def _diagnose_step_model(work: StepModel, threshold: float, usual: Collection[Bottleneck] = ()) -> Diagnosis:
    now = work.step_seconds
    apart = _exclude_simultaneous_gc(work.gc_seconds)
    _, planned_garbage = _plan_gc_interval(apart)
    has_to_change = work.has_slow_ranks or work.is_uneven
    lost = {
        Bottleneck.GARBAGE: _estimate_gc_wait_seconds(apart, work) - planned_garbage,
        Bottleneck.LENGTHS: work.compute_longest_mean(work.working) - work.compute_longest_mean(work.level),
        Bottleneck.COMPUTE: work.compute_longest_mean(work.level) - work.compute_longest_mean(work.paced) if has_to_change else 0.0,
        Bottleneck.VOLATILE: work.compute_longest_mean(work.paced) - work.steady_seconds,
        Bottleneck.COMMUNICATION: _estimate_communication_growth(work),
    }
    effects = {trouble: now / (now - min(max(0.0, seconds), 0.99 * now)) for trouble, seconds in lost.items()}
    main = max((each for each in effects if each not in usual), key=lambda each: effects[each])
    trouble = main if effects[main] >= threshold else Bottleneck.NONE
    lasting = max(FREE_LASTING_REMEDIES, key=lambda each: effects[each])
    if trouble is Bottleneck.NONE and effects[lasting] >= max(MIN_FREE_REMEDY_SLOWDOWN, effects[Bottleneck.COMPUTE]):
        trouble = main = lasting
    return Diagnosis(
        trouble=trouble,
        slowdown=effects[main],
        culprits=work.culprits,
        evidence=_build_evidence(work, trouble, effects),
        step_seconds=now,
        exposed_seconds=work.exposed,
        rank_slowdown=work.rank_slowdown,
        effects=effects,
        window=work.window,
    )


def _estimate_communication_growth(work: StepModel) -> float:
    """By how much exposed communication has grown since the job's first steady steps.

    Where only the whole of those is known: 0 if the own work alone outlasts them, as it may be that which has grown.
    What the usual rank waited in them was in part for others, by chance; but as that may have grown, too, it counts
    only where exposed communication outlasts the whole of it.
    """
    first, before = work.window.baseline_seconds, work.window.baseline_exposed
    if before is None:
        before = first - work.steady_seconds
        if before <= 0:
            return 0.0
    elif work.exposed > before:
        before = max(0.0, before - work.waits_by_chance)
    return min(work.exposed - before, work.step_seconds - first)


def _build_evidence(work: StepModel, trouble: Bottleneck, effects: Mapping[Bottleneck, float]) -> tuple[str, ...]:
    ranked = ", ".join(f"{each} {effects[each]:.2f}" for each in sorted(effects, key=lambda each: -effects[each]))
    return (
        _describe_bottleneck(work, trouble),
        f"a step takes {_format_milliseconds(work.step_seconds)} over {len(work.own)} steps; S of each trouble by itself: {ranked}",
        *(_describe_whatif(work) if trouble is Bottleneck.COMPUTE and work.culprits else ()),
    )


def _describe_whatif(work: StepModel) -> tuple[str, ...]:
    """S_w of the slowest ranks, and what it would win to replace the culprits (arXiv 2505.05713); (): there is nothing
    that could be shared out among the ranks."""
    whatif = data_parallel.analyze_compute_seconds(work.own, work.exposed)
    if whatif.decomposition is None:
        return ()
    by_rank = whatif.decomposition.by_replica
    largest = sorted(range(len(by_rank)), key=lambda rank: -by_rank[rank])[:MAX_RANKS_NAMED]
    listed = ", ".join(f"rank {rank} {by_rank[rank]:.2f}" for rank in largest)
    gain = whatif.compute_gain(data_parallel.build_replacement_scenario(work.culprits))
    return (
        f"simulated without stragglers: S {whatif.slowdown:.2f}; with every other rank ideal, S_w: {listed}; "
        f"the slow ones at their peers' pace: {gain:.2f} × as fast",
    )


def _describe_bottleneck(work: StepModel, trouble: Bottleneck) -> str:
    match trouble:
        case Bottleneck.COMPUTE if work.culprits:
            slow = [f"rank {rank} {work.rank_slowdown[rank]:.2f} ×" for rank in work.culprits]
            more = f" and {len(slow) - MAX_RANKS_NAMED} more" if len(slow) > MAX_RANKS_NAMED else ""
            named = ", ".join(slow[:MAX_RANKS_NAMED])
            return f"slow in their own work in most steps, at equal shares over their peers: {named}{more}"
        case Bottleneck.COMPUTE if work.differ:
            apart = max(work.rank_slowdown) / min(work.rank_slowdown)
            return f"the ranks' own work differs by {apart:.2f} × at equal shares"
        case Bottleneck.COMPUTE:
            return "no rank is slow any more, and the shares are uneven"
        case Bottleneck.VOLATILE:
            return (
                f"the last rank of a step takes {_format_milliseconds(work.compute_longest_mean(work.paced))}, and no rank on average more than "
                f"{_format_milliseconds(work.steady_seconds)}: slow ranks come and go"
            )
        case Bottleneck.COMMUNICATION:
            return (
                f"{_format_milliseconds(work.exposed)} of a step are communication that no computation hides; the job's first steady "
                f"steps took {_format_milliseconds(work.window.baseline_seconds)} altogether"
            )
        case Bottleneck.GARBAGE:
            waited = _estimate_gc_wait_seconds(_exclude_simultaneous_gc(work.gc_seconds), work)
            return (
                f"garbage is collected for {_format_milliseconds(float(work.gc_seconds.mean()))} a step on each rank, and all wait for "
                f"{_format_milliseconds(waited)}: ranks collect in different steps"
            )
        case Bottleneck.LENGTHS:
            return (
                f"own work follows the samples' cost: dealt evenly, the last rank of a step would take "
                f"{_format_milliseconds(work.compute_longest_mean(work.level))} instead of {_format_milliseconds(work.compute_longest_mean(work.working))}"
            )
        case Bottleneck.NONE:
            return "no trouble costs enough to be dealt with"


def _propose_rebalance(
    work: StepModel, reference: float, smallest: int, largest: int | None, known: Mapping[int, float] | None = None
) -> Strategy:
    now = work.step_seconds
    unknown = Strategy(REBALANCE_REMEDY, SyncMode.SYNC, now, now / reference, "batch shares that fit the ranks")
    if not work.has_sample_counts:
        return replace(unknown, refused=NOT_MANAGED)
    try:
        balance = shares.rebalance_shares(
            balance_lengths(work.window, work.window.samples),
            work.window.samples,
            costs=work.window.costs,
            minimum=smallest,
            maximum=largest,
            granularity=work.window.share_grain,
            known=known,
        )
    except InputError as error:
        return replace(unknown, refused=str(error))
    after = now - (balance.seconds_now - balance.seconds_after)
    return Strategy(
        REBALANCE_REMEDY,
        SyncMode.SYNC,
        after,
        after / reference,
        f"shares {_format_values(work.shares)} → {_format_values(balance.shares)}: steps of {_format_milliseconds(after)} instead of {_format_milliseconds(now)}",
        shares=balance.shares,
        refused="" if balance.is_worthwhile else f"other shares would win only {balance.win:.1%}",
        least_win=balance.least_win,
    )


def _propose_equal_shares(work: StepModel, reference: float) -> Strategy:
    """For ranks none of which is slow in most steps."""
    after = work.step_seconds
    way = Strategy(REBALANCE_REMEDY, SyncMode.SYNC, after, after / reference, "equal shares")
    if not work.has_sample_counts:
        return replace(way, refused=NOT_MANAGED)
    equal = shares.divide_equally(sum(work.shares), len(work.shares), work.window.share_grain)
    reshared = work.with_shares(equal)
    after, shorter = reshared.step_seconds, 1.0 - reshared.own.max(axis=1) / work.own.max(axis=1)
    sure = min(shorter[0::2].mean(), shorter[1::2].mean()) >= shares.MIN_HALF_WINDOW_WIN
    return replace(
        way,
        step_seconds=after,
        slowdown_after=after / reference,
        reason=f"shares {_format_values(work.shares)} → {_format_values(equal)}: no rank is slow in most steps",
        shares=equal,
        refused="" if sure else "steps are shorter with other shares by luck, if at all",
    )


def _propose_local_sgd(work: StepModel, reference: float, transfer: float, *, counted: bool) -> list[Strategy]:
    """By the clock (A-EDiT), and, where `counted` and the ranks are alike, by the number of steps (EDiT). `counted`: it
    is for a slow link."""
    own = work.even + work.gc_seconds
    pace = own.mean(axis=0)
    level = None
    if work.is_uneven and work.has_sample_counts:
        level = shares.divide_equally(sum(work.shares), len(pace), work.window.share_grain)
    free, cost = _estimate_timed_sync_costs(own, transfer)
    wanted = cost / MAX_SYNC_COST_SHARE
    if counted:
        wanted = min(wanted, max(LINK_CHECK_SYNC_SECONDS, cost / MAX_LINK_CHECK_SYNC_COST_SHARE))
    seconds = _clamp_sync_interval(own, wanted)
    after = free * (1 + cost / seconds)
    by_clock = Strategy(
        LOCAL_SGD_REMEDY,
        SyncMode.ASYNC_EDIT,
        after,
        after / reference,
        f"AsyncEDiT, synchronising every {seconds:g} s: no rank waits for a slower one in between",
        shares=level,
        sync_seconds=seconds,
    )
    allowed = [each for each in SYNC_STEP_CHOICES if each * float(pace.max()) <= MAX_SECONDS_BETWEEN_SYNCS]
    if not counted or not allowed or pace.max() > MAX_ALIKE_RANKS_RATIO * pace.mean():
        return [by_clock]
    every = next((each for each in allowed if transfer <= MAX_SYNC_COST_SHARE * each * pace.mean()), allowed[-1])
    rows = np.random.default_rng(0).integers(0, len(own), size=4 * every)  # a window may be shorter than an interval
    after = data_parallel.estimate_local_sgd_step_seconds(data_parallel.analyze_compute_seconds(own[rows]), every, transfer)
    at_last = free * (1 + cost / _clamp_sync_interval(own, cost / MAX_LASTING_SYNC_COST_SHARE))  # by the clock, once it is as rare
    by_clock_will_do = price.outweighs_exact(work.step_seconds / reference, by_clock.slowdown_after) and after > at_last
    by_steps = Strategy(
        LOCAL_SGD_REMEDY,
        SyncMode.EDIT,
        after,
        after / reference,
        f"EDiT, synchronising every {every} steps: the ranks are alike",
        shares=level,
        sync_every=every,
        refused="AsyncEDiT will be as fast, and stays so should a rank get slow" if by_clock_will_do else "",
    )
    return [by_clock, by_steps]


def _estimate_timed_sync_costs(own: Seconds, transfer: float) -> tuple[float, float]:
    """Of ranks with this own work: seconds for a step's worth of samples between two synchronisations by the clock, and
    what each of these costs: the transfer, and the wait for the last rank's step in hand."""
    free = data_parallel.estimate_local_sgd_step_seconds(data_parallel.analyze_compute_seconds(own), 1, 0.0, by_clock=True)
    return free, transfer + data_parallel.estimate_sync_wait_seconds(own.mean(axis=0))


def _clamp_sync_interval(own: Seconds, wanted: float) -> float:
    """Seconds between two synchronisations by the clock: as wanted, within limits."""
    least, most = SYNC_INTERVAL_SECONDS_RANGE
    return round(min(most, max(least, wanted, MIN_STEPS_BETWEEN_SYNCS * float(own.mean(axis=0).max()))), 2)


def _propose_planned_gc(work: StepModel, reference: float, in_force: int) -> Strategy:
    """Under a plan that is in force only the script itself collects, and goes on to, however often the plan does."""
    apart = _exclude_simultaneous_gc(work.gc_seconds)
    every, cost = _plan_gc_interval(apart)
    together = work.compute_longest_mean(work.gc_seconds - apart)
    after = work.compute_longest_mean(work.working) + cost + together + work.exposed
    return Strategy(
        PLAN_GC_REMEDY,
        SyncMode.SYNC,
        after,
        after / reference,
        f"garbage collection every {every} steps, on all ranks in the same step",
        garbage_every=every,
        least_win=price.MIN_LASTING_WIN,
        refused="garbage is collected by plan already, and the script collects beside it" if in_force else "",
    )


def _plan_gc_interval(garbage: Seconds) -> tuple[int, float]:
    """Steps between two collections, as often as the ranks collect by themselves, and what they cost a step then.

    All collect in the same step, so the longest pause counts, once. garbage: (steps, ranks). How often is the mean of
    what these steps show and of ASSUMED_GC_INTERVAL_STEPS, as if ASSUMED_GC_PRIOR_STEPS had been seen: a window is looked at because of its
    pauses, and a short one has many by luck.
    """
    if garbage.max() <= 0:
        return 1, 0.0
    pauses = _find_gc_pauses(garbage)
    often = (float(pauses.sum()) + ASSUMED_GC_PRIOR_STEPS / ASSUMED_GC_INTERVAL_STEPS) / (garbage.size + ASSUMED_GC_PRIOR_STEPS)
    lengths = np.where(pauses, garbage, 0.0).sum(axis=0) / np.maximum(pauses.sum(axis=0), 1)
    return max(1, round(1.0 / often)), often * float(lengths.max()) + float(garbage[~pauses].sum()) / garbage.size


def _exclude_simultaneous_gc(garbage: Seconds) -> Seconds:
    """Without the collections that all ranks do in the same step: nobody waits for those."""
    together = ((garbage >= MIN_GC_PAUSE_SHARE * garbage.max(axis=0)) & (garbage > 0)).all(axis=1, keepdims=True)
    return np.where(together, 0.0, garbage)


def _estimate_gc_wait_seconds(garbage: Seconds, work: StepModel) -> float:
    """Seconds by which these collections lengthen a step."""
    return work.compute_longest_mean(work.own) - work.compute_longest_mean(work.own - garbage)


def _find_gc_pauses(garbage: Seconds) -> npt.NDArray[np.bool_]:
    return np.asarray((garbage >= MIN_GC_PAUSE_SHARE * garbage.max()) & (garbage > 0))


def _propose_balanced_lengths(work: StepModel, reference: float, in_force: SequenceCost | None) -> Strategy:
    """By the cost that fits these steps. Another cost leaves as much uneven as the one in force leaves of what it
    balances, since single sequences may outweigh the others; without one, the win is an upper bound."""
    cost, level, refused = work.window.sequence_cost, work.level, ""
    assert cost is not None
    if work.window.squares is None:
        refused = "the script's loader does not know how long samples are: give its dataloader their lengths"
    elif in_force is not None:
        left = _compute_unevenness(work, in_force)
        level = level * left
        if np.abs(_compute_unevenness(work, cost) - left).max(axis=1).mean() <= MAX_SAME_BALANCE_DIFFERENCE:
            refused = "samples are balanced by this cost already: single ones outweigh the others"
    after = work.compute_longest_mean(level) + work.compute_longest_mean(work.own) - work.compute_longest_mean(work.working) + work.exposed
    return Strategy(
        BALANCE_LENGTHS_REMEDY,
        SyncMode.SYNC,
        after,
        after / reference,
        "samples dealt so that every rank's cost the same: one takes {:.3g} s + {:.3g} s × its length + {:.3g} s × its "
        "length²".format(*cost.terms),
        sequence_cost=cost.terms,
        refused=refused,
        least_win=price.MIN_LASTING_WIN,
    )


def _compute_unevenness(work: StepModel, cost: SequenceCost) -> Seconds:
    """Of the ranks' parts of each step, by this cost of a sequence: 1 is as much as a rank's share says."""
    window = work.window
    assert window.lengths is not None
    assert window.squares is not None
    weight = cost.compute_seconds_from_sums(window.samples, window.lengths, window.squares)
    return np.asarray(weight / compute_fair_parts(weight, window.samples))


def _sort_strategies(found: Sequence[Strategy], slowdown: float, threshold: float) -> tuple[Strategy, ...]:
    """The one to prefer first, then what could be taken instead, then what is refused or not worth its change."""
    choice = price.choose_remedy([way.to_option() for way in found], slowdown, 0.0, mended=threshold)
    judged = [
        (priced is choice.chosen, way if priced.due else replace(way, refused=way.refused or priced.reason))
        for way, priced in zip(found, choice.prices, strict=True)
    ]
    judged.sort(key=lambda each: (not each[0], bool(each[1].refused), each[1].step_seconds))
    return tuple(way for _, way in judged)


def _format_values(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values[:16]))}{', …' if len(values) > 16 else ''}]"


def _format_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
