"""Which rank the others wait for in a job that is slow, over nested groups. (C4, arXiv 2406.04594, judges each group
alone.)

Of clocks only durations are compared. A rank's wait w in a collective is how long it did nothing but wait for it: what
it computes beside an asynchronous one is none. Who comes last waits for nobody, so the least of the members' waits is
the *transfer*, and what the others waited beyond it is lost time, owed to the last to come.

Who came late may have been held up itself: as much as it waited in other groups since the group's previous collective,
beyond what those waited there who now wait for it, it passes on to whoever came last there, and so on. The rest stays
with it. So blames sum to the lost time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..communicators import Communicator
from ..operations import OPERATION, decode_operations
from ..records import NOTICED_LATE, SYMMETRIC_COLLECTIVES, Collective
from ..reports import Evidence

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

MIN_BLAMED_STEP_SHARE = 0.1
"""Of a step that a rank costs, in most of its steps, before it is called slow."""
MIN_BLAMED_STEPS_SHARE = 0.8
"""Of the steps: those count as most."""
MIN_SLOW_TRANSFER_RATIO = 1.3
"""So many times as long as usual a transfer is slow."""
MAX_BLAME_PASSES = 64
"""From rank to rank that blame is passed on; what is still on its way then stays where it is."""
_JUDGED_COLLECTIVES = [int(collective) for collective in (*SYMMETRIC_COLLECTIVES, Collective.SEND, Collective.RECV)]
"""In the others the first to come may leave without the last."""


@dataclass(frozen=True)
class WaitAttribution:
    """Who makes whom wait."""

    ranks: Whole
    steps: Whole
    seconds: Floats
    """[rank, step]: that all others together waited for it."""
    roles: Whole
    """By rank: the same number for those that do the same in a step, as one stage of a pipeline in all replicas."""

    @property
    def lost_seconds(self) -> float:
        """Seconds that all ranks together waited."""
        return float(self.seconds.sum())

    def compute_shares(self, step_seconds: float) -> Floats:
        """[rank, step]: what each of its peers waits for a rank, beyond what it waits for the median of the ranks that
        do the same, over the time of a step. Stages of a pipeline wait for each other by their nature. 0 where no other
        rank does the same."""
        beyond = np.zeros_like(self.seconds)
        for role in np.unique(self.roles):
            alike = np.flatnonzero(self.roles == role)
            beyond[alike] = self.seconds[alike] - _compute_median_of_others(self.seconds[alike])
        return beyond / max(1, len(self.ranks) - 1) / step_seconds

    def find_slow_ranks(self, step_seconds: float) -> tuple[int, ...]:
        """Ranks that cost LEAST_SHARE of a step or more in MOST_STEPS of the steps, the dearest first."""
        share = self.compute_shares(step_seconds)
        often = (share >= MIN_BLAMED_STEP_SHARE).mean(axis=1) >= MIN_BLAMED_STEPS_SHARE if share.size else np.zeros(len(share), bool)
        return tuple(int(self.ranks[at]) for at in np.argsort(-share.sum(axis=1), kind="stable") if often[at])


class TransferClass(NamedTuple):
    """Transfers that take alike, as long as their links are the same."""

    group: int  # identity
    collective: int
    size: int  # the power of two that its bytes reach


class MeasuredTransfer(NamedTuple):
    """How long they take, in the median."""

    seconds: float
    seconds_per_byte: float
    late_seconds: float  # from the first to come to the last
    ranks: tuple[int, ...]  # of the group


def attribute_waits(evidence: Sequence[Evidence]) -> WaitAttribution:
    """Of the collectives of all ranks' last steps; those that some member has not told of do not count."""
    table = _build_table(evidence)
    ranks, rank_of = np.unique(table.rank, return_inverse=True)
    steps, step_of = np.unique(table.step, return_inverse=True)
    seconds = np.zeros((len(ranks), len(steps)))
    np.add.at(seconds, (rank_of[table.last_row], step_of[table.last_row]), _pass_on_blame(table))
    return WaitAttribution(ranks, steps, seconds, _number_roles(table, rank_of, len(ranks)))


def measure_transfers(evidence: Sequence[Evidence]) -> dict[TransferClass, MeasuredTransfer]:
    """By class: who comes last is inside for no longer than the transfer takes."""
    table = _build_table(evidence)
    first = table.first
    inside = np.where(table.end_is_exact, table.end - table.start, np.inf)
    least, late = np.minimum.reduceat(inside, first), np.maximum.reduceat(table.lost_seconds, first)
    size = np.log2(np.maximum(table.bytes[first], 1.0)).astype(np.int64)
    measured = np.flatnonzero(np.isfinite(least) & (table.bytes[first] > 0))
    kinds, kind_of = np.unique(
        np.stack([table.group[first], table.collective[first], size])[:, measured], axis=1, return_inverse=True
    )
    found = {}
    for at, (group, collective, power) in enumerate(kinds.T.tolist()):
        of = measured[kind_of.reshape(-1) == at]
        identity, ranks = table.groups[group].identity, table.groups[group].ranks
        per_byte = least[of] / table.bytes[first][of]
        middle = [float(np.median(values)) for values in (least[of], per_byte, late[of])]
        found[TransferClass(identity, collective, power)] = MeasuredTransfer(middle[0], middle[1], middle[2], ranks)
    return found


