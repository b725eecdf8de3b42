"""The groups over which the ranks' CPUs talk of the library's own matters: no record is made of what goes over them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pacekeeper.exchange import all_gather_objects
from pacekeeper_analysis.records import Collective

from .collectives import register_group, exclude_group
from .recorder import Recorder


class CpuGroup:
    """All ranks. Where this rank waits for the others, its launcher sees it wait."""

    def __init__(self, recorder: Recorder, description: str = "pacekeeper") -> None:
        """Collective: all ranks make theirs together."""
        self.group = new_cpu_group(description)
        self._ring = recorder.ring
        self._place = register_group(self.group, recorder)

    def wait(self, work: dist.Work) -> None:
        """Waits for the peers, visibly to the launcher."""
        with self._show_wait():
            work.wait()

    def all_gather(self, mine: Any) -> list[Any]:
        """What every rank has given, in rank order. Collective, and visible to the launcher."""
        with self._show_wait():
            return all_gather_objects(mine, self.group)

    def start_sum(self, vector: torch.Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
        """Begins to sum `vector` over all ranks (of `group`), in place."""
        work = dist.all_reduce(vector, group=group or self.group, async_op=True)
        assert work is not None
        return work

    def all_agree(self, mine: bool) -> bool:
        """Whether it holds on all ranks. Collective."""
        votes = torch.tensor([int(mine)])
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
        return bool(votes.item())

    @contextmanager
    def _show_wait(self) -> Iterator[None]:
        """A rank that never comes here has fewer collectives entered than those that wait for it."""
        identity, entered, sequence, _ = self._place
        self._ring.enter_collective(Collective.ALL_REDUCE, identity, next(sequence), time.monotonic_ns(), entered)
        yield
        self._ring.leave_collective()


def new_cpu_group(description: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A group of all ranks, or of these. Collective over the group's ranks."""
    own = ranks is not None
    group = dist.new_group(ranks, backend="gloo", group_desc=description, use_local_synchronization=own)
    assert isinstance(group, dist.ProcessGroup), "this rank belongs to it"
    exclude_group(group)
    return group
