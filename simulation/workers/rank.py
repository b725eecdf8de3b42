"""A rank's process, as its launcher, its sidecar and its peers see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from pacekeeper.launcher.rounds import RankSeen
from pacekeeper.launcher.watch import Look
from pacekeeper.observe.windows import RankHistory
from pacekeeper_analysis.diagnose.crash import lost_a_peer
from pacekeeper_analysis.plan import MODES, SyncMode
from pacekeeper_analysis.records import STATE, Collective, Phase
from pacekeeper_analysis.reports import RankWindow

if TYPE_CHECKING:
    from .run import Run
    from .worker import Worker

SIGKILL = -9
LEFT = 143
"""Exit codes."""
LOST_PEER = "RuntimeError: Connection closed by peer"
BAD_VALUE = "ValueError: the script has a mistake"
MISTAKE = "NameError: name 'model' is not defined"
"""Errors of a script. The second one is its text's own, whatever is away."""
_UNSET = dict.fromkeys(STATE.names or (), 0)
"""Every field of a state, in the order of the record."""
_GROUP = 1
_LOAD_NS = 50_000_000


class Stand(StrEnum):
    """Why a rank stands still. Its values for a fault of the script are `faults.ranks.Stand`'s."""

    TRAIN = "train"  # in its own work, before the collective
    COLLECTIVE = "collective"  # all come to the collective, and none gets out
    LOADER = "loader"
    STOPPED = "stopped"  # by a signal
    KERNEL = "kernel"  # in a system call: it cannot be killed


@dataclass
class Leg:
    """What a rank does until it waits for its peers. Times are virtual seconds."""

    phase: Phase
    began: float
    seconds: float
    """Of its own work, in each part."""
    parts: int = 1
    steps: bool = False
    """Whether the parts are optimizer steps."""
    share: int = 0
    """Samples of each step."""
    samples: int = 0
    """Of all steps."""

    @property
    def end(self) -> float:
        """When it is through, if nothing holds it up."""
        return self.began + self.seconds * self.parts


