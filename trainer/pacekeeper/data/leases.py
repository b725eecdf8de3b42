"""Unused positions of the sample stream, and the assignment of the next ones. Pure integers.

A *ticket* is a place in the rest of the stream: ticket 0 is its first unused position. Samples are assigned in two
ways. A `ShareDistributor` splits each step's global batch among the ranks by shares, so that each rank can compute what
the others take. A `LeaseDistributor` takes the next tickets from a counter that all ranks share, so that a fast rank
takes more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from .shares import RankTopology, split_equally

Interval = tuple[int, int]
"""Positions from the first to before the second."""

TakeTickets = Callable[[int], int]
"""Shared counter: takes this number of new tickets and returns the first of them; no two ranks get the same."""

ENDLESS_TICKETS = 1 << 40
"""Number of tickets that no job reaches. After this number is taken at once, no step gets any."""


@dataclass(frozen=True)
class Remainder:
    """Unused rest of the stream: `pending`, and all positions from `cursor` on."""

    cursor: int = 0
    pending: tuple[Interval, ...] = ()
    """Disjoint, in ascending order, below the cursor: assigned once, but not used."""

    @property
    def used_positions(self) -> int:
        """Number of used positions."""
        return self.cursor - self._pending_counts[-1]

    def locate_tickets(self, first: int, end: int) -> tuple[Interval, ...]:
        """Return the positions of tickets [first, end). The time does not depend on the number of pending positions."""
        counts = self._pending_counts
        begin, stop = bisect_right(counts, first) - 1, bisect_left(counts, end)
        positions = slice_intervals(self.pending[begin:stop], first - counts[begin], end - counts[begin])
        extra = max(first - counts[-1], 0), end - counts[-1]
        return positions if extra[0] >= extra[1] else (*positions, (self.cursor + extra[0], self.cursor + extra[1]))

    def with_tickets_used(self, tickets: int, unused: Iterable[Interval] = ()) -> Remainder:
        """Return the remainder after the first `tickets` are used, except for the positions in `unused`.

        Raises ValueError if an unused position was not among these tickets.
        """
        assigned = self.locate_tickets(0, tickets)
        returned = merge_intervals(unused)
        if not _are_contained(returned, assigned):
            raise ValueError(f"of {returned}, not all were among the first {tickets} tickets, which are at {assigned}")
        pending_count = self._pending_counts[-1]
        cursor = self.cursor + max(tickets - pending_count, 0)
        pending = list(merge_intervals([*returned, *self.locate_tickets(tickets, max(tickets, pending_count))]))
        if pending and pending[-1][1] == cursor:
            cursor = pending.pop()[0]
        return Remainder(cursor, tuple(pending))

    @cached_property
    def _pending_counts(self) -> tuple[int, ...]:
        """Number of positions that are pending before each of the intervals, and finally in total."""
        return (0, *accumulate(end - first for first, end in self.pending))


@dataclass(frozen=True)
class SharedBatch:
    """A batch that some ranks share, and their parts of it."""

    positions: tuple[Interval, ...]
    shares: tuple[int, ...]
    share_index: int
    """Index of this rank's share."""
    matching_shares: tuple[int, ...]
    """Shares of the ranks that must run as many microbatches as this one, including its own."""


@dataclass
class ShareDistributor:
    """Assigns the global batches after `start`, one after the other, by shares."""

    start: Remainder
    topology: RankTopology
    _taken: int = field(default=0, init=False)

    def take_batch(self, shares: Sequence[int]) -> SharedBatch:
        first, self._taken = self._taken, self._taken + sum(shares)
        positions = self.start.locate_tickets(first, self._taken)
        return SharedBatch(positions, tuple(shares), self.topology.rank, self.topology.select_replica_shares(shares))


@dataclass
class LeaseDistributor:
    """Takes tickets after `start` for a replica: its ranks share them, and must all take the same."""

    start: Remainder
    topology: RankTopology
    take_tickets: TakeTickets
    ticket_limit: int | None
    """Number of tickets; None: `ENDLESS_TICKETS`."""
    granularity: int = 1
    """Samples that the parts of the last lease are multiples of, if there are enough."""
    reserve_tickets: TakeTickets | None = None
    """A separate counter, from which a step reserves a number of tickets.

    It then takes them one microbatch at a time, so that a rank that becomes slow leaves to the others what it has not
    begun. None: a step takes all of its tickets at once.
    """

    def take_batch(self, shares: Sequence[int]) -> SharedBatch | None:
        """Take the replica's next tickets, by its ranks' shares, finally perhaps fewer. None: all are taken."""
        first, parts = self._draw_tickets(self.take_tickets, shares)
        return None if parts is None else self._build_batch(first, parts)

    def reserve_step(self, shares: Sequence[int]) -> tuple[int, ...] | None:
        """Return the tickets that each of the replica's ranks may take for its next step. None: all are reserved."""
        assert self.reserve_tickets is not None
        return self._draw_tickets(self.reserve_tickets, shares)[1]

    def take_reserved(self, parts: tuple[int, ...]) -> SharedBatch:
        """Take the given number of reserved tickets for each of the replica's ranks."""
        return self._build_batch(self.take_tickets(sum(parts)), parts)

    def _draw_tickets(self, counter: TakeTickets, shares: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
        """Return the first ticket and the parts of the replica's ranks; None: nothing is left."""
        parts = self.topology.select_replica_shares(shares)
        first = counter(sum(parts))
        count = min(sum(parts), (ENDLESS_TICKETS if self.ticket_limit is None else self.ticket_limit) - first)
        if count <= 0:
            return first, None
        if count < sum(parts):
            parts = split_equally(count, self.topology.replica_size, self.granularity)
        return first, parts

    def _build_batch(self, first: int, parts: tuple[int, ...]) -> SharedBatch:
        return SharedBatch(
            self.start.locate_tickets(first, first + sum(parts)), parts, self.topology.replica_rank, parts
        )


def slice_intervals(intervals: Iterable[Interval], first: int, end: int) -> tuple[Interval, ...]:
    """Return the positions from number `first` to before number `end`, counted through all `intervals`."""
    selected: list[Interval] = []
    offset = 0
    for low, high in intervals:
        begin, stop = max(first - offset, 0), min(end - offset, high - low)
        if begin < stop:
            selected.append((low + begin, low + stop))
        offset += high - low
    return tuple(selected)


def merge_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the same positions as few ascending intervals. Raises ValueError if two overlap."""
    merged: list[Interval] = []
    for first, end in sorted(intervals):
        if merged and first < merged[-1][1]:
            raise ValueError(f"positions {first} to {merged[-1][1]} come twice")
        if merged and first == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        elif first < end:
            merged.append((first, end))
    return tuple(merged)


def _are_contained(inner: Sequence[Interval], outer: Sequence[Interval]) -> bool:
    """Return whether each interval of `inner` lies in one of `outer`; both are ascending and disjoint."""
    ends = [end for _, end in outer]
    candidates = ((first, end, bisect_right(ends, first)) for first, end in inner)
    return all(i < len(outer) and outer[i][0] <= first and end <= outer[i][1] for first, end, i in candidates)
