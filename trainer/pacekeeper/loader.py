"""Fetches this rank's part of each step's samples, in microbatches, with torch's DataLoader and its workers.

The samples of a step come by shares from the global batch, or as a lease (leases.py). Between the two the DataLoader
and its workers go on: what they have prefetched is fetched and thrown away, and its positions are dealt again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from pacekeeper_analysis.errors import InputError

from .leases import Deal, Dealing, Interval, Leasing, Remainder, Take, cut, merge
from .sampler import SampleStream
from .shares import check_replicas, check_shares, equal_shares, microbatch_count, microbatch_sizes, rank_interval

Weight = Callable[[Any], Any]
"""From a batch to what its loss sum is to be divided by: its valid tokens, say."""


@dataclass(frozen=True)
class Draw:
    """What a rank takes in one step."""

    sizes: tuple[int, ...]
    """Samples of each microbatch. 0 (in the last lease of a sharded replica only): there was none left for this rank.
    Its batch is one sample that others train on, so that collectives match; it must count nothing."""

    @property
    def microbatches(self) -> int:
        return len(self.sizes)

    @property
    def samples(self) -> int:
        return sum(self.sizes)


class Loader:
    """Made by `Job.dataloader`. Its state is what of the stream of samples is not yet used."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        max_microbatch: int,
        rank: int,
        world_size: int,
        weight: Weight | None = None,
        seed: int = 0,
        shuffle: bool = True,
        **options: Any,
    ) -> None:
        """`options` go to torch's DataLoader. Raises InputError that names the argument and the remedy."""
        size = len(dataset) if hasattr(dataset, "__len__") else 0
        if size == 0:
            raise InputError("dataset: it has no length or no samples; give a map-style data set with __len__")
        if global_batch_size < world_size:
            raise InputError(
                f"global_batch_size={global_batch_size} is less than the {world_size} ranks; raise it, or take fewer"
            )
        if max_microbatch < 1:
            raise InputError(f"max_microbatch={max_microbatch} must be at least 1: the samples of one forward pass")
        taken = {"batch_size", "sampler", "batch_sampler", "drop_last"} & options.keys()
        if taken:
            raise InputError(f"{sorted(taken)}: the shares decide this; leave it out")
        self.global_batch_size = global_batch_size
        self.max_microbatch = max_microbatch
        self.weight = weight
        self.replica_size = 1
        """Ranks that share a replica (a shard group): ranks 0 … n-1 the first, and so on. They run equally many
        microbatches, and lease together. To be set before the first step."""
        self._rank = rank
        self._world_size = world_size
        self._stream = SampleStream(size, seed, shuffle)
        self._shares = equal_shares(global_batch_size, world_size)
        # iter(DataLoader) draws its workers' seeds; from a generator of its own, or it would shift the script's.
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_Indices(self._draw),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )
        self.lookahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        """Steps until a change of shares takes effect, on all ranks alike: what workers may have prefetched."""
        self._batches: Iterator[Any] | None = None
        self._asked = 0  # batches that the present iterator was asked for, and those that it gave
        self._received = 0
        self._stale = 0  # batches to come that belong to no step any more
        self._ended = False  # the present iterator has nothing left to ask for
        self._left = Remainder()
        self._phase = _Phase(None, self._shares)

    # Steps

    def next_step(self) -> tuple[Draw, Iterator[Any]] | None:
        """What this rank takes in the next step, and its microbatches. None: no ticket is left below the limit."""
        phase = self._phase
        if phase.source is None:
            phase.source = Dealing(self._left, self._rank, self.replica_size)
        if self._batches is None:
            self._asked = self._received = 0
            self._batches = iter(self._loader)
        try:
            while self._stale:
                self._stale -= 1
                self._fetch()
            first = self._fetch()  # drawing it tells what else there is
        except StopIteration:
            return None
        draw, phase.underway = phase.drawn.popleft()
        phase.taken += 1
        return draw, self._rest(first, draw.microbatches)

    def complete_step(self) -> None:
        """The optimizer has stepped with the samples of the last `next_step`."""
        if isinstance(self._phase.source, Leasing):
            self._phase.underway, self._phase.exact = (), False
        else:
            self._left = self._left.after(self.global_batch_size)

    @property
    def cursor(self) -> int:
        """All positions of the stream from here on are still to be used, and some before it, if leases came back."""
        return self._left.cursor

    @property
    def used(self) -> int:
        """Samples of the job that the completed steps have used; those of leases up to the newest exact meeting."""
        return self._left.used

    # Shares

    @property
    def shares(self) -> tuple[int, ...]:
        """The newest shares, in force now or, with DataLoader workers, `lookahead` steps after they came."""
        return self._shares

    def set_shares(self, shares: tuple[int, ...] | None) -> None:
        """From the next step on, or from the first one that is not yet prefetched; None: equal shares."""
        wanted = shares or equal_shares(self.global_batch_size, self._world_size)
        if wanted == self._shares:
            return
        self.check(wanted)
        self._shares = wanted
        self._phase.change(wanted, self.lookahead)

    def check(self, shares: tuple[int, ...]) -> None:
        """Raises InputError where `shares` cannot be followed."""
        check_shares(shares, self.global_batch_size, self._world_size)
        check_replicas(shares, self.replica_size, self.max_microbatch)

    # Leases

    def start_leases(self, take: Take, limit: int | None) -> None:
        """From the next step on this rank leases its samples, as many a step as its share. On all ranks alike.

        take: the counter that all ranks share; it counts from 0 anew for each call of this. With `replica_size` > 1
        the ranks of a replica take for all of it, each as often as its peers: the first one's answer is for them all.
        limit: how many samples the job may use in all, counted like `used`; tickets beyond it stay; None: no limit.
        """
        tickets = None if limit is None else limit - self.used
        self._begin(Leasing(self._left, self._rank, self.replica_size, take, tickets))

    def unused(self) -> list[Interval]:
        """Positions [first, end) that this rank has leased and not used in a completed step: prefetched ones, say."""
        phase = self._phase
        if not isinstance(phase.source, Leasing):
            return []
        return list(merge([*phase.underway, *(interval for _, positions in phase.drawn for interval in positions)]))

    def meet(self, used: int, unused: Sequence[Interval] | None) -> None:
        """All ranks meet, none of them within a step. While samples are dealt by shares, this changes nothing.

        used: samples of the steps that all ranks together have completed since the last meeting, or since the leases
        began. unused: of all ranks, what `unused` gives: after it the state is exact, and may be kept; the leases
        go on. None: where it is not to be kept. Raises ValueError where the two do not fit each other.
        """
        phase = self._phase
        if not isinstance(phase.source, Leasing):
            return
        phase.used += used
        if unused is not None:
            out = sum(end - first for first, end in unused)
            self._left = phase.source.start.after(phase.used + out, unused)
            phase.exact = True

    def stop_leases(self) -> None:
        """Back to dealing by shares, from the next step on, what is unused first. After an exact meeting."""
        self._check_exact()
        self._begin(None)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Raises RuntimeError among leases, where there was no exact meeting after the last step."""
        self._check_exact()
        return {
            "cursor": self._left.cursor,
            "pending": [list(interval) for interval in self._left.pending],
            "shares": list(self._shares),
            "size": self._stream.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Samples are dealt by shares then. Raises InputError where the position belongs to another data set."""
        if state["size"] != self._stream.size:
            raise InputError(
                f"dataset: it has {self._stream.size} samples, the checkpoint's had {state['size']}; "
                "train on the same data, or begin with another checkpoint path (spec.checkpoint.path)"
            )
        self._left = Remainder(state["cursor"], tuple((first, end) for first, end in state.get("pending", ())))
        shares = tuple(state["shares"])
        if len(shares) == self._world_size and sum(shares) == self.global_batch_size:
            self._shares = shares
        self._begin(None)

    # Within

    def _begin(self, source: Leasing | None) -> None:
        """Another source of samples: what the old one has dealt ahead is of no use any more."""
        self._phase = _Phase(source, self._shares)
        if self._ended:
            self._batches, self._ended = None, False
        self._stale = 0 if self._batches is None else self._asked - self._received

    def _check_exact(self) -> None:
        if not self._phase.exact:
            raise RuntimeError("leases are out since the last meet(used, unused); meet before the state is taken")

    def _fetch(self) -> Any:
        assert self._batches is not None
        batch = next(self._batches)
        self._received += 1
        return batch

    def _rest(self, first: Any, count: int) -> Iterator[Any]:
        yield first
        for _ in range(count - 1):
            yield self._fetch()

    def _draw(self) -> Iterator[list[int]]:
        """Microbatch after microbatch as indices in the data set. The DataLoader asks for them ahead of the steps."""
        while (deal := (phase := self._phase).deal()) is not None:
            draw, positions = self._of_this_rank(deal)
            phase.drawn.append((draw, positions))
            indices = [index for first, end in positions for index in self._stream.indices(first, end)]
            for size in draw.sizes:
                if phase is not self._phase:
                    break
                self._asked += 1
                if size == 0:
                    first = deal.positions[0][0]
                    yield self._stream.indices(first, first + 1)
                else:
                    yield indices[:size]
                    del indices[:size]
        self._ended = True

    def _of_this_rank(self, deal: Deal) -> tuple[Draw, tuple[Interval, ...]]:
        first, end = rank_interval(deal.shares, deal.place)
        count = microbatch_count(deal.matching, self.max_microbatch)
        return Draw(microbatch_sizes(end - first, count)), cut(deal.positions, first, end)


