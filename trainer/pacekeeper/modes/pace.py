"""How fast a rank steps, by which step of it the clock of AsyncEDiT is up, and how long synchronisations held it up.

All by the rank's clock: a device may have steps in flight that the script has done. They are taken for typical ones.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import torch
import torch.distributed as dist

from pacekeeper.observe.clock import Mark
from pacekeeper.observe.recorder import Recorder
from pacekeeper.replication.local_sgd.replicas import Synchronization
from pacekeeper.replication.replication import Replication
from pacekeeper_analysis.records import RecordKind, Phase

from .agreement import Agreement
from .course import should_synchronize

_RECENT_STEPS = 8


class StepTimer:
    """Of one rank. The ranks that share a replica make equally many steps: their first one decides for all of them."""

    def __init__(self, recorder: Recorder, agreement: Agreement, replica: dist.ProcessGroup | None) -> None:
        """`replica`: the ranks that share this one's; None: it has one for itself."""
        self._recorder = recorder
        self._agreement = agreement
        self._replica = replica
        self._in_flight: deque[tuple[Mark, Mark]] = deque()
        """Beginnings and ends of steps that the device may not have come to."""
        self._steps = 0
        """Since the ordinal."""
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step_start = self._sync_point = self._last_reached = recorder.clock.mark()
        """`_known`: the end of the newest step that the device has come to, or the ordinal."""
        self._decision: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def step_seconds(self) -> float:
        """Of a typical step lately, waits at ordinals left out; 0: not known yet."""
        self._collect_finished_steps()
        return median(self._seconds) if self._seconds else 0.0

    def begin_interval(self) -> None:
        """The clock begins anew."""
        self._collect_finished_steps()
        self._sync_point = self._last_reached = self._recorder.clock.mark()
        self._steps = 0

    def begin_step(self) -> None:
        self._step_start = self._recorder.clock.mark()

    def begin_decision(self, seconds: float) -> None:
        """Where ranks share a replica: the first one tells the others whether the present step will be the last."""
        if self._replica is None:
            return
        step = self.step_seconds
        wanted = should_synchronize(self._measure_elapsed(self._recorder.clock.mark()), step, seconds, in_flight_seconds=step)
        decision = torch.tensor([float(wanted)])
        work = dist.broadcast(decision, group_src=0, group=self._replica, async_op=True)
        assert work is not None
        self._decision = (work, decision)

    def end_step(self) -> None:
        self._in_flight.append((self._step_start, self._recorder.clock.mark()))
        self._steps += 1

    def is_interval_over(self, seconds: float) -> bool:
        """Whether the step that has just ended is the last before the synchronisation, `seconds` after the one before.

        The same on all ranks of a replica.
        """
        if self._decision is None:
            end = self._in_flight[-1][1] if self._in_flight else self._last_reached
            return should_synchronize(self._measure_elapsed(end), self.step_seconds, seconds)
        (work, decision), self._decision = self._decision, None
        self._agreement.wait(work)
        return bool(decision.item())

    def _measure_elapsed(self, here: Mark) -> float:
        """Seconds from the ordinal to `here`, the point that the script is at."""
        self._collect_finished_steps()
        newest = here if here.reached else self._last_reached
        done = newest.ns - self._sync_point.ns if self._sync_point.reached and newest.reached else 0
        ahead = 0 if newest is here else min(len(self._in_flight), self._steps)
        return max(0, done) * 1e-9 + ahead * self.step_seconds

    def _collect_finished_steps(self) -> None:
        """Takes in the steps that the device has come to the end of."""
        while self._in_flight and self._in_flight[0][0].reached and self._in_flight[0][1].reached:
            began, ended = self._in_flight.popleft()
            self._seconds.append((ended.ns - began.ns) * 1e-9)
            self._last_reached = ended


class SynchronizationTimes:
    """How long synchronisations hold this rank up: recorded when the rank's clock knows it."""

    def __init__(self, recorder: Recorder, replication: Replication) -> None:
        self._recorder = recorder
        self._replication = replication
        self._pending = False
        """Whether one was begun that may not be complete."""
        self._completed: deque[tuple[int, list[Synchronization]]] = deque()
        """Each with the step of its ordinal. The device may still be at them."""
        self._exposed: tuple[Mark, Mark] | None = None
        self._exposed_seconds = 0.0

    @property
    def exposed_seconds(self) -> float:
        """What it took last to complete a synchronisation at once, with no forward pass to hide it; 0: not known."""
        if self._exposed is not None and self._exposed[0].reached and self._exposed[1].reached:
            (began, ended), self._exposed = self._exposed, None
            self._exposed_seconds = (ended.ns - began.ns) * 1e-9
        return self._exposed_seconds

    def mark_begun(self) -> None:
        self._pending = True

    def finish(self, step: int) -> None:
        """Completes the one of the ordinal at `step` at once; nothing where the forward pass has done so."""
        if not self._pending:
            return
        began = self._recorder.clock.mark()
        self._replication.finish()
        self._exposed = (began, self._recorder.clock.mark())
        self.record(step)

    def record(self, step: int) -> None:
        """`step`: of the last ordinal. Its synchronisation is complete by now where a forward pass has been made."""
        newest = self._replication.newest_synchronizations
        if self._pending and all(one.ended is not None for one in newest):
            self._pending = False
            self._completed.append((step, newest))
        while self._completed and all(one.ended_ns for one in self._completed[0][1]):
            step, complete = self._completed.popleft()
            start, end = min(one.started_ns for one in complete), max(one.ended_ns for one in complete)
            waited = sum(one.waited_ns for one in complete) * 1e-9
            nbytes = sum(one.nbytes for one in complete)
            self._recorder.ring.write(RecordKind.SYNCHRONISATION, start, end, step, Phase.TRAIN, waited, nbytes=nbytes)
