"""Finds the rank that blocks a hanging job (C4, arXiv 2406.04594, its table of hang syndromes).

Every worker whose ranks make no progress reports what each of them is doing. Most of them are innocent: they wait in a
collective for another rank. The culprit is the rank that they wait for: it never entered the collective, and its stack
does not move.

On GPUs all ranks have issued their collectives and wait for their GPU, so the state of the GPU counts. The culprit's
GPU has not begun the oldest collective, because a kernel before it never ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from pacekeeper_rank.records import Collective, Device, Phase

from ..protocol.reports import (
    DEBUGGER_WAIT,
    EXITED_PROCESS_STATES,
    BlockedConnection,
    FaultKind,
    FaultReport,
    RankState,
)
from .crash import describe_reached_step
from .wait_graph import PendingCollective, WaitGraph, WaitSinks, name_ranks

MIN_COMMUNICATION_HANG_SECONDS = 10.0
"""Time that all ranks must have been inside the same collective before it counts as one that never ends."""
MIN_BLOCKED_SECONDS = 1.5
"""The same time if one of their connections makes no progress.

By then TCP has retransmitted three times without an answer (RFC 6298, from a timeout of 0.2 s on).
"""
DEVICE_POLL_TIMEOUT_SECONDS = 10.0
"""Time after which a rank whose GPU was not polled is treated as if it had no GPU."""


OUTSIDE_COLLECTIVES_SECONDS = 300.0
"""Time that a rank may wait outside collectives for something that no rank provides, unless `hangSeconds` is larger."""
LONG_WAIT_REMEDY = "if training may wait this long, raise hangSeconds, or wait within job.phase(…)"


class HangKind(StrEnum):
    """The kind of a hang, which decides what may be done about it."""

    STOPPED = "Stopped"  # the process is stopped or gone: its stack gives no information
    NEVER_ENTERED = "NeverEntered"  # its peers wait in a collective that it never entered, and its stack does not move
    KERNEL = "Kernel"  # its own kernel never ends, before a collective that its peers have begun
    MISMATCH = "Mismatch"  # it entered another collective than its peers
    COMMUNICATION = "Communication"  # all entered the same collective and none left it: a link is at fault, not a rank


@dataclass(frozen=True)
class HangVerdict:
    """The diagnosis of a hang. `ranks` is empty if no rank is to blame (HangKind.COMMUNICATION)."""

    kind: HangKind
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    waits: str = ""  # which ranks wait for which, for people; "": not examined
    members: tuple[int, ...] = ()  # of the group that makes no progress, if no rank is to blame


def diagnose_hang(
    faults: Sequence[FaultReport], world_size: int, ceiling_seconds: float = 1800.0
) -> HangVerdict | None:
    """Return which ranks block the job, from the stalls that the workers of one round reported.

    Only the newest report of each worker counts. A stopped process is blamed first: no phase excuses it. Otherwise the
    result is None while the job may still make progress, because a rank

    * has not reported: its worker sees no stall, so the job is in a phase that may take long. Or the worker is lost,
      which
    this function does not diagnose;
    * is in a phase with its own deadline;
    * still moves;
    * waits outside collectives for something that no rank provides (`RankState.excused`).

    A rank that stays in such a phase without moving for `ceiling_seconds`, or for longer than its launcher allows, is
    blamed anyway.

    Once a rank has exited with code 0 or has finished training, only a wait for a collective that an exited rank never
    enters counts as a hang. All other ranks may take any time.
    """
    stalls, ranks = _select_newest_states(faults)
    if len(ranks) < world_size:
        return _build_verdict(HangKind.STOPPED, [rank for rank in ranks if rank.process_state == "T"])
    newest = _find_newest_collectives(ranks)
    waiting = [rank.rank for rank in ranks if not rank.ended and _is_waiting(rank, newest)]
    graph = WaitGraph({rank.rank: rank for rank in ranks}, waiting, stalls)
    blocked = frozenset(end.rank for end in find_blocked_ends(stalls))
    state = _HangState(ranks, blocked, frozenset(waiting), graph, ceiling_seconds)
    for check in (
        _check_stopped,
        _check_training_over,
        _check_phase_ceiling,
        _check_busy,
        _check_unpolled_devices,
        _check_kernel,
        _check_sinks,
    ):
        verdict = check(state)
        if verdict is not None:
            return verdict if verdict.evidence else None
    return None


def find_blocked_ends(stalls: Sequence[FaultReport]) -> tuple[BlockedConnection, ...]:
    """Return the ends that made no progress for MIN_BLOCKED_SECONDS, the longest first.

    Only the newest report of each worker counts.
    """
    newest = {fault.worker: fault for fault in sorted(stalls, key=lambda report: report.noticed_at)}
    ends = [end for fault in newest.values() for end in fault.blocked if end.seconds >= MIN_BLOCKED_SECONDS]
    return tuple(sorted(ends, key=lambda end: -end.seconds))


@dataclass(frozen=True)
class _HangState:
    ranks: Sequence[RankState]
    blocked: frozenset[int]
    """Ranks with a connection that makes no progress."""
    waits: frozenset[int]
    """Ranks inside a collective, where a rank may stand still as long as another one does."""
    graph: WaitGraph
    ceiling: float

    def blame(self, kind: HangKind, culprits: Sequence[RankState]) -> HangVerdict | None:
        verdict = _build_verdict(kind, culprits)
        return None if verdict is None else replace(verdict, waits=self.graph.describe_waiters(verdict.ranks))

    def never_ends(self, inside: Collection[int], members: Collection[int]) -> bool:
        """Return whether the collective of `members`, in which the ranks `inside` wait, counts as endless."""
        shortest_wait = min(self._waited_seconds[rank] for rank in inside if rank in self._waited_seconds)
        return shortest_wait >= MIN_COMMUNICATION_HANG_SECONDS or not self.blocked.isdisjoint(members)

    @cached_property
    def _waited_seconds(self) -> Mapping[int, float]:
        """Seconds that each rank has waited, by rank."""
        return {rank.rank: rank.waiting_seconds for rank in self.ranks}


_NO_VERDICT = HangVerdict(HangKind.COMMUNICATION, (), ())
"""A result without evidence ends the checks: a rank has a good reason to be slow."""


def _check_stopped(state: _HangState) -> HangVerdict | None:
    stopped = [rank for rank in state.ranks if rank.process_state in ("T", *EXITED_PROCESS_STATES) and not rank.ended]
    return state.blame(HangKind.STOPPED, stopped)


def _check_training_over(state: _HangState) -> HangVerdict | None:
    ended = {rank.rank: rank for rank in state.ranks if rank.ended}
    if not ended and all(rank.phase != Phase.FINISHED.name for rank in state.ranks):
        return None
    awaited = [rank for rank in ended.values() if state.graph.describe_waiters((rank.rank,))]
    return state.blame(HangKind.NEVER_ENTERED, awaited) or _NO_VERDICT


def _check_phase_ceiling(state: _HangState) -> HangVerdict | None:
    overdue = [rank for rank in state.ranks if rank.overdue or rank.phase_seconds > state.ceiling]
    stuck = [rank for rank in overdue if _has_own_deadline(rank) and not rank.moving]
    return state.blame(HangKind.NEVER_ENTERED, stuck)


def _check_busy(state: _HangState) -> HangVerdict | None:
    """Return an empty verdict if a rank is in a long phase, or works or may wait outside collectives."""
    busy = [
        rank
        for rank in state.ranks
        if _has_own_deadline(rank)
        or rank.waits_for == DEBUGGER_WAIT
        or (rank.rank not in state.waits and _can_progress(rank))
    ]
    return _NO_VERDICT if busy else None


def _check_unpolled_devices(state: _HangState) -> HangVerdict | None:
    """Return an empty verdict while a GPU was not polled. A rank polls its GPU a moment after its progress stops."""
    unknown = [
        rank
        for rank in state.ranks
        if rank.device == Device.RUNNING.name and rank.waiting_seconds < DEVICE_POLL_TIMEOUT_SECONDS
    ]
    return _NO_VERDICT if unknown else None


def _check_kernel(state: _HangState) -> HangVerdict | None:
    return state.blame(HangKind.KERNEL, [rank for rank in state.ranks if rank.device == Device.SCHEDULED.name])


def _check_sinks(state: _HangState) -> HangVerdict | None:
    """Judge the sinks of the wait-for graph.

    A rank that waits for no other rank is blamed first: it may be the reason why the collectives of its peers look
    inconsistent. On a GPU a rank counts as inside the collective in progress, even if its process does other work. If
    all members have entered the collective, the stack decides.
    """
    sinks = state.graph.find_sinks()
    by_rank = {rank.rank: rank for rank in state.ranks}
    if len(sinks.ranks_outside) == len(state.ranks):
        return state.blame(HangKind.STOPPED, state.ranks)
    if sinks.ranks_outside:
        return state.blame(HangKind.NEVER_ENTERED, [by_rank[rank] for rank in sinks.ranks_outside])
    elsewhere = [
        by_rank[rank]
        for pending in sinks.pending_collectives
        for rank in pending.inside
        if _is_elsewhere(by_rank[rank])
    ]
    if elsewhere:
        can_progress = any(map(_can_progress, elsewhere))
        return _NO_VERDICT if can_progress else state.blame(HangKind.NEVER_ENTERED, elsewhere)
    cycle_ranks = {rank for cycle in sinks.wait_cycles for rank in cycle}
    collective_counts = Counter(rank.collective for rank in state.ranks)
    mismatched = {
        rank for pending in sinks.pending_collectives for rank in _find_mismatched(pending, collective_counts)
    }
    if cycle_ranks or mismatched:
        return state.blame(HangKind.MISMATCH, [by_rank[rank] for rank in sorted(cycle_ranks | mismatched)])
    return _check_communication(state, sinks)


def _can_progress(rank: RankState) -> bool:
    """Return whether the rank may still progress.

    It may not if it waits for other ranks: those are judged themselves.
    """
    waits_for_ranks = any(part in _find_innermost_call(rank) for part in (_GROUP_SETUP_PATH, *_OWN_PATHS))
    return rank.moving or (rank.excused and not waits_for_ranks)


def _is_elsewhere(rank: RankState) -> bool:
    """Return whether the rank is in code that does not wait for collectives."""
    innermost = _find_innermost_call(rank)
    is_conclusive = rank.device == Device.NONE.name and innermost.startswith("File ")
    return is_conclusive and not any(part in innermost for part in _COLLECTIVE_WAIT_PATHS)


_OWN_PATHS = (
    *("-packages/pacekeeper/", "/trainer/pacekeeper/"),
    *("-packages/pacekeeper_rank/", "/trainer/pacekeeper_rank/", "/_pacekeeper_rank/"),
)
_COLLECTIVE_WAIT_PATHS = ("/torch/", "/torchinductor", *_OWN_PATHS)
"""Parts of the paths of files in which a rank waits for a collective.

