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

from pacekeeper.environment import LEFT_WHEN_TOLD
from pacekeeper.observe.cpu_group import new_cpu_group
from pacekeeper.observe.garbage import PlannedCollection
from pacekeeper.observe.losses import Losses
from pacekeeper.replication.replication import Replication
from pacekeeper.step import Step
from pacekeeper_analysis.plan import MODES, SyncMode

from .agreement import Agreed, Agreement
from .asking import Question, Questions
from .conclusion import Conclusion, Limits, conclude
from .course import Supply
from .local import LocalSGD
from .mode import Mode, Parts, Period
from .pace import Pace
from .sync import Sync
from .telling import Telling

_log = logging.getLogger(__name__)


class Ordinals:
    """One rank's part in what the ranks of a job do together. Implements `step.Peers`."""

    def __init__(self, parts: Parts, limits: Limits) -> None:
        """Collective."""
        self.loss = math.nan
        """Mean loss over the newest period that all ranks have reported; NaN: none was."""
        self.finished = False
        """Whether the last step is done."""
        self._parts = parts
        self._limits = limits
        self._state = parts.recorder.ring.state
        self._garbage = PlannedCollection()
        self._losses = Losses(parts.recorder)
        self._questions = Questions(parts.progress.step)
        replica = _replica_group(parts.replication, parts.agreement)
        self._pace = Pace(parts.recorder, parts.agreement, replica)
        self._telling = Telling(parts, self._pace, self._losses, self._questions)
        self._sync = Sync(parts, self._telling)
        self._local = LocalSGD(parts, self._telling, self._pace, replica)
        self._period = Period(Supply(SyncMode.SYNC))
        self._step: Step | None = None
        """The present one."""
        self._stepping = False
        """Whether it is not counted yet."""
        self._last_microbatch = False
        """Whether it has come to it."""
        self._asked_early = False
        """Whether the script has asked in this step before any optimizer had stepped."""
        self._ordinal_step = parts.progress.step
        """Steps of the job at the last ordinal."""

    @property
    def _mode(self) -> Mode:
        return self._local if self._period.supply.local else self._sync

    # The course of a round

    def open(self) -> None:
        """The ordinal before the first step: all ranks learn how the training goes on."""
        self._telling.begin(self._period)
        self._follow(self._conclude(self._parts.agreement.take()))

    def next_step(self) -> Step | None:
        """None: no sample is left for this rank up to the next ordinal, which it now comes to."""
        self._pace.begin_step()
        loader, recorder = self._parts.loader, self._parts.recorder
        drawn = recorder.load(loader.next_step)
        if drawn is None:
            self._period.ends = self._period.done = True
            return None
        self._step = Step(self, self._parts.progress.step + 1, *drawn)
        self._stepping, self._last_microbatch, self._asked_early = True, False, False
        self._state.share = self._step.samples
        if self._period.supply.leased:
            self._pace.begin_decision(self._parts.progress.course.sync_seconds)
        return self._step

    def complete_step(self) -> None:
        """The job's optimizer has stepped: the rank knows whether an ordinal follows. The first call in a step counts.

        Where it has left its step out, as a `GradScaler` may have it do, the end of the step completes it, or the first
        question behind the last microbatch.
        """
        if not self._stepping:
            return
        self._stepping = False
        step, period, progress = self._step, self._period, self._parts.progress
        assert step is not None
        self._pace.end_step()
        progress.count_step(step.samples)
        self._parts.loader.complete_step()
        period.steps += 1
        period.samples += step.samples
        period.weight += step.batch_weight
        period.ends = self._mode.end_step(period)
        self._state.samples = progress.own_samples
        self._parts.recorder.end_step(step.samples, lengths=step.lengths)

    def optimizer_begins(self) -> None:
        """The job's optimizer is about to step.

        Raises RuntimeError where the script has asked already, in every mode: in a Local-SGD mode it would have had no
        answer, or left its peers behind, and the operator may change the mode at any time.
        """
        if self._asked_early:
            assert self._step is not None
            raise RuntimeError(f"step {self._step.number}: step.due was asked before optimizer.step(); ask behind it")
        if self._stepping:
            self._parts.recorder.optimizer_begins()

    def optimizers_stepped(self) -> None:
        """All optimizers have, in this step: in Local-SGD modes this is where the ranks meet."""
        if self._period.supply.local and self._period.ends:
            self._meet()

    def pass_boundary(self) -> None:
        """Between two steps: an ordinal, or nothing happens."""
        if self._step is not None:
            self._losses.take(self._step)
        if self._period.ends:
            self._follow(self._meet())
        self._step = None

    def close(self) -> None:
        """After the last step: one state for all replicas."""
        if self._period.supply.local:
            self._local.stop()
        self._losses.finish()
        self._parts.recorder.finish()

    # What a step asks of its peers

    def synchronise_gradients(self, wanted: bool) -> None:
        self._last_microbatch = wanted
        self._parts.replication.synchronise_gradients(wanted)

    def computing(self) -> None:
        if not self._period.supply.local:
            self._sync.begin_exchange(self._period)

    def total_weight(self, weight: float | None, samples: int) -> tuple[dist.Work, torch.Tensor] | float:
        if weight is None and not self._period.supply.local:
            return float(self._parts.progress.global_batch)
        mine, group = float(samples) if weight is None else weight, self._mode.batch_group
        if group is None:
            return mine
        total = torch.tensor([mine], dtype=torch.float64)
        return self._parts.agreement.start_sum(total, group), total

    def wait(self, work: dist.Work) -> None:
        self._parts.agreement.wait(work)

    def due(self, step: Step, name: str, every: int) -> bool:
        question = Question(name, every)
        self._asked_early |= self._stepping
        self._questions.ask(question)
        if not self._period.supply.local:
            return self._questions.is_due(question, step.number)
        conclusion = self._conclusion()
        return conclusion is not None and question in conclusion.due

    def checkpoint_if_due(self) -> None:
        if not self._period.supply.local or self._conclusion() is not None:
            self._checkpoint_if_due()

    def _conclusion(self) -> Conclusion | None:
        """In Local-SGD modes: of the ordinal that follows this step; None: none follows.

        The ranks have met there. Only where a `GradScaler` has left the optimizer's step out, as it may on one replica
        alone, this rank comes now: all of them answer alike.
        """
        if self._last_microbatch and self._stepping:
            self.complete_step()
            self._asked_early |= self._period.ends
        return self._meet() if self._period.ends else None

    # Ordinals

    def _meet(self) -> Conclusion:
        """At an ordinal; the first call holds the meeting. Collective."""
        period = self._period
        if period.conclusion is None:
            if self._step is not None:
                self._losses.take(self._step)
            period.conclusion = self._mode.meet(period, self._conclude)
        return period.conclusion

    def _conclude(self, agreed: Agreed) -> Conclusion:
        """The job's progress is exact. Collective where a rank asks for something new, or a snapshot is due."""
        if agreed.tally.asking:
            self._questions.learn(self._parts.agreement.gather(self._questions.to_tell))
        progress, retention, supply = self._parts.progress, self._parts.retention, self._period.supply
        return conclude(
            agreed,
            progress,
            supply,
            self._limits,
            checkpoint_due=retention.checkpoint_due(self._ordinal_step, progress.step),
            snapshot_due=retention.snapshot_due(
                self._ordinal_step, progress.step, agreed.orders.snapshot_every, look_first=supply.local
            ),
            due=self._questions.due(progress.step),
        )

    def _follow(self, conclusion: Conclusion) -> None:
        """All ranks alike do what follows, and begin the next period."""
        progress, retention = self._parts.progress, self._parts.retention
        orders, tally, duties = conclusion.agreed.orders, conclusion.agreed.tally, conclusion.duties
        self._state.plan_version = orders.plan_version
        if tally.weight > 0:
            self.loss = tally.loss / tally.weight
        if duties.leave:
            retention.leave(snapshot=orders.snapshot_every > 0)
            sys.exit(LEFT_WHEN_TOLD)
        if orders.checkpoint_request > progress.answered:
            retention.answer(orders.checkpoint_request)
        self._checkpoint_if_due()
        retention.settle()
        if duties.snapshot:
            retention.snapshot()
        self._ordinal_step = progress.step
        if not tally.done:  # a rank that came without a step could not ask
            self._questions.pass_ordinal(progress.step, all_answered=not self._period.supply.local)
        self.finished = duties.finish
        if not self.finished:
            self._open_period(conclusion)

    def _checkpoint_if_due(self) -> None:
        if self._parts.retention.checkpoint_due(self._ordinal_step, self._parts.progress.step):
            self._parts.retention.checkpoint()

    def _open_period(self, conclusion: Conclusion) -> None:
        orders, progress, loader = conclusion.agreed.orders, self._parts.progress, self._parts.loader
        course = progress.course = orders.course
        if orders.plan_version:  # without a plan, shares come from the checkpoint alone
            loader.set_shares(course.shares)
        loader.set_cost(course.cost)
        self._garbage.boundary(progress.step, course.garbage_every)
        if conclusion.duties.switch:
            self._switch(self._period.supply, conclusion.supply)
        self._state.sync_mode = self._parts.recorder.mode = MODES.index(conclusion.supply.mode)
        self._period = Period(conclusion.supply)
        self._period.planned = self._planned_steps()
        self._pace.begin_interval()

    def _planned_steps(self) -> int | None:
        """Of the present period: no more than are left. None: as many as the clock and the samples allow."""
        if self._period.supply.leased:
            return None
        steps, progress = self._mode.steps_in_period, self._parts.progress
        if self._limits.samples is None:
            return steps
        return min(steps, (self._limits.samples - progress.samples) // progress.global_batch)

    def _switch(self, old: Supply, new: Supply) -> None:
        """Another mode, or another source of samples: with the common parameters, and nothing leased."""
        if old.leased:
            self._parts.loader.stop_leases()
        if old.local and not new.local:
            self._local.stop()
        elif new.local and not old.local:
            self._local.start()
        if new.leased:
            self._local.start_leases(new.limit)
        if new.mode is not old.mode and self._parts.agreement.rank == 0:
            _log.warning("%s from step %d on", new.mode, self._parts.progress.step + 1)


def _replica_group(replication: Replication, agreement: Agreement) -> dist.ProcessGroup | None:
    """For the small talk of the ranks that share a replica; None: this rank has one for itself. Collective."""
    size = replication.shape["shard"]
    if size == 1:
        return None
    first = agreement.rank - agreement.rank % size
    return agreement.group if replication.shape["sync"] == 1 else new_cpu_group("replica", range(first, first + size))
