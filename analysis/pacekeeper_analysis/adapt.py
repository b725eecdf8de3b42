"""Training that adapts: what holds a job back, and which ways to train would win what.

    found = diagnose(windows, threshold)                 # of a job in mode Sync: its trouble and S
    for way in ways(found, threshold=threshold): ...     # best first: each priced, none applied
    plan = way.applied_to(plan)
    way_back(windows, threshold=threshold, trouble=…)    # of a job in a Local-SGD mode: back to Sync?

Everything is pure: windows in, proposals out. `price.choose` takes `way.option()` beside the dearer remedies, and a
`Hysteresis` says when the mode may change again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from . import price, shares
from .diagnose import straggler
from .diagnose.straggler import MINIMAL_STEPS, PERSISTENT, Window
from .errors import InputError
from .plan import Plan, SyncMode
from .reports import RankWindow
from .whatif import data_parallel

REBALANCE = "Rebalance"
LOCAL_SGD = "LocalSGD"
PLAN_GARBAGE = "PlanGarbage"
BALANCE_LENGTHS = "BalanceLengths"
SYNC = "Sync"

SYNCHRONISING = 0.03
"""What synchronisations may cost: the shortest interval is chosen that keeps them within this part of the time."""
SYNC_SECONDS = (0.5, 30.0)
SYNC_EVERY = (4, 8, 16, 32, 64, 128)
STEPS_BETWEEN = 4
"""Steps that the slowest rank does between two synchronisations at least."""
ALIKE = 1.05
"""Ranks none of which takes longer than this many times the mean are alike: equal numbers of steps suit them."""
HIDDEN = 0.5
"""Part of a step's own work that hides a transfer: most of a backward pass, which is two thirds of the work."""
EXCEPTIONAL = 0.1
"""Unusually long steps are exceptions, and not judged, while they are at most this part of the window's."""
AS_GOOD = 1.1
"""A slow rank does not bar the way back where shares mend it to within this many times Local-SGD's steps: less than
`price.NEARLY`, so that it does not lead away again at once."""
DRAWS = 256
"""Synchronous steps that are put together from the steps of ranks that do not wait for each other."""

Seconds = npt.NDArray[np.float64]


class Trouble(StrEnum):
    """Why the steps of a synchronous job take longer than they need."""

    NONE = "None"
    COMPUTE = "Compute"  # some rank is persistently slow in its own work, or the shares do not fit the ranks
    VOLATILE = "Volatile"  # slow ranks come and go
    COMMUNICATION = "Communication"  # steps outlast the ranks' own work by more than in the job's first steady steps
    GARBAGE = "Garbage"  # garbage collections of different ranks fall into different steps, and all wait for each
    LENGTHS = "Lengths"  # cost follows the samples (sequence lengths), which are dealt unevenly


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
    window: Window = field(repr=False, compare=False)  # the common steps


@dataclass(frozen=True)
class Way:
    """A way to train from now on, and what it is expected to win.

    `shares`, `sync_every`, `sync_seconds` and `garbage_every` are the plan's fields; None: as the plan has it.
    """

    remedy: str  # Rebalance, LocalSGD, PlanGarbage, BalanceLengths (only ever advised), or Sync (the way back)
    mode: SyncMode
    step_seconds: float  # expected for one step's worth of samples of the whole job
    slowdown_after: float  # over the same reference as Diagnosis.slowdown; may be below 1 (noise is won, too)
    reason: str
    shares: tuple[int, ...] | None = None
    sync_every: int | None = None
    sync_seconds: float | None = None
    garbage_every: int | None = None
    refused: str = ""  # why a plan cannot, or should not, take it; "": it may

    def option(self, refused: str = "") -> price.Option:
        """For `price.choose`: a free live change. refused: a further reason why it may not be taken."""
        exact = self.mode is SyncMode.SYNC
        return price.Option(self.remedy, 0.0, self.slowdown_after, self.refused or refused, exact)

    def applied_to(self, plan: Plan) -> Plan:
        """The plan's next version, with this way to train."""
        fields = ("shares", "sync_every", "sync_seconds", "garbage_every")
        told: dict[str, Any] = {name: getattr(self, name) for name in fields if getattr(self, name) is not None}
        return replace(plan, version=plan.version + 1, sync_mode=self.mode, **told)


