"""In the operator: from the patterns of all ranks to the function, the ranks and the class of fault.

Everything is counted in seconds of a step: G(f, r) = what rank r spends in function f, less the smaller one of its
peers' median and its own early steps: the seconds that it would save. (PerfTracker, arXiv 2506.08528, compares shares
of the time; a share falls where anything else grows.) A job's excess has three parts, each looked for where it shows:

- one rank's own work against its peers': they wait for it;
- own work that has grown on all ranks since their early steps, at once, or on each in its turn: then all wait for it;
- waits that even the rank that waits least has not had before: the transfer itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ..diagnose.finding import FaultClass, Finding, Signal, SignalKind
from ..reading import Truncated, MaxLength, Within
from . import setup as setups
from .pattern import MAX_FUNCTION_NAME_LENGTH, TimeOwner
from .table import FunctionStatistics, PatternTable, read_table

MIN_SUSPECT_SPREADS = 5.0
"""Σ|Δ| over the spread of the peers (1.48 of their median absolute deviation, MIN_PEER_SPREAD at least)."""
MIN_PEER_SPREAD = 0.02
MIN_GROWTH_SPREAD = 0.01
"""In its place where ranks are held against their own early steps: the middle one of many differs by less."""
MIN_NAMED_EXCESS_SHARE = 0.25
"""Of the excess: what saves less is not named."""
MIN_EXPLAINED_SHARE = 0.5
"""Of the excess: an answer that explains less is "unknown"."""
MIN_EXCESS_STEP_SHARE = 0.03
"""Of a step: less is nothing to be explained."""
MIN_GROWTH_STANDARD_ERRORS = 5.0
"""Standard errors."""
MIN_ALIKE_GROWN_SHARE = 0.6
"""Part of the other functions' time that has grown, where it is the machine that is slow and not one function."""
MIN_GROWN_WITH_OTHERS_SHARE = 0.25
"""Of the mean growth: a function that has grown by so much has grown with the others."""
MIN_JOINT_GROWTH_SHARE = 0.4
"""Of the mean growth: by so much those functions that have grown make all but the one that grew most grow, where they
grew alike. One function that grows much raises the mean, and others differ from the usual by chance where looks are
few."""
MIN_LENGTH_CORRELATION = 0.7
"""Correlation of a rank's own work with its samples' lengths."""
LIBRARY_PREFIX = "torch/"
"""What computes there is slow by how it is set up, where that has changed."""
CPU_LIMIT_ADVICE = "raise the CPU limit of the worker, or take it away"
MACHINE_FAULTS = frozenset({FaultClass.HARDWARE, FaultClass.CONFIGURATION})
MAX_EXPLANATIONS = 8
MAX_FUNCTIONS_NAMED = 3
"""Functions that words tell of."""
MAX_RANKS_COMPARED_EXACTLY = 64
"""Up to so many, a rank is compared with the others without itself."""


Ranks = Annotated[tuple[Annotated[int, Within(0)], ...], MaxLength(1000)]
Seconds = Annotated[float, Within(0, 1e6)]
Part = Annotated[float, Within(0, 1)]
Remarks = Annotated[tuple[Annotated[str, Truncated(2048)], ...], MaxLength(1000)]


@dataclass(frozen=True)
class Explanation:
    """One cause of a part of the excess."""

    finding: Finding
    function: Annotated[str, MaxLength(MAX_FUNCTION_NAME_LENGTH)]  # that is named; "": none
    ranks: Ranks  # on which; (): on all
    saved_seconds: Seconds  # a step
    explained: Part  # of the job's excess


@dataclass(frozen=True)
class Localization:
    """What a window comes to. `finding`: the verdict, Unknown where less than half of the excess is explained."""

    finding: Finding
    explanations: Annotated[tuple[Explanation, ...], MaxLength(MAX_EXPLANATIONS)] = ()  # those that save most first
    step_seconds: Seconds = 0.0
    excess_seconds: Seconds = 0.0  # of a step
    explained: Part = 0.0  # of the excess
    heard: Annotated[int, Within(0)] = 0  # ranks whose patterns came
    expected: Annotated[int, Within(0)] = 0
    remarks: Remarks = ()  # for people: what is missing, and settings that are slow whatever the excess is
    usual: Ranks = ()  # ranks that are like most, to be compared with
    suspects: Ranks = ()


