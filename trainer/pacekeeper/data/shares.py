"""Batch shares: how many samples of a step's global batch each rank takes. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pacekeeper_analysis.errors import InputError


def equal_shares(global_batch: int, ranks: int) -> tuple[int, ...]:
    """As equal as integers allow; the first ranks take what is left over."""
    whole, rest = divmod(global_batch, ranks)
    return tuple(whole + (rank < rest) for rank in range(ranks))


def check_shares(shares: Sequence[int], global_batch: int, ranks: int) -> None:
    """Raises InputError unless each of `ranks` ranks has a sample or more, and all together have `global_batch`."""
    if len(shares) != ranks:
        raise InputError(f"shares: {len(shares)} shares for {ranks} ranks; give one a rank")
    if sum(shares) != global_batch:
        raise InputError(
            f"shares: {list(shares)} sum to {sum(shares)}; they must sum to the global batch, {global_batch}"
        )
    _check_least(shares, 1, "a rank without samples would hold the others; take it out of the job instead")


def check_replicas(shares: Sequence[int], replica_size: int, max_microbatch: int) -> None:
    """Raises InputError unless the ranks of each replica can run equally many microbatches, none of them empty.

    Their collectives must match in each microbatch, so the largest share of the replica sets the number for all of it.
    """
    for first in range(0, len(shares) if replica_size > 1 else 0, replica_size):
        replica = shares[first : first + replica_size]
        count = microbatch_count(replica, max_microbatch)
        _check_least(
            replica,
            count,
            f"the largest of them makes {count} microbatches of max_microbatch={max_microbatch} on each of ranks "
            f"{first} to {first + replica_size - 1}; raise the smallest, or max_microbatch",
        )


def rank_interval(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Which part of the step's samples is `rank`'s, when they are dealt out in rank order: [first, end)."""
    ends = [0, *accumulate(shares)]
    return ends[rank], ends[rank + 1]


def microbatch_sizes(share: int, count: int) -> tuple[int, ...]:
    """`share` samples in `count` microbatches, as even as integers allow."""
    return equal_shares(share, count)


def microbatch_count(shares: Sequence[int], max_microbatch: int) -> int:
    """How many microbatches of at most `max_microbatch` samples the ranks with `shares` run in a step.

    `shares`: of all ranks that must run equally many of them: those that share one replica, because their collectives
    must match in each microbatch. Replicas meet once a step, and each runs only as many as it needs.
    """
    return -(-max(shares) // max_microbatch)


def _check_least(shares: Sequence[int], least: int, reason: str) -> None:
    if min(shares) < least:
        raise InputError(f"shares: {list(shares)} must all be at least {least}: {reason}")