def diagnose(windows: Sequence[RankWindow], threshold: float) -> Diagnosis | None:
    """What costs the synchronous job most.

    `Trouble.NONE` where no trouble has an S of `threshold` or more. None where the windows cannot tell: ranks are
    missing, fewer than 8 common steps since the shares last changed, or a Local-SGD mode is in force.
    """
    if any(window.sync_mode not in {"", SyncMode.SYNC} for window in windows):
        return None
    window = straggler.align(windows)
    if window is None or not _is_sound(window):
        return None
    work = _Work.of(window, threshold)
    return None if work is None else _judge(work, threshold)


def ways(
    diagnosis: Diagnosis, *, threshold: float, smallest_share: int = 1, largest_share: int | None = None
) -> tuple[Way, ...]:
    """The ways to train that fit the trouble, priced: those to take first, best first, then those that are refused.

    Exact synchronous SGD (other shares, planned garbage collection) comes before Local-SGD where it leaves a slowdown
    below `threshold` or mends nearly as well. Where there is no trouble: shares, if they are uneven and no longer fit.
    smallest_share, largest_share: samples that a rank can take in a step (memory).
    """
    work = _Work.of(diagnosis.window, threshold)
    if work is None:
        return ()
    trouble, found = diagnosis.trouble, list[Way]()
    reference = diagnosis.step_seconds / diagnosis.slowdown
    if trouble in {Trouble.COMPUTE, Trouble.VOLATILE} or work.is_uneven:
        found.append(_rebalance(work, reference, smallest_share, largest_share))
    if trouble in {Trouble.VOLATILE, Trouble.COMMUNICATION} or (
        trouble is Trouble.COMPUTE and (work.culprits or work.differ)
    ):
        found += _local_sgd(work, reference, work.exposed, counted=trouble is Trouble.COMMUNICATION)
    if trouble is Trouble.GARBAGE:
        found.append(_planned_garbage(work, reference))
    if trouble is Trouble.LENGTHS:
        found.append(_balanced_lengths(work, reference))
    return _in_order(found, diagnosis.slowdown, threshold)


def way_back(
    windows: Sequence[RankWindow],
    *,
    threshold: float,
    trouble: Trouble = Trouble.NONE,
    global_batch: int = 0,
    smallest_share: int = 1,
    largest_share: int | None = None,
) -> Way | None:
    """Synchronous SGD again, where the trouble that led to a Local-SGD mode is over; None: stay.

    windows: of all ranks, in a Local-SGD mode; they need no steps in common. The steps that these ranks would do
    together are put together from the steps that each did alone, and judged as synchronous ones are. trouble: that led
    here; its S has to fall below half of the threshold's excess (1.05 for 1.1), any other only below the threshold;
    NONE: every one below half. A rank that stays slow does not matter where shares mend it nearly as well.
    global_batch: samples of a synchronous step; 0: as many as the ranks' local batches together.
    """
    window = _as_if_synchronous(windows, global_batch)
    work = None if window is None else _Work.of(window, threshold)
    transfer = _transfer_seconds(windows)
    if work is None or transfer is None:
        return None
    mended = _rebalance(work, 1.0, smallest_share, largest_share)
    new_shares = None if mended.refused else mended.shares
    if new_shares is not None:
        work = work.reshared(new_shares)
    found = _judge(work, threshold)
    lower = 1.0 + (threshold - 1.0) / 2
    limits = {each: lower if trouble in {each, Trouble.NONE} else threshold for each in found.effects}
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


