"""Which rank holds a job that stands still (C4, arXiv 2406.04594, its table of hang syndromes).

Every worker whose ranks make no progress says what each of them is doing. Most of them are innocent: they wait in a
collective for somebody. The culprit is the one they wait for: it never entered the collective, and it stands still.

On GPUs all ranks have issued their collectives and wait for their GPU, so there it is the GPU that counts: that of the
culprit has not begun the oldest of them, since a kernel before it never ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from ..records import Collective, Device, Phase
from ..reports import DEBUGGER_WAIT, EXITED_PROCESS_STATES, BlockedConnection, FaultReport, FaultKind, RankState
from .waiting import PendingCollective, WaitSinks, WaitGraph, name_ranks

MIN_COMMUNICATION_HANG_SECONDS = 10.0
"""So long all ranks must have been inside the same collective before it is taken for one that never ends."""
MIN_BLOCKED_SECONDS = 1.5
"""The same where a connection of theirs gets nothing through: three times in a row it has been in vain by then (RFC
6298, from a time-out of 0.2 s on)."""
DEVICE_POLL_TIMEOUT_SECONDS = 10.0
"""A rank that waits for longer without anybody having looked at its GPU is judged as if it had none."""


OUTSIDE_COLLECTIVES_SECONDS = 300.0
"""A rank may wait for this duration outside of collectives for what no rank gives, unless `hangSeconds` says more."""
LONG_WAIT_REMEDY = "where training may wait so long, raise hangSeconds, or do it within job.phase(…)"


class HangKind(StrEnum):
    """What kind of hang it is, which decides what may be done about it."""

    STOPPED = "Stopped"  # the process is stopped or gone: nothing that it runs can be read from its stack
    NEVER_ENTERED = "NeverEntered"  # its peers wait in a collective that it never entered, and its stack stands still
    KERNEL = "Kernel"  # a kernel of its own never ends, before a collective that its peers have begun
    MISMATCH = "Mismatch"  # it entered another collective than its peers
    COMMUNICATION = "Communication"  # all entered the same collective and none came out: a link, not a rank


@dataclass(frozen=True)
class HangVerdict:
    """Who holds the job. `ranks` is empty where no rank is to blame (HangKind.COMMUNICATION)."""

    kind: HangKind
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    waits: str = ""  # who waits for whom, for people; "": nothing of the kind was looked at
    members: tuple[int, ...] = ()  # of the group in which it comes to nothing, where no rank is to blame


def diagnose_hang(faults: Sequence[FaultReport], world_size: int, ceiling_seconds: float = 1800.0) -> HangVerdict | None:
    """Judge the stalls that the workers of one round have reported; earlier reports of a worker do not count.

    A stopped process is to blame whatever the others say: no phase excuses it. Otherwise None as long as nobody can be
    blamed: a rank has not reported (its worker has nothing to complain of, so the job is in a phase that may take long;
    or it is lost, which is not for this function to say), is in a phase with a deadline of its own, still moves, or
    waits outside of collectives for something that no rank gives (`RankState.excused`). A rank that stays in such a
    phase without moving for `ceiling_seconds`, or for longer than its launcher allows, is blamed all the same.

    Once a rank has exited with code 0 or has finished training, only those ranks are in trouble that wait in a
    collective which an exited rank never enters; all others may take as long as they like.
    """
    stalls, ranks = _select_newest_states(faults)
    if len(ranks) < world_size:
        return _build_verdict(HangKind.STOPPED, [rank for rank in ranks if rank.process_state == "T"])
    newest = _find_newest_collectives(ranks)
    waits = [rank.rank for rank in ranks if not rank.ended and _is_waiting(rank, newest)]
    graph = WaitGraph({rank.rank: rank for rank in ranks}, waits, stalls)
    blocked = frozenset(end.rank for end in find_blocked_ends(stalls))
    case = _HangState(ranks, blocked, frozenset(waits), graph, ceiling_seconds)
    for judge in (_check_stopped, _check_training_over, _check_phase_ceiling, _check_busy, _check_unpolled_devices, _check_kernel, _check_sinks):
        found = judge(case)
        if found is not None:
            return found if found.evidence else None
    return None


def find_blocked_ends(stalls: Sequence[FaultReport]) -> tuple[BlockedConnection, ...]:
    """Ends that have got nothing through for MIN_BLOCKED_SECONDS, the longest first, by what each worker has told last."""
    newest = {fault.worker: fault for fault in sorted(stalls, key=lambda each: each.noticed_at)}
    ends = [end for fault in newest.values() for end in fault.blocked if end.seconds >= MIN_BLOCKED_SECONDS]
    return tuple(sorted(ends, key=lambda end: -end.seconds))


@dataclass(frozen=True)
class _HangState:
    ranks: Sequence[RankState]
    blocked: frozenset[int]
    """Those with a connection that gets nothing through."""
    waits: frozenset[int]
    """Those inside of a collective, where a rank may stand still for as long as another one does."""
    graph: WaitGraph
    ceiling: float

    def blame(self, kind: HangKind, culprits: Sequence[RankState]) -> HangVerdict | None:
        found = _build_verdict(kind, culprits)
        return None if found is None else replace(found, waits=self.graph.describe_waiters(found.ranks))

    def never_ends(self, inside: Collection[int], members: Collection[int]) -> bool:
        """Whether the collective of `members` that the ranks `inside` wait in is taken for one that never ends."""
        waited = min(self._waited_seconds[rank] for rank in inside if rank in self._waited_seconds)
        return waited >= MIN_COMMUNICATION_HANG_SECONDS or not self.blocked.isdisjoint(members)

    @cached_property
    def _waited_seconds(self) -> Mapping[int, float]:
        """Seconds, by rank."""
        return {rank.rank: rank.waiting_seconds for rank in self.ranks}


_NO_VERDICT = HangVerdict(HangKind.COMMUNICATION, (), ())
"""An answer without evidence ends the questioning: somebody has a good reason to be slow."""


def _check_stopped(case: _HangState) -> HangVerdict | None:
    gone = [rank for rank in case.ranks if rank.process_state in ("T", *EXITED_PROCESS_STATES) and not rank.ended]
    return case.blame(HangKind.STOPPED, gone)


def _check_training_over(case: _HangState) -> HangVerdict | None:
    ended = {rank.rank: rank for rank in case.ranks if rank.ended}
    if not ended and all(rank.phase != Phase.FINISHED.name for rank in case.ranks):
        return None
    missed = [rank for rank in ended.values() if case.graph.describe_waiters((rank.rank,))]
    return case.blame(HangKind.NEVER_ENTERED, missed) or _NO_VERDICT


def _check_phase_ceiling(case: _HangState) -> HangVerdict | None:
    late = [rank for rank in case.ranks if rank.overdue or rank.phase_seconds > case.ceiling]
    stuck = [rank for rank in late if _has_own_deadline(rank) and not rank.moving]
    return case.blame(HangKind.NEVER_ENTERED, stuck)


def _check_busy(case: _HangState) -> HangVerdict | None:
    """A rank in a long phase, or one that works or may wait outside of collectives, keeps others waiting rightly."""
    busy = [
        rank
        for rank in case.ranks
        if _has_own_deadline(rank) or rank.waits_for == DEBUGGER_WAIT or (rank.rank not in case.waits and _can_progress(rank))
    ]
    return _NO_VERDICT if busy else None


def _check_unpolled_devices(case: _HangState) -> HangVerdict | None:
    """How far a GPU is, its rank tells a moment after it has stopped to make progress."""
    unknown = [
        rank for rank in case.ranks if rank.device == Device.RUNNING.name and rank.waiting_seconds < DEVICE_POLL_TIMEOUT_SECONDS
    ]
    return _NO_VERDICT if unknown else None


def _check_kernel(case: _HangState) -> HangVerdict | None:
    return case.blame(HangKind.KERNEL, [rank for rank in case.ranks if rank.device == Device.SCHEDULED.name])


def _check_sinks(case: _HangState) -> HangVerdict | None:
    """The sinks of the wait-for graph. A rank that waits for nobody goes before all else: what its peers wait in may
    look odd because of it.

    With a collective under way a rank counts as inside of it, whatever it does meanwhile: where all its members have
    come, the stack tells.
    """
    sinks = case.graph.find_sinks()
    by_rank = {rank.rank: rank for rank in case.ranks}
    if len(sinks.outside) == len(case.ranks):
        return case.blame(HangKind.STOPPED, case.ranks)
    if sinks.outside:
        return case.blame(HangKind.NEVER_ENTERED, [by_rank[rank] for rank in sinks.outside])
    elsewhere = [by_rank[rank] for meeting in sinks.meetings for rank in meeting.inside if _is_elsewhere(by_rank[rank])]
    if elsewhere:
        goes_on = any(map(_can_progress, elsewhere))
        return _NO_VERDICT if goes_on else case.blame(HangKind.NEVER_ENTERED, elsewhere)
    circle = {rank for found in sinks.circles for rank in found}
    everywhere = Counter(rank.collective for rank in case.ranks)
    odd = {rank for meeting in sinks.meetings for rank in _find_mismatched(meeting, everywhere)}
    if circle or odd:
        return case.blame(HangKind.MISMATCH, [by_rank[rank] for rank in sorted(circle | odd)])
    return _check_communication(case, sinks)


def _can_progress(rank: RankState) -> bool:
    """What the library or torch.distributed waits for comes from other ranks, which are judged themselves."""
    waits_for_ranks = any(part in _find_innermost_call(rank) for part in (_GROUP_SETUP_PATH, *_OWN_PATHS))
    return rank.moving or (rank.excused and not waits_for_ranks)


def _is_elsewhere(rank: RankState) -> bool:
    """It is not where ranks wait for collectives."""
    innermost = _find_innermost_call(rank)
    told = rank.device == Device.NONE.name and innermost.startswith("File ")
    return told and not any(part in innermost for part in _COLLECTIVE_WAIT_PATHS)


_OWN_PATHS = ("-packages/pacekeeper/", "/trainer/pacekeeper/")
_COLLECTIVE_WAIT_PATHS = ("/torch/", "/torchinductor", *_OWN_PATHS)
"""Parts of the paths of files, the innermost of a rank that waits for a collective: torch, what it compiles, and what
stands around its waits, installed or in a checkout. A script may lie in a folder of any name."""
_GROUP_SETUP_PATH = "/torch/distributed/"
"""Part of the path of files in which ranks make their groups together, which is no collective."""


def _find_mismatched(meeting: PendingCollective, everywhere: Mapping[str, int]) -> Collection[int]:
    """Its group's others have gone on to later ones, so those inside lag behind; or some take it for another one."""
    return tuple(meeting.inside) if meeting.has_been_left else meeting.find_mismatched(everywhere)


