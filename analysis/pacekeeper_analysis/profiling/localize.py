"""Finds the function, the ranks and the class of a fault in the patterns of all ranks. It runs in the operator.

All values are in seconds per step. G(f, r) is the time that rank r spends in function f, less the smaller one of its
peers' median and its own early steps: the seconds that it would save. (PerfTracker, arXiv 2506.08528, compares shares
of the time, but a share falls if anything else grows.) A job's excess has three parts, each found where it appears:

- one rank's own work compared with its peers': they wait for it;
- own work that has grown on all ranks since their early steps, at once, or on each in turn: then all wait for it;
- waits that even the rank that waits least did not have before: the transfer itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ..failures.finding import FaultClass, Finding, Signal, SignalKind
from ..protocol.decoding import MaxLength, Truncated, Within
from . import setup as setups
from .pattern import MAX_FUNCTION_NAME_LENGTH, TimeOwner
from .table import FunctionStatistics, PatternTable, read_table

MIN_SUSPECT_SPREADS = 5.0
"""Σ|Δ| over the spread of the peers (1.48 of their median absolute deviation, at least MIN_PEER_SPREAD)."""
MIN_PEER_SPREAD = 0.02
MIN_GROWTH_SPREAD = 0.01
"""Spread if ranks are compared with their own early steps: the middle one of many differs by less."""
MIN_NAMED_EXCESS_SHARE = 0.25
"""Share of the excess below which a function is not named."""
MIN_EXPLAINED_SHARE = 0.5
"""Share of the excess that an explanation must cover. Otherwise the result is "unknown"."""
MIN_EXCESS_STEP_SHARE = 0.03
"""Share of a step below which there is no excess to explain."""
MIN_GROWTH_STANDARD_ERRORS = 5.0
"""Standard errors from which on a function has grown."""
MIN_ALIKE_GROWN_SHARE = 0.6
"""Share of the other functions' time that has grown if the machine is slow, and not one function."""
MIN_GROWN_WITH_OTHERS_SHARE = 0.25
"""Share of the mean growth from which on a function has grown with the others."""
MIN_JOINT_GROWTH_SHARE = 0.4
"""Share of the mean growth by which all functions but the one with the largest growth must have grown.

It means that they grew alike. One function that grows much raises the mean, and others differ by chance if there are
few samples.
"""
MIN_LENGTH_CORRELATION = 0.7
"""Correlation of a rank's own work with its samples' lengths."""
LIBRARY_PREFIX = "torch/"
"""Prefix of library functions. Slow computation there comes from the setup, if that has changed."""
CPU_LIMIT_ADVICE = "raise the CPU limit of the worker, or remove it"
MACHINE_FAULTS = frozenset({FaultClass.HARDWARE, FaultClass.CONFIGURATION})
MAX_EXPLANATIONS = 8
MAX_FUNCTIONS_NAMED = 3
"""Upper limit of functions that a sentence names."""
MAX_RANKS_COMPARED_EXACTLY = 64
"""Upper limit of ranks for which each rank is compared with the others without itself."""


Ranks = Annotated[tuple[Annotated[int, Within(0)], ...], MaxLength(1000)]
Seconds = Annotated[float, Within(0, 1e6)]
Part = Annotated[float, Within(0, 1)]
Remarks = Annotated[tuple[Annotated[str, Truncated(2048)], ...], MaxLength(1000)]


@dataclass(frozen=True)
class Explanation:
    """One cause of a part of the excess."""

    finding: Finding
    function: Annotated[str, MaxLength(MAX_FUNCTION_NAME_LENGTH)]  # the named function; "": none
    ranks: Ranks  # affected ranks; (): all
    saved_seconds: Seconds  # per step
    explained: Part  # of the job's excess


@dataclass(frozen=True)
class Localization:
    """The result of a profile window. `finding` is Unknown if less than half of the excess is explained."""

    finding: Finding
    explanations: Annotated[tuple[Explanation, ...], MaxLength(MAX_EXPLANATIONS)] = ()  # the largest saving first
    step_seconds: Seconds = 0.0
    excess_seconds: Seconds = 0.0  # per step
    explained: Part = 0.0  # of the excess
    reported: Annotated[int, Within(0)] = 0  # number of ranks whose patterns arrived
    expected: Annotated[int, Within(0)] = 0
    remarks: Remarks = ()  # for people: what is missing, and settings that are always slow
    usual: Ranks = ()  # ranks like most others, for comparison
    suspects: Ranks = ()


