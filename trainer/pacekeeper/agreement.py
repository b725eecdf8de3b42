"""What all ranks agree on at each step: the content of the plan and whether anybody was told to leave.

One small all-reduce a step over a CPU group of the library's own. It is issued when a step begins and read when the
next one begins, so it is over long before anybody waits for it. Rank 0 puts the content of its plan in, not a version
number: ranks see different versions at different times. The sum does the rest, since the other ranks add nothing to it.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.records import Collective

from .collectives import group_identity, unwatch
from .recorder import Recorder

_log = logging.getLogger(__name__)
_SHARES = 8
"""Where the shares begin in the vector that is summed."""


@dataclass(frozen=True)
class Agreed:
    """What is in force from the step on at whose beginning it was read; the same on all ranks."""

    plan_version: int = 0
    checkpoint_request: int = 0
    suspend: bool = False
    shares: tuple[int, ...] | None = None
    snapshot_every: int = 0
    leaving: int = 0
    """How many ranks were told to leave by a signal."""
    loss: float = 0.0
    """Sum of the ranks' losses over the step before, and of what they are divided by."""
    weight: float = 0.0


class Agreement:
    """The exchange of one rank with its peers."""

    def __init__(self, recorder: Recorder) -> None:
        """Collective: all ranks make theirs together."""
        self.group = new_cpu_group("pacekeeper")
        self._world_size = self.group.size()
        self._ring = recorder.ring
        self._identity = group_identity(self.group)
        self._waits = 0
        self._issued: tuple[dist.Work, torch.Tensor] | None = None

    def issue(self, mine: Agreed) -> None:
        """Starts the next exchange; of all ranks but 0 only `leaving`, `loss` and `weight` may differ from 0."""
        vector = torch.zeros(_SHARES + self._world_size, dtype=torch.float64)
        vector[:_SHARES] = torch.tensor(
            [
                mine.plan_version,
                mine.checkpoint_request,
                mine.suspend,
                mine.shares is not None,
                mine.snapshot_every,
                mine.leaving,
                mine.loss,
                mine.weight,
            ],
            dtype=torch.float64,
        )
        if mine.shares is not None:
            vector[_SHARES:] = torch.tensor(mine.shares, dtype=torch.float64)
        self._issued = (self.start_sum(vector), vector)

    def take(self) -> Agreed:
        """What the exchange issued last has brought."""
        assert self._issued is not None, "issue() comes first"
        work, vector = self._issued
        self._issued = None
        self.wait(work)
        version, request, suspend, has_shares, snapshot_every, leaving, loss, weight = vector[:_SHARES].tolist()
        return Agreed(
            plan_version=int(version),
            checkpoint_request=int(request),
            suspend=suspend > 0,
            shares=tuple(int(share) for share in vector[_SHARES:].tolist()) if has_shares else None,
            snapshot_every=int(snapshot_every),
            leaving=int(leaving),
            loss=loss,
            weight=weight,
        )

    def start_sum(self, vector: torch.Tensor) -> dist.Work:
        """Begins to sum `vector` over all ranks, in place."""
        work = dist.all_reduce(vector, group=self.group, async_op=True)
        assert work is not None
        return work

    def wait(self, work: dist.Work) -> None:
        """Waits for the peers, visibly to the launcher: a rank that never comes here has fewer collectives entered."""
        self._waits += 1
        self._ring.enter_collective(Collective.ALL_REDUCE, self._identity, self._waits, time.monotonic_ns())
        work.wait()
        self._ring.leave_collective()


def new_cpu_group(description: str) -> dist.ProcessGroup:
    """A group of all ranks for the library's own talk, which no record is made of. Collective."""
    group = dist.new_group(backend="gloo", group_desc=description)
    assert isinstance(group, dist.ProcessGroup), "every rank of the job belongs to it"
    unwatch(group)
    return group


class PlanFile:
    """Rank 0's view of the plan: the last good content of the runtime folder's plan.json."""

    def __init__(self, path: Path | None, world_size: int) -> None:
        self._path = path
        self._world_size = world_size
        self._seen: tuple[int, int] | None = None
        self._plan = WorkerPlan()
        self._membership: int | None = None

    def read(self) -> WorkerPlan:
        """Reads the file again only when it was replaced: otherwise this costs one stat."""
        if self._path is None:
            return self._plan
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return self._plan
        signature = (status.st_ino, status.st_mtime_ns)
        if signature != self._seen:
            self._seen = signature
            self._take()
        return self._plan

    def _take(self) -> None:
        assert self._path is not None
        try:
            plan = WorkerPlan.from_json(json.loads(self._path.read_text()))
        except (InputError, ValueError) as error:
            _log.warning("plan not taken, the last good one goes on: %s", error)
            return
        if self._membership is None:
            self._membership = plan.membership
        if plan.membership != self._membership:  # the next round's: this one keeps its shares until it is ended
            plan = replace(plan, shares=self._plan.shares)
        self._plan = plan
