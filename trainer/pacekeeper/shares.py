"""Batch shares: how many samples of a step's global batch each rank takes. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pacekeeper_analysis.errors import InputError


def equal_shares(global_batch: int, ranks: int) -> tuple[int, ...]:
    """As equal as integers allow; the first ranks take what is left over."""
    whole, rest = divmod(global_batch, ranks)
    return tuple(whole + (rank < rest) for rank in range(ranks))


def check_shares(shares: Sequence[int], global_batch: int, ranks: int, least: int = 1) -> None:
    """Raises InputError unless each of `ranks` ranks has `least` samples or more, and all together `global_batch`."""
    if len(shares) != ranks:
        raise InputError(f"shares: {len(shares)} shares for {ranks} ranks; give one a rank")
    if sum(shares) != global_batch:
        raise InputError(
            f"shares: {list(shares)} sum to {sum(shares)}; they must sum to the global batch, {global_batch}"
        )
    if min(shares) < least:
        raise InputError(f"shares: {list(shares)} must all be at least {least}")


def rank_interval(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Which part of the step's samples is `rank`'s, when they are dealt out in rank order: [first, end)."""
    ends = [0, *accumulate(shares)]
    return ends[rank], ends[rank + 1]


def microbatch_sizes(share: int, count: int) -> tuple[int, ...]:
    """`share` samples in `count` microbatches, as even as integers allow."""
    return equal_shares(share, count)


def microbatch_count(shares: Sequence[int], rank: int, max_microbatch: int, alike: bool) -> int:
    """How many microbatches of at most `max_microbatch` samples `rank` runs in a step.

    `alike`: as many as the rank with the largest share, because the ranks' collectives must match in each microbatch
    (sharded models); otherwise the ranks meet once a step, and each runs only as many as its own share needs.
    """
    share = max(shares) if alike else shares[rank]
    return -(-share // max_microbatch)