def localize_fault(answers: Iterable[tuple[int, bytes]], expected: int) -> Localization:
    """Localize the fault.

    `answers` are by rank, as sent (`pattern.ProfileAnswer`). `expected` is the number of ranks.
    """
    return localize_in_table(read_table(answers), expected)


def localize_in_table(table: PatternTable, expected: int) -> Localization:
    """Localize the fault in a table of patterns."""
    reported = len(table.ranks)
    remarks = _build_remarks(table, expected)
    if reported == 0:
        unanswered = Finding(FaultClass.UNKNOWN, "", advice="no rank has answered: request another window by hand")
        return Localization(unanswered, expected=expected, remarks=remarks)
    view = _TableView(table)
    base = Localization(
        Finding(FaultClass.UNKNOWN, ""),
        step_seconds=view.step,
        excess_seconds=view.excess,
        reported=reported,
        expected=expected,
        remarks=remarks,
        usual=view.usual_ranks,
    )
    if view.excess < MIN_EXCESS_STEP_SHARE * view.step:
        return replace(base, finding=_build_no_excess_finding(view))
    slow_ranks, common_growth, throttled = (
        _explain_slow_ranks(view),
        _explain_common_growth(view),
        _find_throttled_rows(view),
    )
    machine_slow = bool(throttled) or any(e.finding.fault in MACHINE_FAULTS for e in (*slow_ranks, *common_growth))
    # If ranks are missing, the others may wait for one of them.
    transfer = (
        _explain_transfer(view, throttled, in_turn=bool(common_growth) or not throttled)
        if reported == expected or machine_slow
        else []
    )
    consequences = transfer if machine_slow else []  # delayed CPUs delay transfers, too
    explanations = sorted(
        [*slow_ranks, *common_growth, *transfer], key=lambda e: (e in consequences, -e.saved_seconds)
    )[:MAX_EXPLANATIONS]
    explained = max((e.explained for e in slow_ranks), default=0.0) + sum(
        e.explained for e in (*common_growth, *transfer)
    )
    explained = min(explained, 1.0)
    suspects = tuple(dict.fromkeys(rank for explanation in explanations for rank in explanation.ranks))
    finding = (
        explanations[0].finding
        if explanations and explained >= MIN_EXPLAINED_SHARE
        else _build_unknown_finding(view, explanations, explained)
    )
    return replace(base, finding=finding, explanations=tuple(explanations), explained=explained, suspects=suspects)


def describe_localization(localization: Localization) -> tuple[str, ...]:
    """Describe the result for people: the largest saving first, its part of the excess, and what is missing."""
    causes = tuple(
        f"{e.finding.fault}: {e.finding.culprit}; without it a step would take {e.saved_seconds:.3f} s less "
        f"({e.explained:.0%} of the excess). {'; '.join(signal.message for signal in e.finding.signals)}"
        for e in localization.explanations
    )
    overview = (
        f"in a profile window of {localization.reported} ranks a step took {localization.step_seconds:.3f} s, "
        f"{localization.excess_seconds:.3f} s more than usual; {localization.explained:.0%} of that is explained",
    )
    return (*overview, *causes, *localization.remarks)


class _TableView:
    """The table, with the derived values that all three explanations need."""

    def __init__(self, table: PatternTable) -> None:
        self.table = table = _scale_table_to_equal_shares(table)
        waits = table.owners == TimeOwner.COLLECTIVE
        self.own = ~waits
        now, early = table.now, table.early
        self.known = np.isfinite(early.step_seconds)
        """Ranks whose early steps are known."""
        self.has_early = 2 * self.known.sum() >= len(table.ranks)
        self.work = (now.step_seconds - now.seconds[:, waits].sum(axis=1)) * _compute_share_factors(now)
        self.early_work = (early.step_seconds - early.seconds[:, waits].sum(axis=1)) * _compute_share_factors(early)
        self.peers_work = _compute_others_median(self.work[:, None].astype(np.float32))[:, 0]
        self.step = float(np.median(now.step_seconds))
        ahead = self.work - self.peers_work if len(table.ranks) > 1 else np.zeros(1)
        self.ahead: NDArray[np.float64] = ahead
        """Seconds of each rank's own work beyond its peers'."""
        self.early_step = float(np.median(early.step_seconds[self.known])) if self.has_early else self.step
        self.grown = float(np.median((self.work - self.early_work)[self.known])) if self.has_early else 0.0
        """Growth of the middle rank's own work since its early steps."""
        self.waited = self._find_min_wait_growth(waits)
        self.excess = max(0.0, float(ahead.max(initial=0.0)), self.step - self.early_step)

    @property
    def usual_ranks(self) -> tuple[int, ...]:
        order = np.argsort(np.abs(self.ahead), kind="stable")
        return tuple(int(self.table.ranks[row]) for row in order[:2])

    def _find_min_wait_growth(self, waits: NDArray[np.bool_]) -> float:
        """Return the growth of the waits, per step, of the rank that waits least since the early steps."""
        if not self.has_early:
            return 0.0
        now, early = self.table.now.seconds[:, waits].sum(axis=1), self.table.early.seconds[:, waits].sum(axis=1)
        return max(0.0, float(now.min()) - float(early[self.known].min()))


