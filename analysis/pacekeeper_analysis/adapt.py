"""Training that adapts: what holds a job back, and which ways to train would win what.

    found = diagnose(windows, threshold)                 # of a job in mode Sync: its trouble and S
    for way in ways(found, threshold=threshold): ...     # best first: each priced, none applied
    plan = way.applied_to(plan)
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
from .diagnose.windows import WINDOW_SECONDS, Window, align, since_longer
from .diagnose.work import KnownPaces, Seconds, Work, as_if_synchronous, fair_parts, levelled, transfer_seconds
from .errors import InputError
from .lengths import SequenceCost
from .plan import Plan, SyncMode
from .reports import RankWindow
from .whatif import data_parallel

REBALANCE = "Rebalance"
LOCAL_SGD = "LocalSGD"
PLAN_GARBAGE = "PlanGarbage"
BALANCE_LENGTHS = "BalanceLengths"
SYNC = "Sync"

NOT_STEERED = "the script does not use the library, so the way it trains cannot be changed"

SYNCHRONISING, LASTING_SYNCHRONISING = 0.03, 0.01
"""What synchronisations may cost: the shortest interval is chosen that keeps them within this part of the time; the
second one in the long run."""
SYNC_SECONDS = (0.5, 30.0)
SOON_SECONDS, SOON = 10.0, 0.1
"""So often there is a synchronisation all the same for a slow link, as long as they stay within this part of the time:
each shows whether it is well again."""
RARER = 0.2
"""Of the time that a trouble has lasted: as long may pass between two synchronisations. What has gone on for long will
not be over soon."""
WORTH_A_PLAN = 1.2
"""Times as rare they get by a change of the plan, at least."""
SYNC_EVERY = (4, 8, 16, 32, 64, 128)
LONGEST_BETWEEN = 15.0
"""Seconds that so many steps may take: ranks end, suspend and checkpoint at a synchronisation only, and a pod has 30 s
to end in unless its template says more."""
STEPS_BETWEEN = 4
"""Steps that the slowest rank does between two synchronisations at least."""
ALIKE = 1.05
"""Ranks none of which takes longer than this many times the mean are alike: equal numbers of steps suit them."""
ENOUGH = 0.5
"""Shares for a slow rank are preferred to Local-SGD where they leave no more than this part of what it costs with equal
ones."""
FEW_STEPS, FEW_BROKEN_STEPS = 4, 3
"""So many steps of a trouble tell what it costs, and so many long ones that a rank is broken; of fewer, the next answer
will."""
BROKEN = 3.0
"""A rank so many times slower than its peers is broken rather than slow."""
NAMED = 8
"""Ranks in a sentence at most."""
COLLECTS_EVERY, STEPS_BEFORE = 50, 50
"""Steps of a rank between two garbage collections that are worth planning, before any is seen, and of how many steps
that is taken to be known."""
PAUSE = 0.25
"""Of the longest collection, at least, is one that is worth planning."""
LITTLE = 1.01
"""From this slowdown on what is MENDED_FOR_GOOD is dealt with."""
SAME_COST = 0.02
"""Costs by which the ranks' parts of a step differ by less balance alike."""
AS_GOOD = 1.1
"""A slow rank does not bar the way back where shares mend it to within this many times Local-SGD's steps: less than
`price.NEARLY`, so that it does not lead away again at once."""


class Trouble(StrEnum):
    """Why the steps of a synchronous job take longer than they need."""

    NONE = "None"
    COMPUTE = "Compute"  # some rank is persistently slow in its own work, or the shares do not fit the ranks
    VOLATILE = "Volatile"  # slow ranks come and go
    COMMUNICATION = "Communication"  # steps outlast the ranks' own work by more than in the job's first steady steps
    GARBAGE = "Garbage"  # garbage collections of different ranks fall into different steps, and all wait for each
    LENGTHS = "Lengths"  # cost follows the samples (sequence lengths), which are dealt unevenly


MENDED_FOR_GOOD = {Trouble.GARBAGE: PLAN_GARBAGE, Trouble.LENGTHS: BALANCE_LENGTHS}
"""Troubles, and what is done about them for nothing, and stays."""


