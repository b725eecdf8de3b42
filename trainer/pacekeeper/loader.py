"""Fetches this rank's part of each step's global batch, in microbatches, with torch's DataLoader and its workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from pacekeeper_analysis.errors import InputError

from .sampler import SampleStream
from .shares import check_shares, equal_shares, microbatch_count, microbatch_sizes, rank_interval

Weight = Callable[[Any], Any]
"""From a batch to what its loss sum is to be divided by: its valid tokens, say."""


@dataclass(frozen=True)
class Draw:
    """What a rank takes in one step."""

    microbatches: int
    samples: int


class Loader:
    """Made by `Job.dataloader`. Its state is the cursor in the stream of samples."""

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
        self.cursor = 0
        """Samples of the job that the completed steps have used; the position of the next step in the stream."""
        self.alike = False
        """Whether all ranks must run equally many microbatches; set for sharded models."""
        self._rank = rank
        self._world_size = world_size
        self._stream = SampleStream(size, seed, shuffle)
        self._shares = equal_shares(global_batch_size, world_size)
        self._changes: dict[int, tuple[int, ...]] = {}
        self._taken = 0
        self._drawn: deque[Draw] = deque()
        self._batches: Iterator[Any] | None = None
        # iter(DataLoader) draws its workers' seeds; from a generator of its own, or it would shift the script's.
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_Indices(self._draw),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )
        self.lookahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        """Steps until a change of shares takes effect, on all ranks alike: what workers may have prefetched."""

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
        if self._batches is not None:
            self._changes[self._taken + self.lookahead] = wanted

    def check(self, shares: tuple[int, ...]) -> None:
        """Raises InputError where `shares` cannot be followed."""
        least = microbatch_count(shares, 0, self.max_microbatch, alike=True) if self.alike and shares else 1
        check_shares(shares, self.global_batch_size, self._world_size, least)

    def next_step(self) -> tuple[Draw, Iterator[Any]]:
        """What this rank takes in the next step, and its microbatches."""
        if self._batches is None:
            self._changes = {0: self._shares}
            self._batches = iter(self._loader)
        first = next(self._batches)  # drawing it tells how many there are
        draw = self._drawn.popleft()
        self._taken += 1
        return draw, self._rest(first, draw.microbatches)

    def complete_step(self) -> None:
        """The optimizer has stepped with the samples of the last `next_step`."""
        self.cursor += self.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "shares": list(self._shares), "size": self._stream.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises InputError where the position belongs to another data set."""
        if state["size"] != self._stream.size:
            raise InputError(
                f"dataset: it has {self._stream.size} samples, the checkpoint's had {state['size']}; "
                "train on the same data, or begin with another checkpoint path (spec.checkpoint.path)"
            )
        self.cursor = state["cursor"]
        shares = tuple(state["shares"])
        if len(shares) == self._world_size and sum(shares) == self.global_batch_size:
            self._shares = shares
        self._taken, self._batches = 0, None
        self._drawn.clear()

    def _rest(self, first: Any, count: int) -> Iterator[Any]:
        assert self._batches is not None
        yield first
        for _ in range(count - 1):
            yield next(self._batches)

    def _draw(self) -> Iterator[list[int]]:
        """Microbatch after microbatch as indices in the data set, without end."""
        cursor, shares, step = self.cursor, self._shares, 0
        while True:
            shares = self._changes.pop(step, shares)
            first, end = rank_interval(shares, self._rank)
            count = microbatch_count(shares, self._rank, self.max_microbatch, self.alike)
            self._drawn.append(Draw(count, end - first))
            indices = self._stream.indices(cursor + first, cursor + end)
            for size in microbatch_sizes(end - first, count):
                yield indices[:size]
                del indices[:size]
            cursor += self.global_batch_size
            step += 1


class _Indices:
    """A batch sampler that starts `draw` anew for each iterator."""

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw()