@dataclass(frozen=True)
class _Work:
    """The ranks' own work in synchronous steps, with one trouble after the other taken out. Arrays: (steps, ranks)."""

    window: Window
    own: Seconds  # as it is
    working: Seconds  # without garbage collections
    level: Seconds  # … and with samples that cost each rank the same for its share
    even: Seconds  # … and with equal shares
    paced: Seconds  # … and with the culprits at their peers' pace
    usual: npt.NDArray[np.bool_]  # (steps,): not exceptionally long
    shares: tuple[int, ...]
    culprits: tuple[int, ...]
    differ: bool  # the ranks' paces, persistently; without culprits where it is not a few that are slower than the rest
    rank_slowdown: tuple[float, ...]
    exposed: float

    @classmethod
    def of(cls, window: Window, threshold: float) -> _Work | None:
        """None where too few steps have the present shares."""
        knows_samples = bool(window.samples.min() > 0)
        samples = window.samples if knows_samples else np.ones_like(window.samples)
        working = _without_garbage(window)
        level = working if window.weight is None else _levelled(working, window.weight, samples)
        costs = shares.fit(level, samples)
        even = level / costs.seconds(samples) * costs.seconds(samples.mean(axis=1, keepdims=True))

        now = _since_shares_changed(window.samples)
        if now.sum() < MINIMAL_STEPS:
            return None
        relative = even[now] / straggler.peers_median(even[now])
        culprits = np.flatnonzero((relative >= threshold).mean(axis=0) >= PERSISTENT)
        paced = even[now].copy()
        common = 1.0 / np.mean(1.0 / paced, axis=1, keepdims=True)  # that the best shares come near to
        differ = bool(((paced / common >= threshold).mean(axis=0) >= PERSISTENT).any())
        if len(culprits):
            paced[:, culprits] = np.median(np.delete(paced, culprits, axis=1), axis=1, keepdims=True)
        elif differ:
            paced *= np.median(common / paced, axis=0)
        exposed = np.min(window.step_seconds[now] - window.compute_seconds[now], axis=1)
        return cls(
            window=window,
            own=window.compute_seconds[now],
            working=working[now],
            level=level[now],
            even=even[now],
            paced=paced,
            usual=_usual(working[now].max(axis=1)),
            shares=tuple(int(n) for n in window.samples[-1]),
            culprits=tuple(int(rank) for rank in culprits),
            differ=differ,
            rank_slowdown=tuple(float(value) for value in np.median(relative, axis=0)),
            exposed=max(0.0, float(np.median(exposed))),
        )

    @property
    def knows_samples(self) -> bool:
        return min(self.shares) > 0

    @property
    def is_uneven(self) -> bool:
        """More than the remainder of an equal division would make them."""
        return max(self.shares) - min(self.shares) > 1

    @property
    def garbage(self) -> Seconds:
        return self.own - self.working

    def longest(self, seconds: Seconds) -> float:
        """Mean over the usual steps of the last rank's time."""
        return float(seconds[self.usual].max(axis=1).mean())

    def step_seconds(self) -> float:
        return self.longest(self.own) + self.exposed

    def reshared(self, new: tuple[int, ...]) -> _Work:
        """The same steps with other shares."""
        costs = shares.fit(self.working, np.broadcast_to(self.shares, self.working.shape))
        factor = costs.seconds(new) / costs.seconds(self.shares)
        return replace(
            self,
            own=self.working * factor + self.garbage,
            working=self.working * factor,
            level=self.level * factor,
            shares=new,
        )


def _judge(work: _Work, threshold: float) -> Diagnosis:
    now = work.step_seconds()
    _, planned_garbage = _plan_garbage(work.garbage)
    has_to_change = bool(work.culprits) or work.differ or work.is_uneven
    steady = float(work.paced[work.usual].mean(axis=0).max())
    lost = {
        Trouble.GARBAGE: work.longest(work.own) - work.longest(work.working) - planned_garbage,
        Trouble.LENGTHS: work.longest(work.working) - work.longest(work.level),
        Trouble.COMPUTE: work.longest(work.level) - work.longest(work.paced) if has_to_change else 0.0,
        Trouble.VOLATILE: work.longest(work.paced) - steady,
        Trouble.COMMUNICATION: _grown_communication(work, now, steady),
    }
    effects = {trouble: now / (now - min(max(0.0, seconds), 0.99 * now)) for trouble, seconds in lost.items()}
    main = max(effects, key=lambda trouble: effects[trouble])
    trouble = main if effects[main] >= threshold else Trouble.NONE
    return Diagnosis(
        trouble=trouble,
        slowdown=effects[main],
        culprits=work.culprits,
        evidence=_evidence(work, trouble, effects, now),
        step_seconds=now,
        exposed_seconds=work.exposed,
        rank_slowdown=work.rank_slowdown,
        effects=effects,
        window=work.window,
    )