def localize_fault(answers: Iterable[tuple[int, bytes]], expected: int) -> Localization:
    """`answers`: by rank, as they were sent (`pattern.Answer`). `expected`: ranks of the job."""
    return localize_in_table(read_table(answers), expected)


def localize_in_table(table: PatternTable, expected: int) -> Localization:
    """The same of what has been read."""
    heard = len(table.ranks)
    remarks = _build_remarks(table, expected)
    if heard == 0:
        nobody = Finding(FaultClass.UNKNOWN, "", advice="no rank has answered: ask again by hand")
        return Localization(nobody, expected=expected, remarks=remarks)
    view = _TableView(table)
    frame = Localization(
        Finding(FaultClass.UNKNOWN, ""),
        step_seconds=view.step,
        excess_seconds=view.excess,
        heard=heard,
        expected=expected,
        remarks=remarks,
        usual=view.usual_ranks,
    )
    if view.excess < MIN_EXCESS_STEP_SHARE * view.step:
        return replace(frame, finding=_build_no_excess_finding(view))
    one, common, late = _explain_slow_ranks(view), _explain_common_growth(view), _find_throttled_rows(view)
    held_up = bool(late) or any(e.finding.fault in MACHINE_FAULTS for e in (*one, *common))
    # Who has not answered may be whom the others wait for.
    transfer = _explain_transfer(view, late, in_turn=bool(common) or not late) if heard == expected or held_up else []
    follows = transfer if held_up else []  # whose processors are late, its transfers are, too
    found = sorted([*one, *common, *transfer], key=lambda e: (e in follows, -e.saved_seconds))[:MAX_EXPLANATIONS]
    explained = max((e.explained for e in one), default=0.0) + sum(e.explained for e in (*common, *transfer))
    explained = min(explained, 1.0)
    suspects = tuple(dict.fromkeys(rank for explanation in found for rank in explanation.ranks))
    finding = found[0].finding if found and explained >= MIN_EXPLAINED_SHARE else _build_unknown_finding(view, found, explained)
    return replace(frame, finding=finding, explanations=tuple(found), explained=explained, suspects=suspects)


def describe_localization(found: Localization) -> tuple[str, ...]:
    """For people: what was found, beginning with what saves most, how much of the excess that is, and what is
    missing."""
    each = tuple(
        f"{e.finding.fault}: {e.finding.culprit}; without it a step would take {e.saved_seconds:.3f} s less "
        f"({e.explained:.0%} of the excess). {'; '.join(witness.words for witness in e.finding.witnesses)}"
        for e in found.explanations
    )
    whole = (
        f"in a behaviour window of {found.heard} ranks a step took {found.step_seconds:.3f} s, "
        f"{found.excess_seconds:.3f} s more than usual; {found.explained:.0%} of that is explained",
    )
    return (*whole, *each, *found.remarks)


class _TableView:
    """The table, with what all three questions need of it."""

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
        """Own work of the middle rank beyond its early steps."""
        self.waited = self._find_min_wait_growth(waits)
        self.excess = max(0.0, float(ahead.max(initial=0.0)), self.step - self.early_step)

    @property
    def usual_ranks(self) -> tuple[int, ...]:
        order = np.argsort(np.abs(self.ahead), kind="stable")
        return tuple(int(self.table.ranks[row]) for row in order[:2])

    def _find_min_wait_growth(self, waits: NDArray[np.bool_]) -> float:
        """Seconds of a step that even the rank that waits least has more than in its early steps."""
        if not self.has_early:
            return 0.0
        now, early = self.table.now.seconds[:, waits].sum(axis=1), self.table.early.seconds[:, waits].sum(axis=1)
        return max(0.0, float(now.min()) - float(early[self.known].min()))


