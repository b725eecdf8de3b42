"""A rank's process, as its launcher, its sidecar, and its peers see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from pacekeeper.launcher.health.stall_detector import ProcessSample
from pacekeeper.launcher.rendezvous.rounds import RankObservation
from pacekeeper.observe.rank_history import RankHistory
from pacekeeper_analysis.failures.crash import is_peer_loss
from pacekeeper_analysis.protocol.plan import SYNC_MODES, SyncMode
from pacekeeper_analysis.protocol.records import RING_STATE, Collective, Phase
from pacekeeper_analysis.protocol.reports import RankWindow

if TYPE_CHECKING:
    from .training_round import TrainingRound
    from .worker import SimulatedWorker

SIGKILL_EXIT_CODE = -9
TERMINATED_EXIT_CODE = 143
"""Exit codes."""
LOST_PEER_ERROR = "RuntimeError: Connection closed by peer"
BAD_VALUE = "ValueError: the script has a mistake"
MISTAKE = "NameError: name 'model' is not defined"
"""Errors of a script. The second one is in its source code: no outage causes it."""
_EMPTY_STATE = dict.fromkeys(RING_STATE.names or (), 0)
"""Every field of a state, in the order of the record."""
_GROUP_ID = 1
_LOAD_NS = 50_000_000


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


class SimulatedRank:
    """One process. `TrainingRound` advances it, and faults delay it."""

    def __init__(
        self, worker: SimulatedWorker, local: int, number: int, round_: int, membership: int, world_size: int
    ) -> None:
        self.worker = worker
        self.local = local
        self.number = number
        self.round = round_
        self.membership = membership
        self.world_size = world_size
        self.training_round: TrainingRound | None = None
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
        self.worker.on_rank_end(self)

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

    def build_state(self, now: float) -> np.void:
        """Return the state in its ring."""
        training_round, segment = self.training_round, self.segment
        assert training_round is not None
        assert segment is not None
        worked_until = min(now, self.stalled_since)
        has_arrived = worked_until >= segment.end_at
        phase, since, step, steps, step_ended = (
            segment.phase,
            segment.started_at,
            self.step,
            self.steps_in_round,
            self.step_ended,
        )
        fields: dict[str, float] = {}
        if segment.trains:
            if self.is_alive and StallReason.LOADER in self.stalls and not has_arrived:
                phase, since = Phase.LOAD, max(segment.started_at, self.stalls[StallReason.LOADER])
            if training_round.mode is not SyncMode.SYNC:
                done = (
                    segment.parts if has_arrived else int(max(0.0, worked_until - segment.started_at) / segment.seconds)
                )
                step, steps = training_round.progress.step + done, steps + done
                step_ended = segment.started_at + done * segment.seconds if done else step_ended
            fields |= {
                "collectives_entered": training_round.sync_points + has_arrived,
                "sequence": training_round.sync_points + has_arrived,
            }
            if has_arrived:
                fields |= {"collective": Collective.ALL_REDUCE, "collective_since_ns": int(1e9 * segment.end_at)}
        fields |= {
            "rank": self.number,
            "round": self.round,
            "pid": 100 + self.local,
            "phase": phase,
            "phase_since_ns": int(1e9 * since),
            "step": step,
            "step_end_ns": int(1e9 * step_ended),
            "steps_in_round": steps,
            "group": _GROUP_ID,
            "checkpoint_step": training_round.checkpoint_step,
            "snapshot_step": training_round.snapshot_step if self.local == 0 else -1,
            "restored_step": training_round.restored_step,
            "samples": self.samples,
            "global_batch": training_round.global_batch,
            "total_steps": training_round.training.last_step or 0,
            "replica_ranks": training_round.training.replica_ranks if training_round.global_batch else 0,
            "checkpoint_request": training_round.answered,
            "share": segment.share,
            "sync_mode": SYNC_MODES.index(training_round.mode) if training_round.global_batch else -1,
            "bad_loss_step": self.bad_loss_step,
            "longest_load_ns": _LOAD_NS if self.steps_in_round else 0,
            "share_granularity": 1,
            **training_round.stamps,
        }
        state: np.void = np.array([tuple((_EMPTY_STATE | fields).values())], RING_STATE)[0]
        return state