@dataclass(frozen=True)
class Diagnosis:
    """The trouble that costs a synchronous job most, judged from its ranks' windows."""

    trouble: Trouble
    slowdown: float  # S: expected step time over that without this trouble; of NONE: without the largest effect
    culprits: tuple[int, ...]  # ranks that are persistently slower than most
    evidence: tuple[str, ...]  # sentences for people
    step_seconds: float  # expected of a step as things are
    exposed_seconds: float  # of them: communication that no computation hides
    rank_slowdown: tuple[float, ...]  # each rank's cost at equal shares over its peers' median
    effects: Mapping[Trouble, float]  # S of every trouble, each by itself
    window: Window = field(repr=False, compare=False)  # the common steps, since the trouble began
    known: Mapping[int, float] = field(default_factory=dict)  # all culprits' paces, if more steps than these tell them


@dataclass(frozen=True)
class Way:
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
    least_win: float = price.MINIMAL_WIN  # as of `price.Option`

    def option(self, refused: str = "") -> price.Option:
        """For `price.choose`: a free live change. refused: a further reason why it may not be taken."""
        exact = self.mode is SyncMode.SYNC
        return price.Option(self.remedy, 0.0, self.slowdown_after, self.refused or refused, exact, self.least_win)

    def applied_to(self, plan: Plan) -> Plan:
        """The plan's next version, with this way to train."""
        fields = ("shares", "sync_every", "sync_seconds", "garbage_every", "sequence_cost")
        told: dict[str, Any] = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return replace(plan, version=plan.version + 1, sync_mode=self.mode, **told)


def diagnose(
    windows: Sequence[RankWindow],
    threshold: float,
    known: KnownPaces | None = None,
    usual: Collection[Trouble] = (),
) -> Diagnosis | None:
    """What costs the synchronous job most.

    `Trouble.NONE` where no trouble has an S of `threshold` or more, and none that is MENDED_FOR_GOOD of LITTLE. None
    where the windows cannot tell: ranks are missing, fewer than 8 common steps since the shares last changed, or a
    Local-SGD mode is in force; or it has begun in the last few steps. One that has begun within the windows is judged
    by the steps since: those before would only make it look less.

    known: ranks that are slow by more steps than these; they are judged by those. usual: troubles that are the job's
    own way, and hide no other.
    """
    if any(window.sync_mode not in {"", SyncMode.SYNC} for window in windows):
        return None
    window = align(windows)
    work = None if window is None else Work.of(window, threshold)
    if work is None or known is None:
        return None if work is None else _since_it_began(work, threshold, usual)
    paces = work.paces_by(known, threshold)
    paced = Work.of(work.at_paces(paces), threshold, known.of_rank)
    found = None if paced is None else _since_it_began(paced, threshold, usual, known.of_rank)
    if found is None or not {*found.culprits} <= {*paces}:
        return found
    return replace(found, known={rank: paces[rank] for rank in found.culprits})


def _since_it_began(
    work: Work, threshold: float, usual: Collection[Trouble], slow: Collection[int] = ()
) -> Diagnosis | None:
    """As `diagnose`. slow: ranks that are known to be so."""
    found = _judge(work, threshold, usual)
    since = _since_first_sign(work, found, threshold)
    later = None if since is None else Work.of(since, threshold, slow)
    if since is None or later is None:
        return found
    alone = _judge(later, threshold, usual)
    if len(since.steps) >= FEW_BROKEN_STEPS and _is_broken(alone):
        return alone
    if len(since.steps) < FEW_STEPS:
        return None if found.trouble is not Trouble.NONE else found
    return alone if alone.trouble is found.trouble else found


def slight(threshold: float) -> float:
    """The slowdown below which a trouble of `threshold` is over."""
    return 1.0 + (threshold - 1.0) / 2


