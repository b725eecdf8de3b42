"""The losses that a script reports: recorded, watched for what is not finite, and summed up for the job's loss."""

from __future__ import annotations

import math
from typing import Protocol

from pacekeeper_analysis.records import Kind, Phase

from .recorder import Recorder


class Reporting(Protocol):
    """A step whose script reports a loss."""

    weight: float
    """What the loss is divided by."""

    @property
    def loss_sum(self) -> float | None:
        """None: none was reported."""


class Losses:
    """Of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sum = self._weight = 0.0
        self._taken: Reporting | None = None
        self._bad = False

    def take(self, step: Reporting) -> None:
        """Of a step that is complete; counts once."""
        if step is self._taken or (loss := step.loss_sum) is None:
            return
        self._taken = step
        self._sum += loss
        self._weight += step.weight
        mean = loss / step.weight if step.weight else math.nan
        ring, number, end = self._recorder.ring, self._recorder.step - 1, self._recorder.last_step_end
        ring.state.loss = mean
        ring.write(Kind.LOSS, end, end, number, Phase.TRAIN, mean)
        if not math.isfinite(loss) and not self._bad:
            self._bad = True
            ring.state.bad_loss_step = number

    def hand_over(self) -> tuple[float, float]:
        """Sum and weight of the losses since the last call."""
        handed = self._sum, self._weight
        self._sum = self._weight = 0.0
        return handed
