"""CPU groups for the library's own communication between ranks, of which no records are made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pacekeeper.object_collectives import all_gather_objects
from pacekeeper_rank.collectives.collective_monitor import exclude_group, register_group
from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import Collective


class CpuGroup:
    """Group of all ranks. While this rank waits for the others, its launcher can see that."""

    def __init__(self, recorder: Recorder, description: str = "pacekeeper") -> None:
        """Create the group. Collective: all ranks create it together."""
        self.group = new_cpu_group(description)
        self._ring = recorder.ring
        self._place = register_group(self.group, recorder)

    def wait(self, work: dist.Work) -> None:
        """Wait for the peers, visibly to the launcher."""
        with self._show_wait():
            work.wait()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Collective, and visible to the launcher."""
        with self._show_wait():
            return all_gather_objects(value, self.group)

    def start_sum(self, vector: torch.Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
        """Begin to sum `vector` over all ranks (of `group`), in place."""
        work = dist.all_reduce(vector, group=group or self.group, async_op=True)
        assert work is not None
        return work

    def all_agree(self, agrees: bool) -> bool:
        """Return whether `agrees` is True on all ranks. Collective."""
        votes = torch.tensor([int(agrees)])
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
        return bool(votes.item())

    @contextmanager
    def _show_wait(self) -> Iterator[None]:
        """Show the wait in the ring: a rank that never arrives has entered fewer collectives than the waiting ranks."""
        identity, place, sequence, _ = self._place
        self._ring.enter_collective(Collective.ALL_REDUCE, identity, next(sequence), time.monotonic_ns(), place)
        yield
        self._ring.leave_collective()


def new_cpu_group(description: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Create a group of all ranks, or of `ranks`. Collective over the group's ranks."""
    is_subset = ranks is not None
    group = dist.new_group(ranks, backend="gloo", group_desc=description, use_local_synchronization=is_subset)
    assert isinstance(group, dist.ProcessGroup), "this rank belongs to it"
    exclude_group(group)
    return group