def _since_first_sign(work: Work, found: Diagnosis, threshold: float) -> Window | None:
    """The steps since the trouble began, within the window; None: it is older, or it does not show when."""
    trouble = found.trouble
    if trouble is Trouble.GARBAGE:  # without the first collection itself, after which the window begins
        shows = np.append(False, np.any(_pauses(_collected_apart(work.garbage)), axis=1)[:-1])
    elif trouble is Trouble.LENGTHS:  # other steps, longer or shorter, are between
        shows = work.working.max(axis=1) >= min(threshold, found.slowdown) * work.level.max(axis=1)
    else:
        return since_longer(work.window, threshold, hiccups=trouble is not Trouble.VOLATILE)
    first = int(np.argmax(shows)) if shows.any() else len(shows) - 1
    return work.window.of(slice(first, None)) if first else None


def _is_broken(found: Diagnosis) -> bool:
    seconds = float(found.window.step_seconds.max(axis=1).sum())
    slowest = min((found.rank_slowdown[rank] for rank in found.culprits), default=0.0)
    return found.trouble is Trouble.COMPUTE and seconds >= WINDOW_SECONDS and slowest >= BROKEN


def broken(windows: Sequence[RankWindow], plan: Plan, *, threshold: float, global_batch: int = 0) -> Diagnosis | None:
    """Ranks that a job in a Local-SGD mode is better without; None: too little is known, or none takes `threshold` ×
    its peers' time.

    In between nobody waits for a slow rank, but its samples are missing, and at a synchronisation all wait for the step
    that it has in hand (in EDiT, for all of its steps). windows, global_batch: as of `way_back`.
    """
    if (known := _together(windows, global_batch, threshold)) is None:
        return None
    work, transfer = known
    if not work.culprits:
        return None

    def seconds(own: Seconds) -> float:
        slowest = float(own.mean(axis=0).max())
        if plan.sync_mode is SyncMode.EDIT:
            return slowest + transfer / plan.sync_every
        free, cost = _by_clock(own, transfer)
        return free * (1 + cost / max(plan.sync_seconds, slowest))

    now, mended = (seconds(own + work.garbage) for own in (work.even, work.paced))
    slowdown = now / mended
    said = f"a step's worth of samples takes {_ms(now)} in mode {plan.sync_mode}, {_ms(mended)} with them at that pace"
    return Diagnosis(
        trouble=Trouble.COMPUTE,
        slowdown=slowdown,
        culprits=work.culprits,
        evidence=(_words(work, Trouble.COMPUTE), said),
        step_seconds=now,
        exposed_seconds=transfer,
        rank_slowdown=work.rank_slowdown,
        effects={Trouble.COMPUTE: slowdown},
        window=work.window,
    )


def ways(
    diagnosis: Diagnosis,
    *,
    threshold: float,
    sequence_cost: tuple[float, float, float] | None = None,
    garbage_every: int = 0,
    smallest_share: int = 1,
    largest_share: int | None = None,
) -> tuple[Way, ...]:
    """The ways to train that fit the trouble, priced: those to take first, best first, then those that are refused.

    Exact synchronous SGD (other shares, planned garbage collection, samples balanced by cost) comes before Local-SGD
    where it leaves a slowdown below `threshold` or mends nearly as well. Where there is no trouble: shares, if they are
    uneven and no longer fit. Where no rank is slow in most steps they are equal: those that fit a few steps fit their
    luck.
    sequence_cost: by which the plan has samples balanced; None: by the script's own, if at all. garbage_every: steps
    between two collections that the plan has; 0: it has none.
    smallest_share, largest_share: samples that a rank can take in a step (memory).
    """
    work = Work.of(diagnosis.window, threshold, diagnosis.culprits)
    if work is None:
        return ()
    trouble, found = diagnosis.trouble, list[Way]()
    reference = diagnosis.step_seconds / diagnosis.slowdown
    if work.has_slow_ranks and (trouble in {Trouble.COMPUTE, Trouble.VOLATILE} or work.is_uneven):
        found.append(_rebalance(work, reference, smallest_share, largest_share, diagnosis.known))
    elif work.is_uneven:
        found.append(_equal_shares(work, reference))
    if trouble in {Trouble.VOLATILE, Trouble.COMMUNICATION} or (trouble is Trouble.COMPUTE and work.has_slow_ranks):
        found += _local_sgd(work, reference, work.exposed, counted=trouble is Trouble.COMMUNICATION)
    if trouble is Trouble.GARBAGE:
        found.append(_planned_garbage(work, reference, garbage_every))
    if trouble is Trouble.LENGTHS:
        in_force = None if sequence_cost is None else SequenceCost(*sequence_cost)
        found.append(_balanced_lengths(work, reference, in_force))
    if not work.knows_samples:
        found = [replace(way, refused=NOT_STEERED) for way in found]
    return _in_order(found, diagnosis.slowdown, threshold)


