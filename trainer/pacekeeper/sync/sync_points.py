"""What the ranks of a job do together: at sync points they agree, synchronize, switch modes, save the state, leave.

Between two sync points a rank trains as it would alone. training_config.py and sync_decision.py make the decisions,
from numbers that are the same on all ranks. synchronous.py and local_sgd.py are the two strategies; this module
switches between them. At a sync point the ranks agree on directives and on the job's progress, begin the
synchronization, apply the decision, and open the next period.

In Local-SGD modes all ranks reach the sync point at the same place: after the optimizer has stepped. A due query has no
collective in it then, so each rank may ask or not.
"""

from __future__ import annotations

import logging
import math
import sys

import torch
import torch.distributed as dist

from pacekeeper.environment import RANK_LEFT_EXIT_CODE
from pacekeeper.observe.collectives.cpu_group import new_cpu_group
from pacekeeper.observe.gc_schedule import GCSchedule
from pacekeeper.observe.losses import LossTracker
from pacekeeper.replication.replication import Replication
from pacekeeper.step import Step
from pacekeeper_analysis.protocol.plan import SYNC_MODES, SyncMode

from .agreement import Agreement, AgreementResult
from .due_queries import DueQueries, DueQuery
from .local_sgd import LocalSGDStrategy
from .report_writer import ReportWriter
from .step_timer import StepTimer
from .sync_decision import RoundLimits, SyncDecision, decide_sync
from .sync_strategy import Period, SyncComponents, SyncStrategy
from .synchronous import SynchronousStrategy
from .training_config import SampleSource

_log = logging.getLogger(__name__)


