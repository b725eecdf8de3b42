"""How a step's global batch is cut: into a share for each rank, and this into microbatches. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pacekeeper_analysis.errors import InputError


@dataclass(frozen=True)
class RankTopology:
    """Which of the ranks that share a batch this one is."""

    rank: int = 0
    world_size: int = 1
    replica_size: int = 1
    """Ranks that share a replica (a shard group): ranks 0 … n-1 the first, and so on. They run equally many
    microbatches, and lease together."""

    @property
    def replica_rank(self) -> int:
        """Which of its replica's ranks it is."""
        return self.rank % self.replica_size

    def select_replica_shares(self, shares: Sequence[int]) -> tuple[int, ...]:
        """The shares of its replica's ranks, of those of all ranks."""
        first = self.rank - self.replica_rank
        return tuple(shares[first : first + self.replica_size])


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a global batch, and of a microbatch. Raises InputError that names the argument and the remedy."""

    global_batch: int
    max_microbatch: int
    static_shapes: bool = False
    """Whether each microbatch has `max_microbatch` samples, neither more nor fewer: compiled code for one shape serves
    all of them, whatever the shares."""

    def __post_init__(self) -> None:
        if self.max_microbatch < 1:
            raise InputError(
                f"max_microbatch={self.max_microbatch} must be at least 1: the samples of one forward pass"
            )
        if self.global_batch % self.granularity:
            raise InputError(
                f"global_batch_size={self.global_batch} is no multiple of max_microbatch={self.max_microbatch}, as "
                "static_shapes needs; change one of them, or leave static_shapes out"
            )

    @property
    def granularity(self) -> int:
        """Samples that each share is a multiple of."""
        return self.max_microbatch if self.static_shapes else 1

    def split_equally(self, ranks: int) -> tuple[int, ...]:
        """Raises InputError where a rank would have none."""
        if self.global_batch < ranks * self.granularity:
            each = f", each with a microbatch of {self.granularity}" if self.static_shapes else ""
            raise InputError(
                f"global_batch_size={self.global_batch} is less than the {ranks} ranks{each}; raise it, or take fewer"
            )
        return split_equally(self.global_batch, ranks, self.granularity)

    def check_shares(self, shares: Sequence[int], ranks: int, replica_size: int) -> None:
        """Raises InputError where the ranks cannot follow `shares`."""
        if len(shares) != ranks:
            raise InputError(f"shares: {len(shares)} shares for {ranks} ranks; give one a rank")
        if sum(shares) != self.global_batch:
            raise InputError(
                f"shares: {list(shares)} sum to {sum(shares)}; they must sum to the global batch, {self.global_batch}"
            )
        _check_minimum(shares, 1, "a rank without samples would hold the others; take it out of the job instead")
        if any(share % self.granularity for share in shares):
            raise InputError(
                f"shares: {list(shares)} must all be multiples of max_microbatch={self.max_microbatch}, as the "
                "loader's static_shapes needs; give such ones"
            )
        for first in range(0, len(shares) if replica_size > 1 else 0, replica_size):
            self._check_replica_shares(shares[first : first + replica_size], first)

    def count_microbatches(self, shares: Sequence[int]) -> int:
        """How many microbatches the ranks with `shares` run in a step.

        `shares`: of all ranks that must run equally many of them: those that share one replica, because their
        collectives must match in each microbatch. Replicas meet once a step, and each runs only as many as it needs.
        """
        return -(-max(shares) // self.max_microbatch)

    def split_microbatches(self, share: int, count: int) -> tuple[int, ...]:
        """The sizes of `count` microbatches: as even as integers allow, or, for static shapes, whole ones first."""
        if not self.static_shapes:
            return split_equally(share, count)
        return tuple(min(max(share - before * self.granularity, 0), self.granularity) for before in range(count))

    def _check_replica_shares(self, shares: Sequence[int], first: int) -> None:
        """Its ranks' collectives match in each microbatch, so that its largest share sets the number for all of it."""
        count = self.count_microbatches(shares)
        _check_minimum(
            shares,
            count * self.granularity,
            f"the largest of them makes {count} microbatches of max_microbatch={self.max_microbatch} on each of ranks "
            f"{first} to {first + len(shares) - 1}; raise the smallest, or max_microbatch",
        )


def split_equally(samples: int, ranks: int, granularity: int = 1) -> tuple[int, ...]:
    """As equal as whole multiples of `grain` allow; the first ranks take what is left over, at last its remainder."""
    whole, rest = divmod(samples, granularity)
    shares = [granularity * (whole // ranks + (rank < whole % ranks)) for rank in range(ranks)]
    shares[whole % ranks] += rest
    return tuple(shares)


def get_rank_interval(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Which part of the step's samples is `rank`'s, when they are dealt out in rank order: [first, end)."""
    ends = [0, *accumulate(shares)]
    return ends[rank], ends[rank + 1]


def _check_minimum(shares: Sequence[int], least: int, reason: str) -> None:
    if min(shares) < least:
        raise InputError(f"shares: {list(shares)} must all be at least {least}: {reason}")