def _scale_table_to_equal_shares(table: PatternTable) -> PatternTable:
    """Scale own work as if each rank had the same number of samples.

    Waits stay as they are: shares that fit slow ranks hide them there.
    """
    return replace(table, now=_rescale_statistics(table, table.now), early=_rescale_statistics(table, table.early))


def _rescale_statistics(table: PatternTable, statistics: FunctionStatistics) -> FunctionStatistics:
    factor = np.where(table.owners == TimeOwner.COLLECTIVE, 1.0, _compute_share_factors(statistics)[:, None]).astype(
        np.float32
    )
    return replace(
        statistics,
        seconds=statistics.seconds * factor,
        errors=statistics.errors * factor,
        busy=statistics.busy * factor,
        spread=statistics.spread * factor,
    )


def _compute_share_factors(statistics: FunctionStatistics) -> NDArray[np.float64]:
    """Return for each rank an equal share over its own share. 1 if shares are not known."""
    samples = statistics.samples[np.isfinite(statistics.step_seconds)]
    if not len(samples) or samples.min() <= 0:
        return np.ones(len(statistics.samples))
    return np.asarray(samples.mean() / np.maximum(statistics.samples, 1.0), np.float64)


# One rank against its peers


def _explain_slow_ranks(view: _TableView) -> list[Explanation]:
    """Explain ranks that their peers wait for. Ranks with the same cause share one explanation."""
    threshold = max(MIN_NAMED_EXCESS_SHARE * view.excess, MIN_EXCESS_STEP_SHARE * view.step)
    rows = [int(row) for row in np.argsort(-view.ahead) if view.ahead[row] >= threshold][:MAX_EXPLANATIONS]
    if not rows:
        return []
    table = view.table
    peers = _ComparedStatistics(table.now)
    causes = [(row, _find_rank_cause(view, row, peers)) for row in rows]
    by_cause: dict[tuple[FaultClass, str], list[tuple[int, _WorkCause]]] = {}
    for row, cause in causes:
        by_cause.setdefault((cause.fault, cause.function), []).append((row, cause))
    return [_build_explanation(view, members) for members in by_cause.values()]


@dataclass(frozen=True)
class _WorkCause:
    """The reason why own work takes longer than it did, or than peers' work."""

    fault: FaultClass
    function: str
    part: float  # share of this excess that it explains
    signals: tuple[Signal, ...]
    advice: str


def _find_rank_cause(view: _TableView, row: int, peers: _ComparedStatistics) -> _WorkCause:
    table, own = view.table, view.own
    setup = table.setups[row]
    peer_setups = [
        peer_setup for i, peer_setup in enumerate(table.setups[: MAX_RANKS_COMPARED_EXACTLY + 1]) if i != row
    ]
    early_setup = table.early_setups[row]
    setting_signals = setups.compare_setups(setup, peer_setups, "its peers have")
    setting_signals += () if early_setup is None else setups.compare_setups(setup, [early_setup], "in its early steps")
    lengths = table.now.lengths
    return _classify_cause(
        _ExcessWork(
            functions=tuple(name for name, is_own in zip(table.functions, own, strict=True) if is_own),
            seconds=table.now.seconds[row, own].astype(np.float64),
            usual=peers.usual.seconds[row, own].astype(np.float64),
            busy=float(table.now.busy[row, own].sum() - peers.usual.busy[row, own].sum()),
            distance=peers.distances(row)[own],
            excess_seconds=float(view.ahead[row]),
            length_ratio=_compute_ratio(float(lengths[row]), float(np.median(lengths))),
            length_correlation=float(table.follows_lengths[row]),
            throttled=setups.check_throttling(setup, peer_setups),
            delayed=setups.check_scheduling_delay(setup, peer_setups),
            setting_signals=setting_signals,
            setting_advice="give this worker the setting that its peers have",
            blames_machine=True,
        )
    )