def _scale_table_to_equal_shares(table: PatternTable) -> PatternTable:
    """As if each rank had as many samples: own work, in seconds of such a step. Waits stay as they are: shares that fit
    slow ranks hide them there."""
    return replace(table, now=_rescale_statistics(table, table.now), early=_rescale_statistics(table, table.early))


def _rescale_statistics(table: PatternTable, figures: FunctionStatistics) -> FunctionStatistics:
    factor = np.where(table.owners == TimeOwner.COLLECTIVE, 1.0, _compute_share_factors(figures)[:, None]).astype(np.float32)
    return replace(
        figures,
        seconds=figures.seconds * factor,
        errors=figures.errors * factor,
        busy=figures.busy * factor,
        spread=figures.spread * factor,
    )


def _compute_share_factors(figures: FunctionStatistics) -> NDArray[np.float64]:
    """Of each rank: an equal share over its own; 1 where shares are not known."""
    samples = figures.samples[np.isfinite(figures.step_seconds)]
    if not len(samples) or samples.min() <= 0:
        return np.ones(len(figures.samples))
    return np.asarray(samples.mean() / np.maximum(figures.samples, 1.0), np.float64)


# One rank against its peers


def _explain_slow_ranks(view: _TableView) -> list[Explanation]:
    """Ranks that their peers wait for; those with the same cause together."""
    least = max(MIN_NAMED_EXCESS_SHARE * view.excess, MIN_EXCESS_STEP_SHARE * view.step)
    rows = [int(row) for row in np.argsort(-view.ahead) if view.ahead[row] >= least][:MAX_EXPLANATIONS]
    if not rows:
        return []
    table = view.table
    peers = _ComparedStatistics(table.now)
    causes = [(row, _find_rank_cause(view, row, peers)) for row in rows]
    together: dict[tuple[FaultClass, str], list[tuple[int, _WorkCause]]] = {}
    for row, cause in causes:
        together.setdefault((cause.fault, cause.function), []).append((row, cause))
    return [_build_explanation(view, members) for members in together.values()]


@dataclass(frozen=True)
class _WorkCause:
    """What makes some own work longer than it was, or than peers'."""

    fault: FaultClass
    function: str
    part: float  # of this longer work that it explains
    witnesses: tuple[Signal, ...]
    advice: str


def _find_rank_cause(view: _TableView, row: int, peers: _ComparedStatistics) -> _WorkCause:
    table, own = view.table, view.own
    setup = table.setups[row]
    others = [other for i, other in enumerate(table.setups[: MAX_RANKS_COMPARED_EXACTLY + 1]) if i != row]
    early = table.early_setups[row]
    static = setups.compare_setups(setup, others, "its peers have")
    static += () if early is None else setups.compare_setups(setup, [early], "in its early steps")
    lengths = table.now.lengths
    return _classify_cause(
        _ExcessWork(
            functions=tuple(name for name, mine in zip(table.functions, own, strict=True) if mine),
            seconds=table.now.seconds[row, own].astype(np.float64),
            usual=peers.usual.seconds[row, own].astype(np.float64),
            busy=float(table.now.busy[row, own].sum() - peers.usual.busy[row, own].sum()),
            distance=peers.distances(row)[own],
            longer=float(view.ahead[row]),
            longer_lengths=_safe_ratio(float(lengths[row]), float(np.median(lengths))),
            follows=float(table.follows_lengths[row]),
            held_up=setups.check_throttling(setup, others),
            delayed=setups.check_scheduling_delay(setup, others),
            static=static,
            setting_advice="give this worker the setting that its peers have",
            machine=True,
        )
    )