def with_slow(diagnosis: Diagnosis, slow: Collection[int], threshold: float) -> float:
    """What is left of the slowdown where, of the culprits, these alone stay as slow as they are. slow: ranks."""
    work = Work.of(diagnosis.window, threshold, diagnosis.culprits)
    if work is None:
        return 1.0
    stay = np.isin(np.arange(work.even.shape[1]), list(slow))
    won = work.longest(work.level) - work.longest(np.where(stay, work.even, work.paced))
    return max(1.0, diagnosis.slowdown * (1.0 - won / diagnosis.step_seconds))


def exact_helps(diagnosis: Diagnosis, found: Sequence[Way]) -> str:
    """Why a slow rank needs no Local-SGD: what exact training may do, or has done, mends most of it; "": it does not.

    found: the `ways`, refused as far as the job's own policy refuses them, too.
    """
    if diagnosis.trouble is not Trouble.COMPUTE or min(diagnosis.window.shares) < 1:
        return ""
    exact = (way.slowdown_after for way in found if way.mode is SyncMode.SYNC and not way.refused)
    left = min(exact, default=diagnosis.slowdown)  # what has been mended stays mended
    equal = max(diagnosis.slowdown, *diagnosis.rank_slowdown)
    return "shares mend most of it, and stay exact" if left - 1 <= ENOUGH * (equal - 1) else ""


def way_back(
    windows: Sequence[RankWindow],
    *,
    threshold: float,
    trouble: Trouble = Trouble.NONE,
    global_batch: int = 0,
    smallest_share: int = 1,
    largest_share: int | None = None,
    usual: Mapping[Trouble, float] | None = None,
) -> Way | None:
    """Synchronous SGD again, where the trouble that led to a Local-SGD mode is over; None: stay.

    windows: of all ranks, in a Local-SGD mode; they need no steps in common. The steps that these ranks would do
    together are put together from the steps that each did alone, and judged as synchronous ones are. trouble: that led
    here; its S has to fall below half of the threshold's excess (1.05 for 1.1), any other only below the threshold;
    NONE: every one below half. A rank that stays slow does not matter where shares mend it nearly as well.
    global_batch: samples of a synchronous step; 0: as many as the ranks' local batches together. usual: S of troubles
    that are none below it, because the job, or the machines that it shares, have always had them.

    It has new shares only for ranks that are slow in most of their steps.
    """
    if (known := _together(windows, global_batch, threshold)) is None:
        return None
    work, transfer = known
    new_shares = None
    if work.has_slow_ranks:
        mended = _rebalance(work, 1.0, smallest_share, largest_share)
        new_shares = None if mended.refused else mended.shares
    if new_shares is not None:
        work = work.reshared(new_shares)
    found = _judge(work, threshold)
    lower = slight(threshold)
    limits = {each: lower if trouble in {each, Trouble.NONE} else threshold for each in found.effects}
    limits |= {each: max(limits[each], s) for each, s in (usual or {}).items()}
    (by_clock,) = _local_sgd(work, 1.0, transfer, counted=False)
    mended_seconds = found.step_seconds / found.effects[Trouble.COMPUTE]
    if found.step_seconds <= AS_GOOD * max(by_clock.step_seconds, mended_seconds):
        limits[Trouble.COMPUTE] = np.inf
    if any(effect >= limits[each] for each, effect in found.effects.items()):
        return None
    largest = max(found.effects.values())
    return Way(
        SYNC,
        SyncMode.SYNC,
        step_seconds=found.step_seconds,
        slowdown_after=largest,
        reason=f"a synchronous step would take {_ms(found.step_seconds)} now, {largest:.2f} × its time without "
        f"trouble; under Local-SGD it is {_ms(by_clock.step_seconds)}",
        shares=new_shares,
    )


