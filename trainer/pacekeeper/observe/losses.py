"""The losses that a script reports: recorded, watched for what is not finite, and summed up for the job's loss.

From a device they come a step or two after the script has reported them: nothing waits for them before the job's end.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, Protocol

import torch

from pacekeeper_analysis.records import RecordKind, Phase

from .clock import PendingValue, Mark
from .recorder import Recorder


class LossReportingStep(Protocol):
    """A step whose script reports a loss."""

    weight: float
    """What the loss is divided by."""

    @property
    def loss_sum(self) -> torch.Tensor | None:
        """Of one element, where it was computed; None: none was reported."""


class _PendingLoss(NamedTuple):
    """A step's loss on its way to the host."""

    number: int
    weight: float
    sum: PendingValue
    end: Mark
    """Of the step."""


class LossTracker:
    """Of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending: deque[_PendingLoss] = deque()
        self._sum = self._weight = 0.0
        self._taken: LossReportingStep | None = None
        self._bad = False

    def add_step(self, step: LossReportingStep) -> None:
        """Of a step that is complete; counts once."""
        if step is self._taken or (loss := step.loss_sum) is None:
            return
        self._taken = step
        recorder = self._recorder
        fetched = recorder.clock.fetch(loss)
        self._pending.append(_PendingLoss(recorder.step - 1, step.weight, fetched, recorder.last_end))
        self._collect_arrived()

    def take_sums(self, whole: bool = False) -> tuple[float, float]:
        """Sum and weight of the losses that have come since the last call. whole: waits for those on their way."""
        self._collect_arrived(whole)
        handed = self._sum, self._weight
        self._sum = self._weight = 0.0
        return handed

    def finish(self) -> None:
        """The last ones, which it waits for."""
        self._collect_arrived(whole=True)

    def _collect_arrived(self, whole: bool = False) -> None:
        while self._pending and (whole or (self._pending[0].end.reached and self._pending[0].sum.ready)):
            number, weight, fetched, end = self._pending.popleft()
            end.wait()
            loss = fetched.value()
            self._sum += loss
            self._weight += weight
            mean = loss / weight if weight else math.nan
            ring = self._recorder.ring
            ring.state.loss = mean
            ring.write(RecordKind.LOSS, end.ns, end.ns, number, Phase.TRAIN, mean)
            if not math.isfinite(loss) and not self._bad:
                self._bad = True
                ring.state.bad_loss_step = number
