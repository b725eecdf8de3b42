"""Splits a step's global batch into a share for each rank, and each share into microbatches. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pacekeeper_analysis.errors import InputError


@dataclass(frozen=True)
class RankTopology:
    """Position of this rank among the ranks that share a batch."""

    rank: int = 0
    world_size: int = 1
    replica_size: int = 1
    """Number of ranks that share a replica (a shard group): ranks 0 … n-1 are the first, and so on.

    They run equally many microbatches, and lease together.
    """

    @property
    def replica_rank(self) -> int:
        """Rank within its replica."""
        return self.rank % self.replica_size

    def select_replica_shares(self, shares: Sequence[int]) -> tuple[int, ...]:
        """Return the shares of its replica's ranks from those of all ranks."""
        first = self.rank - self.replica_rank
        return tuple(shares[first : first + self.replica_size])


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a global batch and of a microbatch. Raises InputError that names the argument and the remedy."""

    global_batch: int
    max_microbatch: int
    static_shapes: bool = False
    """Whether each microbatch has exactly `max_microbatch` samples.

    Code that is compiled for one shape then works for any shares.
    """

    def __post_init__(self) -> None:
        if self.max_microbatch < 1:
            raise InputError(
                f"max_microbatch={self.max_microbatch} must be at least 1: the samples of one forward pass"
            )
        if self.global_batch % self.granularity:
            raise InputError(
                f"global_batch_size={self.global_batch} is no multiple of max_microbatch={self.max_microbatch}, which "
                "static_shapes needs; change one of them, or omit static_shapes"
            )

    @property
    def granularity(self) -> int:
        """Samples that each share is a multiple of."""
        return self.max_microbatch if self.static_shapes else 1

    def split_equally(self, ranks: int) -> tuple[int, ...]:
        """Return equal shares. Raises InputError if a rank would have none."""
        if self.global_batch < ranks * self.granularity:
            detail = f", each with a microbatch of {self.granularity}" if self.static_shapes else ""
            raise InputError(
                f"global_batch_size={self.global_batch} is less than the {ranks} ranks{detail}; raise it, or use fewer"
            )
        return split_equally(self.global_batch, ranks, self.granularity)

    def check_shares(self, shares: Sequence[int], ranks: int, replica_size: int) -> None:
        """Raise InputError if the ranks cannot use `shares`."""
        if len(shares) != ranks:
            raise InputError(f"shares: {len(shares)} shares for {ranks} ranks; give one per rank")
        if sum(shares) != self.global_batch:
            raise InputError(
                f"shares: {list(shares)} sum to {sum(shares)}; they must sum to the global batch, {self.global_batch}"
            )
        _check_minimum(shares, 1, "a rank without samples would block the others; remove it from the job instead")
        if any(share % self.granularity for share in shares):
            raise InputError(
                f"shares: {list(shares)} must all be multiples of max_microbatch={self.max_microbatch}, because the "
                "loader has static_shapes; change them"
            )
        for first in range(0, len(shares) if replica_size > 1 else 0, replica_size):
            self._check_replica_shares(shares[first : first + replica_size], first)

    def count_microbatches(self, shares: Sequence[int]) -> int:
        """Return the number of microbatches that ranks with `shares` run in a step.

        `shares`: shares of the ranks that must run equally many. These are the ranks of one replica, whose collectives
        must match in each microbatch. Replicas synchronize once per step, and each runs only as many as it needs.
        """
        return -(-max(shares) // self.max_microbatch)

    def split_microbatches(self, share: int, count: int) -> tuple[int, ...]:
        """Return the sizes of `count` microbatches: as equal as possible, or for static shapes full ones first."""
        if not self.static_shapes:
            return split_equally(share, count)
        return tuple(min(max(share - before * self.granularity, 0), self.granularity) for before in range(count))

    def _check_replica_shares(self, shares: Sequence[int], first: int) -> None:
        """Check the shares of a replica: its largest share sets the number of microbatches for all its ranks."""
        count = self.count_microbatches(shares)
        _check_minimum(
            shares,
            count * self.granularity,
            f"the largest of them makes {count} microbatches of max_microbatch={self.max_microbatch} on each of ranks "
            f"{first} to {first + len(shares) - 1}; raise the smallest, or max_microbatch",
        )


def split_equally(samples: int, ranks: int, granularity: int = 1) -> tuple[int, ...]:
    """Split samples as equally as multiples of `granularity` allow.

    The first ranks take the excess; the remainder below `granularity` is added at the end.
    """
    units, remainder = divmod(samples, granularity)
    shares = [granularity * (units // ranks + (rank < units % ranks)) for rank in range(ranks)]
    shares[units % ranks] += remainder
    return tuple(shares)


def get_rank_interval(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the interval [first, end) of the step's samples that is `rank`'s, in rank order."""
    ends = [0, *accumulate(shares)]
    return ends[rank], ends[rank + 1]


def _check_minimum(shares: Sequence[int], minimum: int, reason: str) -> None:
    if min(shares) < minimum:
        raise InputError(f"shares: {list(shares)} must all be at least {minimum}: {reason}")