def rarer(
    windows: Sequence[RankWindow], in_force: float, stayed: float, *, threshold: float, global_batch: int = 0
) -> float:
    """Seconds between two synchronisations in mode AsyncEDiT from now on, while it is needed: the rarer the longer it
    has been, until they cost no more than LASTING_SYNCHRONISING.

    windows, global_batch: as of `way_back`. in_force: seconds as the plan has them. stayed: that the trouble lasts.
    """
    if (known := _together(windows, global_batch, threshold)) is None:
        return in_force
    work, transfer = known
    own = work.even + work.garbage
    _, cost = _by_clock(own, transfer)
    seconds = min(_interval(own, cost / LASTING_SYNCHRONISING), round(RARER * stayed, 2))
    return seconds if seconds >= min(WORTH_A_PLAN * in_force, SYNC_SECONDS[1]) else in_force


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

    def changed(self, now: float) -> Hysteresis:
        """After a change of mode at `now`. One that comes long after its predecessor starts from `first` again."""
        is_flap = self.hold_seconds > 0 and now < self.changed_at + 4 * self.hold_seconds
        hold = min(2 * self.hold_seconds, self.longest) if is_flap else self.first
        return replace(self, hold_seconds=hold, changed_at=now)


def _together(windows: Sequence[RankWindow], global_batch: int, threshold: float) -> tuple[Work, float] | None:
    """Of ranks in a Local-SGD mode: what they would do in synchronous steps, and the seconds of an exchange; None: too
    little is known."""
    window = as_if_synchronous(windows, global_batch)
    work = None if window is None else Work.of(window, threshold)
    transfer = transfer_seconds(windows)
    return None if work is None or transfer is None else (work, transfer)


def _judge(work: Work, threshold: float, usual: Collection[Trouble] = ()) -> Diagnosis:
    now = work.step_seconds
    apart = _collected_apart(work.garbage)
    _, planned_garbage = _plan_garbage(apart)
    has_to_change = work.has_slow_ranks or work.is_uneven
    lost = {
        Trouble.GARBAGE: _waited_for(apart, work) - planned_garbage,
        Trouble.LENGTHS: work.longest(work.working) - work.longest(work.level),
        Trouble.COMPUTE: work.longest(work.level) - work.longest(work.paced) if has_to_change else 0.0,
        Trouble.VOLATILE: work.longest(work.paced) - work.steady_seconds,
        Trouble.COMMUNICATION: _grown_communication(work),
    }
    effects = {trouble: now / (now - min(max(0.0, seconds), 0.99 * now)) for trouble, seconds in lost.items()}
    main = max((each for each in effects if each not in usual), key=lambda each: effects[each])
    trouble = main if effects[main] >= threshold else Trouble.NONE
    lasting = max(MENDED_FOR_GOOD, key=lambda each: effects[each])
    if trouble is Trouble.NONE and effects[lasting] >= max(LITTLE, effects[Trouble.COMPUTE]):
        trouble = main = lasting
    return Diagnosis(
        trouble=trouble,
        slowdown=effects[main],
        culprits=work.culprits,
        evidence=_evidence(work, trouble, effects),
        step_seconds=now,
        exposed_seconds=work.exposed,
        rank_slowdown=work.rank_slowdown,
        effects=effects,
        window=work.window,
    )


def _grown_communication(work: Work) -> float:
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


def _evidence(work: Work, trouble: Trouble, effects: Mapping[Trouble, float]) -> tuple[str, ...]:
    ranked = ", ".join(f"{each} {effects[each]:.2f}" for each in sorted(effects, key=lambda each: -effects[each]))
    return (
        _words(work, trouble),
        f"a step takes {_ms(work.step_seconds)} over {len(work.own)} steps; S of each trouble by itself: {ranked}",
        *(_whatif_words(work) if trouble is Trouble.COMPUTE and work.culprits else ()),
    )