def _check_communication(case: _HangState, sinks: WaitSinks) -> HangVerdict | None:
    """All have entered it. Their bytes may still be on the way, over a link that has become slow: this verdict has more
    time than the others, unless the kernel of one of them says that nothing comes through."""
    for meeting in sorted(sinks.meetings, key=lambda meeting: -len(meeting.inside)):
        members = meeting.group.members
        if case.never_ends(meeting.inside, members):
            said = f"all {len(members)} ranks entered {meeting} and {_describe_who_stayed(meeting)}"
            return HangVerdict(HangKind.COMMUNICATION, (), (said,), waits=said, members=members)
    if sinks.meetings or not sinks.unknown or not case.never_ends(sinks.unknown, sinks.unknown):
        return None
    said = f"{name_ranks(sinks.unknown)} wait, and nobody knows for whom"
    return HangVerdict(HangKind.COMMUNICATION, (), (said,), waits=said, members=sinks.unknown)


def _describe_who_stayed(meeting: PendingCollective) -> str:
    if len(meeting.inside) == len(meeting.group.members):
        return "none came out of it"
    return f"{name_ranks(sorted(meeting.inside))} did not come out of it"


def _build_verdict(kind: HangKind, culprits: Sequence[RankState]) -> HangVerdict | None:
    if not culprits:
        return None
    return HangVerdict(kind, tuple(rank.rank for rank in culprits), tuple(map(_describe_rank, culprits)))


