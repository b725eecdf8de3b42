"""The losses that a script reports: recorded, checked for non-finite values, and summed for the job's loss.

From a device they arrive a step or two after the script has reported them: nothing waits for them before the job's end.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, Protocol

import torch

from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import Phase, RecordKind
from pacekeeper_rank.work_clock import Mark, PendingValue


class LossReportingStep(Protocol):
    """A step whose script reports a loss."""

    weight: float
    """Divisor of the loss."""

    @property
    def loss_sum(self) -> torch.Tensor | None:
        """Loss of one element, on the device that computed it; None: none was reported."""


class _PendingLoss(NamedTuple):
    """A step's loss on its way to the host."""

    number: int
    weight: float
    sum: PendingValue
    end: Mark
    """End of the step."""


class LossTracker:
    """Collects the losses of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending: deque[_PendingLoss] = deque()
        self._sum = self._weight = 0.0
        self._taken: LossReportingStep | None = None
        self._bad = False

    def add_step(self, step: LossReportingStep) -> None:
        """Add the loss of a complete step, once."""
        if step is self._taken or (loss := step.loss_sum) is None:
            return
        self._taken = step
        recorder = self._recorder
        value = recorder.clock.fetch(loss)
        self._pending.append(_PendingLoss(recorder.step - 1, step.weight, value, recorder.last_end))
        self._collect_arrived()

    def take_sums(self, wait: bool = False) -> tuple[float, float]:
        """Return sum and weight of the losses that have arrived since the last call. `wait`: wait for pending ones."""
        self._collect_arrived(wait)
        sums = self._sum, self._weight
        self._sum = self._weight = 0.0
        return sums

    def finish(self) -> None:
        """Wait for the last losses, and record them."""
        self._collect_arrived(wait=True)

    def _collect_arrived(self, wait: bool = False) -> None:
        while self._pending and (wait or (self._pending[0].end.reached and self._pending[0].sum.ready)):
            number, weight, value, end = self._pending.popleft()
            end.wait()
            loss = value.value()
            self._sum += loss
            self._weight += weight
            mean = loss / weight if weight else math.nan
            ring = self._recorder.ring
            ring.state.loss = mean
            ring.write(RecordKind.LOSS, end.ns, end.ns, number, Phase.TRAIN, mean)
            if not math.isfinite(loss) and not self._bad:
                self._bad = True
                ring.state.bad_loss_step = number