def _whatif_words(work: Work) -> tuple[str, ...]:
    """S_w of the slowest ranks, and what it would win to replace the culprits (arXiv 2505.05713); (): there is nothing
    that could be shared out among the ranks."""
    whatif = data_parallel.analyse(work.own, work.exposed)
    if whatif.decomposition is None:
        return ()
    by_rank = whatif.decomposition.by_replica
    largest = sorted(range(len(by_rank)), key=lambda rank: -by_rank[rank])[:NAMED]
    listed = ", ".join(f"rank {rank} {by_rank[rank]:.2f}" for rank in largest)
    gain = whatif.gain(data_parallel.replaced(work.culprits))
    return (
        f"simulated without stragglers: S {whatif.slowdown:.2f}; with every other rank ideal, S_w: {listed}; "
        f"the slow ones at their peers' pace: {gain:.2f} × as fast",
    )


def _words(work: Work, trouble: Trouble) -> str:
    match trouble:
        case Trouble.COMPUTE if work.culprits:
            slow = [f"rank {rank} {work.rank_slowdown[rank]:.2f} ×" for rank in work.culprits]
            more = f" and {len(slow) - NAMED} more" if len(slow) > NAMED else ""
            named = ", ".join(slow[:NAMED])
            return f"slow in their own work in most steps, at equal shares over their peers: {named}{more}"
        case Trouble.COMPUTE if work.differ:
            apart = max(work.rank_slowdown) / min(work.rank_slowdown)
            return f"the ranks' own work differs by {apart:.2f} × at equal shares"
        case Trouble.COMPUTE:
            return "no rank is slow any more, and the shares are uneven"
        case Trouble.VOLATILE:
            return (
                f"the last rank of a step takes {_ms(work.longest(work.paced))}, and no rank on average more than "
                f"{_ms(work.steady_seconds)}: slow ranks come and go"
            )
        case Trouble.COMMUNICATION:
            return (
                f"{_ms(work.exposed)} of a step are communication that no computation hides; the job's first steady "
                f"steps took {_ms(work.window.baseline_seconds)} altogether"
            )
        case Trouble.GARBAGE:
            waited = _waited_for(_collected_apart(work.garbage), work)
            return (
                f"garbage is collected for {_ms(float(work.garbage.mean()))} a step on each rank, and all wait for "
                f"{_ms(waited)}: ranks collect in different steps"
            )
        case Trouble.LENGTHS:
            return (
                f"own work follows the samples' cost: dealt evenly, the last rank of a step would take "
                f"{_ms(work.longest(work.level))} instead of {_ms(work.longest(work.working))}"
            )
        case Trouble.NONE:
            return "no trouble costs enough to be dealt with"


def _rebalance(
    work: Work, reference: float, smallest: int, largest: int | None, known: Mapping[int, float] | None = None
) -> Way:
    now = work.step_seconds
    unknown = Way(REBALANCE, SyncMode.SYNC, now, now / reference, "batch shares that fit the ranks")
    if not work.knows_samples:
        return replace(unknown, refused=NOT_STEERED)
    try:
        balance = shares.rebalance(
            levelled(work.window, work.window.samples),
            work.window.samples,
            costs=work.window.costs,
            minimum=smallest,
            maximum=largest,
            grain=work.window.share_grain,
            known=known,
        )
    except InputError as error:
        return replace(unknown, refused=str(error))
    after = now - (balance.seconds_now - balance.seconds_after)
    return Way(
        REBALANCE,
        SyncMode.SYNC,
        after,
        after / reference,
        f"shares {_listed(work.shares)} → {_listed(balance.shares)}: steps of {_ms(after)} instead of {_ms(now)}",
        shares=balance.shares,
        refused="" if balance.worthwhile else f"other shares would win only {balance.win:.1%}",
        least_win=balance.least_win,
    )