They cover torch, the code that it compiles, and Pacekeeper's wrappers, installed or in a checkout. A script may be in a
folder of any name.
"""
_GROUP_SETUP_PATH = "/torch/distributed/"
"""Part of the path of files in which ranks create their groups, which is not a collective."""


def _find_mismatched(pending: PendingCollective, collective_counts: Mapping[str, int]) -> Collection[int]:
    """Return the ranks in the wrong collective: those that lag behind their group, or disagree with it."""
    return tuple(pending.inside) if pending.has_been_left else pending.find_mismatched(collective_counts)


def _check_communication(state: _HangState, sinks: WaitSinks) -> HangVerdict | None:
    """Return a verdict if all ranks have entered a collective that never ends.

    Their data may still be in transit over a slow link. So this verdict needs more time than the others, unless the
    kernel of one of the ranks reports that a connection makes no progress.
    """
    for pending in sorted(sinks.pending_collectives, key=lambda pending: -len(pending.inside)):
        members = pending.group.members
        if state.never_ends(pending.inside, members):
            message = f"all {len(members)} ranks entered {pending} and {_describe_who_stayed(pending)}"
            return HangVerdict(HangKind.COMMUNICATION, (), (message,), waits=message, members=members)
    if (
        sinks.pending_collectives
        or not sinks.unknown_ranks
        or not state.never_ends(sinks.unknown_ranks, sinks.unknown_ranks)
    ):
        return None
    message = f"{name_ranks(sinks.unknown_ranks)} wait for unknown ranks"
    return HangVerdict(HangKind.COMMUNICATION, (), (message,), waits=message, members=sinks.unknown_ranks)


def _describe_who_stayed(pending: PendingCollective) -> str:
    if len(pending.inside) == len(pending.group.members):
        return "none came out of it"
    return f"{name_ranks(sorted(pending.inside))} did not come out of it"


def _build_verdict(kind: HangKind, culprits: Sequence[RankState]) -> HangVerdict | None:
    if not culprits:
        return None
    return HangVerdict(kind, tuple(rank.rank for rank in culprits), tuple(map(_describe_rank, culprits)))


def _describe_rank(rank: RankState) -> str:
    if rank.ended:
        return (
            f"rank {rank.rank}: exited with code 0 {describe_reached_step(rank.step)}, so it enters no more collectives"
        )
    position = "no step" if rank.step is None else f"step {rank.step}"
    advice = f"; it waits for {rank.waits_for}: {LONG_WAIT_REMEDY}" if rank.waits_for else ""
    return (
        f"rank {rank.rank}: {position}, {_describe_position(rank)}, no progress for "
        f"{rank.waiting_seconds:.1f} s, "
        f"process state {rank.process_state or 'gone'}, {_find_innermost_call(rank) or 'no stack'}{advice}"
    )


def _find_innermost_call(rank: RankState) -> str:
    """Return the call that the rank is in. "" if it reported no stack."""
    stack = rank.stack.strip()
    return stack.splitlines()[-1].strip() if stack else ""


def _describe_position(rank: RankState) -> str:
    if _has_own_deadline(rank):
        return f"in phase {rank.phase}"
    if rank.device == Device.SCHEDULED.name:
        return f"its GPU still before {rank.device_collective} {rank.device_sequence}"
    if rank.collective == Collective.NONE.name:
        return f"after {rank.sequence} collectives"
    return f"inside {rank.collective} {rank.sequence}"


def _find_newest_collectives(ranks: Sequence[RankState]) -> Mapping[int, int]:
    """Return the newest collective that a rank reported, by group."""
    newest: dict[int, int] = {}
    for rank in ranks:
        newest[rank.group] = max(rank.sequence, newest.get(rank.group, rank.sequence))
    return newest


def _is_waiting(rank: RankState, newest: Mapping[int, int]) -> bool:
    """Return whether the rank is inside a collective, where it may stand still as long as another rank does."""
    match Device[rank.device]:
        case Device.STARTED:
            return True
        case Device.SCHEDULED:
            return False
        case Device.IDLE:
            # The rank may have left the collective that its CPU reports: the CPU does not notice the end on the GPU.
            return rank.collective != Collective.NONE.name and rank.sequence == newest[rank.group]
        case Device.NONE | Device.RUNNING:
            return rank.collective != Collective.NONE.name or _GROUP_SETUP_PATH in _find_innermost_call(rank)


def _has_own_deadline(rank: RankState) -> bool:
    return rank.phase != Phase.TRAIN.name


def _select_newest_states(faults: Sequence[FaultReport]) -> tuple[list[FaultReport], list[RankState]]:
    """Return the stalls of the newest round, oldest first, and the newest state of each rank in them."""
    stalls = [fault for fault in faults if fault.kind is FaultKind.STALLED]
    newest_round = max((fault.round for fault in stalls), default=0)
    newest = sorted((fault for fault in stalls if fault.round == newest_round), key=lambda fault: fault.noticed_at)
    states = {rank.rank: rank for fault in newest for rank in fault.ranks}
    return newest, [states[rank] for rank in sorted(states)]