def _grown_communication(work: _Work, now: float, own_work: float) -> float:
    """By how much exposed communication has grown since the job's first steady steps, of which only the whole is known.

    0 where the own work alone outlasts those steps: then it is that which has grown, and nothing tells them apart.
    """
    first = work.window.baseline_seconds
    if first <= own_work:
        return 0.0
    return min(work.exposed - (first - own_work), now - first)


def _evidence(work: _Work, trouble: Trouble, effects: Mapping[Trouble, float], now: float) -> tuple[str, ...]:
    steps, first = len(work.own), work.window.baseline_seconds
    slow = [f"rank {rank} {work.rank_slowdown[rank]:.2f} ×" for rank in work.culprits]
    culprits = ", ".join(slow[:8]) + (f" and {len(slow) - 8} more" if len(slow) > 8 else "")
    words = {
        Trouble.NONE: "no trouble costs enough to be dealt with",
        Trouble.COMPUTE: f"slow in their own work in most steps, at equal shares over their peers: {culprits}"
        if work.culprits
        else f"the ranks' own work differs by {max(work.rank_slowdown) / min(work.rank_slowdown):.2f} × at equal shares"
        if work.differ
        else "no rank is slow any more, and shares are uneven",
        Trouble.VOLATILE: f"the last rank of a step takes {_ms(work.longest(work.paced))}, and no rank on average more "
        f"than {_ms(float(work.paced[work.usual].mean(axis=0).max()))}: slow ranks come and go",
        Trouble.COMMUNICATION: f"{_ms(work.exposed)} of a step are communication that no computation hides; the job's "
        f"first steady steps took {_ms(first)} altogether",
        Trouble.GARBAGE: f"garbage is collected for {_ms(float(work.garbage.mean()))} a step on each rank, and all "
        f"wait for {_ms(work.longest(work.own) - work.longest(work.working))}: ranks collect in different steps",
        Trouble.LENGTHS: f"own work follows the samples' cost: dealt evenly, the last rank of a step would take "
        f"{_ms(work.longest(work.level))} instead of {_ms(work.longest(work.working))}",
    }
    ranked = sorted(effects, key=lambda each: -effects[each])
    costs = ", ".join(f"{each} {effects[each]:.2f}" for each in ranked)
    return words[trouble], f"a step takes {_ms(now)} over {steps} steps; S of each trouble by itself: {costs}"


def _rebalance(work: _Work, reference: float, smallest: int, largest: int | None) -> Way:
    now = work.step_seconds()
    unknown = Way(REBALANCE, SyncMode.SYNC, now, now / reference, "batch shares that fit the ranks")
    if not work.knows_samples:
        return replace(unknown, refused="the script does not use the library: its shares are not known")
    try:
        balance = shares.rebalance(
            _without_garbage(work.window), work.window.samples, minimum=smallest, maximum=largest
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
    )