def _build_explanation(view: _TableView, members: Sequence[tuple[int, _WorkCause]]) -> Explanation:
    row, cause = members[0]  # the slowest
    ranks = tuple(int(view.table.ranks[member]) for member, _ in members)
    times = float(view.work[row] / view.peers_work[row]) if view.peers_work[row] > 0 else float("inf")
    words = f"rank {ranks[0]}'s own work takes {times:.2f} × its peers' ({view.ahead[row]:.3f} s a step more)"
    who = _name_ranks(ranks)
    culprit = f"{cause.function} on {who}" if cause.function else who
    witnesses = (Signal(SignalKind.TIMES, words), *cause.witnesses)
    saved = float(view.ahead[row]) * cause.part
    return Explanation(
        Finding(cause.fault, culprit, witnesses, advice=cause.advice),
        cause.function,
        ranks,
        saved_seconds=saved,
        explained=min(1.0, saved / view.excess),
    )


# All ranks against their early steps


def _explain_common_growth(view: _TableView) -> list[Explanation]:
    """Own work that has grown on all of them: at once, or on each in its turn while the others wait for it."""
    if not view.has_early:
        return []
    table, own, known = view.table, view.own, view.known
    growth = np.median((table.now.seconds - table.early.seconds)[known][:, own], axis=0).astype(np.float64)
    error = _compute_growth_errors(table, own, known)
    grown = max(view.grown, 0.0)
    if grown < MIN_PEER_SPREAD * view.step / len(table.ranks) or not (growth > MIN_GROWTH_STANDARD_ERRORS * error).any():
        return []
    ranks = len(table.ranks)
    turns = min(view.waited, (ranks - 1) * grown)  # while one works longer, the others wait
    in_turn = turns > grown
    saved = grown + (turns if in_turn else 0.0)
    if saved < max(MIN_NAMED_EXCESS_SHARE * view.excess, MIN_EXCESS_STEP_SHARE * view.step):
        return []
    lengths, early_lengths = table.now.lengths[known], table.early.lengths[known]
    both = zip(table.setups, table.early_setups, strict=True)
    pairs = [(setup, [early]) for setup, early in both if early is not None]
    held_up = _pick_common_signal(setups.check_throttling(*pair) for pair in pairs[:MAX_RANKS_COMPARED_EXACTLY])
    delayed = _pick_common_signal(setups.check_scheduling_delay(*pair) for pair in pairs[:MAX_RANKS_COMPARED_EXACTLY])
    static = setups.compare_setups(*pairs[0], "in the early steps")
    usual = np.median(table.early.seconds[known][:, own], axis=0).astype(np.float64)
    busy = (table.now.busy - table.early.busy)[known][:, own].sum(axis=1)
    cause = _classify_cause(
        _ExcessWork(
            functions=tuple(name for name, mine in zip(table.functions, own, strict=True) if mine),
            seconds=usual + growth,
            usual=usual,
            busy=float(np.median(busy)),
            distance=np.where(growth > MIN_GROWTH_STANDARD_ERRORS * error, growth * (saved / grown) / (view.step * MIN_GROWTH_SPREAD), 0.0),
            longer=grown,
            longer_lengths=_safe_ratio(float(np.median(lengths)), float(np.median(early_lengths))),
            follows=1.0,
            held_up=held_up,
            delayed=delayed,
            static=static,
            setting_advice="set it back to what the early steps had",
            machine=False,
        )
    )
    how = "on one rank after the other, and the others wait for it" if in_turn else "on all ranks alike"
    words = f"own work takes {grown:.3f} s a step more than in the job's early steps, {how}"
    place = "all ranks, in turns" if in_turn else "all ranks"
    culprit = f"{cause.function} on {place}" if cause.function else place
    finding = Finding(
        cause.fault, culprit, (Signal(SignalKind.HISTORY, words), *cause.witnesses), advice=cause.advice
    )
    part = saved * cause.part
    return [Explanation(finding, cause.function, (), part, min(1.0, part / view.excess))]