def _build_explanation(view: _TableView, members: Sequence[tuple[int, _WorkCause]]) -> Explanation:
    row, cause = members[0]  # the slowest
    ranks = tuple(int(view.table.ranks[member]) for member, _ in members)
    ratio = float(view.work[row] / view.peers_work[row]) if view.peers_work[row] > 0 else float("inf")
    message = f"rank {ranks[0]}'s own work takes {ratio:.2f} × its peers' ({view.ahead[row]:.3f} s a step more)"
    rank_names = _name_ranks(ranks)
    culprit = f"{cause.function} on {rank_names}" if cause.function else rank_names
    signals = (Signal(SignalKind.TIMES, message), *cause.signals)
    saved = float(view.ahead[row]) * cause.part
    return Explanation(
        Finding(cause.fault, culprit, signals, advice=cause.advice),
        cause.function,
        ranks,
        saved_seconds=saved,
        explained=min(1.0, saved / view.excess),
    )


# All ranks against their early steps


def _explain_common_growth(view: _TableView) -> list[Explanation]:
    """Explain own work that has grown on all ranks: at once, or on each in turn while the others wait for it."""
    if not view.has_early:
        return []
    table, own, known = view.table, view.own, view.known
    growth = np.median((table.now.seconds - table.early.seconds)[known][:, own], axis=0).astype(np.float64)
    error = _compute_growth_errors(table, own, known)
    grown = max(view.grown, 0.0)
    if (
        grown < MIN_PEER_SPREAD * view.step / len(table.ranks)
        or not (growth > MIN_GROWTH_STANDARD_ERRORS * error).any()
    ):
        return []
    rank_count = len(table.ranks)
    turn_wait = min(view.waited, (rank_count - 1) * grown)  # while one rank works longer, the others wait
    in_turn = turn_wait > grown
    saved = grown + (turn_wait if in_turn else 0.0)
    if saved < max(MIN_NAMED_EXCESS_SHARE * view.excess, MIN_EXCESS_STEP_SHARE * view.step):
        return []
    lengths, early_lengths = table.now.lengths[known], table.early.lengths[known]
    current_and_early = zip(table.setups, table.early_setups, strict=True)
    pairs = [(setup, [early_setup]) for setup, early_setup in current_and_early if early_setup is not None]
    throttled = _pick_common_signal(setups.check_throttling(*pair) for pair in pairs[:MAX_RANKS_COMPARED_EXACTLY])
    delayed = _pick_common_signal(setups.check_scheduling_delay(*pair) for pair in pairs[:MAX_RANKS_COMPARED_EXACTLY])
    setting_signals = setups.compare_setups(*pairs[0], "in the early steps")
    usual = np.median(table.early.seconds[known][:, own], axis=0).astype(np.float64)
    busy = (table.now.busy - table.early.busy)[known][:, own].sum(axis=1)
    cause = _classify_cause(
        _ExcessWork(
            functions=tuple(name for name, is_own in zip(table.functions, own, strict=True) if is_own),
            seconds=usual + growth,
            usual=usual,
            busy=float(np.median(busy)),
            distance=np.where(
                growth > MIN_GROWTH_STANDARD_ERRORS * error,
                growth * (saved / grown) / (view.step * MIN_GROWTH_SPREAD),
                0.0,
            ),
            excess_seconds=grown,
            length_ratio=_compute_ratio(float(np.median(lengths)), float(np.median(early_lengths))),
            length_correlation=1.0,
            throttled=throttled,
            delayed=delayed,
            setting_signals=setting_signals,
            setting_advice="set it back to what the early steps had",
            blames_machine=False,
        )
    )
    distribution = "on one rank after the other, and the others wait for it" if in_turn else "on all ranks alike"
    message = f"own work takes {grown:.3f} s a step more than in the job's early steps, {distribution}"
    location = "all ranks, in turns" if in_turn else "all ranks"
    culprit = f"{cause.function} on {location}" if cause.function else location
    finding = Finding(cause.fault, culprit, (Signal(SignalKind.HISTORY, message), *cause.signals), advice=cause.advice)
    explained_seconds = saved * cause.part
    return [Explanation(finding, cause.function, (), explained_seconds, min(1.0, explained_seconds / view.excess))]


