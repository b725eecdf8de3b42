"""Step time of a rank, the step at which AsyncEDiT's interval ends, and the time that synchronizations block a rank.

All times are of the rank's clock. A device may still run steps that the script has completed; they are assumed to be
typical.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import torch
import torch.distributed as dist

from pacekeeper.replication.local_sgd.replicas import Synchronization
from pacekeeper.replication.replication import Replication
from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import Phase, RecordKind
from pacekeeper_rank.work_clock import Mark

from .agreement import Agreement
from .training_config import should_synchronize

_RECENT_STEPS = 8


class StepTimer:
    """Times the steps of one rank.

    Ranks of a replica make equally many steps: the first one decides for all of them.
    """

    def __init__(self, recorder: Recorder, agreement: Agreement, replica: dist.ProcessGroup | None) -> None:
        """Create the timer. `replica`: the ranks that share this one's replica; None: it has no other rank."""
        self._recorder = recorder
        self._agreement = agreement
        self._replica = replica
        self._in_flight: deque[tuple[Mark, Mark]] = deque()
        """Beginnings and ends of steps that the device may not have reached."""
        self._steps = 0
        """Steps since the sync point."""
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step_start = self._sync_point = self._last_reached = recorder.clock.mark()
        """`_last_reached`: end of the newest step that the device has reached, or the sync point."""
        self._decision: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a typical recent step, without waits at sync points; None: unknown."""
        self._collect_finished_steps()
        return median(self._seconds) if self._seconds else None

    @property
    def _expected_step_seconds(self) -> float:
        """Seconds that the next step will take. Before the first is measured, it counts as taking no time."""
        return self.step_seconds or 0.0

    def begin_interval(self) -> None:
        """Restart the interval."""
        self._collect_finished_steps()
        self._sync_point = self._last_reached = self._recorder.clock.mark()
        self._steps = 0

    def begin_step(self) -> None:
        self._step_start = self._recorder.clock.mark()

    def begin_decision(self, seconds: float) -> None:
        """Broadcast, in a shared replica, the first rank's decision whether this step is the last of the interval."""
        if self._replica is None:
            return
        step = self._expected_step_seconds
        is_last = should_synchronize(
            self._measure_elapsed(self._recorder.clock.mark()), step, seconds, in_flight_seconds=step
        )
        decision = torch.tensor([float(is_last)])
        work = dist.broadcast(decision, group_src=0, group=self._replica, async_op=True)
        assert work is not None
        self._decision = (work, decision)

    def end_step(self) -> None:
        self._in_flight.append((self._step_start, self._recorder.clock.mark()))
        self._steps += 1

    def is_interval_over(self, seconds: float) -> bool:
        """Return whether the step that has just ended is the last before the synchronization.

        The synchronization is due `seconds` after the one before. The result is the same on all ranks of a replica.
        """
        if self._decision is None:
            end = self._in_flight[-1][1] if self._in_flight else self._last_reached
            return should_synchronize(self._measure_elapsed(end), self._expected_step_seconds, seconds)
        (work, decision), self._decision = self._decision, None
        self._agreement.wait(work)
        return bool(decision.item())

    def _measure_elapsed(self, script_mark: Mark) -> float:
        """Return the seconds from the sync point to `script_mark`, the script's present position."""
        self._collect_finished_steps()
        newest_mark = script_mark if script_mark.reached else self._last_reached
        elapsed_ns = newest_mark.ns - self._sync_point.ns if self._sync_point.reached and newest_mark.reached else 0
        steps_ahead = 0 if newest_mark is script_mark else min(len(self._in_flight), self._steps)
        return max(0, elapsed_ns) * 1e-9 + steps_ahead * self._expected_step_seconds

    def _collect_finished_steps(self) -> None:
        """Record the steps whose end the device has reached."""
        while self._in_flight and self._in_flight[0][0].reached and self._in_flight[0][1].reached:
            began, ended = self._in_flight.popleft()
            self._seconds.append((ended.ns - began.ns) * 1e-9)
            self._last_reached = ended


class SynchronizationTimes:
    """Measures how long synchronizations block this rank, and records it once the rank's clock has the times."""

    def __init__(self, recorder: Recorder, replication: Replication) -> None:
        self._recorder = recorder
        self._replication = replication
        self._pending = False
        """Whether a synchronization has begun that may be incomplete."""
        self._completed: deque[tuple[int, list[Synchronization]]] = deque()
        """Completed synchronizations, each with the step of its sync point. The device may still work on them."""
        self._exposed: tuple[Mark, Mark] | None = None
        self._exposed_seconds = 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the last synchronization that completed at once, with no forward pass to hide it; 0: unknown."""
        if self._exposed is not None and self._exposed[0].reached and self._exposed[1].reached:
            (began, ended), self._exposed = self._exposed, None
            self._exposed_seconds = (ended.ns - began.ns) * 1e-9
        return self._exposed_seconds

    def mark_begun(self) -> None:
        self._pending = True

    def finish(self, step: int) -> None:
        """Complete the synchronization of the sync point at `step` at once, unless the forward pass has done so."""
        if not self._pending:
            return
        began = self._recorder.clock.mark()
        self._replication.finish()
        self._exposed = (began, self._recorder.clock.mark())
        self.record(step)

    def record(self, step: int) -> None:
        """Record completed synchronizations. `step`: step of the last sync point.

        Its synchronization is complete if a forward pass has run since.
        """
        newest = self._replication.newest_synchronizations
        if self._pending and all(sync.ended is not None for sync in newest):
            self._pending = False
            self._completed.append((step, newest))
        while self._completed:
            step, completed = self._completed[0]
            ends = [sync.ended_ns for sync in completed]
            if None in ends:
                break
            self._completed.popleft()
            start, end = min(sync.started_ns for sync in completed), max(end for end in ends if end is not None)
            waited = sum(sync.waited_ns for sync in completed) * 1e-9
            nbytes = sum(sync.nbytes for sync in completed)
            self._recorder.ring.write(RecordKind.SYNCHRONIZATION, start, end, step, Phase.TRAIN, waited, nbytes=nbytes)
