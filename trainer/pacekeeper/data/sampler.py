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

from .leases import SharedBatch, ShareDistributor, Interval, LeaseDistributor, slice_intervals, merge_intervals
from .lengths import SequenceBalancer
from .shares import BatchSizes, get_rank_interval
from .stream import SampleStream


@dataclass(frozen=True)
class StepBatch:
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
class SharingTerms:
    """How samples are dealt to the ranks."""

    shares: tuple[int, ...]
    cost: SequenceCost
    """By which they are balanced, where their lengths are known."""


class SampleAllotment:
    """What one source of samples gives the ranks, step by step, and how far this rank has come with it."""

    def __init__(self, source: ShareDistributor | LeaseDistributor | None, terms: SharingTerms) -> None:
        """`source`: None: to be set before the first step."""
        self.source = source
        self.drawn_batches: deque[tuple[StepBatch, Sequence[Interval]]] = deque()
        """Of the steps that are dealt and have not begun: what this rank takes, and its positions so far."""
        self.underway_positions: Sequence[Interval] = ()
        """Positions, so far, of the step that has begun and is not complete."""
        self.begun_steps = 0
        """Steps."""
        self.used_samples = 0
        """Samples of all ranks' completed steps, up to the newest meeting."""
        self.is_exact = True
        """Whether all completed steps were counted in a meeting that knew what is unused."""
        self.terms = terms
        """Of the step that was dealt last."""
        self._changes: dict[int, SharingTerms] = {}
        self._taken_steps = 0

    def change_terms(self, terms: SharingTerms, lookahead: int) -> None:
        """Other terms, from the first step that no rank can have dealt yet."""
        if self._taken_steps:
            self._changes[self.begun_steps + lookahead] = terms
        else:
            self.terms = terms

    def take_batch(self) -> SharedBatch | None:
        """The next step's."""
        assert self.source is not None
        self._advance_terms()
        return self.source.take_batch(self.terms.shares)

    @property
    def microbatch_leases(self) -> LeaseDistributor | None:
        """The source, where steps take their samples from it one microbatch at a time."""
        return self.source if isinstance(self.source, LeaseDistributor) and self.source.reserve_tickets is not None else None

    def reserve_step(self, source: LeaseDistributor) -> tuple[int, ...] | None:
        """To the next step."""
        self._advance_terms()
        return source.reserve_step(self.terms.shares)

    def _advance_terms(self) -> None:
        self.terms = self._changes.pop(self._taken_steps, self.terms)
        self._taken_steps += 1


class MicrobatchSampler:
    """What torch's DataLoader asks for the indices of one batch after the other, some of them ahead of the steps.

    It knows nothing of the DataLoader, or workers that it starts would end only when Python collects garbage.
    """

    def __init__(self, stream: SampleStream, sizes: BatchSizes, sequences: SequenceBalancer | None) -> None:
        """`sequences`: by which samples are balanced over ranks and microbatches; None: they are taken as they come."""
        self.allotment: SampleAllotment
        self.requested_batches = 0
        """Batches that the present iterator was asked for."""
        self.is_exhausted = False
        """Whether it has nothing left."""
        self._stream = stream
        self._sizes = sizes
        self._sequences = sequences

    def __iter__(self) -> Iterator[list[int]]:
        self.requested_batches, self.is_exhausted = 0, False
        while (batches := self._start_step(allotment := self.allotment)) is not None:
            while allotment is self.allotment and (batch := next(batches, None)) is not None:
                self.requested_batches += 1
                yield batch
        self.is_exhausted = True

    def _start_step(self, allotment: SampleAllotment) -> Iterator[list[int]] | None:
        """Its microbatches. None: there are no samples left for it. Balanced ones are known only all together."""
        source = allotment.microbatch_leases
        if source is not None and self._sequences is None:
            parts = allotment.reserve_step(source)
            return None if parts is None else self._iterate_leased(allotment, source, parts)
        deal = allotment.take_batch()
        return None if deal is None else self._iterate_shared(allotment, deal)

    def _iterate_shared(self, allotment: SampleAllotment, deal: SharedBatch) -> Iterator[list[int]]:
        draw, positions, indices = self._select_own_samples(deal, allotment.terms.cost)
        allotment.drawn_batches.append((draw, positions))
        rest = iter(indices)
        for size in draw.sizes:
            yield list(islice(rest, size)) or self._get_padding_indices(deal)

    def _iterate_leased(self, allotment: SampleAllotment, source: LeaseDistributor, parts: tuple[int, ...]) -> Iterator[list[int]]:
        count = self._sizes.count_microbatches(parts)
        of_ranks = [self._sizes.split_microbatches(part, count) for part in parts]
        positions: list[Interval] = []
        allotment.drawn_batches.append((StepBatch(of_ranks[source.topology.replica_rank]), positions))
        for of_microbatch in zip(*of_ranks, strict=True):
            deal = source.take_reserved(of_microbatch)
            mine = slice_intervals(deal.positions, *get_rank_interval(deal.shares, deal.share_index))
            positions += mine
            yield self._stream.get_indices(mine) or self._get_padding_indices(deal)

    def _get_padding_indices(self, deal: SharedBatch) -> list[int]:
        """For a rank that has no sample in a microbatch of its replica: of those that others train on."""
        return self._stream.get_indices(slice_intervals(deal.positions, 0, self._sizes.granularity))

    def _select_own_samples(self, deal: SharedBatch, cost: SequenceCost) -> tuple[StepBatch, tuple[Interval, ...], list[int]]:
        """What it takes, at which positions, and their indices in the order of the microbatches."""
        sizes = self._sizes.split_microbatches(deal.shares[deal.share_index], self._sizes.count_microbatches(deal.matching_shares))
        if self._sequences is None:
            positions = slice_intervals(deal.positions, *get_rank_interval(deal.shares, deal.share_index))
            return StepBatch(sizes), positions, self._stream.get_indices(positions)
        places = [position for first, end in deal.positions for position in range(first, end)]
        indices = self._stream.get_indices(deal.positions)
        mine = self._sequences.split_by_shares(indices, deal.shares, cost)[deal.share_index]
        own = [indices[number] for number in mine]
        positions = merge_intervals((places[number], places[number] + 1) for number in mine)
        return (
            StepBatch(sizes, self._sequences.sum_lengths(own)),
            positions,
            [own[number] for part in self._sequences.split_microbatches(own, sizes, cost) for number in part],
        )