def _compute_growth_errors(
    table: PatternTable, own: NDArray[np.bool_], known: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return one standard error of the middle rank's growth, by function. Shares are estimated from samples."""
    squares = np.square(table.now.errors[known][:, own]) + np.square(table.early.errors[known][:, own])
    return np.asarray(np.sqrt(squares.mean(axis=0) / max(1, known.sum())), np.float64)


# The transfer


def _find_throttled_rows(view: _TableView) -> dict[int, Signal]:
    """Return the rows whose CPU quota throttles them so often that their transfers are late, unlike before."""
    pairs = enumerate(zip(view.table.setups, view.table.early_setups, strict=True))
    signals = {
        row: setups.check_throttling(now, () if early is None else [early], setups.MIN_TRANSFERS_THROTTLED_SHARE)
        for row, (now, early) in pairs
    }
    return {row: signal for row, signal in signals.items() if signal is not None}


def _explain_transfer(view: _TableView, throttled: Mapping[int, Signal], *, in_turn: bool) -> list[Explanation]:
    """Explain waits of the rank that waits least. With `in_turn`, only those beyond the effect of slow work in turns.

    If a quota throttles ranks, and no function has clearly grown, late transfers are the only visible effect.
    """
    turn_wait = (len(view.table.ranks) - 1) * max(view.grown, 0.0) if in_turn else 0.0
    saved = view.waited - (turn_wait if turn_wait > MIN_PEER_SPREAD * view.step else 0.0)
    if saved < max(MIN_NAMED_EXCESS_SHARE * view.excess, MIN_EXCESS_STEP_SHARE * view.step):
        return []
    waits = np.flatnonzero(~view.own)
    growth = np.median((view.table.now.seconds - view.table.early.seconds)[view.known][:, waits], axis=0)
    name = view.table.functions[int(waits[int(np.argmax(growth))])][0]
    message = f"even the rank that waits least waits {saved:.3f} s a step more than in the job's early steps"
    waits_longer = Signal(SignalKind.HISTORY, message)
    ranks: tuple[int, ...] = ()
    if throttled:
        ranks = tuple(int(view.table.ranks[row]) for row in throttled) if len(throttled) < len(view.table.ranks) else ()
        grown_most = Signal(SignalKind.PROFILE, f"{name} has grown most")
        culprit, signals = (
            _name_ranks(ranks) if ranks else "all ranks",
            (waits_longer, grown_most, next(iter(throttled.values()))),
        )
        finding = Finding(FaultClass.CONFIGURATION, culprit, signals, advice=CPU_LIMIT_ADVICE)
    else:
        grown_most = Signal(SignalKind.PROFILE, f"{name} has grown most, and no rank's own work has")
        advice = "check the links: the delay matrix and a probe show which one"
        finding = Finding(FaultClass.NETWORK, f"{name} on all ranks", (waits_longer, grown_most), advice=advice)
    return [Explanation(finding, name, ranks, saved, min(1.0, saved / view.excess))]


# What kind of fault it is


@dataclass(frozen=True)
class _ExcessWork:
    """Own work that is longer than usual, by function."""

    functions: tuple[tuple[str, TimeOwner], ...]
    seconds: NDArray[np.float64]
    usual: NDArray[np.float64]
    busy: float  # additional seconds in which it used its resource
    distance: NDArray[np.float64]
    excess_seconds: float  # seconds of a step
    length_ratio: float | None  # of its samples, over the usual ones; None: not known
    length_correlation: float  # correlation with them
    throttled: Signal | None
    delayed: Signal | None
    setting_signals: tuple[Signal, ...]
    setting_advice: str
    blames_machine: bool  # whether equal growth of all functions indicates the machine


def _classify_cause(work: _ExcessWork) -> _WorkCause:
    """Classify the cause of longer work.

    If all functions are slower alike, it is the machine, its settings, or longer samples. If one function is slower, it
    is code or data.
    """
    growth = work.seconds - work.usual
    is_joint, factor, part = _check_joint_growth(work, growth)
    if is_joint:
        return _classify_joint_growth(work, factor, part)
    named = np.flatnonzero(
        (growth >= MIN_NAMED_EXCESS_SHARE * work.excess_seconds) & (work.distance > MIN_SUSPECT_SPREADS)
    )
    named = named[np.argsort(-growth[named], kind="stable")]
    if not len(named):
        signal = Signal(SignalKind.PROFILE, "the time has grown in many functions, but in none of them by much")
        return _WorkCause(FaultClass.UNKNOWN, "", 0.0, (signal,), "check the stacks of this window")
    top = int(named[0])
    name, owner = work.functions[top]
    part = min(1.0, float(growth[named].sum()) / work.excess_seconds)
    signals = tuple(_describe_function(work, int(i)) for i in named[:3])
    if work.setting_signals and name.startswith(LIBRARY_PREFIX):
        return _WorkCause(FaultClass.CONFIGURATION, name, part, (*signals, *work.setting_signals), work.setting_advice)
    if owner is TimeOwner.DATA:
        return _WorkCause(FaultClass.DATA, name, part, signals, "check the loader and the storage that it reads")
    if owner is TimeOwner.GC:
        advice = "create fewer objects per step, or plan collections (PlanGC)"
        return _WorkCause(FaultClass.CODE, name, part, signals, advice)
    return _WorkCause(FaultClass.CODE, name, part, signals, f"check what has changed in {name}")


def _check_joint_growth(work: _ExcessWork, all_growth: NDArray[np.float64]) -> tuple[bool, float, float]:
    """Return whether all functions have grown together, by what factor, and the explained share of the excess."""
    significant = work.usual > 0.005 * max(float(work.usual.sum()), 1e-12)
    usual, seconds = work.usual[significant], work.seconds[significant]
    if not usual.sum() or work.excess_seconds <= 0:
        return False, 1.0, 0.0
    factor = float(seconds.sum() / usual.sum())
    part = min(1.0, float(np.maximum(all_growth[significant], 0).sum()) / work.excess_seconds)
    if factor <= 1 or part < MIN_EXPLAINED_SHARE:
        return False, factor, part
    growth, mean = seconds - usual, factor - 1
    rest = np.arange(len(usual)) != int(np.argmax(growth))
    growth_of_rest, usual_of_rest = growth[rest], usual[rest]
    if usual_of_rest.sum() >= 0.05 * usual.sum():
        most_grown = (
            usual_of_rest[growth_of_rest >= MIN_GROWN_WITH_OTHERS_SHARE * mean * usual_of_rest].sum()
            >= MIN_ALIKE_GROWN_SHARE * usual_of_rest.sum()
        )
        jointly_grown = np.maximum(growth_of_rest, 0).sum() >= MIN_JOINT_GROWTH_SHARE * mean * usual_of_rest.sum()
        return bool(most_grown and jointly_grown), factor, part
    cpu_limited = work.throttled is not None or work.delayed is not None
    return cpu_limited or work.busy >= 0.5 * work.excess_seconds, factor, part


def _classify_joint_growth(work: _ExcessWork, factor: float, part: float) -> _WorkCause:
    signal = Signal(SignalKind.PROFILE, f"all of its functions take longer alike, {factor:.2f} × in all")
    has_longer_samples = work.length_ratio is not None and work.length_ratio - 1 >= 0.5 * (factor - 1)
    if work.length_correlation >= MIN_LENGTH_CORRELATION and has_longer_samples:
        longer_samples = Signal(SignalKind.HISTORY, f"its samples are {work.length_ratio:.2f} × as long in total")
        return _WorkCause(FaultClass.DATA, "", part, (signal, longer_samples), "balance the lengths over the ranks")
    if work.throttled is not None:
        return _WorkCause(FaultClass.CONFIGURATION, "", part, (signal, work.throttled), CPU_LIMIT_ADVICE)
    if work.setting_signals:
        return _WorkCause(FaultClass.CONFIGURATION, "", part, (signal, *work.setting_signals), work.setting_advice)
    if work.delayed is not None:
        advice = "move the worker, or the other load on its node's CPUs"
        return _WorkCause(FaultClass.HARDWARE, "", part, (signal, work.delayed), advice)
    if work.blames_machine:
        return _WorkCause(FaultClass.HARDWARE, "", part, (signal,), "replace the worker, and probe its node")
    return _WorkCause(FaultClass.UNKNOWN, "", 0.0, (signal,), "no setting explains it: check what else the nodes run")


def _describe_function(work: _ExcessWork, index: int) -> Signal:
    name, _ = work.functions[index]
    message = f"{name} takes {work.seconds[index]:.3f} s a step, usual is {work.usual[index]:.3f} s"
    return Signal(SignalKind.PROFILE, message)


# Peers


class _ComparedStatistics:
    """Each rank's statistics, and the usual ones of the others."""

    def __init__(self, statistics: FunctionStatistics) -> None:
        self._figures = statistics
        self.usual = replace(
            statistics,
            seconds=_compute_others_median(statistics.seconds),
            busy=_compute_others_median(statistics.busy),
            spread=_compute_others_median(statistics.spread),
        )

    def distances(self, row: int) -> NDArray[np.float64]:
        """Return this rank's distance from the others, by function: Σ|Δ(β, μ, σ)| over the spread of their β."""
        now, usual, step = self._figures, self.usual, self._figures.step_seconds[row]
        pairs = ((now.seconds, usual.seconds), (now.busy, usual.busy), (now.spread, usual.spread))
        distance = (
            sum(np.abs(values[row].astype(np.float64) - usual_values[row]) for values, usual_values in pairs) / step
        )
        peer_seconds = np.delete(now.seconds, row, axis=0) if len(now.seconds) > 1 else now.seconds
        deviation = np.median(np.abs(peer_seconds - usual.seconds[row]), axis=0) / step
        return np.asarray(distance / np.maximum(1.48 * deviation, MIN_PEER_SPREAD), np.float64)


def _compute_others_median(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return for each row and column the median of the other rows. With many rows, the median of all."""
    rows = len(values)
    if rows == 1:
        return values
    if rows > MAX_RANKS_COMPARED_EXACTLY:
        return np.broadcast_to(np.median(values, axis=0), values.shape)
    return np.stack([np.median(np.delete(values, row, axis=0), axis=0) for row in range(rows)])


# Words


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _compute_ratio(value: float, usual: float) -> float | None:
    """Return the ratio; None: nothing is usual."""
    return value / usual if usual > 0 else None


def _pick_common_signal(signals: Iterable[Signal | None]) -> Signal | None:
    """Return the first signal if most entries have one."""
    all_signals = list(signals)
    present = [signal for signal in all_signals if signal is not None]
    return present[0] if present and 2 * len(present) > len(all_signals) else None


def _build_remarks(table: PatternTable, expected: int) -> tuple[str, ...]:
    reported = len(table.ranks)
    missing = () if reported >= expected else (f"{reported} of {expected} ranks have answered",)
    wrong_settings = dict.fromkeys(
        signal.message
        for setup in table.setups[:MAX_RANKS_COMPARED_EXACTLY]
        for signal in setups.find_wrong_settings(setup)
    )
    return (*missing, *table.refused[:4], *wrong_settings)


def _build_no_excess_finding(view: _TableView) -> Finding:
    baseline = "peers and early steps" if view.has_early else "peers; its early steps are not known"
    signal = Signal(SignalKind.TIMES, f"no rank's step differs by {MIN_EXCESS_STEP_SHARE:.0%} from {baseline}")
    signals = (signal, _describe_where_time_goes(view))
    return Finding(FaultClass.UNKNOWN, "", signals, advice="nothing is slower than usual in this window")


def _build_unknown_finding(view: _TableView, explanations: Sequence[Explanation], explained: float) -> Finding:
    message = f"{explained:.0%} of the {view.excess:.3f} s that a step takes longer is explained"
    signals = [Signal(SignalKind.TIMES, message), _describe_where_time_goes(view)]
    signals += [signal for explanation in explanations[:1] for signal in explanation.finding.signals]
    advice = "too little is explained for a diagnosis: check the stacks of this window"
    culprit = explanations[0].finding.culprit if explanations and not explanations[0].function else ""
    return Finding(FaultClass.UNKNOWN, culprit, tuple(signals), advice=advice)


def _describe_where_time_goes(view: _TableView) -> Signal:
    seconds = np.median(view.table.now.seconds, axis=0)
    top_columns = [int(column) for column in np.argsort(-seconds, kind="stable")[:MAX_FUNCTIONS_NAMED]]
    listed = ", ".join(f"{view.table.functions[column][0]} ({seconds[column]:.3f} s)" for column in top_columns)
    return Signal(SignalKind.PROFILE, f"most of a step goes into {listed or 'no function that is known'}")
