"""Sync: every step of all ranks is one, so each boundary between two steps is an ordinal."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from .agreement import Agreed
from .conclusion import Conclusion
from .mode import Mode, Parts, Period
from .telling import Telling


class Sync(Mode):
    """The exchange runs while a step computes, and nobody waits for it."""

    def __init__(self, parts: Parts, telling: Telling) -> None:
        self._agreement = parts.agreement
        self._progress = parts.progress
        self._telling = telling

    @property
    def batch_group(self) -> dist.ProcessGroup:
        return self._agreement.group

    @property
    def steps_in_period(self) -> int:
        return 1

    def begin_exchange(self, period: Period) -> None:
        """Between the step's last forward pass and its backward pass: so it is over when its result is wanted, and to
        begin it keeps no device waiting, since that has work by then."""
        if not self._agreement.issued:
            self._telling.begin(period)

    def meet(self, period: Period, conclude: Callable[[Agreed], Conclusion]) -> Conclusion:
        self.begin_exchange(period)
        agreed = self._agreement.take()
        self._progress.settle(self._progress.global_batch)
        return conclude(agreed)