def _local_sgd(work: _Work, reference: float, transfer: float, *, counted: bool) -> list[Way]:
    """By the clock (A-EDiT), and, where `counted` and the ranks are alike, by the number of steps (EDiT)."""
    own = work.even + work.garbage
    pace = own.mean(axis=0)
    level = shares.equal(sum(work.shares), len(pace)) if work.is_uneven and work.knows_samples else None
    cost = transfer + data_parallel.meeting_seconds(pace)
    least, most = SYNC_SECONDS
    seconds = round(min(most, max(least, cost / SYNCHRONISING, STEPS_BETWEEN * float(pace.max()))), 2)
    whatif = data_parallel.analyse(own)
    free = data_parallel.local_sgd_step_seconds(whatif, 1, 0.0, by_clock=True)
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
    if not counted or pace.max() > ALIKE * pace.mean():
        return [by_clock]
    every = next((each for each in SYNC_EVERY if transfer <= SYNCHRONISING * each * pace.mean()), SYNC_EVERY[-1])
    rows = np.random.default_rng(0).integers(0, len(own), size=4 * every)  # a window may be shorter than an interval
    after = data_parallel.local_sgd_step_seconds(data_parallel.analyse(own[rows]), every, transfer)
    by_steps = Way(
        LOCAL_SGD,
        SyncMode.EDIT,
        after,
        after / reference,
        f"EDiT, synchronising every {every} steps: the ranks are alike",
        shares=level,
        sync_every=every,
        refused=""
        if after <= (1 - price.MINIMAL_WIN) * by_clock.step_seconds
        else "AsyncEDiT is as fast, and stays so should a rank get slow",
    )
    return [by_clock, by_steps]


def _planned_garbage(work: _Work, reference: float) -> Way:
    every, cost = _plan_garbage(work.garbage)
    after = work.longest(work.working) + cost + work.exposed
    return Way(
        PLAN_GARBAGE,
        SyncMode.SYNC,
        after,
        after / reference,
        f"garbage collection every {every} steps, on all ranks in the same step",
        garbage_every=every,
    )


def _plan_garbage(garbage: Seconds) -> tuple[int, float]:
    """Steps between two collections, as often as the ranks collect by themselves, and what they cost a step then.

    All collect in the same step, so the longest pause counts, once. garbage: (steps, ranks).
    """
    if garbage.max() <= 0:
        return 1, 0.0
    pauses = garbage >= 0.25 * garbage.max()
    often = float(pauses.mean())
    lengths = np.where(pauses, garbage, 0.0).sum(axis=0) / np.maximum(pauses.sum(axis=0), 1)
    return max(1, round(1.0 / often)), often * float(lengths.max()) + float(garbage[~pauses].sum()) / garbage.size


def _balanced_lengths(work: _Work, reference: float) -> Way:
    after = work.longest(work.level) + work.longest(work.own) - work.longest(work.working) + work.exposed
    return Way(
        BALANCE_LENGTHS,
        SyncMode.SYNC,
        after,
        after / reference,
        "samples dealt so that every rank's cost the same",
        refused="a plan cannot change how the script deals its samples: have its loader balance them by their cost",
    )


def _in_order(found: Sequence[Way], slowdown: float, threshold: float) -> tuple[Way, ...]:
    """The one to prefer first, then what could be taken instead, then what is refused or not worth its change."""
    choice = price.choose([way.option() for way in found], slowdown, 0.0, mended=threshold)
    judged = [
        (priced is choice.chosen, way if priced.due else replace(way, refused=way.refused or priced.reason))
        for way, priced in zip(found, choice.prices, strict=True)
    ]
    judged.sort(key=lambda each: (not each[0], bool(each[1].refused), each[1].step_seconds))
    return tuple(way for _, way in judged)


