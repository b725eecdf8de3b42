"""The losses that a script reports: recorded, watched for what is not finite, and summed up for the job's loss.

From a device they come a step or two after the script has reported them: nothing waits for them before the job's end.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, Protocol

import torch

from pacekeeper_analysis.records import Kind, Phase

from .clock import Fetched, Mark
from .recorder import Recorder


class Reporting(Protocol):
    """A step whose script reports a loss."""

    weight: float
    """What the loss is divided by."""

    @property
    def loss_sum(self) -> torch.Tensor | None:
        """Of one element, where it was computed; None: none was reported."""


class _Coming(NamedTuple):
    """A step's loss on its way to the host."""

    number: int
    weight: float
    sum: Fetched
    end: Mark
    """Of the step."""


class Losses:
    """Of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._coming: deque[_Coming] = deque()
        self._sum = self._weight = 0.0
        self._taken: Reporting | None = None
        self._bad = False

    def take(self, step: Reporting) -> None:
        """Of a step that is complete; counts once."""
        if step is self._taken or (loss := step.loss_sum) is None:
            return
        self._taken = step
        recorder = self._recorder
        fetched = recorder.clock.fetch(loss)
        self._coming.append(_Coming(recorder.step - 1, step.weight, fetched, recorder.last_end))
        self._count()

    def hand_over(self, whole: bool = False) -> tuple[float, float]:
        """Sum and weight of the losses that have come since the last call. whole: waits for those on their way."""
        self._count(whole)
        handed = self._sum, self._weight
        self._sum = self._weight = 0.0
        return handed

    def finish(self) -> None:
        """The last ones, which it waits for."""
        self._count(whole=True)

    def _count(self, whole: bool = False) -> None:
        while self._coming and (whole or (self._coming[0].end.reached and self._coming[0].sum.ready)):
            number, weight, fetched, end = self._coming.popleft()
            end.wait()
            loss = fetched.value()
            self._sum += loss
            self._weight += weight
            mean = loss / weight if weight else math.nan
            ring = self._recorder.ring
            ring.state.loss = mean
            ring.write(Kind.LOSS, end.ns, end.ns, number, Phase.TRAIN, mean)
            if not math.isfinite(loss) and not self._bad:
                self._bad = True
                ring.state.bad_loss_step = number