class SyncPoints:
    """One rank's part in what the ranks of a job do together. Implements `step.StepPeers`."""

    def __init__(self, components: SyncComponents, limits: RoundLimits) -> None:
        """Create the parts of one round. Collective."""
        self.loss = math.nan
        """Mean loss over the newest period that all ranks have reported; NaN until the first report."""
        self.finished = False
        """Whether the last step is complete."""
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
        """The present step."""
        self._is_uncounted = False
        """Whether the present step is not counted yet."""
        self._is_last_microbatch = False
        """Whether the present step has reached its last microbatch."""
        self._was_queried_early = False
        """Whether the script called `due` in this step before any optimizer had stepped."""
        self._sync_point_step = components.progress.step
        """Steps of the job at the last sync point."""

    @property
    def _strategy(self) -> SyncStrategy:
        return self._local if self._period.sample_source.is_local else self._sync

    # The phases of a round

    def open_first_period(self) -> None:
        """Pass the sync point before the first step, at which all ranks receive the training config."""
        self._report_writer.begin_exchange(self._period)
        self._apply_decision(self._decide_sync(self._components.agreement.collect_result()))

    def next_step(self) -> Step | None:
        """Return the next step.

        None: no sample is left for this rank before the next sync point, which it now reaches.
        """
        self._step_timer.begin_step()
        loader, recorder = self._components.loader, self._components.recorder
        step_input = recorder.load(loader.next_step)
        if step_input is None:
            self._period.reaches_sync_point = self._period.out_of_samples = True
            return None
        self._step = Step(self, self._components.progress.step + 1, *step_input)
        self._is_uncounted, self._is_last_microbatch, self._was_queried_early = True, False, False
        self._state.share = self._step.samples
        if self._period.sample_source.is_leased:
            self._step_timer.begin_decision(self._components.progress.training_config.sync_seconds)
        return self._step

    def complete_step(self) -> None:
        """Count the step after the job's optimizer has stepped, and determine whether a sync point follows.

        Only the first call in a step counts. If the optimizer skipped its step, as a `GradScaler` may do, the end of
        the step completes it, or the first due query after the last microbatch.
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
        """Prepare for a step of the job's optimizer.

        Raises RuntimeError in every mode if the script has already called `due`. In a Local-SGD mode that call would
        have had no answer, or left its peers behind, and the operator may change the mode at any time.
        """
        if self._was_queried_early:
            assert self._step is not None
            raise RuntimeError(
                f"step {self._step.number}: step.due was called before optimizer.step(); call it afterwards"
            )
        if self._is_uncounted:
            self._components.recorder.optimizer_begins()

    def finish_optimizer_steps(self) -> None:
        """Reach the sync point, if one follows, in a Local-SGD mode: all optimizers have stepped."""
        if self._period.sample_source.is_local and self._period.reaches_sync_point:
            self._reach_sync_point()

    def pass_boundary(self) -> None:
        """Pass the boundary between two steps, which may be a sync point."""
        if self._step is not None:
            self._losses.add_step(self._step)
        if self._period.reaches_sync_point:
            self._apply_decision(self._reach_sync_point())
        self._step = None

    def close(self) -> None:
        """Bring all replicas to one state after the last step."""
        if self._period.sample_source.is_local:
            self._local.stop()
        self._losses.finish()
        self._components.recorder.finish()

    # Interface of a step to its peers

    def synchronize_gradients(self, enabled: bool) -> None:
        self._is_last_microbatch = enabled
        self._components.replication.synchronize_gradients(enabled)

    def computing(self) -> None:
        if not self._period.sample_source.is_local:
            self._sync.begin_exchange(self._period)

    def total_weight(self, weight: float | None, samples: int) -> tuple[dist.Work, torch.Tensor] | float:
        if weight is None and not self._period.sample_source.is_local:
            return float(self._components.progress.global_batch)
        own_weight, group = float(samples) if weight is None else weight, self._strategy.batch_group
        if group is None:
            return own_weight
        total = torch.tensor([own_weight], dtype=torch.float64)
        return self._components.agreement.start_sum(total, group), total

    def wait(self, work: dist.Work) -> None:
        self._components.agreement.wait(work)

    def due(self, step: Step, name: str, every: int) -> bool:
        query = DueQuery(name, every)
        self._was_queried_early |= self._is_uncounted
        self._due_queries.add_query(query)
        if not self._period.sample_source.is_local:
            return self._due_queries.is_due(query, step.number)
        decision = self._get_decision()
        return decision is not None and query in decision.due_queries

    def checkpoint_if_due(self) -> None:
        if not self._period.sample_source.is_local or self._get_decision() is not None:
            self._checkpoint_if_due()

    def _get_decision(self) -> SyncDecision | None:
        """Return the decision of the sync point after this step, in Local-SGD modes; None: none follows.

        The ranks have reached it already, except if a `GradScaler` skipped the optimizer's step, possibly on one
        replica only. Then this rank reaches it now: all ranks get the same answer.
        """
        if self._is_last_microbatch and self._is_uncounted:
            self.complete_step()
            self._was_queried_early |= self._period.reaches_sync_point
        return self._reach_sync_point() if self._period.reaches_sync_point else None

    # Sync points

    def _reach_sync_point(self) -> SyncDecision:
        """Return the decision of the present sync point; the first call makes it. Collective."""
        period = self._period
        if period.decision is None:
            if self._step is not None:
                self._losses.add_step(self._step)
            period.decision = self._strategy.reach_sync_point(period, self._decide_sync)
        return period.decision

    def _decide_sync(self, agreed: AgreementResult) -> SyncDecision:
        """Decide with exact progress. Collective if a rank has a new query, or if a snapshot is due."""
        if agreed.summed_report.querying:
            self._due_queries.merge_reports(self._components.agreement.all_gather(self._due_queries.unreported))
        progress, state_saver, source = (
            self._components.progress,
            self._components.state_saver,
            self._period.sample_source,
        )
        return decide_sync(
            agreed,
            progress,
            source,
            self._limits,
            checkpoint_due=state_saver.is_checkpoint_due(self._sync_point_step, progress.step),
            snapshot_due=state_saver.is_snapshot_due(
                self._sync_point_step, progress.step, agreed.directives.snapshot_every, check_delivery=source.is_local
            ),
            due_queries=self._due_queries.list_due(progress.step),
        )

    def _apply_decision(self, decision: SyncDecision) -> None:
        """Apply the decision, in the same way on all ranks, and open the next period."""
        progress, state_saver = self._components.progress, self._components.state_saver
        directives, report, actions = decision.agreed.directives, decision.agreed.summed_report, decision.actions
        self._state.plan_version = directives.plan_version
        if report.weight > 0:
            self.loss = report.loss / report.weight
        if actions.leave:
            state_saver.leave(snapshot=directives.snapshot_every > 0)
            sys.exit(RANK_LEFT_EXIT_CODE)
        if directives.checkpoint_request > progress.answered_request:
            state_saver.answer_request(directives.checkpoint_request)
        self._checkpoint_if_due()
        state_saver.settle()
        if actions.snapshot:
            state_saver.snapshot()
        self._sync_point_step = progress.step
        if not report.out_of_samples:  # a rank that came without a step had no chance to ask
            self._due_queries.pass_sync_point(progress.step, all_answered=not self._period.sample_source.is_local)
        self.finished = actions.finish
        if not self.finished:
            self._open_period(decision)

    def _checkpoint_if_due(self) -> None:
        if self._components.state_saver.is_checkpoint_due(self._sync_point_step, self._components.progress.step):
            self._components.state_saver.checkpoint()

    def _open_period(self, decision: SyncDecision) -> None:
        directives, progress, loader = decision.agreed.directives, self._components.progress, self._components.loader
        config = progress.training_config = directives.training_config
        if directives.plan_version:  # without a plan, only the checkpoint determines the shares
            loader.set_shares(config.shares)
        loader.set_cost(config.cost)
        self._gc_schedule.collect_if_due(progress.step, config.gc_every)
        if decision.actions.switch:
            self._switch_source(self._period.sample_source, decision.sample_source)
        self._state.sync_mode = self._components.recorder.mode = SYNC_MODES.index(decision.sample_source.mode)
        self._period = Period(decision.sample_source)
        self._period.planned_steps = self._count_planned_steps()
        self._step_timer.begin_interval()

    def _count_planned_steps(self) -> int | None:
        """Return the steps of the present period, at most those that are left.

        None: as many as the interval and the samples allow.
        """
        if self._period.sample_source.is_leased:
            return None
        steps, progress = self._strategy.steps_in_period, self._components.progress
        if self._limits.samples is None:
            return steps
        return min(steps, (self._limits.samples - progress.samples) // progress.global_batch)

    def _switch_source(self, old: SampleSource, new: SampleSource) -> None:
        """Switch to another mode or sample source, with common parameters and without leased samples."""
        if old.is_leased:
            self._components.loader.stop_leases()
        if old.is_local and not new.is_local:
            self._local.stop()
        elif new.is_local and not old.is_local:
            self._local.start()
        if new.is_leased:
            self._local.start_leases(new.limit)
        if new.mode is not old.mode and self._components.agreement.rank == 0:
            _log.warning("sync mode is %s from step %d on", new.mode, self._components.progress.step + 1)


def _create_replica_group(replication: Replication, agreement: Agreement) -> dist.ProcessGroup | None:
    """Create the CPU group of the ranks that share a replica; None: this rank has its own. Collective."""
    size = replication.shape["shard"]
    if size == 1:
        return None
    first = agreement.rank - agreement.rank % size
    return agreement.group if replication.shape["sync"] == 1 else new_cpu_group("replica", range(first, first + size))
