"""Samples of a step: one endless stream, which all ranks can compute, and this rank's part of it.

The stream is a new permutation of the data set for each epoch, one after the other. Each of its positions is assigned
once (leases.py). Each sample is therefore used exactly once per epoch, for any shares and number of ranks. The
remaining positions are all that a restart needs, also in mid-epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pacekeeper_analysis.stragglers.length_cost import SequenceCost

from .leases import Interval, LeaseDistributor, SharedBatch, ShareDistributor, merge_intervals, slice_intervals
from .lengths import SequenceBalancer
from .sample_stream import SampleStream
from .shares import BatchSizes, get_rank_interval


@dataclass(frozen=True)
class StepBatch:
    """Part of a rank in one step."""

    sizes: tuple[int, ...]
    """Samples of each microbatch.

    0 means padding: no sample was left for this rank of a sharded replica, for example in its last lease. It then gets
    samples that other ranks train on, so that collectives match: one, or for static shapes a full microbatch. They must
    have no weight.
    """
    lengths: tuple[float, float] | None = None
    """Sums of the lengths of these samples and of their squares; None: unknown to the loader."""
    weight: float | None = None
    """Weight of these samples by the script's function; None: there is none, and their number counts."""

    @property
    def microbatches(self) -> int:
        return len(self.sizes)

    @property
    def samples(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class SharingTerms:
    """Parameters of the assignment of samples to ranks."""

    shares: tuple[int, ...]
    cost: SequenceCost
    """Cost by which samples are balanced, if their lengths are known."""


class SampleAllotment:
    """Assignments of one source of samples, step by step, and this rank's position in them."""

    def __init__(self, source: ShareDistributor | LeaseDistributor | None, terms: SharingTerms) -> None:
        """Create it. `source` None: it must be set before the first step."""
        self.source = source
        self.drawn_batches: deque[tuple[StepBatch, Sequence[Interval]]] = deque()
        """Steps that are assigned and have not begun: this rank's batches, and their positions so far."""
        self.underway_positions: Sequence[Interval] = ()
        """Positions, so far, of the step that has begun and is not complete."""
        self.begun_steps = 0
        """Number of begun steps."""
        self.used_samples = 0
        """Samples of all ranks' completed steps, up to the newest sync point."""
        self.is_exact = True
        """Whether the last sync point counted all completed steps and had the unused positions."""
        self.terms = terms
        """Terms of the step that was assigned last."""
        self._changes: dict[int, SharingTerms] = {}
        self._taken_steps = 0

    def change_terms(self, terms: SharingTerms, lookahead: int) -> None:
        """Change the terms from the first step on that no rank can have assigned yet."""
        if self._taken_steps:
            self._changes[self.begun_steps + lookahead] = terms
        else:
            self.terms = terms

    def take_batch(self) -> SharedBatch | None:
        """Take the next step's batch."""
        assert self.source is not None
        self._advance_terms()
        return self.source.take_batch(self.terms.shares)

    @property
    def microbatch_leases(self) -> LeaseDistributor | None:
        """The source, if steps take their samples from it one microbatch at a time."""
        return (
            self.source
            if isinstance(self.source, LeaseDistributor) and self.source.reserve_tickets is not None
            else None
        )

    def reserve_step(self, source: LeaseDistributor) -> tuple[int, ...] | None:
        """Reserve tickets for the next step."""
        self._advance_terms()
        return source.reserve_step(self.terms.shares)

    def _advance_terms(self) -> None:
        self.terms = self._changes.pop(self._taken_steps, self.terms)
        self._taken_steps += 1


class MicrobatchSampler:
    """Batch sampler of torch's DataLoader, which requests some batches ahead of the steps.

    It has no reference to the DataLoader: otherwise worker processes would end only at Python's garbage collection.
    """

    def __init__(self, stream: SampleStream, sizes: BatchSizes, sequences: SequenceBalancer | None) -> None:
        """Create it. `sequences`: balances samples over ranks and microbatches; None: they are taken in order."""
        self.allotment: SampleAllotment
        self.requested_batches = 0
        """Batches that the present iterator has requested."""
        self.is_exhausted = False
        """Whether the present iterator is exhausted."""
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
        """Return the step's microbatches. None: no samples are left. Balanced samples are known only all together."""
        source = allotment.microbatch_leases
        if source is not None and self._sequences is None:
            parts = allotment.reserve_step(source)
            return None if parts is None else self._iterate_leased(allotment, source, parts)
        batch = allotment.take_batch()
        return None if batch is None else self._iterate_shared(allotment, batch)

    def _iterate_shared(self, allotment: SampleAllotment, batch: SharedBatch) -> Iterator[list[int]]:
        step_batch, positions, indices = self._select_own_samples(batch, allotment.terms.cost)
        allotment.drawn_batches.append((step_batch, positions))
        remaining = iter(indices)
        for size in step_batch.sizes:
            yield list(islice(remaining, size)) or self._get_padding_indices(batch)

    def _iterate_leased(
        self, allotment: SampleAllotment, source: LeaseDistributor, parts: tuple[int, ...]
    ) -> Iterator[list[int]]:
        count = self._sizes.count_microbatches(parts)
        sizes_by_rank = [self._sizes.split_microbatches(part, count) for part in parts]
        positions: list[Interval] = []
        allotment.drawn_batches.append((StepBatch(sizes_by_rank[source.topology.replica_rank]), positions))
        for microbatch_sizes in zip(*sizes_by_rank, strict=True):
            batch = source.take_reserved(microbatch_sizes)
            own_positions = slice_intervals(batch.positions, *get_rank_interval(batch.shares, batch.share_index))
            positions += own_positions
            yield self._stream.get_indices(own_positions) or self._get_padding_indices(batch)

    def _get_padding_indices(self, batch: SharedBatch) -> list[int]:
        """Return the samples of a rank that has none in a microbatch of its replica: samples that others train on."""
        return self._stream.get_indices(slice_intervals(batch.positions, 0, self._sizes.granularity))

    def _select_own_samples(
        self, batch: SharedBatch, cost: SequenceCost
    ) -> tuple[StepBatch, tuple[Interval, ...], list[int]]:
        """Return this rank's batch, its positions, and their indices in the order of the microbatches."""
        sizes = self._sizes.split_microbatches(
            batch.shares[batch.share_index], self._sizes.count_microbatches(batch.matching_shares)
        )
        if self._sequences is None:
            positions = slice_intervals(batch.positions, *get_rank_interval(batch.shares, batch.share_index))
            return StepBatch(sizes), positions, self._stream.get_indices(positions)
        stream_positions = [position for first, end in batch.positions for position in range(first, end)]
        indices = self._stream.get_indices(batch.positions)
        own_numbers = self._sequences.split_by_shares(indices, batch.shares, cost)[batch.share_index]
        chosen = [indices[number] for number in own_numbers]
        positions = merge_intervals((stream_positions[number], stream_positions[number] + 1) for number in own_numbers)
        return (
            StepBatch(sizes, self._sequences.sum_lengths(chosen)),
            positions,
            [chosen[number] for part in self._sequences.split_microbatches(chosen, sizes, cost) for number in part],
        )
