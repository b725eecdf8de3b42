"""What the ranks of a job do together: at ordinals, they agree, synchronise, switch modes, keep the state, leave.

Between two ordinals a rank trains as it would alone. course.py and conclusion.py have the decisions, from numbers that
all ranks have alike; sync.py and local.py the two ways to train; here is what switches between them. At an ordinal the
ranks *meet* (they agree on orders and on how far the job is, and begin the synchronisation), *follow* what they have
concluded, and *open* the next period.

In Local-SGD modes all ranks meet at the same place: when the optimizer has stepped. Asking what is due has no
collective in it then, so it is each rank's own affair.
"""

from __future__ import annotations

import logging
import math
import sys

import torch
import torch.distributed as dist

from pacekeeper.environment import RANK_LEFT_EXIT_CODE
from pacekeeper.observe.cpu_group import new_cpu_group
from pacekeeper.observe.garbage import GCSchedule
from pacekeeper.observe.losses import LossTracker
from pacekeeper.replication.replication import Replication
from pacekeeper.step import Step
from pacekeeper_analysis.plan import SYNC_MODES, SyncMode

from .agreement import AgreementResult, Agreement
from .asking import DueQuery, DueQueries
from .conclusion import SyncDecision, RoundLimits, decide_sync
from .course import SampleSource
from .local import LocalSGDStrategy
from .mode import SyncStrategy, SyncComponents, Period
from .pace import StepTimer
from .sync import SynchronousStrategy
from .telling import ReportWriter

_log = logging.getLogger(__name__)


