"""Loads this rank's part of each step's samples, in microbatches, with torch's DataLoader and its workers.

The samples of a step come by shares from the global batch, or as a lease (leases.py). When this changes, the DataLoader
and its workers continue: what they have prefetched is fetched and discarded, and its positions are assigned again.

Batches are on the host, where their weight is computed. They are moved to the job's device when the script requests
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.length_cost import SequenceCost

from .device_transfer import create_batch_mover
from .iterables import IterableAdapter, SizedCollate, is_iterable
from .leases import Interval, LeaseDistributor, Remainder, ShareDistributor, TakeTickets, merge_intervals
from .lengths import Lengths, SequenceBalancer
from .sample_stream import IndexedStream, IterableStream, SampleStream
from .sampler import MicrobatchSampler, SampleAllotment, SharingTerms, StepBatch
from .shares import BatchSizes, RankTopology

__all__ = ["BatchSizes", "Loader", "RankTopology", "SampleOrder", "StepBatch", "Weight"]

Weight = Callable[[Any], Any]
"""Function from a batch to the divisor of its loss sum, for example its number of valid tokens."""


@dataclass(frozen=True)
class SampleOrder:
    """In which order samples are used, and how those of a global batch are assigned to the ranks."""

    seed: int = 0
    shuffle: bool = True
    """Whether each epoch has a different order. It is ignored for an iterable, which has its own order."""
    lengths: Lengths | None = None
    """Lengths of the samples by index. Each global batch is then assigned so that each rank's part costs as much as its
    share, and its microbatches cost alike. None: samples are assigned in order."""
    cost: SequenceCost | None = None
    """Cost of a sequence by its length, until a plan changes it; None: proportional to the length."""


_DEFAULT_ORDER = SampleOrder()


class Loader:
    """Loader that `Job.dataloader` creates. Its state is the unused part of the sample stream."""

    def __init__(
        self,
        dataset: Any,
        sizes: BatchSizes,
        topology: RankTopology,
        order: SampleOrder = _DEFAULT_ORDER,
        *,
        weight: Weight | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        """Create the loader; `options` go to torch's DataLoader.

        Raises InputError that names the argument and the remedy.

        `dataset`: a data set with a length and an index, or an iterable (see iterables.py).
        `weight`: weight of a batch on the host.
        `device`: device that batches are moved to (see device_transfer.py); None: they stay.
        """
        reserved = {"batch_size", "sampler", "batch_sampler", "drop_last", "generator", "in_order"} & options.keys()
        if reserved:
            raise InputError(f"{sorted(reserved)}: the loader sets this according to the shares; omit it")
        self._batch_sizes = sizes
        self._topology = topology
        self._weight = weight
        self._move_batch = create_batch_mover(device)
        if device is not None and device.type == "cuda":
            options.setdefault("pin_memory", True)  # otherwise the copy to the device would block the host
        self._shares = sizes.split_equally(topology.world_size)
        size = len(dataset) if hasattr(dataset, "__len__") else None
        self._iterable = IterableAdapter(dataset, size) if is_iterable(dataset) else None
        self._stream: SampleStream = IterableStream()
        if self._iterable is not None:
            dataset = self._iterable
            options["collate_fn"] = SizedCollate(dataset, options.get("collate_fn"))
        elif size:
            self._stream = IndexedStream(size, order.seed, order.shuffle)
        else:
            raise InputError("dataset: it has no length or no samples; give it a __len__, or an iterable")
        self._dataset_size = size
        self._sequences = self._make_sequences(order)
        self._cost = self._script_cost = order.cost or SequenceCost()
        self._sampler = MicrobatchSampler(self._stream, sizes, self._sequences)
        # iter(DataLoader) draws its workers' seeds; a separate generator keeps the script's unchanged.
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self._sampler, generator=torch.Generator().manual_seed(order.seed), **options
        )
        self.lookahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        """Steps until a change of shares or cost takes effect, on all ranks alike: what workers may have prefetched."""
        self._batches: Iterator[Any] | None = None
        self._received_batches = 0  # number of batches that the present iterator has returned
        self._superseded_batches = 0  # number of coming batches that no longer belong to a step
        self._known_remainder = Remainder()
        """Remainder of the stream `_completed_samples` samples ago."""
        self._completed_samples = 0
        self._set_source(None)

    # Steps

    def next_step(self) -> tuple[StepBatch, Iterator[Any]] | None:
        """Return this rank's batch of the next step, and its microbatches, which are moved to the device on request.

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
            first = self._fetch_batch()  # fetching it determines the step's other batches
        except StopIteration:
            if not self._sampler.is_exhausted:
                raise RuntimeError("the data set raised StopIteration for a sample that it should have") from None
            return None
        step_batch, allotment.underway_positions = allotment.drawn_batches.popleft()
        allotment.begun_steps += 1
        batches = self._iterate_batches(first, step_batch.microbatches)
        if self._weight is not None:
            loaded = list(batches)
            weighted = (batch for batch, size in zip(loaded, step_batch.sizes, strict=True) if size)
            step_batch = replace(step_batch, weight=sum(float(self._weight(batch)) for batch in weighted))
            batches = iter(loaded)
        return step_batch, map(self._move_batch, batches)

    def complete_step(self) -> None:
        """Record that the optimizer has stepped with the samples of the last `next_step`."""
        if isinstance(self._allotment.source, LeaseDistributor):
            self._allotment.underway_positions, self._allotment.is_exact = (), False
        else:
            self._completed_samples += self._batch_sizes.global_batch

    @property
    def cursor(self) -> int:
        """First position after which all are unused; returned leases may be before it."""
        return self._remainder.cursor

    @property
    def used_samples(self) -> int:
        """Samples of the job in completed steps; those of leases up to the newest exact sync point."""
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
        """The newest shares, in force now or, with DataLoader workers, `lookahead` steps after they were set."""
        return self._shares

    def set_shares(self, shares: tuple[int, ...] | None) -> None:
        """Set the shares from the next step on, or from the first one not yet prefetched; None: equal shares."""
        new_shares = shares or self._batch_sizes.split_equally(self._topology.world_size)
        if new_shares == self._shares:
            return
        self.check_shares(new_shares)
        self._shares = new_shares
        self._allotment.change_terms(self._terms, self.lookahead)

    def check_shares(self, shares: tuple[int, ...]) -> None:
        """Raise InputError if the loader cannot use `shares`."""
        self._batch_sizes.check_shares(shares, self._topology.world_size, self._topology.replica_size)

    # Sequences

    def set_cost(self, cost: SequenceCost | None) -> None:
        """Set the cost of a sequence, with the delay of `set_shares`; None: the script's own."""
        new_cost = cost or self._script_cost
        if new_cost == self._cost:
            return
        self.check_cost()
        self._cost = new_cost
        self._allotment.change_terms(self._terms, self.lookahead)

    def check_cost(self) -> None:
        """Raise InputError if samples cannot be balanced by their cost."""
        if self._sequences is None:
            raise InputError("sequence_cost: the lengths of samples are unknown; pass lengths to dataloader()")

    # Leases

    def start_leases(
        self, take_tickets: TakeTickets, limit: int | None, reserve_tickets: TakeTickets | None = None
    ) -> None:
        """Lease samples from the next step on, as many per step as this rank's share. On all ranks alike.

        `take_tickets`: counter that all ranks share; it counts from 0 after each call of this method. Ranks that share
        a replica take for all of it, each as often as its peers: the first one's result is for all of them.
        `limit`: number of samples that the job may use in total, counted like `used_samples`. Tickets beyond it are not
        taken. None: no limit.
        `reserve_tickets`: another such counter, with which steps lease one microbatch at a time. None: a step leases
        all its samples at once, as it always does for samples that are balanced by length.
        """
        tickets = None if limit is None else limit - self.used_samples
        self._set_source(
            LeaseDistributor(
                self._remainder, self._topology, take_tickets, tickets, self._batch_sizes.granularity, reserve_tickets
            )
        )

    @property
    def can_lease_microbatches(self) -> bool:
        """Whether steps can lease single microbatches. Balanced samples of a step are known only all together."""
        return self._sequences is None

    def list_unused(self) -> list[Interval]:
        """Return the positions [first, end) that this rank has leased but not used in a completed step."""
        allotment = self._allotment
        if not isinstance(allotment.source, LeaseDistributor):
            return []
        prefetched = (interval for _, positions in allotment.drawn_batches for interval in positions)
        return list(merge_intervals([*allotment.underway_positions, *prefetched]))

    def settle_leases(self, used: int, unused: Sequence[Interval] | None) -> None:
        """Account for the leases at a sync point, when no rank is within a step. Without leases this changes nothing.

        `used`: samples of the steps that all ranks together have completed since the last sync point, or since the
        leases began. `unused`: results of `list_unused` of all ranks. The state is exact afterwards and may be saved;
        the leases continue. None: the state will not be saved. Raises ValueError if the two do not match.
        """
        allotment = self._allotment
        if not isinstance(allotment.source, LeaseDistributor):
            return
        allotment.used_samples += used
        if unused is not None:
            returned = sum(end - first for first, end in unused)
            self._known_remainder = allotment.source.start.with_tickets_used(allotment.used_samples + returned, unused)
            allotment.is_exact = True

    def stop_leases(self) -> None:
        """Return to shares from the next step on, with unused positions first. Call it after an exact sync point."""
        self._check_exact()
        self._set_source(None)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Raises RuntimeError during leases, unless an exact sync point followed the last step."""
        self._check_exact()
        return {
            "cursor": self._remainder.cursor,
            "pending": [list(interval) for interval in self._remainder.pending],
            "shares": list(self._shares),
            "size": self._epoch_size,
            "order": self._stream.order_name,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; samples are then assigned by shares.

        Raises InputError if the positions belong to other data, or to another order.
        """
        size = state["size"]
        if None not in (size, self._epoch_size) and size != self._epoch_size:
            raise InputError(
                f"dataset: it has {self._epoch_size} samples, the checkpoint's had {size}; "
                "train on the same data, or start with another checkpoint path (spec.checkpoint.path)"
            )
        if (order := state.get("order", "not named")) != self._stream.order_name:
            raise InputError(
                f"dataset: its samples come in another order ({self._stream.order_name}) than the checkpoint's "
                f"({order}): "
                "some would be used twice and others never; pass the same `seed` to pk.init() and the same "
                "`shuffle` to dataloader(), and continue with the version of Pacekeeper that wrote it, or start with "
                "another checkpoint path (spec.checkpoint.path)"
            )
        if self._iterable is not None:
            self._iterable.size = size or self._epoch_size
        self._known_remainder = Remainder(state["cursor"], tuple((first, end) for first, end in state["pending"]))
        self._completed_samples = 0
        shares = tuple(state["shares"])
        with suppress(InputError):  # shares of another number of ranks, or of another script
            self.check_shares(shares)
            self._shares = shares
        self._set_source(None)

    # Internals

    @property
    def _epoch_size(self) -> int | None:
        """Samples in an epoch; None: not known yet."""
        return self._dataset_size if self._iterable is None else self._iterable.size

    @property
    def _allotment(self) -> SampleAllotment:
        return self._sampler.allotment

    @property
    def _remainder(self) -> Remainder:
        """Unused part of the stream, as far as known.

        It is computed on access and not in each step: that takes time proportional to the number of pending positions.
        """
        if self._completed_samples:
            self._known_remainder, self._completed_samples = (
                self._known_remainder.with_tickets_used(self._completed_samples),
                0,
            )
        return self._known_remainder

    @property
    def _terms(self) -> SharingTerms:
        return SharingTerms(self._shares, self._cost)

    def _make_sequences(self, order: SampleOrder) -> SequenceBalancer | None:
        if order.lengths is None:
            if order.cost is not None:
                raise InputError("cost: it is of sequences by their length; give lengths too, or leave it out")
            return None
        if self._iterable is not None:
            raise InputError("lengths: an iterable data set is read in its order; give a data set with an index")
        assert self._dataset_size is not None
        return SequenceBalancer(order.lengths, self._dataset_size)

    def _set_source(self, source: LeaseDistributor | None) -> None:
        """Use another source of samples; what the old one has assigned ahead is discarded."""
        self._sampler.allotment = SampleAllotment(source, self._terms)
        if self._sampler.is_exhausted:
            self._batches = None
        self._superseded_batches = (
            0 if self._batches is None else self._sampler.requested_batches - self._received_batches
        )

    def _check_exact(self) -> None:
        if not self._allotment.is_exact:
            raise RuntimeError("leases are open: call settle_leases(used, unused) before the state is taken")

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
