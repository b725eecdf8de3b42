"""A rank's process, as its launcher, its sidecar, and its peers see it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from pacekeeper.health.stall_detector import ProcessSample
from pacekeeper.launcher.rendezvous.rounds import RankObservation
from pacekeeper.observe.rank_history import RankHistory
from pacekeeper_analysis.failures.crash import is_peer_loss
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_rank.records import Phase

from .pod import WorkerPod

SIGKILL_EXIT_CODE = -9
TERMINATED_EXIT_CODE = 143
"""Exit codes."""
LOST_PEER_ERROR = "RuntimeError: Connection closed by peer"


class StallReason(StrEnum):
    """Why a rank is stalled. Values for faults of the script are those of `faults.ranks.HangPoint`."""

    TRAIN = "train"  # in its own work, before the collective
    COLLECTIVE = "collective"  # all reach the collective, and none leaves it
    LOADER = "loader"
    STOPPED = "stopped"  # by a signal
    KERNEL = "kernel"  # in a system call: it cannot be killed


@dataclass
class WorkSegment:
    """What a rank does until it waits for its peers. Times are virtual seconds."""

    phase: Phase
    started_at: float
    seconds: float
    """Duration of its own work, per part."""
    parts: int = 1
    trains: bool = False
    """Whether the parts are optimizer steps."""
    share: int = 0
    """Samples per step."""
    samples: int = 0
    """Samples of all steps."""

    @property
    def end_at(self) -> float:
        """When it ends, if nothing delays it."""
        return self.started_at + self.seconds * self.parts


class PeerGroup(Protocol):
    """The ranks that train together, for one of them."""

    over: bool
    """Whether one of them has exited."""
    sync_points: int
    """Number of their collectives so far."""
    is_stalled: bool
    """Whether they take longer than expected."""

    def check_arrivals(self) -> None:
        """Check whether all ranks have arrived."""

    def rank_ended(self, rank: SimulatedRank) -> None:
        """Notify the peers of a rank that exited."""

    def build_state(self, rank: SimulatedRank, now: float) -> np.void:
        """Return the state in the rank's ring."""


class SimulatedRank:
    """One process. `TrainingRound` advances it, and faults delay it. `on_end`: called when it has exited."""

    def __init__(
        self,
        worker: WorkerPod,
        local: int,
        number: int,
        round_: int,
        membership: int,
        world_size: int,
        on_end: Callable[[SimulatedRank], None],
    ) -> None:
        self.worker = worker
        self.local = local
        self.number = number
        self.round = round_
        self.membership = membership
        self.world_size = world_size
        self.training_round: PeerGroup | None = None
        """None: it has not reached its peers yet."""
        self.segment: WorkSegment | None = None
        self.exit_code: int | None = None
        self.is_gone = False
        self.error = ""
        self.out_of_memory = False
        self.leaving = False
        """Whether it was requested to leave."""
        self.steps_in_round = 0
        self.step_ended = 0.0
        self.step = -1
        self.samples = 0
        self.bad_loss_step = -1
        self.history = RankHistory(worker.window_steps)
        self.stalls: dict[StallReason, float] = {}
        """Why it is stalled, and since when."""
        self._on_end = on_end
        self._due: tuple[int, str, bool] | None = None
        """The exit that is pending until its system call has returned."""

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def stalled_since(self) -> float:
        """Since when it does none of its own work; infinite: it works."""
        if not self.stalls:
            return math.inf
        return min((at for reason, at in self.stalls.items() if reason is not StallReason.COLLECTIVE), default=math.inf)

    @property
    def blocks_collectives(self) -> bool:
        """Whether even a collective that it has reached does not end."""
        return any(reason not in (StallReason.TRAIN, StallReason.LOADER) for reason in self.stalls)

    def compute_arrival_time(self) -> float:
        """Return when it reaches its peers; infinite: it does not."""
        assert self.segment is not None
        return math.inf if self.stalled_since < self.segment.end_at else self.segment.end_at

    # Events that affect it.

    def stall(self, reason: StallReason, now: float) -> None:
        self.stalls.setdefault(reason, now)
        self._notify_change()

    def resume(self, reason: StallReason, now: float) -> None:
        """Resume its work."""
        since = self.stalled_since
        if self.stalls.pop(reason, None) is None:
            return
        if not self.stalls and self.segment is not None and since < self.segment.end_at:
            self.segment.started_at += now - max(since, self.segment.started_at)
        self._notify_change()
        if reason is StallReason.KERNEL and self._due is not None:
            code, error, out_of_memory = self._due
            self.end(code, error, out_of_memory=out_of_memory)

    def end(self, code: int, error: str = "", *, out_of_memory: bool = False) -> None:
        """Let it exit, or be killed. In a system call, the exit is delayed until that has returned."""
        if self.exit_code is not None:
            return
        if StallReason.KERNEL in self.stalls and not self.worker.has_no_power:
            self._due = (code, error, out_of_memory)
            return
        self.exit_code, self.error, self.out_of_memory = code, error, out_of_memory
        self.is_gone = True
        if self.training_round is not None:
            self.training_round.rank_ended(self)
        self._on_end(self)

    def _notify_change(self) -> None:
        if self.training_round is not None:
            self.training_round.check_arrivals()
        self.worker.launcher.wake()

    # Observations.

    def observe(self) -> RankObservation:
        return RankObservation(
            rank=self.number,
            is_gone=self.is_gone,
            exit_code=self.exit_code,
            out_of_memory=self.out_of_memory,
            completed_step=self.steps_in_round > 0,
            monitored=self.training_round is not None,
            step=None if self.step < 0 else self.step,
            error=self.error,
            lost_peer=self.exit_code is not None and is_peer_loss(self.exit_code, self.error),
        )

    def build_window(self) -> RankWindow:
        """Return its last steps, as evidence."""
        return self.history.build_window(self.number)

    def inspect_process(self, now: float) -> ProcessSample:
        """Return a sample of its process."""
        if self.exit_code is not None:
            return ProcessSample()
        if StallReason.STOPPED in self.stalls:
            return ProcessSample("T")
        if StallReason.KERNEL in self.stalls:
            return ProcessSample("D", 0, 'File "train.py", line 9 in batch')
        if self.segment is not None and self.stalled_since < self.segment.end_at:
            return ProcessSample("S", 0, 'File "train.py", line 9 in batch')
        if self.segment is None or now >= self.segment.end_at:
            return ProcessSample("S", 0, 'File "/lib/torch/distributed/distributed_c10d.py", line 7 in all_reduce')
        return ProcessSample("R", int(100 * now), f'File "train.py", line {int(10 * now) % 1000} in forward')
