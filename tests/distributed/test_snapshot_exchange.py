"""A snapshot that some ranks lack goes from one rank to all."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pacekeeper.keep.sources import receive_or_send
from tests.support.ranks import run_ranks


def test_all_get_the_sources_bytes_whatever_they_hold_themselves() -> None:
    """The same state can be pickled to another number of bytes on each rank."""
    sizes = (3000, 5000, None, 7000, 5000)

    def rank_main(rank: int) -> bool:
        dist.init_process_group("gloo")
        size = sizes[rank]
        slot = None if size is None else torch.full((size,), rank, dtype=torch.uint8)
        got = receive_or_send(slot, 1, dist.distributed_c10d._get_default_group())
        behind = torch.tensor([rank])
        dist.all_reduce(behind)  # nothing of the slot is left on the way
        return got.tolist() == [1] * 5000 and behind.item() == 10 and (rank != 1 or got is slot)

    assert run_ranks(rank_main, len(sizes)) == [True] * len(sizes)
