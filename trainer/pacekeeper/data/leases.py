"""Which positions of the stream of samples are still to be used, and who gets the next of them. Pure integers.

A *ticket* is a place in what is left of the stream: ticket 0 is its first position that nobody has used. Samples are
dealt in two ways: `Dealing` gives each step's global batch to the ranks by their shares, so that all ranks know what
each of them takes; `Leasing` takes the next tickets from a counter of all ranks, so that a fast rank takes more.
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
"""The shared counter: takes so many new tickets and returns the first of them; of n ranks, each gets other ones."""

ENDLESS_TICKETS = 1 << 40
"""Tickets: more than any job comes to. Where so many are taken at once, no step has any from then on."""


@dataclass(frozen=True)
class Remainder:
    """What of the stream is not yet used: `pending`, and all positions from `cursor` on."""

    cursor: int = 0
    pending: tuple[Interval, ...] = ()
    """In ascending order and apart from each other, below the cursor: handed out once, but not used."""

    @property
    def used_positions(self) -> int:
        """How many positions are used."""
        return self.cursor - self._pending_counts[-1]

    def locate_tickets(self, first: int, end: int) -> tuple[Interval, ...]:
        """The positions of tickets [first, end). It takes no longer where more is pending than what is asked for."""
        waiting = self._pending_counts
        begin, stop = bisect_right(waiting, first) - 1, bisect_left(waiting, end)
        found = slice_intervals(self.pending[begin:stop], first - waiting[begin], end - waiting[begin])
        beyond = max(first - waiting[-1], 0), end - waiting[-1]
        return found if beyond[0] >= beyond[1] else (*found, (self.cursor + beyond[0], self.cursor + beyond[1]))

    def with_tickets_used(self, tickets: int, unused: Iterable[Interval] = ()) -> Remainder:
        """What is left when the first `tickets` are used, but for the positions that are `unused`.

        Raises ValueError where an unused position was not among these tickets.
        """
        handed_out = self.locate_tickets(0, tickets)
        back = merge_intervals(unused)
        if not _are_contained(back, handed_out):
            raise ValueError(f"of {back}, not all were among the first {tickets} tickets, which are at {handed_out}")
        waiting = self._pending_counts[-1]
        cursor = self.cursor + max(tickets - waiting, 0)
        pending = list(merge_intervals([*back, *self.locate_tickets(tickets, max(tickets, waiting))]))
        if pending and pending[-1][1] == cursor:
            cursor = pending.pop()[0]
        return Remainder(cursor, tuple(pending))

    @cached_property
    def _pending_counts(self) -> tuple[int, ...]:
        """How many positions are pending before each of the intervals, and at last in all."""
        return (0, *accumulate(end - first for first, end in self.pending))


@dataclass(frozen=True)
class SharedBatch:
    """A batch that some ranks share: who of them takes how many of its samples."""

    positions: tuple[Interval, ...]
    shares: tuple[int, ...]
    share_index: int
    """Which of the shares is this rank's."""
    matching_shares: tuple[int, ...]
    """The shares of the ranks that must run as many microbatches as this one, its own among them."""


@dataclass
class ShareDistributor:
    """Deals the global batches behind `start` one after the other, by shares."""

    start: Remainder
    topology: RankTopology
    _taken: int = field(default=0, init=False)

    def take_batch(self, shares: Sequence[int]) -> SharedBatch:
        first, self._taken = self._taken, self._taken + sum(shares)
        positions = self.start.locate_tickets(first, self._taken)
        return SharedBatch(positions, tuple(shares), self.topology.rank, self.topology.select_replica_shares(shares))


@dataclass
class LeaseDistributor:
    """Takes the tickets behind `start` for a replica: its ranks share them, and each of them must take the same."""

    start: Remainder
    topology: RankTopology
    take_tickets: TakeTickets
    ticket_limit: int | None
    """How many there are; None: `ENDLESS`."""
    granularity: int = 1
    """Samples that the ranks' parts of the last lease are multiples of, as far as there are so many."""
    reserve_tickets: TakeTickets | None = None
    """A counter of its own, by which a step is promised a number of tickets, to take them one microbatch at a time
    when it comes to it: so a rank that turns slow leaves the others what it has not begun. None: a step takes all of
    its tickets at once."""

    def take_batch(self, shares: Sequence[int]) -> SharedBatch | None:
        """The replica's next tickets: as many as its ranks' shares, at last perhaps fewer. None: all are taken."""
        first, parts = self._draw_tickets(self.take_tickets, shares)
        return None if parts is None else self._build_batch(first, parts)

    def reserve_step(self, shares: Sequence[int]) -> tuple[int, ...] | None:
        """How many tickets each of the replica's ranks may `lease` for its next step. None: all are promised."""
        assert self.reserve_tickets is not None
        return self._draw_tickets(self.reserve_tickets, shares)[1]

    def take_reserved(self, parts: tuple[int, ...]) -> SharedBatch:
        """So many of the promised tickets, for each of the replica's ranks."""
        return self._build_batch(self.take_tickets(sum(parts)), parts)

    def _draw_tickets(self, counter: TakeTickets, shares: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
        """The counter's answer, and what each of the replica's ranks has of it; None: nothing is left."""
        parts = self.topology.select_replica_shares(shares)
        first = counter(sum(parts))
        count = min(sum(parts), (ENDLESS_TICKETS if self.ticket_limit is None else self.ticket_limit) - first)
        if count <= 0:
            return first, None
        if count < sum(parts):
            parts = split_equally(count, self.topology.replica_size, self.granularity)
        return first, parts

    def _build_batch(self, first: int, parts: tuple[int, ...]) -> SharedBatch:
        return SharedBatch(self.start.locate_tickets(first, first + sum(parts)), parts, self.topology.replica_rank, parts)


def slice_intervals(intervals: Iterable[Interval], first: int, end: int) -> tuple[Interval, ...]:
    """Of all the positions in `intervals`, counted through, those from number `first` to before number `end`."""
    found: list[Interval] = []
    passed = 0
    for low, high in intervals:
        begin, stop = max(first - passed, 0), min(end - passed, high - low)
        if begin < stop:
            found.append((low + begin, low + stop))
        passed += high - low
    return tuple(found)


def merge_intervals(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same positions in ascending order, as few intervals. Raises ValueError where two have one in common."""
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
    """Whether each interval of `inner` lies in one of `outer`; both are in ascending order and apart."""
    ends = [end for _, end in outer]
    places = ((first, end, bisect_right(ends, first)) for first, end in inner)
    return all(at < len(outer) and outer[at][0] <= first and end <= outer[at][1] for first, end, at in places)