class Rank:
    """One process. `Run` moves it on; faults hold it up."""

    def __init__(self, worker: Worker, local: int, number: int, round_: int, membership: int, world_size: int) -> None:
        self.worker = worker
        self.local = local
        self.number = number
        self.round = round_
        self.membership = membership
        self.world_size = world_size
        self.run: Run | None = None
        """None: it has not come to its peers yet."""
        self.leg: Leg | None = None
        self.exit_code: int | None = None
        self.gone = False
        self.error = ""
        self.out_of_memory = False
        self.leaving = False
        """It was told to leave."""
        self.steps_in_round = 0
        self.step_ended = 0.0
        self.step = -1
        self.samples = 0
        self.bad_loss_step = -1
        self.history = RankHistory(worker.window_steps)
        self.still: dict[Stand, float] = {}
        """Why it stands still, and since when."""
        self._due: tuple[int, str, bool] | None = None
        """The end that it comes to once its system call has returned."""

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def stands_since(self) -> float:
        """Since when it does none of its own work; infinite: it works."""
        if not self.still:
            return math.inf
        return min((at for why, at in self.still.items() if why is not Stand.COLLECTIVE), default=math.inf)

    @property
    def blocks_collectives(self) -> bool:
        """Whether even the collective that it has come to does not end."""
        return any(why not in (Stand.TRAIN, Stand.LOADER) for why in self.still)

    def arrives(self) -> float:
        """When it comes to its peers; infinite: it does not."""
        assert self.leg is not None
        return math.inf if self.stands_since < self.leg.end else self.leg.end

    # What befalls it.

    def stand_still(self, why: Stand, now: float) -> None:
        self.still.setdefault(why, now)
        self._changed()

    def move_on(self, why: Stand, now: float) -> None:
        """What it was at goes on."""
        since = self.stands_since
        if self.still.pop(why, None) is None:
            return
        if not self.still and self.leg is not None and since < self.leg.end:
            self.leg.began += now - max(since, self.leg.began)
        self._changed()
        if why is Stand.KERNEL and self._due is not None:
            code, error, out_of_memory = self._due
            self.end(code, error, out_of_memory=out_of_memory)

    def end(self, code: int, error: str = "", *, out_of_memory: bool = False) -> None:
        """It exits, or is killed; one in a system call only when that has returned."""
        if self.exit_code is not None:
            return
        if Stand.KERNEL in self.still and not self.worker.without_power:
            self._due = (code, error, out_of_memory)
            return
        self.exit_code, self.error, self.out_of_memory = code, error, out_of_memory
        self.gone = True
        if self.run is not None:
            self.run.rank_ended(self)
        self.worker.rank_ended(self)

    def _changed(self) -> None:
        if self.run is not None:
            self.run.look()
        self.worker.launcher.wake()

    # How it is seen.

    def seen(self) -> RankSeen:
        return RankSeen(
            rank=self.number,
            gone=self.gone,
            exit_code=self.exit_code,
            out_of_memory=self.out_of_memory,
            completed_step=self.steps_in_round > 0,
            watched=self.run is not None,
            step=self.step,
            error=self.error,
            lost_peer=self.exit_code is not None and lost_a_peer(self.exit_code, self.error),
        )

    def window(self) -> RankWindow:
        """Its last steps, as evidence."""
        return self.history.window(self.number)

    def look(self, now: float) -> Look:
        """At its process."""
        if self.exit_code is not None:
            return Look()
        if Stand.STOPPED in self.still:
            return Look("T")
        if Stand.KERNEL in self.still:
            return Look("D", 0, 'File "train.py", line 9 in batch')
        if self.leg is not None and self.stands_since < self.leg.end:
            return Look("S", 0, 'File "train.py", line 9 in batch')
        if self.leg is None or now >= self.leg.end:
            return Look("S", 0, 'File "/lib/torch/distributed/distributed_c10d.py", line 7 in all_reduce')
        return Look("R", int(100 * now), f'File "train.py", line {int(10 * now) % 1000} in forward')

    def state(self, now: float) -> np.void:
        """What its ring says."""
        run, leg = self.run, self.leg
        assert run is not None
        assert leg is not None
        stands = min(now, self.stands_since)
        arrived = stands >= leg.end
        phase, since, step, steps, ended = leg.phase, leg.began, self.step, self.steps_in_round, self.step_ended
        told: dict[str, float] = {}
        if leg.steps:
            if self.alive and Stand.LOADER in self.still and not arrived:
                phase, since = Phase.LOAD, max(leg.began, self.still[Stand.LOADER])
            if run.mode is not SyncMode.SYNC:
                done = leg.parts if arrived else int(max(0.0, stands - leg.began) / leg.seconds)
                step, steps = run.progress.step + done, steps + done
                ended = leg.began + done * leg.seconds if done else ended
            told |= {"collectives_entered": run.ordinals + arrived, "sequence": run.ordinals + arrived - 1}
            if arrived:
                told |= {"collective": Collective.ALL_REDUCE, "collective_since_ns": int(1e9 * leg.end)}
        told |= {
            "rank": self.number,
            "round": self.round,
            "pid": 100 + self.local,
            "phase": phase,
            "phase_since_ns": int(1e9 * since),
            "step": step,
            "step_end_ns": int(1e9 * ended),
            "steps_in_round": steps,
            "group": _GROUP,
            "checkpoint_step": run.checkpoint_step,
            "snapshot_step": run.snapshot_step if self.local == 0 else -1,
            "restored_step": run.restored_step,
            "samples": self.samples,
            "global_batch": run.global_batch,
            "total_steps": run.training.until or 0,
            "replica_ranks": run.training.replica_ranks if run.global_batch else 0,
            "checkpoint_request": run.answered,
            "share": leg.share,
            "sync_mode": MODES.index(run.mode) if run.global_batch else -1,
            "bad_loss_step": self.bad_loss_step,
            "longest_load_ns": _LOAD_NS if self.steps_in_round else 0,
            "share_grain": 1,
            **run.stamps,
        }
        state: np.void = np.array([tuple((_UNSET | told).values())], STATE)[0]
        return state
