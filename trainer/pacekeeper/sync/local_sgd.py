"""Local-SGD (EDiT and AsyncEDiT): replicas train independently, and each synchronization of them is a sync point."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from pacekeeper import torch_internals
from pacekeeper.data.ticket_counter import TicketCounter
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_rank.records import Phase

from .agreement import AgreementResult
from .report_writer import ReportWriter
from .step_timer import StepTimer, SynchronizationTimes
from .sync_decision import SyncDecision
from .sync_strategy import Period, SyncComponents, SyncStrategy


class LocalSGDStrategy(SyncStrategy):
    """Training in a Local-SGD mode.

    It reads the agreement at once: at synchronizations ranks wait for each other anyway.
    """

    def __init__(
        self,
        components: SyncComponents,
        report_writer: ReportWriter,
        step_timer: StepTimer,
        replica: dist.ProcessGroup | None,
    ) -> None:
        """Create the strategy.

        `replica`: CPU group of the ranks that share this one's replica; None: it has no other rank.
        """
        self._components = components
        self._report_writer = report_writer
        self._step_timer = step_timer
        self._replica = replica
        self._synchronization_times = SynchronizationTimes(components.recorder, components.replication)
        self._step_tickets: TicketCounter | None = None
        """Source of steps; None: nothing is leased, or this rank has ended the period early."""

    # Switch between strategies

    def start(self) -> None:
        """Start with the present parameters as the common ones."""
        self._components.replication.start()

    def stop(self) -> None:
        """Bring all replicas to one state. Collective."""
        with self._components.recorder.run_phase(Phase.CHECKPOINT):
            self._components.replication.stop()
            self._components.state_saver.equalize_other_objects()

    def start_leases(self, limit: int | None) -> None:
        """Lease samples from now on, up to `limit` samples of the job, counted from its origin; None: without end."""
        loader, progress, agreement = self._components.loader, self._components.progress, self._components.agreement
        store, replica_size = torch_internals.get_default_store(), self._components.replication.shape["shard"]
        tickets, reservations = (TicketCounter(store, agreement.rank, replica_size) for _ in range(2))
        self._step_tickets = reservations if loader.can_lease_microbatches else tickets
        remaining = 0 if limit is None else limit + progress.origin - progress.samples
        loader.start_leases(tickets.take, None if limit is None else loader.used_samples + remaining, reservations.take)

    # Between two sync points

    @property
    def batch_group(self) -> dist.ProcessGroup | None:
        return self._replica

    @property
    def steps_in_period(self) -> int:
        return self._components.progress.training_config.sync_every

    def end_step(self, period: Period) -> bool:
        self._synchronization_times.record(self._components.progress.sync_point_step)
        if period.sample_source.is_leased:
            self._end_period_early()
            return self._step_timer.is_interval_over(self._components.progress.training_config.sync_seconds)
        return super().end_step(period)

    def _end_period_early(self) -> None:
        """End the period early if a rank has to leave, or if rank 0 has urgent directives.

        The ranks then reach the sync point after their present steps, not when the interval is over: no rank gets
        samples for another step.
        """
        if self._step_tickets is not None and (self._components.is_leave_requested() or self._has_urgent_directives()):
            self._step_tickets.close()
            self._step_tickets = None

    def _has_urgent_directives(self) -> bool:
        """Return whether rank 0 has directives that take effect only at a sync point and should not wait."""
        components, progress = self._components, self._components.progress
        if components.agreement.rank != 0:
            return False
        directives = components.plan_reader.read_directives(progress.training_config, snapshot_every=0)
        changes_mode = directives.training_config.sync_mode is not progress.training_config.sync_mode
        return changes_mode or directives.suspend or directives.checkpoint_request > progress.answered_request

    # Sync points

    def reach_sync_point(self, period: Period, decide: Callable[[AgreementResult], SyncDecision]) -> SyncDecision:
        components, progress = self._components, self._components.progress
        self._report_writer.begin_exchange(period, self._synchronization_times.exposed_seconds)
        components.replication.begin(period.steps, period.sample_source.mode is SyncMode.ASYNC_EDIT, period.weight)
        self._synchronization_times.mark_begun()
        agreed = components.agreement.collect_result()
        progress.settle(agreed.summed_report.samples)
        components.on_settled()
        components.recorder.step = progress.step + 1
        components.recorder.ring.state.step = progress.step
        decision = decide(agreed)
        unused = None
        if decision.actions.has_any:
            unused = [
                interval
                for intervals in components.agreement.all_gather(components.loader.list_unused())
                for interval in intervals
            ]
        if decision.needs_common_parameters:
            self._synchronization_times.finish(progress.sync_point_step)
        components.loader.settle_leases(agreed.summed_report.samples, unused)
        return decision