class _Phase:
    """Steps between two changes of where samples come from."""

    def __init__(self, source: Leasing | None, shares: tuple[int, ...]) -> None:
        """`source`: None: dealt by shares, from what is left when the first step begins."""
        self.source: Dealing | Leasing | None = source
        self.drawn: deque[tuple[Draw, tuple[Interval, ...]]] = deque()
        """What the DataLoader was asked for, of steps that have not begun."""
        self.underway: tuple[Interval, ...] = ()
        """Positions of the step that is being made."""
        self.taken = 0
        """Steps that have begun."""
        self.used = 0
        """Samples of all ranks' completed steps, up to the newest meeting."""
        self.exact = True
        """Whether all completed steps were counted in an exact meeting."""
        self._shares = shares
        self._changes: dict[int, tuple[int, ...]] = {}
        self._dealt = 0

    def change(self, shares: tuple[int, ...], lookahead: int) -> None:
        """Other shares, from the first step that no rank can have dealt yet."""
        if self._dealt:
            self._changes[self.taken + lookahead] = shares
        else:
            self._shares = shares

    def deal(self) -> Deal | None:
        """The next step's."""
        assert self.source is not None
        self._shares = self._changes.pop(self._dealt, self._shares)
        self._dealt += 1
        return self.source.deal(self._shares)


class _Indices:
    """A batch sampler that starts `draw` anew for each iterator."""

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw()