def _describe_rank(rank: RankState) -> str:
    if rank.ended:
        return f"rank {rank.rank}: has exited with code 0 after step {rank.step}, and enters no collective any more"
    said = f"; it waits for {rank.waits_for}: {LONG_WAIT_REMEDY}" if rank.waits_for else ""
    return (
        f"rank {rank.rank}: step {rank.step}, {_describe_position(rank)}, no progress for {rank.waiting_seconds:.1f} s, "
        f"process state {rank.process_state or 'gone'}, {_find_innermost_call(rank) or 'no stack'}{said}"
    )


def _find_innermost_call(rank: RankState) -> str:
    """The call that the rank is in; "": it has told no stack."""
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
    """The newest collective that a host speaks of, by group."""
    newest: dict[int, int] = {}
    for rank in ranks:
        newest[rank.group] = max(rank.sequence, newest.get(rank.group, rank.sequence))
    return newest


def _is_waiting(rank: RankState, newest: Mapping[int, int]) -> bool:
    """Whether it is inside of a collective, where a rank may stand still for as long as another one does."""
    match Device[rank.device]:
        case Device.STARTED:
            return True
        case Device.SCHEDULED:
            return False
        case Device.IDLE:
            # It may have left the collective that its host speaks of: on a GPU nobody tells the host of the end.
            return rank.collective != Collective.NONE.name and rank.sequence == newest[rank.group]
        case Device.NONE | Device.RUNNING:
            return rank.collective != Collective.NONE.name or _GROUP_SETUP_PATH in _find_innermost_call(rank)


def _has_own_deadline(rank: RankState) -> bool:
    return rank.phase != Phase.TRAIN.name


def _select_newest_states(faults: Sequence[FaultReport]) -> tuple[list[FaultReport], list[RankState]]:
    """The stalls of the newest round, oldest first, and the newest state of every rank that they speak of."""
    stalls = [fault for fault in faults if fault.kind is FaultKind.STALLED]
    newest_round = max((fault.round for fault in stalls), default=0)
    of_round = sorted((fault for fault in stalls if fault.round == newest_round), key=lambda fault: fault.noticed_at)
    states = {rank.rank: rank for fault in of_round for rank in fault.ranks}
    return of_round, [states[rank] for rank in sorted(states)]