def find_usual_transfer_times(now: Mapping[TransferClass, MeasuredTransfer]) -> dict[TransferClass, float]:
    """Seconds per byte in the median of the other groups of as many ranks that do the same."""
    alike: dict[tuple[int, int, int], list[TransferClass]] = defaultdict(list)
    for kind, found in now.items():
        alike[kind.collective, kind.size, len(found.ranks)].append(kind)
    return {
        kind: median(now[other].seconds_per_byte for other in kinds if other != kind)
        for kinds in alike.values()
        if len(kinds) > 1
        for kind in kinds
    }


def find_slow_transfers(
    now: Mapping[TransferClass, MeasuredTransfer], usual: Mapping[TransferClass, float]
) -> dict[TransferClass, float]:
    """How many times as long as usual (seconds per byte), where that is MIN_SLOW_TRANSFER_RATIO times or more and no rank's
    lateness hides it: they come together within less time than the transfer takes."""
    slow = {}
    for kind, found in now.items():
        times = found.seconds_per_byte / usual[kind] if usual.get(kind, 0.0) > 0.0 else 0.0
        if times >= MIN_SLOW_TRANSFER_RATIO and found.late_seconds < found.seconds:
            slow[kind] = times
    return slow


@dataclass(frozen=True)
class _CollectiveTable:
    """Collectives of which all members have told, one row a member; the rows of one collective stand together."""

    groups: Sequence[Communicator]
    group: Whole
    rank: Whole
    step: Whole
    collective: Whole
    bytes: Floats
    start: Floats
    end: Floats
    held: Floats
    end_is_exact: NDArray[np.bool_]
    order: Whole
    """Position of the row in the course of its rank, over all ranks."""
    first: Whole
    """By collective: its first row."""
    of: Whole
    """By row: which collective."""

    @cached_property
    def lost_seconds(self) -> Floats:
        """By row: what this rank waited beyond the transfer."""
        if not len(self.first):
            return self.held
        return self.held - np.minimum.reduceat(self.held, self.first)[self.of]

    @cached_property
    def last_row(self) -> Whole:
        """By collective: the row of the last to come: who waited least, and entered it last."""
        order = np.lexsort((self.end - self.start, self.held, self.of))
        return order[self.first]


def _build_table(evidence: Sequence[Evidence]) -> _CollectiveTable:
    columns, groups = _collect_rows(evidence)
    rank, group, found = columns
    if len(found):
        course = np.lexsort((found["start"], found["step"], rank))
        rank, group, found = rank[course], group[course], found[course]
        order = np.arange(len(found))
        together = np.lexsort((rank, found["sequence"], group))
        keys = np.stack([group[together], found["sequence"][together].astype(np.int64)])
        changes = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
        first = np.concatenate([[0], changes])
        of = np.repeat(np.arange(len(first)), np.diff([*first, len(together)]))
        sizes = np.array([of.size for of in groups])
        twice = np.zeros(len(together), bool)
        twice[1:] = (rank[together][1:] == rank[together][:-1]) & (of[1:] == of[:-1])
        whole = (np.bincount(of) == sizes[group[together][first]]) & (np.bincount(of, weights=twice) == 0)
        rows = together[whole[of]]
        of = np.unique(of[whole[of]], return_inverse=True)[1]
        rank, group, found, order = rank[rows], group[rows], found[rows], order[rows]
    else:
        of = order = np.zeros(0, np.int64)
    return _CollectiveTable(
        groups=groups,
        group=group,
        rank=rank,
        step=found["step"].astype(np.int64),
        collective=found["collective"].astype(np.int64),
        bytes=found["bytes"].astype(np.float64),
        start=found["start"].astype(np.float64),
        end=found["end"].astype(np.float64),
        held=found["held"].astype(np.float64),
        end_is_exact=(found["flags"] & NOTICED_LATE) == 0,
        order=order,
        first=np.flatnonzero(np.diff(of, prepend=-1)),
        of=of,
    )