def _compute_growth_errors(table: PatternTable, own: NDArray[np.bool_], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """One standard error of the middle rank's growth, by function: looks are samples."""
    squares = np.square(table.now.errors[known][:, own]) + np.square(table.early.errors[known][:, own])
    return np.asarray(np.sqrt(squares.mean(axis=0) / max(1, known.sum())), np.float64)


# The transfer


def _find_throttled_rows(view: _TableView) -> dict[int, Signal]:
    """By row: whose quota holds it up so often, and did not in its early steps, that its transfers are late."""
    pairs = enumerate(zip(view.table.setups, view.table.early_setups, strict=True))
    found = {
        row: setups.check_throttling(now, () if early is None else [early], setups.MIN_TRANSFERS_THROTTLED_SHARE)
        for row, (now, early) in pairs
    }
    return {row: witness for row, witness in found.items() if witness is not None}


def _explain_transfer(view: _TableView, late: Mapping[int, Signal], *, in_turn: bool) -> list[Explanation]:
    """Waits of the rank that waits least; `in_turn`: beyond what slow work of each rank in its turn would make of them.

    Where a quota holds ranks up, and no function has grown for sure, their late transfers are all that shows.
    """
    turns = (len(view.table.ranks) - 1) * max(view.grown, 0.0) if in_turn else 0.0
    saved = view.waited - (turns if turns > MIN_PEER_SPREAD * view.step else 0.0)
    if saved < max(MIN_NAMED_EXCESS_SHARE * view.excess, MIN_EXCESS_STEP_SHARE * view.step):
        return []
    waits = np.flatnonzero(~view.own)
    growth = np.median((view.table.now.seconds - view.table.early.seconds)[view.known][:, waits], axis=0)
    name = view.table.functions[int(waits[int(np.argmax(growth))])][0]
    words = f"even the rank that waits least waits {saved:.3f} s a step more than in the job's early steps"
    waits_longer = Signal(SignalKind.HISTORY, words)
    ranks: tuple[int, ...] = ()
    if late:
        ranks = tuple(int(view.table.ranks[row]) for row in late) if len(late) < len(view.table.ranks) else ()
        grown = Signal(SignalKind.BEHAVIOUR, f"{name} has grown most")
        who, witnesses = _name_ranks(ranks) if ranks else "all ranks", (waits_longer, grown, next(iter(late.values())))
        finding = Finding(FaultClass.CONFIGURATION, who, witnesses, advice=CPU_LIMIT_ADVICE)
    else:
        grown = Signal(SignalKind.BEHAVIOUR, f"{name} has grown most, and no rank's own work has")
        advice = "look at the links: the delay matrix and a probe tell which one"
        finding = Finding(FaultClass.NETWORK, f"{name} on all ranks", (waits_longer, grown), advice=advice)
    return [Explanation(finding, name, ranks, saved, min(1.0, saved / view.excess))]


# What kind of fault it is


@dataclass(frozen=True)
class _ExcessWork:
    """Own work that is longer than usual, by function."""

    functions: tuple[tuple[str, TimeOwner], ...]
    seconds: NDArray[np.float64]
    usual: NDArray[np.float64]
    busy: float  # seconds more that it used what its functions are bound to
    distance: NDArray[np.float64]
    longer: float  # seconds of a step
    longer_lengths: float  # of its samples, over the usual ones; 0: not known
    follows: float  # correlation with them
    held_up: Signal | None
    delayed: Signal | None
    static: tuple[Signal, ...]
    setting_advice: str
    machine: bool  # that all functions are slower alike says something about the machine by itself


def _classify_cause(work: _ExcessWork) -> _WorkCause:
    """Everything slower alike is the machine, its settings, or longer samples; one function alone is code, or data."""
    gain = work.seconds - work.usual
    alike, factor, part = _check_joint_growth(work, gain)
    if alike:
        return _classify_joint_growth(work, factor, part)
    named = np.flatnonzero((gain >= MIN_NAMED_EXCESS_SHARE * work.longer) & (work.distance > MIN_SUSPECT_SPREADS))
    named = named[np.argsort(-gain[named], kind="stable")]
    if not len(named):
        words = Signal(SignalKind.BEHAVIOUR, "the time has grown in many functions, in none of them much")
        return _WorkCause(FaultClass.UNKNOWN, "", 0.0, (words,), "look at the stacks of this window")
    top = int(named[0])
    name, owner = work.functions[top]
    part = min(1.0, float(gain[named].sum()) / work.longer)
    witnesses = tuple(_describe_function(work, int(i)) for i in named[:3])
    if work.static and name.startswith(LIBRARY_PREFIX):
        return _WorkCause(FaultClass.CONFIGURATION, name, part, (*witnesses, *work.static), work.setting_advice)
    if owner is TimeOwner.DATA:
        return _WorkCause(FaultClass.DATA, name, part, witnesses, "look at the loader and at the storage that it reads")
    if owner is TimeOwner.GARBAGE:
        advice = "make fewer objects in a step, or have collections planned (PlanGarbage)"
        return _WorkCause(FaultClass.CODE, name, part, witnesses, advice)
    return _WorkCause(FaultClass.CODE, name, part, witnesses, f"look at what {name} does since it takes longer")


def _check_joint_growth(work: _ExcessWork, gain: NDArray[np.float64]) -> tuple[bool, float, float]:
    """Whether all functions have grown together; by what factor, and how much of the longer work that is."""
    known = work.usual > 0.005 * max(float(work.usual.sum()), 1e-12)
    usual, seconds = work.usual[known], work.seconds[known]
    if not usual.sum() or work.longer <= 0:
        return False, 1.0, 0.0
    factor = float(seconds.sum() / usual.sum())
    part = min(1.0, float(np.maximum(gain[known], 0).sum()) / work.longer)
    if factor <= 1 or part < MIN_EXPLAINED_SHARE:
        return False, factor, part
    growth, mean = seconds - usual, factor - 1
    rest = np.arange(len(usual)) != int(np.argmax(growth))
    growth_of_rest, usual_of_rest = growth[rest], usual[rest]
    if usual_of_rest.sum() >= 0.05 * usual.sum():
        grown = usual_of_rest[growth_of_rest >= MIN_GROWN_WITH_OTHERS_SHARE * mean * usual_of_rest].sum() >= MIN_ALIKE_GROWN_SHARE * usual_of_rest.sum()
        together = np.maximum(growth_of_rest, 0).sum() >= MIN_JOINT_GROWTH_SHARE * mean * usual_of_rest.sum()
        return bool(grown and together), factor, part
    held_up = work.held_up is not None or work.delayed is not None
    return held_up or work.busy >= 0.5 * work.longer, factor, part


def _classify_joint_growth(work: _ExcessWork, factor: float, part: float) -> _WorkCause:
    words = Signal(SignalKind.BEHAVIOUR, f"all of its functions take longer alike, {factor:.2f} × in all")
    if work.follows >= MIN_LENGTH_CORRELATION and work.longer_lengths - 1 >= 0.5 * (factor - 1):
        longer = Signal(SignalKind.HISTORY, f"its samples are {work.longer_lengths:.2f} × as long in sum")
        return _WorkCause(FaultClass.DATA, "", part, (words, longer), "balance the lengths over the ranks")
    if work.held_up is not None:
        return _WorkCause(FaultClass.CONFIGURATION, "", part, (words, work.held_up), CPU_LIMIT_ADVICE)
    if work.static:
        return _WorkCause(FaultClass.CONFIGURATION, "", part, (words, *work.static), work.setting_advice)
    if work.delayed is not None:
        advice = "move the worker, or what else runs on its node's processors"
        return _WorkCause(FaultClass.HARDWARE, "", part, (words, work.delayed), advice)
    if work.machine:
        return _WorkCause(FaultClass.HARDWARE, "", part, (words,), "swap the worker, and have its node probed")
    return _WorkCause(FaultClass.UNKNOWN, "", 0.0, (words,), "no setting says why: look at what else the nodes do")


def _describe_function(work: _ExcessWork, place: int) -> Signal:
    name, _ = work.functions[place]
    words = f"{name} takes {work.seconds[place]:.3f} s a step, usual is {work.usual[place]:.3f} s"
    return Signal(SignalKind.BEHAVIOUR, words)


# Peers


class _ComparedStatistics:
    """Each rank's figures, and the usual ones of the others."""

    def __init__(self, figures: FunctionStatistics) -> None:
        self._figures = figures
        self.usual = replace(
            figures, seconds=_compute_others_median(figures.seconds), busy=_compute_others_median(figures.busy), spread=_compute_others_median(figures.spread)
        )

    def distances(self, row: int) -> NDArray[np.float64]:
        """Of this rank from the others, by function: Σ|Δ(β, μ, σ)| over the spread of the others' β."""
        now, usual, step = self._figures, self.usual, self._figures.step_seconds[row]
        kinds = ((now.seconds, usual.seconds), (now.busy, usual.busy), (now.spread, usual.spread))
        away = sum(np.abs(mine[row].astype(np.float64) - its[row]) for mine, its in kinds) / step
        others = np.delete(now.seconds, row, axis=0) if len(now.seconds) > 1 else now.seconds
        deviation = np.median(np.abs(others - usual.seconds[row]), axis=0) / step
        return np.asarray(away / np.maximum(1.48 * deviation, MIN_PEER_SPREAD), np.float64)


def _compute_others_median(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """For each row, by column: the median of the other rows; of all, where they are many."""
    rows = len(values)
    if rows == 1:
        return values
    if rows > MAX_RANKS_COMPARED_EXACTLY:
        return np.broadcast_to(np.median(values, axis=0), values.shape)
    return np.stack([np.median(np.delete(values, row, axis=0), axis=0) for row in range(rows)])


# Words


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _safe_ratio(value: float, usual: float) -> float:
    return value / usual if usual > 0 else 0.0


def _pick_common_signal(found: Iterable[Signal | None]) -> Signal | None:
    """The first one, where most of them have one."""
    every = list(found)
    some = [witness for witness in every if witness is not None]
    return some[0] if some and 2 * len(some) > len(every) else None


def _build_remarks(table: PatternTable, expected: int) -> tuple[str, ...]:
    heard = len(table.ranks)
    missing = () if heard >= expected else (f"{heard} of {expected} ranks have answered",)
    wrong = dict.fromkeys(
        witness.words for setup in table.setups[:MAX_RANKS_COMPARED_EXACTLY] for witness in setups.find_wrong_settings(setup)
    )
    return (*missing, *table.refused[:4], *wrong)


def _build_no_excess_finding(view: _TableView) -> Finding:
    against = "peers and early steps" if view.has_early else "peers; its early steps are not known"
    words = Signal(SignalKind.TIMES, f"no rank's step differs by {MIN_EXCESS_STEP_SHARE:.0%} from {against}")
    witnesses = (words, _describe_where_time_goes(view))
    return Finding(FaultClass.UNKNOWN, "", witnesses, advice="nothing is slower than usual in this window")


def _build_unknown_finding(view: _TableView, found: Sequence[Explanation], explained: float) -> Finding:
    part = f"{explained:.0%} of the {view.excess:.3f} s that a step takes longer is explained"
    witnesses = [Signal(SignalKind.TIMES, part), _describe_where_time_goes(view)]
    witnesses += [witness for explanation in found[:1] for witness in explanation.finding.witnesses]
    advice = "too little is explained to blame anything: look at the stacks of this window"
    culprit = found[0].finding.culprit if found and not found[0].function else ""
    return Finding(FaultClass.UNKNOWN, culprit, tuple(witnesses), advice=advice)


def _describe_where_time_goes(view: _TableView) -> Signal:
    seconds = np.median(view.table.now.seconds, axis=0)
    most = [int(place) for place in np.argsort(-seconds, kind="stable")[:MAX_FUNCTIONS_NAMED]]
    each = ", ".join(f"{view.table.functions[place][0]} ({seconds[place]:.3f} s)" for place in most)
    return Signal(SignalKind.BEHAVIOUR, f"most of a step goes into {each or 'no function that is known'}")
