"""Which rank holds a job that stands still (C4, arXiv 2406.04594, its table of hang syndromes).

Every worker whose ranks make no progress says what each of them is doing. Most of them are innocent: they wait in a
collective for somebody. The culprit is the one they wait for: it never entered the collective, and it stands still.

On GPUs all ranks have issued their collectives and wait for their GPU, so there it is the GPU that counts: that of the
culprit has not begun the oldest of them, since a kernel before it never ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..records import Collective, Device, Phase
from ..reports import Fault, FaultKind, RankState

COMMUNICATION_SECONDS = 10.0
"""So long all ranks must have been inside the same collective before it is taken for one that never ends."""
LOOK_SECONDS = 10.0
"""A rank that waits for longer without anybody having looked at its GPU is judged as if it had none."""


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


def verdict(faults: Sequence[Fault], world_size: int, ceiling_seconds: float = 1800.0) -> HangVerdict | None:
    """Judge the stalls that the workers of one round have reported; earlier reports of a worker do not count.

    A stopped process is to blame whatever the others say: no phase excuses it. Otherwise None as long as nobody can be
    blamed: a rank has not reported (its worker has nothing to complain of, so the job is in a phase that may take long;
    or it is lost, which is not for this function to say), is in a phase with a deadline of its own, or still moves. A
    rank that stays in such a phase without moving for `ceiling_seconds`, or for longer than its launcher allows, is
    blamed all the same.
    """
    ranks = _latest(faults)
    if len(ranks) < world_size:
        return _blame(HangKind.STOPPED, [rank for rank in ranks if rank.process_state == "T"])
    for judge in (_stopped, _beyond_ceiling, _busy, _not_looked_at, _kernel, _never_entered, _mismatch, _communication):
        found = judge(ranks, ceiling_seconds)
        if found is not None:
            return found if found.evidence else None
    return None


_NO_VERDICT = HangVerdict(HangKind.COMMUNICATION, (), ())
"""An answer without evidence ends the questioning: somebody has a good reason to be slow."""


def _stopped(ranks: Sequence[RankState], _ceiling: float) -> HangVerdict | None:
    return _blame(HangKind.STOPPED, [rank for rank in ranks if rank.process_state in ("T", "t", "Z", "X", "")])


def _beyond_ceiling(ranks: Sequence[RankState], ceiling: float) -> HangVerdict | None:
    late = [rank for rank in ranks if rank.overdue or rank.phase_seconds > ceiling]
    stuck = [rank for rank in late if _has_own_deadline(rank) and not rank.moving]
    return _blame(HangKind.NEVER_ENTERED, stuck)


def _busy(ranks: Sequence[RankState], _ceiling: float) -> HangVerdict | None:
    """A rank in a long phase, or one that works outside of collectives, keeps the others waiting rightly."""
    newest = _newest(ranks)
    busy = [rank for rank in ranks if _has_own_deadline(rank) or (not _waits(rank, newest) and rank.moving)]
    return _NO_VERDICT if busy else None


def _not_looked_at(ranks: Sequence[RankState], _ceiling: float) -> HangVerdict | None:
    """How far a GPU is, its rank tells a moment after it has stopped to make progress."""
    unknown = [rank for rank in ranks if rank.device == Device.RUNNING.name and rank.waiting_seconds < LOOK_SECONDS]
    return _NO_VERDICT if unknown else None


def _kernel(ranks: Sequence[RankState], _ceiling: float) -> HangVerdict | None:
    return _blame(HangKind.KERNEL, [rank for rank in ranks if rank.device == Device.SCHEDULED.name])


def _never_entered(ranks: Sequence[RankState], _ceiling: float) -> HangVerdict | None:
    newest = _newest(ranks)
    behind = [rank for rank in ranks if not _waits(rank, newest)]
    return _blame(HangKind.NEVER_ENTERED, behind) if len(behind) < len(ranks) else _blame(HangKind.STOPPED, behind)


def _mismatch(ranks: Sequence[RankState], _ceiling: float) -> HangVerdict | None:
    """All are inside a collective, but not the same one: the fewest are wrong; in a group, those that lag behind."""
    odd: list[RankState] = []
    groups: dict[tuple[bool, int], list[tuple[RankState, _Place]]] = {}
    for rank in ranks:
        if (place := _place(rank)) is not None:
            groups.setdefault((place.on_gpu, place.group), []).append((rank, place))
    for inside in groups.values():
        newest = max(place.sequence for _, place in inside)
        odd += [rank for rank, place in inside if place.sequence < newest]
        there = [(rank, place) for rank, place in inside if place.sequence == newest]
        (usual, _), *others = Counter(place.collective for _, place in there).most_common()
        odd += [rank for rank, place in there if others and place.collective != usual]
    return _blame(HangKind.MISMATCH, odd)


def _communication(ranks: Sequence[RankState], _ceiling: float) -> HangVerdict | None:
    """Their bytes may still be on the way, over a link that has become slow: this one has more time than the others."""
    if min(rank.waiting_seconds for rank in ranks) < COMMUNICATION_SECONDS:
        return None
    first = _place(ranks[0])
    what = "a collective" if first is None else f"{first.collective} {first.sequence}"
    return HangVerdict(HangKind.COMMUNICATION, (), (f"all {len(ranks)} ranks entered {what} and none came out of it",))


def _blame(kind: HangKind, culprits: Sequence[RankState]) -> HangVerdict | None:
    if not culprits:
        return None
    return HangVerdict(kind, tuple(rank.rank for rank in culprits), tuple(map(_describe, culprits)))


def _describe(rank: RankState) -> str:
    innermost = rank.stack.strip().splitlines()[-1].strip() if rank.stack.strip() else "no stack"
    return (
        f"rank {rank.rank}: step {rank.step}, {_where(rank)}, no progress for {rank.waiting_seconds:.1f} s, "
        f"process state {rank.process_state or 'gone'}, {innermost}"
    )


def _where(rank: RankState) -> str:
    if _has_own_deadline(rank):
        return f"in phase {rank.phase}"
    if rank.device == Device.SCHEDULED.name:
        return f"its GPU still before {rank.device_collective} {rank.device_sequence}"
    if rank.collective == Collective.NONE.name:
        return f"after {rank.sequence} collectives"
    return f"inside {rank.collective} {rank.sequence}"


def _newest(ranks: Sequence[RankState]) -> Mapping[int, int]:
    """The newest collective that a host speaks of, by group."""
    newest: dict[int, int] = {}
    for rank in ranks:
        newest[rank.group] = max(rank.sequence, newest.get(rank.group, rank.sequence))
    return newest


def _waits(rank: RankState, newest: Mapping[int, int]) -> bool:
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
            return rank.collective != Collective.NONE.name


@dataclass(frozen=True)
class _Place:
    """The collective that a rank waits in. Numbers of hosts and GPUs do not compare: hosts run ahead."""

    on_gpu: bool
    group: int
    sequence: int
    collective: str


def _place(rank: RankState) -> _Place | None:
    """None: its number compares with no other rank's."""
    if rank.device == Device.STARTED.name:
        place = _Place(True, rank.device_group, rank.device_sequence, rank.device_collective)
        return place if rank.device_group else None
    if rank.device == Device.RUNNING.name:
        return None
    return _Place(False, rank.group, rank.sequence, rank.collective)


def _has_own_deadline(rank: RankState) -> bool:
    return rank.phase != Phase.TRAIN.name


def _latest(faults: Sequence[Fault]) -> list[RankState]:
    """The newest state of every rank that a stall of the newest round speaks of."""
    stalls = [fault for fault in faults if fault.kind is FaultKind.STALLED]
    newest_round = max((fault.round for fault in stalls), default=0)
    states: dict[int, RankState] = {}
    for fault in sorted((fault for fault in stalls if fault.round == newest_round), key=lambda fault: fault.noticed_at):
        states.update((rank.rank, rank) for rank in fault.ranks)
    return [states[rank] for rank in sorted(states)]
