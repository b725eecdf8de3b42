"""Finds the rank that the others wait for in a slow job, over nested groups.

Of the clocks only durations are compared. A rank's wait in a collective is the time in which it only waited for it.
Work next to an asynchronous collective is not a wait. The last rank to arrive waits for no other. So the shortest wait
of the members is the *transfer*, and longer waits are lost time, owed to the last to arrive.

The last to arrive may have been delayed itself: it has waited in other groups since the group's previous collective.
What it waited there, beyond the waits there of the ranks that wait for it now, is passed on to the last to arrive
there, and so on. The rest stays with the rank. So the blames sum to the lost time. In contrast, C4 (arXiv 2406.04594)
judges each group separately.
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

from pacekeeper_rank.records import NOTICED_LATE, SYMMETRIC_COLLECTIVES, Collective

from ..protocol.communicators import Communicator
from ..protocol.operations import OPERATION, decode_operations
from ..protocol.reports import Evidence

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

MIN_BLAMED_STEP_SHARE = 0.1
"""Share of a step that a rank must cost in most of its steps to be called slow."""
MIN_BLAMED_STEPS_SHARE = 0.8
"""Share of the steps that count as most."""
MIN_SLOW_TRANSFER_RATIO = 1.3
"""Ratio to the usual time from which on a transfer is slow."""
MAX_BLAME_PASSES = 64
"""Upper limit of passes in which blame moves from rank to rank. Blame still moving then stays where it is."""
_JUDGED_COLLECTIVES = [int(collective) for collective in (*SYMMETRIC_COLLECTIVES, Collective.SEND, Collective.RECV)]
"""Collectives that are judged. In others the first rank to arrive may leave before the last arrives."""


@dataclass(frozen=True)
class WaitAttribution:
    """Which rank makes the others wait."""

    ranks: Whole
    steps: Whole
    seconds: Floats
    """[rank, step]: seconds that all others together waited for it."""
    roles: Whole
    """By rank: the same number for ranks with the same work in a step, such as one pipeline stage in all replicas."""

    @property
    def lost_seconds(self) -> float:
        """The seconds that all ranks together waited."""
        return float(self.seconds.sum())

    def compute_shares(self, step_seconds: float) -> Floats:
        """Return the relative wait that each rank causes, [rank, step].

        It is what each of its peers waits for the rank, beyond the wait for the median rank of the same role, over the
        step time. Stages of a pipeline always wait for each other. The value is 0 if no other rank has the same role.
        """
        excess = np.zeros_like(self.seconds)
        for role in np.unique(self.roles):
            same_role = np.flatnonzero(self.roles == role)
            excess[same_role] = self.seconds[same_role] - _compute_median_of_others(self.seconds[same_role])
        return excess / max(1, len(self.ranks) - 1) / step_seconds

    def find_slow_ranks(self, step_seconds: float) -> tuple[int, ...]:
        """Return ranks that cost MIN_BLAMED_STEP_SHARE of a step in MIN_BLAMED_STEPS_SHARE of them, worst first."""
        share = self.compute_shares(step_seconds)
        is_slow = (
            (share >= MIN_BLAMED_STEP_SHARE).mean(axis=1) >= MIN_BLAMED_STEPS_SHARE
            if share.size
            else np.zeros(len(share), bool)
        )
        return tuple(int(self.ranks[row]) for row in np.argsort(-share.sum(axis=1), kind="stable") if is_slow[row])


class TransferClass(NamedTuple):
    """Transfers of equal duration, while their links are the same."""

    group: int  # identity
    collective: int
    size: int  # exponent of the largest power of two within its bytes


class MeasuredTransfer(NamedTuple):
    """Median duration of a class of transfers."""

    seconds: float
    seconds_per_byte: float
    arrival_spread_seconds: float  # between the first and the last arrival
    ranks: tuple[int, ...]  # of the group


def attribute_waits(evidence: Sequence[Evidence]) -> WaitAttribution:
    """Attribute the waits in the collectives of all ranks' last steps.

    Collectives that a member did not report are skipped.
    """
    table = _build_table(evidence)
    ranks, rank_of = np.unique(table.rank, return_inverse=True)
    steps, step_of = np.unique(table.step, return_inverse=True)
    seconds = np.zeros((len(ranks), len(steps)))
    np.add.at(seconds, (rank_of[table.last_row], step_of[table.last_row]), _pass_on_blame(table))
    return WaitAttribution(ranks, steps, seconds, _number_roles(table, rank_of, len(ranks)))


def measure_transfers(evidence: Sequence[Evidence]) -> dict[TransferClass, MeasuredTransfer]:
    """Measure transfers by class. The last rank to arrive is inside only for the duration of the transfer."""
    table = _build_table(evidence)
    first = table.first_row
    inside = np.where(table.end_is_exact, table.end - table.start, np.inf)
    shortest, arrival_spread = np.minimum.reduceat(inside, first), np.maximum.reduceat(table.lost_seconds, first)
    size = np.log2(np.maximum(table.bytes[first], 1.0)).astype(np.int64)
    measured = np.flatnonzero(np.isfinite(shortest) & (table.bytes[first] > 0))
    classes, class_of = np.unique(
        np.stack([table.group[first], table.collective[first], size])[:, measured], axis=1, return_inverse=True
    )
    transfers = {}
    for position, (group, collective, exponent) in enumerate(classes.T.tolist()):
        rows = measured[class_of.reshape(-1) == position]
        identity, ranks = table.groups[group].identity, table.groups[group].ranks
        per_byte = shortest[rows] / table.bytes[first][rows]
        medians = [float(np.median(values)) for values in (shortest[rows], per_byte, arrival_spread[rows])]
        transfers[TransferClass(identity, collective, exponent)] = MeasuredTransfer(
            medians[0], medians[1], medians[2], ranks
        )
    return transfers


def find_usual_transfer_times(transfers: Mapping[TransferClass, MeasuredTransfer]) -> dict[TransferClass, float]:
    """Return the median seconds per byte of the other groups of the same size with the same collective."""
    by_size: dict[tuple[int, int, int], list[TransferClass]] = defaultdict(list)
    for transfer_class, transfer in transfers.items():
        by_size[transfer_class.collective, transfer_class.size, len(transfer.ranks)].append(transfer_class)
    return {
        transfer_class: median(transfers[peer].seconds_per_byte for peer in classes if peer != transfer_class)
        for classes in by_size.values()
        if len(classes) > 1
        for transfer_class in classes
    }


def find_slow_transfers(
    transfers: Mapping[TransferClass, MeasuredTransfer], usual: Mapping[TransferClass, float]
) -> dict[TransferClass, float]:
    """Return the ratio to the usual seconds per byte for each slow transfer.

    Slow means MIN_SLOW_TRANSFER_RATIO or more, and no late rank hides it: all arrive within less time than the
    transfer.
    """
    slow = {}
    for transfer_class, transfer in transfers.items():
        ratio = transfer.seconds_per_byte / usual[transfer_class] if usual.get(transfer_class, 0.0) > 0.0 else 0.0
        if ratio >= MIN_SLOW_TRANSFER_RATIO and transfer.arrival_spread_seconds < transfer.seconds:
            slow[transfer_class] = ratio
    return slow


@dataclass(frozen=True)
class _CollectiveTable:
    """Collectives that all members have reported, one row per member. The rows of one collective are adjacent."""

    groups: Sequence[Communicator]
    group: Whole
    rank: Whole
    step: Whole
    collective: Whole
    bytes: Floats
    start: Floats
    end: Floats
    wait_seconds: Floats
    end_is_exact: NDArray[np.bool_]
    order: Whole
    """Position of the row in the sequence of its rank, over all ranks."""
    first_row: Whole
    """First row of each collective."""
    collective_of_row: Whole
    """Collective of each row."""

    @cached_property
    def lost_seconds(self) -> Floats:
        """Time that the rank of each row waited beyond the transfer."""
        if not len(self.first_row):
            return self.wait_seconds
        return self.wait_seconds - np.minimum.reduceat(self.wait_seconds, self.first_row)[self.collective_of_row]

    @cached_property
    def last_row(self) -> Whole:
        """Row of the last arrival in each collective: the one that waited least, and entered last."""
        order = np.lexsort((self.end - self.start, self.wait_seconds, self.collective_of_row))
        return order[self.first_row]


def _build_table(evidence: Sequence[Evidence]) -> _CollectiveTable:
    columns, groups = _collect_rows(evidence)
    rank, group, operations = columns
    if len(operations):
        by_time = np.lexsort((operations["start"], operations["step"], rank))
        rank, group, operations = rank[by_time], group[by_time], operations[by_time]
        order = np.arange(len(operations))
        by_collective = np.lexsort((rank, operations["sequence"], group))
        keys = np.stack([group[by_collective], operations["sequence"][by_collective].astype(np.int64)])
        changes = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
        first = np.concatenate([[0], changes])
        owner = np.repeat(np.arange(len(first)), np.diff([*first, len(by_collective)]))
        sizes = np.array([owner.size for owner in groups])
        is_duplicate = np.zeros(len(by_collective), bool)
        is_duplicate[1:] = (rank[by_collective][1:] == rank[by_collective][:-1]) & (owner[1:] == owner[:-1])
        is_complete = (np.bincount(owner) == sizes[group[by_collective][first]]) & (
            np.bincount(owner, weights=is_duplicate) == 0
        )
        rows = by_collective[is_complete[owner]]
        owner = np.unique(owner[is_complete[owner]], return_inverse=True)[1]
        rank, group, operations, order = rank[rows], group[rows], operations[rows], order[rows]
    else:
        owner = order = np.zeros(0, np.int64)
    return _CollectiveTable(
        groups=groups,
        group=group,
        rank=rank,
        step=operations["step"].astype(np.int64),
        collective=operations["collective"].astype(np.int64),
        bytes=operations["bytes"].astype(np.float64),
        start=operations["start"].astype(np.float64),
        end=operations["end"].astype(np.float64),
        wait_seconds=operations["wait"].astype(np.float64),
        end_is_exact=(operations["flags"] & NOTICED_LATE) == 0,
        order=order,
        first_row=np.flatnonzero(np.diff(owner, prepend=-1)),
        collective_of_row=owner,
    )


def _collect_rows(
    evidence: Sequence[Evidence],
) -> tuple[tuple[Whole, Whole, NDArray[np.void]], list[Communicator]]:
    """Return rank, group and operation of everything that is judged, and the groups."""
    number_of: dict[tuple[int, str], int] = {}
    groups: list[Communicator] = []
    ranks, group_numbers, operations = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, OPERATION)]
    for report in evidence:
        for communicator in report.communicators:
            if (communicator.identity, communicator.members) not in number_of:
                number_of[communicator.identity, communicator.members] = len(groups)
                groups.append(communicator)
        numbers = np.array([number_of[group.identity, group.members] for group in report.communicators], np.int64)
        for rank_operations in report.operations:
            decoded = decode_operations(rank_operations.operations)
            decoded = decoded[np.isin(decoded["collective"], _JUDGED_COLLECTIVES) & (decoded["group"] < len(numbers))]
            ranks.append(np.full(len(decoded), rank_operations.rank, np.int64))
            group_numbers.append(numbers[decoded["group"]])
            operations.append(decoded)
    return (np.concatenate(ranks), np.concatenate(group_numbers), np.concatenate(operations)), groups


def _pass_on_blame(table: _CollectiveTable) -> Floats:
    """Return for each collective the lost seconds that stay with its last arrival.

    They come from its own lost time and from blame passed on to it.
    """
    lost_seconds = table.lost_seconds
    blame = _sum_by_index(table.collective_of_row, lost_seconds, len(table.first_row))
    row_order = np.argsort(table.order)  # rows by rank, in the order of each rank
    interval_start, waited_elsewhere = _sum_waits_elsewhere(table, row_order)
    delay = waited_elsewhere[table.last_row][table.collective_of_row] - waited_elsewhere
    passed = _sum_by_index(table.collective_of_row, np.clip(delay, 0.0, lost_seconds), len(table.first_row))
    share = np.divide(passed, blame, out=np.zeros_like(passed), where=blame > 0)
    source, target, weight = _find_blame_edges(
        table, row_order, interval_start, waited_elsewhere, np.flatnonzero(share)
    )
    retained = np.zeros_like(blame)
    for _ in range(MAX_BLAME_PASSES):
        retained += blame * (1.0 - share)
        blame = _sum_by_index(target, (blame * share)[source] * weight, len(retained))
        if not blame.any():
            break
    return retained + blame


def _sum_by_index(index: Whole, values: Floats, count: int) -> Floats:
    """Sum values by index."""
    return np.bincount(index, weights=values, minlength=count).astype(np.float64)


def _sum_waits_elsewhere(table: _CollectiveTable, row_order: Whole) -> tuple[Whole, Floats]:
    """Return for each row the start of its interval in `row_order`, and the time lost in it.

    The interval begins after the same rank's previous row of the group, or at the rank's first row.
    """
    rank, group = table.rank[row_order], table.group[row_order]
    position = np.arange(len(row_order))
    start = np.searchsorted(rank, rank, side="left")
    by_group = np.lexsort((position, group, rank))
    same = (np.diff(rank[by_group]) == 0) & (np.diff(group[by_group]) == 0)
    start[by_group[1:][same]] = by_group[:-1][same] + 1
    cumulative = np.concatenate([[0.0], np.cumsum(table.lost_seconds[row_order])])
    lost_between = np.maximum(cumulative[position] - cumulative[start], 0.0)
    interval_start, waited_elsewhere = np.empty_like(start), np.empty_like(lost_between)
    interval_start[row_order], waited_elsewhere[row_order] = start, lost_between
    return interval_start, waited_elsewhere


def _find_blame_edges(
    table: _CollectiveTable, row_order: Whole, interval_start: Whole, waited_elsewhere: Floats, passing: Whole
) -> tuple[Whole, Whole, Floats]:
    """Return edges from the `passing` collectives to those in which their last arrival waited.

    They consist of source, target, and the part of the passed blame that goes there.
    """
    position = np.empty_like(row_order)
    position[row_order] = np.arange(len(row_order))
    rows = table.last_row[passing]
    counts = position[rows] - interval_start[rows]
    source = np.repeat(passing, counts)
    offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows_between = row_order[np.repeat(interval_start[rows], counts) + offset]
    weight = table.lost_seconds[rows_between] / np.repeat(waited_elsewhere[rows], counts)
    is_positive = weight > 0
    return source[is_positive], table.collective_of_row[rows_between[is_positive]], weight[is_positive]


def _number_roles(table: _CollectiveTable, rank_of: Whole, ranks: int) -> Whole:
    """Number the ranks' roles by their newest step: the sequence of collectives, with the sizes of their groups."""
    size = np.array([group.size for group in table.groups])
    row_order = np.argsort(table.order)
    roles: dict[bytes, int] = {}
    role_of = np.zeros(ranks, np.int64)
    for rank, rows in enumerate(
        np.split(row_order, np.searchsorted(rank_of[row_order], np.arange(1, ranks))) if ranks else ()
    ):
        newest = rows[table.step[rows] == table.step[rows].max()]
        signature = np.stack([table.collective[newest], size[table.group[newest]]]).tobytes()
        role_of[rank] = roles.setdefault(signature, len(roles))
    return role_of


def _compute_median_of_others(values: Floats) -> Floats:
    """Return the median of all other ranks in each step, [rank, step]. A single rank gets its own value."""
    count = len(values) - 1
    if count == 0:
        return values
    order = np.argsort(values, axis=0, kind="stable")
    position = np.argsort(order, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0)

    def exclude_own(index: int) -> Floats:
        return np.take_along_axis(ordered, index + (position <= index), axis=0)

    return 0.5 * (exclude_own((count - 1) // 2) + exclude_own(count // 2))
