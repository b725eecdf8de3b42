"""Sync: every step of all ranks is one, so each boundary between two steps is an ordinal."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from .agreement import AgreementResult
from .conclusion import SyncDecision
from .mode import SyncStrategy, SyncComponents, Period
from .telling import ReportWriter


class SynchronousStrategy(SyncStrategy):
    """The exchange runs while a step computes, and nobody waits for it."""

    def __init__(self, components: SyncComponents, report_writer: ReportWriter) -> None:
        self._agreement = components.agreement
        self._progress = components.progress
        self._report_writer = report_writer

    @property
    def batch_group(self) -> dist.ProcessGroup:
        return self._agreement.group

    @property
    def steps_in_period(self) -> int:
        return 1

    def begin_exchange(self, period: Period) -> None:
        """Between the step's last forward pass and its backward pass: so it is over when its result is wanted, and to
        begin it keeps no device waiting, since that has work by then."""
        if not self._agreement.is_issued:
            self._report_writer.begin_exchange(period)

    def reach_sync_point(self, period: Period, decide: Callable[[AgreementResult], SyncDecision]) -> SyncDecision:
        self.begin_exchange(period)
        agreed = self._agreement.collect_result()
        self._progress.settle(self._progress.global_batch)
        return decide(agreed)