def _equal_shares(work: Work, reference: float) -> Way:
    """For ranks none of which is slow in most steps."""
    after = work.step_seconds
    way = Way(REBALANCE, SyncMode.SYNC, after, after / reference, "equal shares")
    if not work.knows_samples:
        return replace(way, refused=NOT_STEERED)
    equal = shares.equal(sum(work.shares), len(work.shares), work.window.share_grain)
    reshared = work.reshared(equal)
    after, shorter = reshared.step_seconds, 1.0 - reshared.own.max(axis=1) / work.own.max(axis=1)
    sure = min(shorter[0::2].mean(), shorter[1::2].mean()) >= shares.SURE_WIN
    return replace(
        way,
        step_seconds=after,
        slowdown_after=after / reference,
        reason=f"shares {_listed(work.shares)} → {_listed(equal)}: no rank is slow in most steps",
        shares=equal,
        refused="" if sure else "steps are shorter with other shares by luck, if at all",
    )


def _local_sgd(work: Work, reference: float, transfer: float, *, counted: bool) -> list[Way]:
    """By the clock (A-EDiT), and, where `counted` and the ranks are alike, by the number of steps (EDiT). `counted`: it
    is for a slow link."""
    own = work.even + work.garbage
    pace = own.mean(axis=0)
    level = None
    if work.is_uneven and work.knows_samples:
        level = shares.equal(sum(work.shares), len(pace), work.window.share_grain)
    free, cost = _by_clock(own, transfer)
    wanted = cost / SYNCHRONISING
    if counted:
        wanted = min(wanted, max(SOON_SECONDS, cost / SOON))
    seconds = _interval(own, wanted)
    after = free * (1 + cost / seconds)
    by_clock = Way(
        LOCAL_SGD,
        SyncMode.ASYNC_EDIT,
        after,
        after / reference,
        f"AsyncEDiT, synchronising every {seconds:g} s: no rank waits for a slower one in between",
        shares=level,
        sync_seconds=seconds,
    )
    allowed = [each for each in SYNC_EVERY if each * float(pace.max()) <= LONGEST_BETWEEN]
    if not counted or not allowed or pace.max() > ALIKE * pace.mean():
        return [by_clock]
    every = next((each for each in allowed if transfer <= SYNCHRONISING * each * pace.mean()), allowed[-1])
    rows = np.random.default_rng(0).integers(0, len(own), size=4 * every)  # a window may be shorter than an interval
    after = data_parallel.local_sgd_step_seconds(data_parallel.analyse(own[rows]), every, transfer)
    at_last = free * (1 + cost / _interval(own, cost / LASTING_SYNCHRONISING))  # by the clock, once it is as rare
    by_clock_will_do = price.outweighs_exact(work.step_seconds / reference, by_clock.slowdown_after) and after > at_last
    by_steps = Way(
        LOCAL_SGD,
        SyncMode.EDIT,
        after,
        after / reference,
        f"EDiT, synchronising every {every} steps: the ranks are alike",
        shares=level,
        sync_every=every,
        refused="AsyncEDiT will be as fast, and stays so should a rank get slow" if by_clock_will_do else "",
    )
    return [by_clock, by_steps]


def _by_clock(own: Seconds, transfer: float) -> tuple[float, float]:
    """Of ranks with this own work: seconds for a step's worth of samples between two synchronisations by the clock, and
    what each of these costs: the transfer, and the wait for the last rank's step in hand."""
    free = data_parallel.local_sgd_step_seconds(data_parallel.analyse(own), 1, 0.0, by_clock=True)
    return free, transfer + data_parallel.meeting_seconds(own.mean(axis=0))


def _interval(own: Seconds, wanted: float) -> float:
    """Seconds between two synchronisations by the clock: as wanted, within limits."""
    least, most = SYNC_SECONDS
    return round(min(most, max(least, wanted, STEPS_BETWEEN * float(own.mean(axis=0).max()))), 2)


def _planned_garbage(work: Work, reference: float, in_force: int) -> Way:
    """Under a plan that is in force only the script itself collects, and goes on to, however often the plan does."""
    apart = _collected_apart(work.garbage)
    every, cost = _plan_garbage(apart)
    together = work.longest(work.garbage - apart)
    after = work.longest(work.working) + cost + together + work.exposed
    return Way(
        PLAN_GARBAGE,
        SyncMode.SYNC,
        after,
        after / reference,
        f"garbage collection every {every} steps, on all ranks in the same step",
        garbage_every=every,
        least_win=price.LASTING_WIN,
        refused="garbage is collected by plan already, and the script collects beside it" if in_force else "",
    )


