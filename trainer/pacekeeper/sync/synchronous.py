"""Sync: all ranks make each step together, so each boundary between two steps is a sync point."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from .agreement import AgreementResult
from .report_writer import ReportWriter
from .sync_decision import SyncDecision
from .sync_strategy import Period, SyncComponents, SyncStrategy


class SynchronousStrategy(SyncStrategy):
    """Training in Sync. The exchange runs while a step computes, and no rank waits for it."""

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
        """Begin the exchange between the step's last forward pass and its backward pass.

        It is then complete when its result is needed. Starting it does not idle the device, which has work by then.
        """
        if not self._agreement.is_issued:
            self._report_writer.begin_exchange(period)

    def reach_sync_point(self, period: Period, decide: Callable[[AgreementResult], SyncDecision]) -> SyncDecision:
        self.begin_exchange(period)
        agreed = self._agreement.collect_result()
        self._progress.settle(self._progress.global_batch)
        return decide(agreed)
