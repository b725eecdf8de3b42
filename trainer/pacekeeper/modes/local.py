"""Local-SGD (EDiT and AsyncEDiT): replicas train by themselves, and each synchronisation of theirs is an ordinal."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from pacekeeper import torch_internals
from pacekeeper.data.tickets import TicketCounter
from pacekeeper_analysis.plan import SyncMode
from pacekeeper_analysis.records import Phase

from .agreement import AgreementResult
from .conclusion import SyncDecision
from .mode import SyncStrategy, SyncComponents, Period
from .pace import StepTimer, SynchronizationTimes
from .telling import ReportWriter


class LocalSGDStrategy(SyncStrategy):
    """The exchange is read at once: ranks wait for each other at synchronisations anyway."""

    def __init__(self, components: SyncComponents, report_writer: ReportWriter, step_timer: StepTimer, replica: dist.ProcessGroup | None) -> None:
        """`replica`: for the small talk of the ranks that share this one's; None: it has one for itself."""
        self._components = components
        self._report_writer = report_writer
        self._step_timer = step_timer
        self._replica = replica
        self._synchronization_times = SynchronizationTimes(components.recorder, components.replication)
        self._step_tickets: TicketCounter | None = None
        """What steps are dealt from; None: nothing is leased, or this rank has called all together."""

    # From and to other ways to train

    def start(self) -> None:
        """The parameters are the common ones now."""
        self._components.replication.start()

    def stop(self) -> None:
        """One state for all replicas. Collective."""
        with self._components.recorder.run_phase(Phase.CHECKPOINT):
            self._components.replication.stop()
            self._components.state_saver.equalize_other_objects()

    def start_leases(self, limit: int | None) -> None:
        """`limit`: samples of the job, counted from its origin."""
        loader, progress, agreement = self._components.loader, self._components.progress, self._components.agreement
        store, replica_size = torch_internals.get_default_store(), self._components.replication.shape["shard"]
        tickets, promises = (TicketCounter(store, agreement.rank, replica_size) for _ in range(2))
        self._step_tickets = promises if loader.can_lease_microbatches else tickets
        ahead = 0 if limit is None else limit + progress.origin - progress.samples
        loader.start_leases(tickets.take, None if limit is None else loader.used_samples + ahead, promises.take)

    # Between two ordinals

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
        """Where somebody has to leave, or rank 0 has new orders: the ranks meet behind the steps that they are in, and
        not once the clock is up. Nobody finds samples for another one."""
        if self._step_tickets is not None and (self._components.is_leave_requested() or self._has_urgent_directives()):
            self._step_tickets.close()
            self._step_tickets = None

    def _has_urgent_directives(self) -> bool:
        """What the ranks can do at an ordinal only, and is better done soon."""
        parts, progress = self._components, self._components.progress
        if parts.agreement.rank != 0:
            return False
        orders = parts.plan_reader.read_directives(progress.training_config, snapshot_every=0)
        changes = orders.training_config.sync_mode is not progress.training_config.sync_mode
        return changes or orders.suspend or orders.checkpoint_request > progress.answered_request

    # Ordinals

    def reach_sync_point(self, period: Period, decide: Callable[[AgreementResult], SyncDecision]) -> SyncDecision:
        parts, progress = self._components, self._components.progress
        self._report_writer.begin_exchange(period, self._synchronization_times.exposed_seconds)
        parts.replication.begin(period.steps, period.sample_source.mode is SyncMode.ASYNC_EDIT, period.weight)
        self._synchronization_times.mark_begun()
        agreed = parts.agreement.collect_result()
        progress.settle(agreed.summed_report.samples)
        parts.on_settled()
        parts.recorder.step = progress.step + 1
        parts.recorder.ring.state.step = progress.step
        conclusion = decide(agreed)
        unused = None
        if conclusion.actions.has_any:
            unused = [positions for its in parts.agreement.all_gather(parts.loader.list_unused()) for positions in its]
        if conclusion.needs_common_parameters:
            self._synchronization_times.finish(progress.sync_point_step)
        parts.loader.settle_leases(agreed.summed_report.samples, unused)
        return conclusion
