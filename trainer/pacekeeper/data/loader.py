"""Fetches this rank's part of each step's samples, in microbatches, with torch's DataLoader and its workers.

The samples of a step come by shares from the global batch, or as a lease (leases.py). Between the two the DataLoader
and its workers go on: what they have prefetched is fetched and thrown away, and its positions are dealt again.

What is fetched is on the host, where it is also weighed. It goes to the job's device when the script asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.lengths import SequenceCost

from .device import create_batch_mover
from .iterables import IterableAdapter, SizedCollate, is_iterable
from .leases import ShareDistributor, Interval, LeaseDistributor, Remainder, TakeTickets, merge_intervals
from .lengths import Lengths, SequenceBalancer
from .sampler import SampleAllotment, StepBatch, MicrobatchSampler, SharingTerms
from .shares import BatchSizes, RankTopology
from .stream import IndexedStream, IterableStream, SampleStream

__all__ = ["BatchSizes", "StepBatch", "Loader", "RankTopology", "Weight"]

Weight = Callable[[Any], Any]
"""From a batch to what its loss sum is to be divided by: its valid tokens, say."""


class Loader:
    """Made by `Job.dataloader`. Its state is what of the stream of samples is not yet used."""

    def __init__(
        self,
        dataset: Any,
        sizes: BatchSizes,
        topology: RankTopology,
        *,
        weight: Weight | None = None,
        device: torch.device | None = None,
        seed: int = 0,
        shuffle: bool = True,
        lengths: Lengths | None = None,
        cost: SequenceCost | None = None,
        **options: Any,
    ) -> None:
        """`options` go to torch's DataLoader. Raises InputError that names the argument and the remedy.

        dataset: with a length and an index, or an iterable (see iterable.py). shuffle: not of an iterable, which comes
        in its own order.
        weight: of a batch on the host. device: where batches go then (see device.py); None: they stay.
        lengths: of the samples, by their index: each global batch is then dealt so that each rank's part costs as much
        as its share says, and its microbatches cost alike. None: samples are dealt as they come. cost: of a sequence,
        by its length, until a plan says otherwise; None: as its length.
        """
        taken = {"batch_size", "sampler", "batch_sampler", "drop_last", "generator", "in_order"} & options.keys()
        if taken:
            raise InputError(f"{sorted(taken)}: the loader decides this, by the shares; leave it out")
        self._batch_sizes = sizes
        self._topology = topology
        self._weight = weight
        self._move_batch = create_batch_mover(device)
        if device is not None and device.type == "cuda":
            options.setdefault("pin_memory", True)  # or the copy to the device would keep the host waiting
        self._shares = sizes.split_equally(topology.world_size)
        size = len(dataset) if hasattr(dataset, "__len__") else None
        self._iterable = IterableAdapter(dataset, size) if is_iterable(dataset) else None
        self._stream: SampleStream = IterableStream()
        if self._iterable is not None:
            dataset = self._iterable
            options["collate_fn"] = SizedCollate(dataset, options.get("collate_fn"))
        elif size:
            self._stream = IndexedStream(size, seed, shuffle)
        else:
            raise InputError("dataset: it has no length or no samples; give it a __len__, or an iterable")
        self._dataset_size = size
        self._sequences = self._make_sequences(lengths, cost)
        self._cost = self._script_cost = cost or SequenceCost()
        self._sampler = MicrobatchSampler(self._stream, sizes, self._sequences)
        # iter(DataLoader) draws its workers' seeds; from a generator of its own, or it would shift the script's.
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self._sampler, generator=torch.Generator().manual_seed(seed), **options
        )
        self.lookahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        """Steps until a change of shares or cost takes effect, on all ranks alike: what workers may have prefetched."""
        self._batches: Iterator[Any] | None = None
        self._received_batches = 0  # of the batches that the present iterator was asked for
        self._superseded_batches = 0  # batches to come that belong to no step any more
        self._known_remainder = Remainder()
        """What was left of the stream `_completed` samples ago."""
        self._completed_samples = 0
        self._set_source(None)

    # Steps

    def next_step(self) -> tuple[StepBatch, Iterator[Any]] | None:
        """What this rank takes in the next step, and its microbatches, which go to the device as they are asked for.

        None: no ticket is left below the limit.
        """
        allotment = self._allotment
        if allotment.source is None:
            allotment.source = ShareDistributor(self._remainder, self._topology)
        if self._batches is None:
            self._received_batches = 0
            self._batches = iter(self._loader)
        try:
            while self._superseded_batches:
                self._superseded_batches -= 1
                self._fetch_batch()
            first = self._fetch_batch()  # drawing it tells what else there is
        except StopIteration:
            if not self._sampler.is_exhausted:
                raise RuntimeError("the data set raised StopIteration for a sample that it should have") from None
            return None
        draw, allotment.underway_positions = allotment.drawn_batches.popleft()
        allotment.begun_steps += 1
        batches = self._iterate_batches(first, draw.microbatches)
        if self._weight is not None:
            known = list(batches)
            counted = (batch for batch, size in zip(known, draw.sizes, strict=True) if size)
            draw = replace(draw, weight=sum(float(self._weight(batch)) for batch in counted))
            batches = iter(known)
        return draw, map(self._move_batch, batches)

    def complete_step(self) -> None:
        """The optimizer has stepped with the samples of the last `next_step`."""
        if isinstance(self._allotment.source, LeaseDistributor):
            self._allotment.underway_positions, self._allotment.is_exact = (), False
        else:
            self._completed_samples += self._batch_sizes.global_batch

    @property
    def cursor(self) -> int:
        """All positions of the stream from here on are still to be used, and some before it, if leases came back."""
        return self._remainder.cursor

    @property
    def used_samples(self) -> int:
        """Samples of the job that the completed steps have used; those of leases up to the newest exact meeting."""
        return self._remainder.used_positions

    # Shares

    @property
    def global_batch_size(self) -> int:
        return self._batch_sizes.global_batch

    @property
    def share_granularity(self) -> int:
        """Samples that each share is a multiple of."""
        return self._batch_sizes.granularity

    @property
    def shares(self) -> tuple[int, ...]:
        """The newest shares, in force now or, with DataLoader workers, `lookahead` steps after they came."""
        return self._shares

    def set_shares(self, shares: tuple[int, ...] | None) -> None:
        """From the next step on, or from the first one that is not yet prefetched; None: equal shares."""
        wanted = shares or self._batch_sizes.split_equally(self._topology.world_size)
        if wanted == self._shares:
            return
        self.check_shares(wanted)
        self._shares = wanted
        self._allotment.change_terms(self._terms, self.lookahead)

    def check_shares(self, shares: tuple[int, ...]) -> None:
        """Raises InputError where `shares` cannot be followed."""
        self._batch_sizes.check_shares(shares, self._topology.world_size, self._topology.replica_size)

    # Sequences

    def set_cost(self, cost: SequenceCost | None) -> None:
        """Of a sequence, as of `set_shares`; None: the script's own."""
        wanted = cost or self._script_cost
        if wanted == self._cost:
            return
        self.check_cost()
        self._cost = wanted
        self._allotment.change_terms(self._terms, self.lookahead)

    def check_cost(self) -> None:
        """Raises InputError where samples cannot be balanced by their cost."""
        if self._sequences is None:
            raise InputError("sequence_cost: the loader does not know how long samples are; give dataloader() lengths")

    # Leases

    def start_leases(self, take_tickets: TakeTickets, limit: int | None, reserve_tickets: TakeTickets | None = None) -> None:
        """From the next step on this rank leases its samples, as many a step as its share. On all ranks alike.

        take: the counter that all ranks share; it counts from 0 anew for each call of this. Ranks that share a replica
        take for all of it, each as often as its peers: the first one's answer is for them all.
        promise: another such counter, by which steps lease one microbatch at a time; None: all of a step at once, as
        samples that are balanced by their lengths are always.
        limit: how many samples the job may use in all, counted like `used`; tickets beyond it stay; None: no limit.
        """
        tickets = None if limit is None else limit - self.used_samples
        self._set_source(LeaseDistributor(self._remainder, self._topology, take_tickets, tickets, self._batch_sizes.granularity, reserve_tickets))

    @property
    def can_lease_microbatches(self) -> bool:
        """Where there is a promise to be had; balanced samples are known only all of a step's together."""
        return self._sequences is None

    def list_unused(self) -> list[Interval]:
        """Positions [first, end) that this rank has leased and not used in a completed step: prefetched ones, say."""
        allotment = self._allotment
        if not isinstance(allotment.source, LeaseDistributor):
            return []
        ahead = (interval for _, positions in allotment.drawn_batches for interval in positions)
        return list(merge_intervals([*allotment.underway_positions, *ahead]))

    def settle_leases(self, used: int, unused: Sequence[Interval] | None) -> None:
        """All ranks meet, none of them within a step. While samples are dealt by shares, this changes nothing.

        used: samples of the steps that all ranks together have completed since the last meeting, or since the leases
        began. unused: of all ranks, what `unused` gives: after it the state is exact, and may be kept; the leases
        go on. None: where it is not to be kept. Raises ValueError where the two do not fit each other.
        """
        allotment = self._allotment
        if not isinstance(allotment.source, LeaseDistributor):
            return
        allotment.used_samples += used
        if unused is not None:
            out = sum(end - first for first, end in unused)
            self._known_remainder = allotment.source.start.with_tickets_used(allotment.used_samples + out, unused)
            allotment.is_exact = True

    def stop_leases(self) -> None:
        """Back to dealing by shares, from the next step on, what is unused first. After an exact meeting."""
        self._check_exact()
        self._set_source(None)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Raises RuntimeError among leases, where there was no exact meeting after the last step."""
        self._check_exact()
        return {
            "cursor": self._remainder.cursor,
            "pending": [list(interval) for interval in self._remainder.pending],
            "shares": list(self._shares),
            "size": self._epoch_size,
            "order": self._stream.order_name,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Samples are dealt by shares then. Raises InputError where the positions belong to other data, or to another
        order."""
        size = state["size"]
        if None not in (size, self._epoch_size) and size != self._epoch_size:
            raise InputError(
                f"dataset: it has {self._epoch_size} samples, the checkpoint's had {size}; "
                "train on the same data, or begin with another checkpoint path (spec.checkpoint.path)"
            )
        if (order := state.get("order", "not named")) != self._stream.order_name:
            raise InputError(
                f"dataset: its samples come in another order ({self._stream.order_name}) than the checkpoint's ({order}): "
                "some would be used twice and others never; give pk.init() the same `seed` and dataloader() the same "
                "`shuffle`, and go on with the version of Pacekeeper that wrote it, or begin with another checkpoint "
                "path (spec.checkpoint.path)"
            )
        if self._iterable is not None:
            self._iterable.size = size or self._epoch_size
        self._known_remainder = Remainder(state["cursor"], tuple((first, end) for first, end in state["pending"]))
        self._completed_samples = 0
        shares = tuple(state["shares"])
        with suppress(InputError):  # of another number of ranks, or of another script
            self.check_shares(shares)
            self._shares = shares
        self._set_source(None)

    # Within

    @property
    def _epoch_size(self) -> int | None:
        """Samples in an epoch; None: it is not known yet."""
        return self._dataset_size if self._iterable is None else self._iterable.size

    @property
    def _allotment(self) -> SampleAllotment:
        return self._sampler.allotment

    @property
    def _remainder(self) -> Remainder:
        """What of the stream is not yet used, as far as is known. Worked out where it is asked for and not in each
        step: it takes as long as there are pending positions."""
        if self._completed_samples:
            self._known_remainder, self._completed_samples = self._known_remainder.with_tickets_used(self._completed_samples), 0
        return self._known_remainder

    @property
    def _terms(self) -> SharingTerms:
        return SharingTerms(self._shares, self._cost)

    def _make_sequences(self, lengths: Lengths | None, cost: SequenceCost | None) -> SequenceBalancer | None:
        if lengths is None:
            if cost is not None:
                raise InputError("cost: it is of sequences by their length; give lengths too, or leave it out")
            return None
        if self._iterable is not None:
            raise InputError("lengths: an iterable data set is read in its order; give a data set with an index")
        assert self._dataset_size is not None
        return SequenceBalancer(lengths, self._dataset_size)

    def _set_source(self, source: LeaseDistributor | None) -> None:
        """Another source of samples: what the old one has dealt ahead is of no use any more."""
        self._sampler.allotment = SampleAllotment(source, self._terms)
        if self._sampler.is_exhausted:
            self._batches = None
        self._superseded_batches = 0 if self._batches is None else self._sampler.requested_batches - self._received_batches

    def _check_exact(self) -> None:
        if not self._allotment.is_exact:
            raise RuntimeError("leases are out since the last meet(used, unused); meet before the state is taken")

    def _fetch_batch(self) -> Any:
        assert self._batches is not None
        batch = next(self._batches)
        self._received_batches += 1
        if self._iterable is not None:
            size, batch = batch
            self._iterable.size = size or self._iterable.size
        return batch

    def _iterate_batches(self, first: Any, count: int) -> Iterator[Any]:
        yield first
        for _ in range(count - 1):
            yield self._fetch_batch()