def _as_if_synchronous(windows: Sequence[RankWindow], global_batch: int) -> Window | None:
    """Synchronous steps put together at random from the steps that each rank did alone; None: too little is known.

    A transfer shows in a synchronous step as far as the backward pass cannot hide it, and as far as it did in the
    job's first steady steps.
    """
    by_rank = sorted(windows, key=lambda window: window.rank)
    if not by_rank or [window.rank for window in by_rank] != list(range(len(by_rank))):
        return None
    if min(len(window.steps) for window in by_rank) < MINIMAL_STEPS:
        return None
    transfer = _transfer_seconds(by_rank)
    if transfer is None or not all(_are_sound(window.compute_seconds, window.step_seconds) for window in by_rank):
        return None
    random = np.random.default_rng(0)
    rows = [random.integers(0, len(window.steps), size=DRAWS) for window in by_rank]

    def drawn(values: Sequence[Sequence[float]]) -> Seconds:
        return np.stack([np.asarray(of, dtype=np.float64)[row] for of, row in zip(values, rows, strict=True)], axis=1)

    compute = drawn([window.compute_seconds for window in by_rank])
    own, first = float(np.median(compute)), straggler.baseline(by_rank)
    exposed = max(transfer - HIDDEN * own, min(transfer, max(0.0, first - own)))
    recorded = all(window.garbage_seconds for window in by_rank)
    weighed = all(window.weight for window in by_rank)
    newest = np.array([window.samples[-1] for window in by_rank], dtype=np.int64)
    if newest.min() > 0 and global_batch >= len(newest) and global_batch != newest.sum():
        of_a_step = np.array(shares.equal(global_batch, len(newest)))
        compute, newest = compute * (of_a_step / newest), of_a_step
    return Window(
        steps=np.arange(DRAWS),
        compute_seconds=compute,
        samples=np.broadcast_to(newest, compute.shape),
        step_seconds=np.repeat(compute.max(axis=1, keepdims=True) + exposed, len(by_rank), axis=1),
        garbage_seconds=drawn([window.garbage_seconds for window in by_rank]) if recorded else None,
        weight=drawn([window.weight for window in by_rank]) if weighed else None,
        baseline_seconds=first,
    )


def _transfer_seconds(windows: Sequence[RankWindow]) -> float | None:
    """What a synchronisation takes once all ranks are there; None: there were too few.

    Whoever comes last waits for nobody, so its time inside is the transfer alone. Synchronisations are counted from
    the newest; a rank that is one ahead changes little, as they are much alike.
    """
    known = min((len(window.transfers) for window in windows), default=0)
    if known < 2:
        return None
    inside = np.array([window.transfers[-known:] for window in windows], dtype=np.float64)
    return float(np.median(inside.min(axis=0)))


def _levelled(working: Seconds, weight: Seconds, samples: npt.NDArray[np.int64]) -> Seconds:
    """Own work as it would be, had each step's cost units been dealt in proportion to the ranks' samples."""
    if weight.min() <= 0:
        return working
    costs = shares.fit(working, weight)
    even = weight.sum(axis=1, keepdims=True) * samples / samples.sum(axis=1, keepdims=True)
    return np.where(costs.identified, working * costs.seconds(even) / costs.seconds(weight), working)


def _without_garbage(window: Window) -> Seconds:
    garbage = 0.0 if window.garbage_seconds is None else window.garbage_seconds
    return np.maximum(window.compute_seconds - garbage, 0.1 * window.compute_seconds)


def _since_shares_changed(samples: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(steps,): those with the present shares; all, where the samples vary by design from step to step."""
    changes = (np.diff(samples, axis=0) != 0).any(axis=1)
    since = np.ones(len(samples), dtype=bool)
    if changes.any() and changes.mean() < 0.5:
        since[: int(np.flatnonzero(changes)[-1]) + 1] = False
    return since


def _usual(seconds: Seconds) -> npt.NDArray[np.bool_]:
    """Which steps are not exceptionally long (a hiccup, a pause that nobody recorded). seconds: (steps,)."""
    median = float(np.median(seconds))
    spread = 1.4826 * float(np.median(np.abs(seconds - median)))
    long = seconds > median + max(6.0 * spread, 0.15 * median)
    return ~long if long.sum() <= max(1.0, EXCEPTIONAL * len(seconds)) else np.ones_like(long)


def _is_sound(window: Window) -> bool:
    return _are_sound(window.compute_seconds, window.step_seconds) and bool(window.samples.min() >= 0)


def _are_sound(*seconds: npt.ArrayLike) -> bool:
    return all(bool(np.all(np.isfinite(each)) and np.all(np.asarray(each) > 0)) for each in seconds)


def _listed(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values[:16]))}{', …' if len(values) > 16 else ''}]"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
