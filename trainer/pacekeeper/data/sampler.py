"""Which samples a step takes: one endless stream of samples that all ranks know, and what of it is this rank's.

The stream is a fresh permutation of the data set for each epoch, one behind the other. Each of its positions is given
out once (leases.py), so each sample is used exactly once an epoch whatever the shares and the number of ranks are, and
the positions that are left are all that a restart has to know, also in mid-epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pacekeeper_analysis.lengths import SequenceCost

from .leases import Deal, Dealing, Interval, Leasing, cut, merge
from .lengths import Sequences
from .shares import BatchSizes, rank_interval
from .stream import Stream


@dataclass(frozen=True)
class Draw:
    """What a rank takes in one step."""

    sizes: tuple[int, ...]
    """Samples of each microbatch. 0 (of a sharded replica only, such as in its last lease): none was left for this
    rank. It gets samples that others train on, so that collectives match: one, or for static shapes as many as always.
    They must count nothing."""
    lengths: tuple[float, float] | None = None
    """Of these samples in sum, and their squares in sum; None: the loader does not know them."""
    weight: float | None = None
    """Of these samples, by the script's function; None: it has none, and their number counts."""

    @property
    def microbatches(self) -> int:
        return len(self.sizes)

    @property
    def samples(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Terms:
    """How samples are dealt to the ranks."""

    shares: tuple[int, ...]
    cost: SequenceCost
    """By which they are balanced, where their lengths are known."""


class Allotment:
    """What one source of samples gives the ranks, step by step, and how far this rank has come with it."""

    def __init__(self, source: Dealing | Leasing | None, terms: Terms) -> None:
        """`source`: None: to be set before the first step."""
        self.source = source
        self.drawn: deque[tuple[Draw, Sequence[Interval]]] = deque()
        """Of the steps that are dealt and have not begun: what this rank takes, and its positions so far."""
        self.underway: Sequence[Interval] = ()
        """Positions, so far, of the step that has begun and is not complete."""
        self.begun = 0
        """Steps."""
        self.used = 0
        """Samples of all ranks' completed steps, up to the newest meeting."""
        self.exact = True
        """Whether all completed steps were counted in a meeting that knew what is unused."""
        self.terms = terms
        """Of the step that was dealt last."""
        self._changes: dict[int, Terms] = {}
        self._dealt = 0

    def change(self, terms: Terms, lookahead: int) -> None:
        """Other terms, from the first step that no rank can have dealt yet."""
        if self._dealt:
            self._changes[self.begun + lookahead] = terms
        else:
            self.terms = terms

    def deal(self) -> Deal | None:
        """The next step's."""
        assert self.source is not None
        self._next_terms()
        return self.source.deal(self.terms.shares)

    @property
    def by_microbatch(self) -> Leasing | None:
        """The source, where steps take their samples from it one microbatch at a time."""
        return self.source if isinstance(self.source, Leasing) and self.source.promise is not None else None

    def promised(self, source: Leasing) -> tuple[int, ...] | None:
        """To the next step."""
        self._next_terms()
        return source.promised(self.terms.shares)

    def _next_terms(self) -> None:
        self.terms = self._changes.pop(self._dealt, self.terms)
        self._dealt += 1


class MicrobatchSampler:
    """What torch's DataLoader asks for the indices of one batch after the other, some of them ahead of the steps.

    It knows nothing of the DataLoader, or workers that it starts would end only when Python collects garbage.
    """

    def __init__(self, stream: Stream, sizes: BatchSizes, sequences: Sequences | None) -> None:
        """`sequences`: by which samples are balanced over ranks and microbatches; None: they are taken as they come."""
        self.allotment: Allotment
        self.asked = 0
        """Batches that the present iterator was asked for."""
        self.ended = False
        """Whether it has nothing left."""
        self._stream = stream
        self._sizes = sizes
        self._sequences = sequences

    def __iter__(self) -> Iterator[list[int]]:
        self.asked, self.ended = 0, False
        while (batches := self._next_step(allotment := self.allotment)) is not None:
            while allotment is self.allotment and (batch := next(batches, None)) is not None:
                self.asked += 1
                yield batch
        self.ended = True

    def _next_step(self, allotment: Allotment) -> Iterator[list[int]] | None:
        """Its microbatches. None: there are no samples left for it. Balanced ones are known only all together."""
        source = allotment.by_microbatch
        if source is not None and self._sequences is None:
            parts = allotment.promised(source)
            return None if parts is None else self._leased(allotment, source, parts)
        deal = allotment.deal()
        return None if deal is None else self._dealt(allotment, deal)

    def _dealt(self, allotment: Allotment, deal: Deal) -> Iterator[list[int]]:
        draw, positions, indices = self._of_this_rank(deal, allotment.terms.cost)
        allotment.drawn.append((draw, positions))
        rest = iter(indices)
        for size in draw.sizes:
            yield list(islice(rest, size)) or self._standing_in(deal)

    def _leased(self, allotment: Allotment, source: Leasing, parts: tuple[int, ...]) -> Iterator[list[int]]:
        count = self._sizes.microbatch_count(parts)
        of_ranks = [self._sizes.microbatches(part, count) for part in parts]
        positions: list[Interval] = []
        allotment.drawn.append((Draw(of_ranks[source.place.in_replica]), positions))
        for of_microbatch in zip(*of_ranks, strict=True):
            deal = source.lease(of_microbatch)
            mine = cut(deal.positions, *rank_interval(deal.shares, deal.place))
            positions += mine
            yield self._stream.indices(mine) or self._standing_in(deal)

    def _standing_in(self, deal: Deal) -> list[int]:
        """For a rank that has no sample in a microbatch of its replica: of those that others train on."""
        return self._stream.indices(cut(deal.positions, 0, self._sizes.grain))

    def _of_this_rank(self, deal: Deal, cost: SequenceCost) -> tuple[Draw, tuple[Interval, ...], list[int]]:
        """What it takes, at which positions, and their indices in the order of the microbatches."""
        sizes = self._sizes.microbatches(deal.shares[deal.place], self._sizes.microbatch_count(deal.matching))
        if self._sequences is None:
            positions = cut(deal.positions, *rank_interval(deal.shares, deal.place))
            return Draw(sizes), positions, self._stream.indices(positions)
        places = [position for first, end in deal.positions for position in range(first, end)]
        indices = self._stream.indices(deal.positions)
        mine = self._sequences.shares(indices, deal.shares, cost)[deal.place]
        own = [indices[number] for number in mine]
        positions = merge((places[number], places[number] + 1) for number in mine)
        return (
            Draw(sizes, self._sequences.sums(own)),
            positions,
            [own[number] for part in self._sequences.microbatches(own, sizes, cost) for number in part],
        )