def _collect_rows(
    evidence: Sequence[Evidence],
) -> tuple[tuple[Whole, Whole, NDArray[np.void]], list[Communicator]]:
    """Rank, group and operation of all that is judged, as it was told; and the groups."""
    number_of: dict[tuple[int, str], int] = {}
    groups: list[Communicator] = []
    ranks, of_groups, operations = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, OPERATION)]
    for told in evidence:
        for communicator in told.communicators:
            if (communicator.identity, communicator.members) not in number_of:
                number_of[communicator.identity, communicator.members] = len(groups)
                groups.append(communicator)
        numbers = np.array([number_of[each.identity, each.members] for each in told.communicators], np.int64)
        for of_rank in told.operations:
            found = decode_operations(of_rank.operations)
            found = found[np.isin(found["collective"], _JUDGED_COLLECTIVES) & (found["group"] < len(numbers))]
            ranks.append(np.full(len(found), of_rank.rank, np.int64))
            of_groups.append(numbers[found["group"]])
            operations.append(found)
    return (np.concatenate(ranks), np.concatenate(of_groups), np.concatenate(operations)), groups


def _pass_on_blame(table: _CollectiveTable) -> Floats:
    """By collective: of what was lost in it and what was passed on to it, the part that stays with the last to come."""
    lost = table.lost_seconds
    amount = _sum_by_index(table.of, lost, len(table.first))
    course = np.argsort(table.order)  # rows by rank, each rank's in its course
    before, elsewhere = _sum_waits_elsewhere(table, course)
    held_up = elsewhere[table.last_row][table.of] - elsewhere
    passed = _sum_by_index(table.of, np.clip(held_up, 0.0, lost), len(table.first))
    share = np.divide(passed, amount, out=np.zeros_like(passed), where=amount > 0)
    source, target, weight = _find_blame_edges(table, course, before, elsewhere, np.flatnonzero(share))
    stays = np.zeros_like(amount)
    for _ in range(MAX_BLAME_PASSES):
        stays += amount * (1.0 - share)
        amount = _sum_by_index(target, (amount * share)[source] * weight, len(stays))
        if not amount.any():
            break
    return stays + amount


def _sum_by_index(of: Whole, values: Floats, count: int) -> Floats:
    """Of the values, by where they belong."""
    return np.bincount(of, weights=values, minlength=count).astype(np.float64)


def _sum_waits_elsewhere(table: _CollectiveTable, course: Whole) -> tuple[Whole, Floats]:
    """By row: the place in `course` behind the same rank's previous row of the group (or where the rank's rows begin),
    and what it lost in between."""
    rank, group = table.rank[course], table.group[course]
    place = np.arange(len(course))
    behind = np.searchsorted(rank, rank, side="left")
    grouped = np.lexsort((place, group, rank))
    same = (np.diff(rank[grouped]) == 0) & (np.diff(group[grouped]) == 0)
    behind[grouped[1:][same]] = grouped[:-1][same] + 1
    sums = np.concatenate([[0.0], np.cumsum(table.lost_seconds[course])])
    between = np.maximum(sums[place] - sums[behind], 0.0)
    before, elsewhere = np.empty_like(behind), np.empty_like(between)
    before[course], elsewhere[course] = behind, between
    return before, elsewhere


def _find_blame_edges(
    table: _CollectiveTable, course: Whole, before: Whole, elsewhere: Floats, passing: Whole
) -> tuple[Whole, Whole, Floats]:
    """From each of the `passing` collectives to those in which its last to come waited: source, target, and which part
    of what is passed on goes there."""
    place = np.empty_like(course)
    place[course] = np.arange(len(course))
    rows = table.last_row[passing]
    counts = place[rows] - before[rows]
    source = np.repeat(passing, counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    between = course[np.repeat(before[rows], counts) + within]
    weight = table.lost_seconds[between] / np.repeat(elsewhere[rows], counts)
    some = weight > 0
    return source[some], table.of[between[some]], weight[some]


def _number_roles(table: _CollectiveTable, rank_of: Whole, ranks: int) -> Whole:
    """By rank: a number for what it does in its newest step, in order: which collectives, in groups of how many."""
    size = np.array([of.size for of in table.groups])
    course = np.argsort(table.order)
    roles: dict[bytes, int] = {}
    found = np.zeros(ranks, np.int64)
    for at, rows in enumerate(np.split(course, np.searchsorted(rank_of[course], np.arange(1, ranks))) if ranks else ()):
        newest = rows[table.step[rows] == table.step[rows].max()]
        does = np.stack([table.collective[newest], size[table.group[newest]]]).tobytes()
        found[at] = roles.setdefault(does, len(roles))
    return found


def _compute_median_of_others(values: Floats) -> Floats:
    """[rank, step]: in each step, the median of all ranks but this one; its own value where there is no other."""
    count = len(values) - 1
    if count == 0:
        return values
    order = np.argsort(values, axis=0, kind="stable")
    place = np.argsort(order, axis=0, kind="stable")
    rising = np.take_along_axis(values, order, axis=0)

    def without_own(at: int) -> Floats:
        return np.take_along_axis(rising, at + (place <= at), axis=0)

    return 0.5 * (without_own((count - 1) // 2) + without_own(count // 2))
