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

from .shares import Place, equal_shares

Interval = tuple[int, int]
"""Positions from the first to before the second."""

Take = Callable[[int], int]
"""The shared counter: takes so many new tickets and returns the first of them; of n ranks, each gets other ones."""

ENDLESS = 1 << 40
"""Tickets: more than any job comes to. Where so many are taken at once, no step has any from then on."""


@dataclass(frozen=True)
class Remainder:
    """What of the stream is not yet used: `pending`, and all positions from `cursor` on."""

    cursor: int = 0
    pending: tuple[Interval, ...] = ()
    """In ascending order and apart from each other, below the cursor: handed out once, but not used."""

    @property
    def used(self) -> int:
        """How many positions are used."""
        return self.cursor - self._waiting[-1]

    def places(self, first: int, end: int) -> tuple[Interval, ...]:
        """The positions of tickets [first, end). It takes no longer where more is pending than what is asked for."""
        waiting = self._waiting
        begin, stop = bisect_right(waiting, first) - 1, bisect_left(waiting, end)
        found = cut(self.pending[begin:stop], first - waiting[begin], end - waiting[begin])
        beyond = max(first - waiting[-1], 0), end - waiting[-1]
        return found if beyond[0] >= beyond[1] else (*found, (self.cursor + beyond[0], self.cursor + beyond[1]))

    def after(self, tickets: int, unused: Iterable[Interval] = ()) -> Remainder:
        """What is left when the first `tickets` are used, but for the positions that are `unused`.

        Raises ValueError where an unused position was not among these tickets.
        """
        handed_out = self.places(0, tickets)
        back = merge(unused)
        if not _are_within(back, handed_out):
            raise ValueError(f"of {back}, not all were among the first {tickets} tickets, which are at {handed_out}")
        waiting = self._waiting[-1]
        cursor = self.cursor + max(tickets - waiting, 0)
        pending = list(merge([*back, *self.places(tickets, max(tickets, waiting))]))
        if pending and pending[-1][1] == cursor:
            cursor = pending.pop()[0]
        return Remainder(cursor, tuple(pending))

    @cached_property
    def _waiting(self) -> tuple[int, ...]:
        """How many positions are pending before each of the intervals, and at last in all."""
        return (0, *accumulate(end - first for first, end in self.pending))


@dataclass(frozen=True)
class Deal:
    """A batch that some ranks share: who of them takes how many of its samples."""

    positions: tuple[Interval, ...]
    shares: tuple[int, ...]
    place: int
    """Which of the shares is this rank's."""
    matching: tuple[int, ...]
    """The shares of the ranks that must run as many microbatches as this one, its own among them."""


@dataclass
class Dealing:
    """Deals the global batches behind `start` one after the other, by shares."""

    start: Remainder
    place: Place
    _dealt: int = field(default=0, init=False)

    def deal(self, shares: Sequence[int]) -> Deal:
        first, self._dealt = self._dealt, self._dealt + sum(shares)
        positions = self.start.places(first, self._dealt)
        return Deal(positions, tuple(shares), self.place.rank, self.place.of_replica(shares))


@dataclass
class Leasing:
    """Takes the tickets behind `start` for a replica: its ranks share them, and each of them must take the same."""

    start: Remainder
    place: Place
    take: Take
    tickets: int | None
    """How many there are; None: `ENDLESS`."""
    grain: int = 1
    """Samples that the ranks' parts of the last lease are multiples of, as far as there are so many."""
    promise: Take | None = None
    """A counter of its own, by which a step is promised a number of tickets, to take them one microbatch at a time
    when it comes to it: so a rank that turns slow leaves the others what it has not begun. None: a step takes all of
    its tickets at once."""

    def deal(self, shares: Sequence[int]) -> Deal | None:
        """The replica's next tickets: as many as its ranks' shares, at last perhaps fewer. None: all are taken."""
        first, parts = self._count(self.take, shares)
        return None if parts is None else self._deal(first, parts)

    def promised(self, shares: Sequence[int]) -> tuple[int, ...] | None:
        """How many tickets each of the replica's ranks may `lease` for its next step. None: all are promised."""
        assert self.promise is not None
        return self._count(self.promise, shares)[1]

    def lease(self, parts: tuple[int, ...]) -> Deal:
        """So many of the promised tickets, for each of the replica's ranks."""
        return self._deal(self.take(sum(parts)), parts)

    def _count(self, counter: Take, shares: Sequence[int]) -> tuple[int, tuple[int, ...] | None]:
        """The counter's answer, and what each of the replica's ranks has of it; None: nothing is left."""
        parts = self.place.of_replica(shares)
        first = counter(sum(parts))
        count = min(sum(parts), (ENDLESS if self.tickets is None else self.tickets) - first)
        if count <= 0:
            return first, None
        if count < sum(parts):
            parts = equal_shares(count, self.place.replica_size, self.grain)
        return first, parts

    def _deal(self, first: int, parts: tuple[int, ...]) -> Deal:
        return Deal(self.start.places(first, first + sum(parts)), parts, self.place.in_replica, parts)


def cut(intervals: Iterable[Interval], first: int, end: int) -> tuple[Interval, ...]:
    """Of all the positions in `intervals`, counted through, those from number `first` to before number `end`."""
    found: list[Interval] = []
    passed = 0
    for low, high in intervals:
        begin, stop = max(first - passed, 0), min(end - passed, high - low)
        if begin < stop:
            found.append((low + begin, low + stop))
        passed += high - low
    return tuple(found)


def merge(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
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


def _are_within(inner: Sequence[Interval], outer: Sequence[Interval]) -> bool:
    """Whether each interval of `inner` lies in one of `outer`; both are in ascending order and apart."""
    ends = [end for _, end in outer]
    places = ((first, end, bisect_right(ends, first)) for first, end in inner)
    return all(at < len(outer) and outer[at][0] <= first and end <= outer[at][1] for first, end, at in places)