class SyncPoints:
    """One rank's part in what the ranks of a job do together. Implements `step.Peers`."""

    def __init__(self, components: SyncComponents, limits: RoundLimits) -> None:
        """Collective."""
        self.loss = math.nan
        """Mean loss over the newest period that all ranks have reported; NaN: none was."""
        self.finished = False
        """Whether the last step is done."""
        self._components = components
        self._limits = limits
        self._state = components.recorder.ring.state
        self._gc_schedule = GCSchedule()
        self._losses = LossTracker(components.recorder)
        self._due_queries = DueQueries(components.progress.step)
        replica = _create_replica_group(components.replication, components.agreement)
        self._step_timer = StepTimer(components.recorder, components.agreement, replica)
        self._report_writer = ReportWriter(components, self._step_timer, self._losses, self._due_queries)
        self._sync = SynchronousStrategy(components, self._report_writer)
        self._local = LocalSGDStrategy(components, self._report_writer, self._step_timer, replica)
        self._period = Period(SampleSource(SyncMode.SYNC))
        self._step: Step | None = None
        """The present one."""
        self._is_uncounted = False
        """Whether it is not counted yet."""
        self._is_last_microbatch = False
        """Whether it has come to it."""
        self._was_queried_early = False
        """Whether the script has asked in this step before any optimizer had stepped."""
        self._sync_point_step = components.progress.step
        """Steps of the job at the last ordinal."""

    @property
    def _strategy(self) -> SyncStrategy:
        return self._local if self._period.sample_source.is_local else self._sync

    # The course of a round

    def open_first_period(self) -> None:
        """The ordinal before the first step: all ranks learn how the training goes on."""
        self._report_writer.begin_exchange(self._period)
        self._apply_decision(self._decide_sync(self._components.agreement.collect_result()))

    def next_step(self) -> Step | None:
        """None: no sample is left for this rank up to the next ordinal, which it now comes to."""
        self._step_timer.begin_step()
        loader, recorder = self._components.loader, self._components.recorder
        drawn = recorder.load(loader.next_step)
        if drawn is None:
            self._period.reaches_sync_point = self._period.out_of_samples = True
            return None
        self._step = Step(self, self._components.progress.step + 1, *drawn)
        self._is_uncounted, self._is_last_microbatch, self._was_queried_early = True, False, False
        self._state.share = self._step.samples
        if self._period.sample_source.is_leased:
            self._step_timer.begin_decision(self._components.progress.training_config.sync_seconds)
        return self._step

    def complete_step(self) -> None:
        """The job's optimizer has stepped: the rank knows whether an ordinal follows. The first call in a step counts.

        Where it has left its step out, as a `GradScaler` may have it do, the end of the step completes it, or the first
        question behind the last microbatch.
        """
        if not self._is_uncounted:
            return
        self._is_uncounted = False
        step, period, progress = self._step, self._period, self._components.progress
        assert step is not None
        self._step_timer.end_step()
        progress.count_step(step.samples)
        self._components.loader.complete_step()
        period.steps += 1
        period.samples += step.samples
        period.weight += step.batch_weight
        period.reaches_sync_point = self._strategy.end_step(period)
        self._state.samples = progress.own_samples
        self._components.recorder.end_step(step.samples, lengths=step.lengths)

    def optimizer_begins(self) -> None:
        """The job's optimizer is about to step.

        Raises RuntimeError where the script has asked already, in every mode: in a Local-SGD mode it would have had no
        answer, or left its peers behind, and the operator may change the mode at any time.
        """
        if self._was_queried_early:
            assert self._step is not None
            raise RuntimeError(f"step {self._step.number}: step.due was asked before optimizer.step(); ask behind it")
        if self._is_uncounted:
            self._components.recorder.optimizer_begins()

    def finish_optimizer_steps(self) -> None:
        """All optimizers have, in this step: in Local-SGD modes this is where the ranks meet."""
        if self._period.sample_source.is_local and self._period.reaches_sync_point:
            self._reach_sync_point()

    def pass_boundary(self) -> None:
        """Between two steps: an ordinal, or nothing happens."""
        if self._step is not None:
            self._losses.add_step(self._step)
        if self._period.reaches_sync_point:
            self._apply_decision(self._reach_sync_point())
        self._step = None

    def close(self) -> None:
        """After the last step: one state for all replicas."""
        if self._period.sample_source.is_local:
            self._local.stop()
        self._losses.finish()
        self._components.recorder.finish()

    # What a step asks of its peers

    def synchronize_gradients(self, wanted: bool) -> None:
        self._is_last_microbatch = wanted
        self._components.replication.synchronize_gradients(wanted)

    def computing(self) -> None:
        if not self._period.sample_source.is_local:
            self._sync.begin_exchange(self._period)

    def total_weight(self, weight: float | None, samples: int) -> tuple[dist.Work, torch.Tensor] | float:
        if weight is None and not self._period.sample_source.is_local:
            return float(self._components.progress.global_batch)
        mine, group = float(samples) if weight is None else weight, self._strategy.batch_group
        if group is None:
            return mine
        total = torch.tensor([mine], dtype=torch.float64)
        return self._components.agreement.start_sum(total, group), total

    def wait(self, work: dist.Work) -> None:
        self._components.agreement.wait(work)

    def due(self, step: Step, name: str, every: int) -> bool:
        question = DueQuery(name, every)
        self._was_queried_early |= self._is_uncounted
        self._due_queries.add_query(question)
        if not self._period.sample_source.is_local:
            return self._due_queries.is_due(question, step.number)
        conclusion = self._get_decision()
        return conclusion is not None and question in conclusion.due_queries

    def checkpoint_if_due(self) -> None:
        if not self._period.sample_source.is_local or self._get_decision() is not None:
            self._checkpoint_if_due()

    def _get_decision(self) -> SyncDecision | None:
        """In Local-SGD modes: of the ordinal that follows this step; None: none follows.

        The ranks have met there. Only where a `GradScaler` has left the optimizer's step out, as it may on one replica
        alone, this rank comes now: all of them answer alike.
        """
        if self._is_last_microbatch and self._is_uncounted:
            self.complete_step()
            self._was_queried_early |= self._period.reaches_sync_point
        return self._reach_sync_point() if self._period.reaches_sync_point else None

    # Ordinals

    def _reach_sync_point(self) -> SyncDecision:
        """At an ordinal; the first call holds the meeting. Collective."""
        period = self._period
        if period.decision is None:
            if self._step is not None:
                self._losses.add_step(self._step)
            period.decision = self._strategy.reach_sync_point(period, self._decide_sync)
        return period.decision

    def _decide_sync(self, agreed: AgreementResult) -> SyncDecision:
        """The job's progress is exact. Collective where a rank asks for something new, or a snapshot is due."""
        if agreed.summed_report.querying:
            self._due_queries.merge_reports(self._components.agreement.all_gather(self._due_queries.unreported))
        progress, retention, supply = self._components.progress, self._components.state_saver, self._period.sample_source
        return decide_sync(
            agreed,
            progress,
            supply,
            self._limits,
            checkpoint_due=retention.is_checkpoint_due(self._sync_point_step, progress.step),
            snapshot_due=retention.is_snapshot_due(
                self._sync_point_step, progress.step, agreed.directives.snapshot_every, check_delivery=supply.is_local
            ),
            due_queries=self._due_queries.list_due(progress.step),
        )

    def _apply_decision(self, decision: SyncDecision) -> None:
        """All ranks alike do what follows, and begin the next period."""
        progress, retention = self._components.progress, self._components.state_saver
        orders, tally, duties = decision.agreed.directives, decision.agreed.summed_report, decision.actions
        self._state.plan_version = orders.plan_version
        if tally.weight > 0:
            self.loss = tally.loss / tally.weight
        if duties.leave:
            retention.leave(snapshot=orders.snapshot_every > 0)
            sys.exit(RANK_LEFT_EXIT_CODE)
        if orders.checkpoint_request > progress.answered_request:
            retention.answer_request(orders.checkpoint_request)
        self._checkpoint_if_due()
        retention.settle()
        if duties.snapshot:
            retention.snapshot()
        self._sync_point_step = progress.step
        if not tally.out_of_samples:  # a rank that came without a step could not ask
            self._due_queries.pass_sync_point(progress.step, all_answered=not self._period.sample_source.is_local)
        self.finished = duties.finish
        if not self.finished:
            self._open_period(decision)

    def _checkpoint_if_due(self) -> None:
        if self._components.state_saver.is_checkpoint_due(self._sync_point_step, self._components.progress.step):
            self._components.state_saver.checkpoint()

    def _open_period(self, decision: SyncDecision) -> None:
        orders, progress, loader = decision.agreed.directives, self._components.progress, self._components.loader
        course = progress.training_config = orders.training_config
        if orders.plan_version:  # without a plan, shares come from the checkpoint alone
            loader.set_shares(course.shares)
        loader.set_cost(course.cost)
        self._gc_schedule.collect_if_due(progress.step, course.gc_every)
        if decision.actions.switch:
            self._switch_source(self._period.sample_source, decision.sample_source)
        self._state.sync_mode = self._components.recorder.mode = SYNC_MODES.index(decision.sample_source.mode)
        self._period = Period(decision.sample_source)
        self._period.planned_steps = self._count_planned_steps()
        self._step_timer.begin_interval()

    def _count_planned_steps(self) -> int | None:
        """Of the present period: no more than are left. None: as many as the clock and the samples allow."""
        if self._period.sample_source.is_leased:
            return None
        steps, progress = self._strategy.steps_in_period, self._components.progress
        if self._limits.samples is None:
            return steps
        return min(steps, (self._limits.samples - progress.samples) // progress.global_batch)

    def _switch_source(self, old: SampleSource, new: SampleSource) -> None:
        """Another mode, or another source of samples: with the common parameters, and nothing leased."""
        if old.is_leased:
            self._components.loader.stop_leases()
        if old.is_local and not new.is_local:
            self._local.stop()
        elif new.is_local and not old.is_local:
            self._local.start()
        if new.is_leased:
            self._local.start_leases(new.limit)
        if new.mode is not old.mode and self._components.agreement.rank == 0:
            _log.warning("%s from step %d on", new.mode, self._components.progress.step + 1)


def _create_replica_group(replication: Replication, agreement: Agreement) -> dist.ProcessGroup | None:
    """For the small talk of the ranks that share a replica; None: this rank has one for itself. Collective."""
    size = replication.shape["shard"]
    if size == 1:
        return None
    first = agreement.rank - agreement.rank % size
    return agreement.group if replication.shape["sync"] == 1 else new_cpu_group("replica", range(first, first + size))