def _plan_garbage(garbage: Seconds) -> tuple[int, float]:
    """Steps between two collections, as often as the ranks collect by themselves, and what they cost a step then.

    All collect in the same step, so the longest pause counts, once. garbage: (steps, ranks). How often is the mean of
    what these steps show and of COLLECTS_EVERY, as if STEPS_BEFORE had been seen: a window is looked at because of its
    pauses, and a short one has many by luck.
    """
    if garbage.max() <= 0:
        return 1, 0.0
    pauses = _pauses(garbage)
    often = (float(pauses.sum()) + STEPS_BEFORE / COLLECTS_EVERY) / (garbage.size + STEPS_BEFORE)
    lengths = np.where(pauses, garbage, 0.0).sum(axis=0) / np.maximum(pauses.sum(axis=0), 1)
    return max(1, round(1.0 / often)), often * float(lengths.max()) + float(garbage[~pauses].sum()) / garbage.size


def _collected_apart(garbage: Seconds) -> Seconds:
    """Without the collections that all ranks do in the same step: nobody waits for those."""
    together = ((garbage >= PAUSE * garbage.max(axis=0)) & (garbage > 0)).all(axis=1, keepdims=True)
    return np.where(together, 0.0, garbage)


def _waited_for(garbage: Seconds, work: Work) -> float:
    """Seconds by which these collections lengthen a step."""
    return work.longest(work.own) - work.longest(work.own - garbage)


def _pauses(garbage: Seconds) -> npt.NDArray[np.bool_]:
    return np.asarray((garbage >= PAUSE * garbage.max()) & (garbage > 0))


def _balanced_lengths(work: Work, reference: float, in_force: SequenceCost | None) -> Way:
    """By the cost that fits these steps. Another cost leaves as much uneven as the one in force leaves of what it
    balances, since single sequences may outweigh the others; without one, the win is an upper bound."""
    cost, level, refused = work.window.sequence_cost, work.level, ""
    assert cost is not None
    if work.window.squares is None:
        refused = "the script's loader does not know how long samples are: give its dataloader their lengths"
    elif in_force is not None:
        left = _unevenness(work, in_force)
        level = level * left
        if np.abs(_unevenness(work, cost) - left).max(axis=1).mean() <= SAME_COST:
            refused = "samples are balanced by this cost already: single ones outweigh the others"
    after = work.longest(level) + work.longest(work.own) - work.longest(work.working) + work.exposed
    return Way(
        BALANCE_LENGTHS,
        SyncMode.SYNC,
        after,
        after / reference,
        "samples dealt so that every rank's cost the same: one takes {:.3g} s + {:.3g} s × its length + {:.3g} s × its "
        "length²".format(*cost.terms),
        sequence_cost=cost.terms,
        refused=refused,
        least_win=price.LASTING_WIN,
    )


def _unevenness(work: Work, cost: SequenceCost) -> Seconds:
    """Of the ranks' parts of each step, by this cost of a sequence: 1 is as much as a rank's share says."""
    window = work.window
    assert window.lengths is not None
    assert window.squares is not None
    weight = cost.of_sums(window.samples, window.lengths, window.squares)
    return np.asarray(weight / fair_parts(weight, window.samples))


def _in_order(found: Sequence[Way], slowdown: float, threshold: float) -> tuple[Way, ...]:
    """The one to prefer first, then what could be taken instead, then what is refused or not worth its change."""
    choice = price.choose([way.option() for way in found], slowdown, 0.0, mended=threshold)
    judged = [
        (priced is choice.chosen, way if priced.due else replace(way, refused=way.refused or priced.reason))
        for way, priced in zip(found, choice.prices, strict=True)
    ]
    judged.sort(key=lambda each: (not each[0], bool(each[1].refused), each[1].step_seconds))
    return tuple(way for _, way in judged)


def _listed(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values[:16]))}{', …' if len(values) > 16 else ''}]"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
